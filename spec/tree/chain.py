"""The best candidate of each depth, one after another: speculative decoding without a tree."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..types import Proposal, Tree
from .base import TREES, check_budget


@TREES.register("chain")
class Chain:
    """A single path."""

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """`budget` is the chain's length without the root; None is the drafter's depth."""

        budget: int | None = None

        def __post_init__(self) -> None:
            if self.budget is not None:
                check_budget(self.budget)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.candidates = 1

    def nodes(self, depth: int) -> int:
        """The drafter's depth or the budget, whichever is less, and the root."""
        return 1 + (depth if self.config.budget is None else min(depth, self.config.budget))

    def build(self, proposal: Proposal, root: Tensor) -> Tree:
        """Rank 0 of each depth. With edges, rank 0 must be a path (every drafter's spine is)."""
        nodes = self.nodes(proposal.depth)
        token = torch.cat([root[:, None], proposal.ids[:, : nodes - 1, 0]], 1)
        score = proposal.score[:, : nodes - 1, 0]
        if proposal.edge is not None:
            score = torch.cat([score[:, :1], proposal.edge[:, 1 : nodes - 1, 0, 0]], 1)
        exists = (score > -torch.inf).long().cumprod(1).bool()
        return Tree.line(token=token, valid=torch.cat([torch.ones_like(exists[:, :1]), exists], 1))
