"""Which strategies go together: what an engine refuses or warns about before anything is loaded or run."""

from __future__ import annotations

import warnings

from sampling import Sampler

from .config import GenerateConfig
from .tree import TreePolicy


def serves(sampler: Sampler, tree: TreePolicy) -> bool:
    """Whether the sampler can verify that policy's trees: with one candidate a depth there are no siblings."""
    return tree.candidates == 1 or not sampler.chains_only


def takes_parts(sampler: Sampler) -> bool:
    """Whether the sampler can work on a process's part of the logits; users' processors want whole ones."""
    return getattr(sampler, "takes_parts", False) and not getattr(sampler, "processors", ())


def check_strategies(config: GenerateConfig, sampler: Sampler, tree: TreePolicy) -> None:
    """Refuse pairs that do not go together; warn if outputs are not to follow the target's law.

    Raises:
        ValueError: the sampler wants chains and the policy makes siblings.
    """
    name = config.sampling.name
    if not serves(sampler, tree):
        raise ValueError(
            f"sampler '{name}' verifies chains only, and tree '{config.tree.name}' takes {tree.candidates} candidates "
            'a depth: set [tree] name = "chain", or [sampling] name = "rejection", which serves trees'
        )
    if not sampler.lossless:
        warnings.warn(
            f"sampler '{name}' is lossy: above temperature 0 its outputs do not follow the target's law",
            stacklevel=3,
        )
