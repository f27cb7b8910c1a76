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
    users = [*getattr(sampler, "processors", ()), *getattr(sampler, "host_processors", ())]
    return getattr(sampler, "takes_parts", False) and not users


def check_strategies(config: GenerateConfig, sampler: Sampler, tree: TreePolicy) -> None:
    """Refuse pairs that do not go together; warn of a law that is not the target's, and of what is slow.

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
    if hosts := getattr(sampler, "host_processors", ()):
        graphs = config.compile.resolved_mode(config.target.device) != "none"
        warnings.warn(
            f"host_processors ({', '.join(one.name for one in hosts)}) run in Python between the target and the "
            "sampler of every round: all its logits go to the CPU and back, and no round is launched while one is "
            f"running{'; a round is two compiled steps, not one' if graphs else ''}",
            stacklevel=3,
        )
