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
        tokens: emitted, of each slot.
        reasons: of each slot just after the round, see `state`.
        owners: slots that took part, with whatever tells their request.
    """

    tokens: list[list[int]]
    reasons: list[int]
    owners: Owners

    @property
    def ended(self) -> bool:
        """Whether a request ended in it."""
        return any(self.reasons[slot] != RUNNING for slot in self.owners)


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
        self._queue: deque[tuple[_Entry, Owners]] = deque()
        self._pushed = 0
        staging = torch.empty(state.ring.shape, dtype=state.ring.dtype, pin_memory=self._cuda)
        # Made once: views and events are a good part of what a round costs the host.
        self._entries = [
            _Entry(
                device=device, host=host, numbers=host.numpy(),
                event=torch.cuda.Event() if self._cuda else None,  # type: ignore[no-untyped-call]
            )
            for device, host in zip(state.ring, staging, strict=True)
        ]  # fmt: skip

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the oldest must be looked at before anything else is launched: the ring holds no more."""
        return len(self._queue) >= (RING - 1 if self.lag else 1)

    def push(self, owners: Owners) -> None:
        """Queue the round (or prefill) that was launched last.

        Args:
            owners: slots that took part, with whatever tells their request.
        """
        assert len(self._queue) < RING - 1, "the ring would be overwritten before it is read"
        entry = self._entries[self._pushed % RING]
        entry.host.copy_(entry.device, non_blocking=True)
        if entry.event is not None:
            entry.event.record(torch.cuda.current_stream(entry.device.device))
        self._queue.append((entry, owners))
        self._pushed += 1

    def pop(self) -> Round:
        """The oldest queued round; waits for it."""
        entry, owners = self._queue.popleft()
        if entry.event is not None:
            entry.event.synchronize()
        rows = entry.numbers.tolist()
        return Round(tokens=[row[2 : 2 + row[0]] for row in rows], reasons=[row[1] for row in rows], owners=owners)

    def clear(self) -> None:
        """Forget what is in flight, and take the ring up where the state has it (rounds may have run by hand)."""
        self._queue.clear()
        self._pushed = int(self._state.round)
