"""Warm-up: every step that serving will use is compiled, captured and replayed before the first request.

The steps really run, on an engine whose slots are all idle, so they commit and emit nothing; what they touch besides
(the ring, the round counter, pending features) is put back. Knows which buckets there are, not what a step does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from modelkit.compile import Step
from sampling import Sampler

from .state import RoundState

if TYPE_CHECKING:
    from .engine import Engine

EXACT_SLOTS = 4
RUNS = 3  # cudagraph trees run a graph uncaptured, then record it, then replay it


def slot_buckets(slots: int) -> list[int]:
    """Numbers of active slots that rounds are compiled for; a round of fewer gets padding rows.

    All numbers while they are few; beyond `EXACT_SLOTS` slots powers of two and the whole, so that the graphs stay few.
    """
    if slots <= EXACT_SLOTS:
        return list(range(1, slots + 1))
    return [*(1 << i for i in range(slots.bit_length()) if 1 << i < slots), slots]


def size_for(slots: int, active: int) -> int:
    """The bucket that a round of `active` of `slots` slots runs in."""
    return next(size for size in slot_buckets(slots) if size >= active)


def greedy_kinds(sampler: Sampler) -> set[bool]:
    """Kinds of sampling that requests of any temperature can ask for, see `NodeContext.greedy`."""
    kinds = {sampler.always_argmax(sampler.params())}
    for temperature in (0.0, 1.0):
        with contextlib.suppress(ValueError):  # this strategy does not serve it
            kinds.add(sampler.always_argmax(sampler.params(temperature=temperature)))
    return kinds


def warm_up(
    engine: Engine,
    lengths: Sequence[int] | None,
    plain: Sequence[bool],
    greedy: set[bool],
    progress: Callable[[str], None] | None,
) -> None:
    """Run each step until it replays; see `Engine.warm_up`.

    Args:
        engine: not busy, and compiling.
        lengths: tokens of each prompt to come; None for any number of any length.
        plain: kinds of decoding.
        greedy: kinds of sampling, see `NodeContext.greedy`.
        progress: called with a line before each step.
    """
    steps = _steps(engine, lengths, plain, sorted(greedy))
    with untouched(engine.state):
        engine.prefiller.count.zero_()
        for number, (name, step) in enumerate(steps, 1):
            if progress is not None:
                progress(f"compiling {name} ({number} of {len(steps)})")
            for _ in range(RUNS):
                step()
            if engine.target.device.type == "cuda":
                torch.cuda.synchronize()


def _steps(
    engine: Engine, lengths: Sequence[int] | None, plain: Sequence[bool], greedy: Sequence[bool]
) -> list[tuple[str, Step]]:
    """The steps by what they are called in progress lines; each once."""
    prefill, slots = engine.prefiller, engine.state.slots
    buckets = prefill.all_buckets() if lengths is None else set().union(*map(prefill.buckets, lengths))
    found: dict[Step, str] = {}
    for kind in plain:
        for bucket in sorted(buckets):
            found[prefill.chunk_step(bucket, kind)] = f"prefill of {bucket.rows} rows behind {bucket.bound}"
    for choice in greedy:
        found[prefill.first_step(choice)] = f"the first token{'' if choice else ', sampled'}"
    most = slots if lengths is None else min(slots, len(lengths))
    buckets_used = [size for size in slot_buckets(slots) if size < most] + [size_for(slots, most)]
    for kind, choice, active in itertools.product(plain, greedy, buckets_used):
        rows = active * (1 if kind else engine.nodes)
        name = f"{'plain round' if kind else 'round'} of {rows} row{'s' if rows > 1 else ''}"
        found[engine.compiled_step(rows, kind, choice)] = name + ("" if choice else ", sampled")
    return [(name, step) for step, name in found.items()]


@contextlib.contextmanager
def untouched(state: RoundState) -> Iterator[None]:
    """Put every buffer of the state back in place (compiled steps know their addresses), with all slots idle inside."""
    buffers = [*state.buffers(recurse=False), *state.sampling.buffers()]
    saved = [buffer.clone() for buffer in buffers]
    state.active.zero_()
    state.pending_count.zero_()
    try:
        yield
    finally:
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.copy_(value)
