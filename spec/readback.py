"""Reading rounds late: tokens are copied to the host behind each round and looked at while the next one runs."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .state import RING, RUNNING, RoundState

Owners = Mapping[int, int | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What a round left for the host.

    Attributes:
        tokens: emitted, of each slot that took part.
        reasons: of each of them just after the round, see `state`.
        owners: these slots, with whatever tells their request.
        first: it was a prefill.
    """

    tokens: dict[int, list[int]]
    reasons: dict[int, int]
    owners: Owners
    first: bool

    @property
    def ended(self) -> bool:
        """Whether a request ended in it."""
        return any(reason != RUNNING for reason in self.reasons.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A place in the ring, its copy on the host (a tensor, and its numbers), and what tells that the copy is there."""

    device: Tensor
    host: Tensor
    numbers: Any
    event: torch.cuda.Event | None


class Readback:
    """A queue of launched rounds whose tokens are on their way to the host.

    Args:
        state: the rounds' state; its ring must hold more rounds than are ever in flight.
    """

    def __init__(self, state: RoundState) -> None:
        self._state = state
        self._cuda = state.total.device.type == "cuda"
        self.lag = 1 if self._cuda else 0
        self._queue: deque[tuple[_Entry, Owners, bool]] = deque()
        self._pushed: int | None = 0
        self._begun = torch.zeros((), dtype=torch.int64, pin_memory=self._cuda)
        staging = torch.empty(state.ring.shape, dtype=state.ring.dtype, pin_memory=self._cuda)
        self._begun_event = self._event()
        # Made once: views and events are a good part of what a round costs the host.
        self._entries = [
            _Entry(
                device=device, host=host, numbers=host.numpy(), event=self._event(),
            )
            for device, host in zip(state.ring, staging, strict=True)
        ]  # fmt: skip

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the oldest must be looked at before anything else is launched: the ring holds no more."""
        return len(self._queue) >= (RING - 1 if self.lag else 1)

    def push(self, owners: Owners, first: bool = False) -> None:
        """Queue the round (or prefill) that was launched last.

        Args:
            owners: slots that took part, with whatever tells their request.
            first: it was a prefill.
        """
        assert len(self._queue) < RING - 1, "the ring would be overwritten before it is read"
        if self._pushed is None:
            self._wait(self._begun_event)
            self._pushed = int(self._begun)
        entry = self._entries[self._pushed % RING]
        entry.host.copy_(entry.device, non_blocking=True)
        self._record(entry.event)
        self._queue.append((entry, owners, first))
        self._pushed += 1

    def pop(self) -> Round:
        """The oldest queued round; waits for it."""
        entry, owners, first = self._queue.popleft()
        self._wait(entry.event)
        slots = list(owners)
        rows = dict(zip(slots, entry.numbers[slots].tolist(), strict=True))
        return Round(
            tokens={slot: row[2 : 2 + row[0]] for slot, row in rows.items()},
            reasons={slot: row[1] for slot, row in rows.items()}, owners=owners, first=first,
        )  # fmt: skip

    def begin(self) -> None:
        """Take the ring up where the state has it (rounds may have run by hand), without waiting for the device."""
        self._queue.clear()
        self._begun.copy_(self._state.round, non_blocking=True)
        self._record(self._begun_event)
        self._pushed = None

    def end(self, wait: bool) -> None:
        """Forget what is in flight; `wait` for it first."""
        self._queue.clear()
        if wait:
            int(self._state.round)

    def _record(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.record(torch.cuda.current_stream(self._state.round.device))

    @staticmethod
    def _wait(event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()
