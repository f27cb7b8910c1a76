"""Warm-up: every step that serving will use is compiled, captured and replayed before the first request.

The steps really run, on an engine whose slots are all idle, so they commit and emit nothing; what they touch besides
(the ring, the round counter, pending features) is put back. Knows which buckets there are, not what a step does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from modelkit.compile import Step

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


def warm_up(
    engine: Engine,
    lengths: Sequence[int] | None,
    plain: Sequence[bool],
    progress: Callable[[str], None] | None,
) -> None:
    """Run each step until it replays; see `Engine.warm_up`.

    Args:
        engine: not busy, and compiling.
        lengths: tokens of each prompt to come; None for any number of any length.
        plain: kinds of decoding.
        progress: called with a line before each step.
    """
    steps = _steps(engine, lengths, plain)
    with untouched(engine.state):
        engine.prefiller.count.zero_()
        for number, (name, step) in enumerate(steps, 1):
            if progress is not None:
                progress(f"compiling {name} ({number} of {len(steps)})")
            for _ in range(RUNS):
                step()
            if engine.target.device.type == "cuda":
                torch.cuda.synchronize()


def _steps(engine: Engine, lengths: Sequence[int] | None, plain: Sequence[bool]) -> list[tuple[str, Step]]:
    """The steps by what they are called in progress lines; each once."""
    prefill, slots = engine.prefiller, engine.state.slots
    buckets = prefill.all_buckets() if lengths is None else set().union(*map(prefill.buckets, lengths))
    found: dict[Step, str] = {}
    for kind in plain:
        for bucket in sorted(buckets):
            found[prefill.chunk_step(bucket, kind)] = f"prefill of {bucket.rows} rows behind {bucket.bound}"
    found[prefill.first_step()] = "the first token"
    most = slots if lengths is None else min(slots, len(lengths))
    for kind in plain:
        for active in slot_buckets(slots):
            rows = active * (1 if kind else engine.nodes)
            name = f"{'plain round' if kind else 'round'} of {rows} row{'s' if rows > 1 else ''}"
            found[engine.compiled_step(rows, kind)] = name
            if active >= most:
                break
    return [(name, step) for step, name in found.items()]


@contextlib.contextmanager
def untouched(state: RoundState) -> Iterator[None]:
    """Put every buffer of the state back in place (compiled steps know their addresses), with all slots idle inside."""
    saved = {name: buffer.clone() for name, buffer in state.named_buffers(recurse=False)}
    state.active.zero_()
    state.pending_count.zero_()
    try:
        yield
    finally:
        for name, buffer in state.named_buffers(recurse=False):
            buffer.copy_(saved[name])
