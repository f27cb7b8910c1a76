"""Tree policies: from a drafter's proposal to the tree that the target verifies."""

from . import best_first as _best_first  # each import registers a policy
from . import chain as _chain
from . import spine_first as _spine_first
from . import static as _static
from .base import MAX_BUDGET, TREES, TreePolicy

__all__ = ["MAX_BUDGET", "TREES", "TreePolicy"]
del _best_first, _chain, _spine_first, _static
