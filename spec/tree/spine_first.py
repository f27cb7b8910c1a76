"""The drafter's best path first, then the best of what is left, with a discount below siblings.

A block drafter's marginals hold along its own best path (the spine): a few tokens down another path they are right
a quarter as often. So the whole spine is drafted whatever its score, and each step from a node that is not on it costs
a factor. (The same observation leads 2602.16994 to branch late, and lucebox to seed its trees with a chain.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .base import TREES
from .best_first import BestFirst

OFF_SPINE = 0.3  # for drafters that do not say; z-lab's checkpoints were seen at 0.25 to 0.35


@TREES.register("spine_first")
class SpineFirst(BestFirst):
    """Best-first tree of `budget` nodes behind the path of the drafter's best candidates."""

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config(BestFirst.Config):
        """As that of `best_first`.

        `off_spine`: how right a marginal is below a node that is not on the spine, over how right it is on it; the
        drafter's own value if None, and 0.3 where the drafter has none.
        """

        off_spine: float | None = None

        def __post_init__(self) -> None:
            BestFirst.Config.__post_init__(self)
            if self.off_spine is not None and not 0.0 < self.off_spine <= 1.0:
                raise ValueError(f"off_spine = {self.off_spine}: must be in (0, 1]; 1 is no discount")

    def __init__(self, config: SpineFirst.Config) -> None:
        super().__init__(config)
        self._given = config.off_spine is not None
        self.off_spine = OFF_SPINE if config.off_spine is None else config.off_spine

    def suit(self, drafter: Any) -> None:
        """Take the drafter's discount, unless the config has one."""
        if not self._given:
            self.off_spine = getattr(drafter, "off_spine", None) or OFF_SPINE
