"""The one place where anything is compiled or captured.

A step is a callable without arguments and results: it reads and writes state that lives in module buffers, so it can be
captured whole in one CUDA graph. Each gets a compile of its own; shapes are fixed, so it is compiled once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], None]
MODES = ("none", "default", "reduce-overhead", "max-autotune")


def compile_step(step: Step, mode: str) -> Step:
    """A step in the given mode.

    Args:
        step: no arguments, no result, fixed shapes.
        mode: "none" runs it eagerly; the others are those of `torch.compile`.
    """
    if mode == "none":
        return step
    if mode not in MODES:
        raise ValueError(f"unknown compile mode '{mode}'; known: {', '.join(MODES)}")
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)
    _shorten_log()
    compiled: Step = torch.compile(step, mode=mode, fullgraph=True, dynamic=False)
    return compiled


def _shorten_log() -> None:
    """Name an operator in inductor's log without its arguments.

    Before torch 2.13 the log line about an operator that is met for the first time spells out its arguments, whether or
    not anything is logged; behind a deep network that text is exponential in the depth, and compiling never ends.
    """
    from torch._inductor import exc

    exc.OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"target: {target}")  # type: ignore[method-assign]


def forget() -> None:
    """Drop everything compiled in this process, with the memory that captured graphs hold."""
    torch._dynamo.reset()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What the compiler did so far in this process.

    Attributes:
        graphs: frames compiled.
        recompiles: frames compiled again for other guards.
        skipped: graphs that ran without being captured.
        partitions: pieces a graph was split into beyond the first.
        non_static_inputs: inputs whose addresses a captured graph had to copy.
    """

    graphs: int
    recompiles: int
    skipped: int
    partitions: int
    non_static_inputs: int

    @classmethod
    def read(cls) -> Counters:
        """The compiler's counters as of now."""
        from torch._dynamo.utils import counters

        inductor: Any = counters["inductor"]
        return cls(
            graphs=int(counters["stats"]["unique_graphs"]),
            recompiles=sum(int(n) for n in counters["recompiles"].values()),
            skipped=int(inductor["cudagraph_skips"]),
            partitions=int(inductor["cudagraph_partitions"]),
            non_static_inputs=int(inductor["cudagraph_recorded_non_static_inputs"]),
        )
