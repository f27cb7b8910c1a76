"""A fixed topology: so many best children at each depth (SpecInfer's expansion configuration, arXiv 2305.09781)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..types import Proposal, Tree
from .base import TREES, check_budget


@TREES.register("static")
class Static:
    """Every node of depth d gets `widths[d]` children, the best ranks of the next depth."""

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """`widths[d]`: children of each node at depth d. (2, 2, 1) makes 2 + 4 + 4 nodes."""

        widths: tuple[int, ...] = (3, 2, 1, 1)

        def __post_init__(self) -> None:
            if not self.widths or min(self.widths) < 1:
                raise ValueError(f"widths = {self.widths}: at least one depth, each with 1 child or more")
            check_budget(self.budget)

        @property
        def budget(self) -> int:
            """Nodes besides the root."""
            total, level = 0, 1
            for width in self.widths:
                level *= width
                total += level
            return total

    def __init__(self, config: Config) -> None:
        self.config = config
        self.candidates = max(config.widths)

    def nodes(self, depth: int) -> int:
        """The budget and the root."""
        if len(self.config.widths) > depth:
            raise ValueError(f"[tree] widths has {len(self.config.widths)} depths, the drafter proposes {depth}")
        return self.config.budget + 1

    def build(self, proposal: Proposal, root: Tensor) -> Tree:
        """Fill the topology level by level with the best candidates; with edges, by the parent's own scores."""
        slots = root.shape[0]
        candidate = torch.zeros_like(root)[:, None]
        alive = torch.ones_like(candidate, dtype=torch.bool)
        token, parent, depth, valid = [root[:, None]], [candidate - 1], [candidate], [alive]
        above = 0  # nodes before the level above
        for d, width in enumerate(self.config.widths):
            size = candidate.shape[1] * width
            index = torch.arange(size, device=root.device)
            up, rank = index // width, (index % width).expand(slots, size)[:, :, None]
            if proposal.edge is None or d == 0:
                scores = proposal.score[:, d, None, :].expand(-1, size, -1)
            else:
                scores = proposal.edge[:, d].gather(1, candidate[:, up, None].expand(-1, -1, proposal.candidates))
            best, order = scores.sort(dim=-1, descending=True, stable=True)
            above, first = above + candidate.shape[1], above
            candidate = order.gather(2, rank)[:, :, 0]
            alive = alive[:, up] & (best.gather(2, rank)[:, :, 0] > -torch.inf)
            token.append(proposal.ids[:, d].gather(1, candidate))
            parent.append((up + first).expand(slots, size))
            depth.append(torch.full_like(candidate, d + 1))
            valid.append(alive)
        whole = [torch.cat(parts, 1) for parts in (token, parent, depth, valid)]
        return Tree.make(
            token=whole[0], parent=whole[1], depth=whole[2], valid=whole[3], max_depth=len(self.config.widths)
        )
