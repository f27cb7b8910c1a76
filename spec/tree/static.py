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
        parent, rank, depth = [-1], [0], [0]
        level = [0]
        self._level_sizes = []
        for d, width in enumerate(config.widths):
            below = []
            for node in level:
                for r in range(width):
                    below.append(len(parent))
                    parent.append(node)
                    rank.append(r)
                    depth.append(d + 1)
            level = below
            self._level_sizes.append(len(below))
        self._parent, self._rank, self._depth = torch.tensor(parent), torch.tensor(rank), torch.tensor(depth)

    def nodes(self, depth: int) -> int:
        """The budget and the root."""
        if len(self.config.widths) > depth:
            raise ValueError(f"[tree] widths has {len(self.config.widths)} depths, the drafter proposes {depth}")
        return self.config.budget + 1

    def build(self, proposal: Proposal, root: Tensor) -> Tree:
        """Fill the topology with the best candidates; with edges, ranks follow the parent's own scores."""
        slots, device = root.shape[0], root.device
        parent, rank, depth = (t.to(device) for t in (self._parent, self._rank, self._depth))
        if self._parent.device != device:
            self._parent, self._rank, self._depth = parent, rank, depth
        candidate = torch.zeros(slots, len(parent), dtype=torch.int64, device=device)
        alive = torch.ones(slots, len(parent), dtype=torch.bool, device=device)
        first = 1
        for d, size in enumerate(self._level_sizes):
            last = first + size
            nodes = slice(first, last)
            above = candidate[:, parent[nodes]]
            if proposal.edge is None or d == 0:
                scores = proposal.score[:, d, None, :].expand(-1, last - first, -1)
            else:
                scores = proposal.edge[:, d].gather(1, above[:, :, None].expand(-1, -1, proposal.candidates))
            best, order = scores.sort(dim=-1, descending=True, stable=True)
            pick = rank[nodes].expand(slots, -1)[:, :, None]
            candidate[:, nodes] = order.gather(2, pick)[:, :, 0]
            alive[:, nodes] = alive[:, parent[nodes]] & (best.gather(2, pick)[:, :, 0] > -torch.inf)
            first = last
        level = (depth - 1).clamp(min=0).expand(slots, -1)
        token = proposal.ids[torch.arange(slots, device=device)[:, None], level, candidate]
        token = torch.where(depth > 0, token, root[:, None])
        return Tree.make(
            token=token,
            parent=parent.expand(slots, -1),
            depth=depth.expand(slots, -1),
            valid=alive,
            max_depth=len(self.config.widths),
        )
