"""Block verification: a drawn chain is accepted or cut as a whole, which accepts more than token by token.

Source: Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444, algorithm 2. Exact, and
optimal among strategies that verify a single drawn path.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .base import SAMPLERS, Acceptance, Draws, NodeContext, walk, with_fault
from .draws import Drawn, or_else, pick, target_law, uniforms
from .filters import filtered


@SAMPLERS.register("block_verification")
class BlockVerification(Drawn):
    """Exact sampling on chains; see the module."""

    chains_only: ClassVar[bool] = True

    def sampled(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """The longest prefix that passes its test, then a draw from what is left.

        Candidates without a law of their own are matched with draws from p, which is the best there is for them.
        """
        rows = filtered(logits, nodes, self.processors)
        p = target_law(rows.score, nodes)
        found = walk(pick(p, nodes), nodes) if nodes.draws is None else self.longest(p, nodes, nodes.draws)
        return with_fault(found, rows.fault)

    def longest(self, p: Tensor, nodes: NodeContext, draws: Draws) -> Acceptance:
        """Algorithm 2 of the paper, in its names: p_i, h_i, eta_i, tau.

        Args:
            p: fp32 [R, V], the target's law after each row.
            nodes: R rows, a chain a slot.
            draws: of the slots, one a depth.
        """
        row = rows_by_depth(nodes)
        exists, last = row >= 0, row.shape[1] - 1
        row, own = row.clamp(min=0), p[row.clamp(min=0)]
        q = torch.nn.functional.pad(draws.log_q.exp(), (0, 0, 0, row.shape[1] - draws.log_q.shape[1]))
        x = nodes.token[row]
        drawn = x[:, 1:, None]
        ratio = (own[:, :-1].gather(2, drawn) / q[:, :-1].gather(2, drawn).clamp(min=1e-38))[:, :, 0]
        joint = [torch.ones_like(ratio[:, 0])]
        for i in range(last):
            joint.append((joint[-1] * ratio[:, i]).clamp(max=1.0))
        reach = torch.stack(joint, 1)  # p_i, [S, L + 1]
        residual = (reach[:, :, None] * own - q).clamp(min=0)
        total = residual.sum(-1)
        # The chain ends where the next row is missing: there h is p_i, and what follows is drawn from p.
        ends = torch.cat([~exists[:, 1:], torch.ones_like(exists[:, :1])], 1)
        h = torch.where(ends | (reach >= 1.0), reach, total / (total + 1.0 - reach))
        eta = uniforms(nodes, 1)[:, 0][row[:, :-1]]  # of the test of x_1, x_2, ..., keyed by where they are
        passes = torch.cat([exists[:, :1], exists[:, 1:] & (eta <= h[:, 1:])], 1)
        depth = torch.arange(last + 1, device=row.device)
        tau = torch.where(passes, depth, -1).amax(-1, keepdim=True)
        left = torch.where(ends[:, :, None], own, or_else(residual, total, own))
        # Back to rows, so that the draw has the key of its position.
        place = torch.where(exists, row, p.shape[0]).flatten()
        weight = torch.cat([p, p[:1]]).index_copy(0, place, left.flatten(0, 1))[:-1]
        bonus = pick(weight, nodes)[row]
        following = torch.cat([x[:, 1:], x[:, :1]], 1)
        token = torch.where(depth < tau, following, torch.where(depth == tau, bonus, -1))
        return Acceptance(path=torch.where(depth <= tau, row, -1), token=token, count=tau[:, 0] + 1)


def rows_by_depth(nodes: NodeContext) -> Tensor:
    """Row of each depth of each slot's chain, int64 [S, L + 1]; -1 from the first one that is missing."""
    device, real = nodes.slot.device, nodes.valid & (nodes.slot < nodes.slots)
    row = torch.full((nodes.slots + 1, nodes.max_depth + 1), -1, device=device)
    place = (torch.where(real, nodes.slot, nodes.slots), torch.where(real, nodes.depth, 0))
    row = row.index_put(place, torch.arange(nodes.slot.shape[0], device=device))[: nodes.slots]
    return torch.where((row >= 0).long().cumprod(1).bool(), row, -1)
