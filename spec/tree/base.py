"""The table of tree policies and what one must offer."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from modelkit.registry import Registry

from ..types import Proposal, Tree

MAX_BUDGET = 1023


class TreePolicy(Protocol):
    """How a proposal becomes a draft tree.

    Attributes:
        candidates: k, how many candidates a depth the policy wants.
        use_kernels: set by the engine where kernels may run; a policy without kernels has no such attribute.

    A policy that depends on the drafter has a method `suit(drafter)`, which the engine calls once.
    """

    Config: ClassVar[type[Any]]
    candidates: int

    def nodes(self, depth: int) -> int:
        """N, rows of one slot (budget + 1) for a drafter of depth L; a host constant.

        Raises:
            ValueError: the policy does not fit that depth.
        """
        ...

    def build(self, proposal: Proposal, root: Tensor) -> Tree:
        """The trees of all slots, on the device and in fixed shapes.

        Args:
            proposal: ids [S, L, k] and scores.
            root: int64 [S], the anchors.
        """
        ...


TREES: Registry[TreePolicy] = Registry("tree")


def check_budget(budget: int) -> None:
    """Refuse a budget outside 1..MAX_BUDGET."""
    if not 1 <= budget <= MAX_BUDGET:
        raise ValueError(f"budget = {budget}: nodes besides the root must be in 1..{MAX_BUDGET}")
