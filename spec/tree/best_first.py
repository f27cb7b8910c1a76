"""DDTree: the budget's most probable prefixes (arXiv 2604.12989, algorithm 1), without a heap.

Depth by depth the best B of {frontier x candidates} are kept; at the end the best B of all depths by path score are
the tree. An ancestor's score is never below its descendant's and ties go to the lesser depth, then to the parent's
order, then to the lower rank, so the choice is closed under taking prefixes and equals what the heap pops (among nodes
of exactly equal score another one of them may be taken; the trees are equally good).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ..types import Proposal, Tree
from .base import TREES, check_budget


@TREES.register("best_first")
class BestFirst:
    """Best-first tree of `budget` nodes over the drafter's marginals or, where it has them, its edges."""

    use_kernels = False  # see `TreePolicy`; on CPUs and with `kernels = "reference"` it stays so
    off_spine: float | None = None  # of `SpineFirst`; None: no path is preferred

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """`budget` counts nodes without the root; `candidates` is how many ranks a depth may enter the tree."""

        budget: int = 31
        candidates: int = 16

        def __post_init__(self) -> None:
            check_budget(self.budget)
            if self.candidates < 1:
                raise ValueError(f"candidates = {self.candidates}: at least 1")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.candidates = min(config.candidates, config.budget)

    def nodes(self, depth: int) -> int:
        """The budget and the root."""
        return self.config.budget + 1

    def build(self, proposal: Proposal, root: Tensor) -> Tree:
        """Grow, then prune to the budget; with kernels, node by node."""
        if self.use_kernels:
            from ..kernels.best_first import best_first_tree

            return best_first_tree(proposal, root, self.config.budget, self.off_spine)
        slots, budget, k = root.shape[0], self.config.budget, proposal.candidates
        score, candidate, parent, spine = self._grow(proposal)
        depths = torch.arange(1, proposal.depth + 1, device=root.device)
        width = score.shape[1] // proposal.depth
        # Depth-major order makes a stable sort break ties by depth, then by rank.
        kept = first(score, spine).sort(dim=-1, descending=True, stable=True).indices[:, :budget]
        kept = kept.sort(-1).values
        valid = score.gather(1, kept) > -torch.inf
        level = kept // width
        place = torch.full_like(score, 0, dtype=torch.int64)
        rank = torch.arange(1, kept.shape[1] + 1, device=root.device).expand(slots, -1)
        place = place.scatter(1, kept, rank)
        above = parent.gather(1, kept)
        tree_parent = torch.where(level == 0, 0, place.gather(1, above.clamp(min=0)))
        token = proposal.ids.flatten(1).gather(1, level * k + candidate.gather(1, kept))
        missing = budget - kept.shape[1]

        def with_root(at_root: Tensor, rest: Tensor, fill: int) -> Tensor:
            return torch.nn.functional.pad(torch.cat([at_root[:, None], rest], 1), (0, missing), value=fill)

        zero = torch.zeros_like(root)
        return Tree.make(
            token=with_root(root, token, 0),
            parent=with_root(zero - 1, tree_parent, 0),
            depth=with_root(zero, depths[level], 1),
            valid=with_root(zero, valid.long(), 0).bool() | (torch.arange(budget + 1, device=root.device) == 0),
            max_depth=proposal.depth,
        )

    def _grow(self, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Frontiers of all depths side by side, [S, L * F]: score, candidate index, flat parent index, spine.

        The last is bool: nodes that come before all others; none without `off_spine`.
        """
        slots, depth, k = proposal.ids.shape
        frontier = min(self.config.budget, k**depth) if depth < 8 else self.config.budget
        device = proposal.ids.device
        path = torch.zeros(slots, 1, device=device)
        last = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        spine = torch.full_like(path, self.off_spine is not None, dtype=torch.bool)
        scores, candidates, parents, spines = [], [], [], []
        for d in range(depth):
            if proposal.edge is None or d == 0:
                step = proposal.score[:, d, None, :].expand(-1, path.shape[1], -1)
            else:
                step = proposal.edge[:, d].gather(1, last[:, :, None].expand(-1, -1, k))
            if self.off_spine is not None:
                step = torch.where(spine[:, :, None], step, step + math.log(self.off_spine))
            best_child = step.argmax(-1, keepdim=True) == torch.arange(k, device=device)
            total, ahead = (path[:, :, None] + step).flatten(1), (spine[:, :, None] & best_child).flatten(1)
            order = first(total, ahead).sort(dim=-1, descending=True, stable=True).indices[:, :frontier]
            missing = frontier - order.shape[1]
            path = torch.nn.functional.pad(total.gather(1, order), (0, missing), value=-torch.inf)
            # Numbers: inductor cannot pad bools on a CPU.
            spine = (torch.nn.functional.pad(ahead.gather(1, order).long(), (0, missing)) > 0) & (path > -torch.inf)
            index = torch.nn.functional.pad(order, (0, missing))
            last = index % k
            scores.append(path)
            candidates.append(last)
            parents.append(index // k + (d - 1) * frontier)
            spines.append(spine)
        return torch.cat(scores, 1), torch.cat(candidates, 1), torch.cat(parents, 1), torch.cat(spines, 1)


def first(score: Tensor, ahead: Tensor) -> Tensor:
    """Scores to sort by: nodes that go ahead, if they are there at all, before all others."""
    return torch.where(ahead & (score > -torch.inf), torch.inf, score)
