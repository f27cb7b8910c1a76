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


class Readback:
    """A queue of launched rounds whose tokens are on their way to the host.

    Args:
        state: the rounds' state; its ring must hold more rounds than are ever in flight.
    """

    def __init__(self, state: RoundState) -> None:
        self._state = state
        self._cuda = state.total.device.type == "cuda"
        self.lag = 1 if self._cuda else 0
        self._queue: deque[tuple[Tensor, Any, Owners]] = deque()
        self._pushed = 0
        self._staging = torch.empty(state.ring.shape, dtype=state.ring.dtype, pin_memory=self._cuda)

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
        entry = self._pushed % RING
        assert len(self._queue) < RING - 1, "the ring would be overwritten before it is read"
        staging = self._staging[entry]
        staging.copy_(self._state.ring[entry], non_blocking=True)
        event = None
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._state.ring.device))
        self._queue.append((staging, event, owners))
        self._pushed += 1

    def pop(self) -> Round:
        """The oldest queued round; waits for it."""
        staging, event, owners = self._queue.popleft()
        if event is not None:
            event.synchronize()
        counts, reasons, *tokens = staging.T.tolist()
        rows = [list(row[:n]) for row, n in zip(zip(*tokens, strict=True), counts, strict=True)]
        return Round(tokens=rows, reasons=reasons, owners=owners)

    def clear(self) -> None:
        """Forget what is in flight, and take the ring up where the state has it (rounds may have run by hand)."""
        self._queue.clear()
        self._pushed = int(self._state.round)
