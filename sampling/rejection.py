"""Rejection sampling: candidates are drawn from the drafter's law and tested against the target's, one after another.

A chain is the rule of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): accept x with
min(1, p(x) / q(x)), else draw from max(p - q, 0). Siblings are draws without replacement and are tested in the order in
which they were drawn: after a rejection p becomes the normalised max(p - q, 0), and q loses the token and is normalised
(recursive rejection sampling: Jeon et al., arXiv 2402.14160; Sequoia, arXiv 2402.12374).

Why trees may share the draws of a depth, and what their shape may depend on: docs/concepts/sampling.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SAMPLERS, Acceptance, Draws, NodeContext, walk, with_fault
from .draws import Drawn, or_else, pick, target_law, uniforms
from .filters import filtered


@SAMPLERS.register("rejection")
class Rejection(Drawn):
    """Exact sampling; candidates are drawn, and replaced by draws from exact residuals where they are rejected."""

    def sampled(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """Each row's token, as if the path led there; then the walk.

        The randomness after a row is its position's own, so that one token a row can be chosen before it is known
        which rows are on the path. Candidates without a law of their own are accepted with p(x), then p without x is
        left: that is drawing from p, and accepting the child that is equal.
        """
        rows = filtered(logits, nodes, self.processors)
        p = target_law(rows.score, nodes)
        token = pick(p, nodes) if nodes.draws is None else self.choose(p, nodes, nodes.draws)
        return with_fault(walk(token, nodes), rows.fault)

    def choose(self, p: Tensor, nodes: NodeContext, draws: Draws) -> Tensor:
        """The child accepted after each row, or what is drawn instead; int64 [R].

        Not normalised, what is left of p after i rejections is max(p - c q, 0) with one number c a row: a token drawn
        and rejected has nothing left, so that removing it from q changes its other values by a factor only. A
        rejection adds (mass left of p) / (mass left of q) to c.

        Args:
            p: fp32 [R, V], the target's law.
            nodes: R rows.
            draws: of the slots.
        """
        slots, depths, k = draws.ids.shape
        at = nodes.slot.clamp(max=slots - 1) * depths + nodes.depth.clamp(max=depths - 1)
        q = draws.log_q.flatten(0, 1)[at].exp()
        ids, mass = draws.ids.flatten(0, 1)[at], self.mass_left(draws).flatten(0, 1)[at]
        q_drawn, p_drawn = q.gather(1, ids), p.gather(1, ids)
        # Only a leading part of the draws may be tested: whether one is must not depend on what it is.
        tested = (self.children(nodes, draws) & (mass > 0)).long().cumprod(1).bool()
        uniform = uniforms(nodes, k)
        taken = torch.full_like(nodes.token, -1)
        c, left = torch.zeros_like(p[:, 0]), p.sum(-1)
        for rank in range(k):
            step = left / mass[:, rank]
            test = tested[:, rank] & (taken < 0)
            wins = uniform[:, rank] * step * q_drawn[:, rank] < p_drawn[:, rank] - c * q_drawn[:, rank]
            taken = torch.where(test & wins, ids[:, rank], taken)
            c = torch.where(test & ~wins, c + step, c)
            left = (p - c[:, None] * q).clamp(min=0).sum(-1)
        residual = torch.where(c[:, None] > 0, (p - c[:, None] * q).clamp(min=0), p)
        return torch.where(taken < 0, pick(or_else(residual, left, p), nodes), taken)

    def mass_left(self, draws: Draws) -> Tensor:
        """What q has left before each draw, fp32 [S, L, k]; sums of what is there, so that small ones are right."""
        q = draws.log_q.exp()
        drawn = q.gather(-1, draws.ids)
        rest = q.scatter(-1, draws.ids, 0.0).sum(-1, keepdim=True)
        return rest + drawn.flip(-1).cumsum(-1).flip(-1)

    def children(self, nodes: NodeContext, draws: Draws) -> Tensor:
        """Whether each draw is a child of each row, bool [R, k]."""
        slots, depths, _ = draws.ids.shape
        above = nodes.slot.clamp(max=slots - 1) * depths + (nodes.depth - 1).clamp(min=0)
        is_child = nodes.valid & (nodes.parent >= 0) & (nodes.slot < slots)
        which = is_child[:, None] & (draws.ids.flatten(0, 1)[above] == nodes.token[:, None])
        found = torch.zeros_like(which, dtype=torch.int32)
        return found.index_add(0, nodes.parent.clamp(min=0), which.to(torch.int32)) > 0
