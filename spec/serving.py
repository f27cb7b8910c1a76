"""Requests go through an engine's slots: admitted, run round by round, their tokens looked at one round late.

Knows what is launched when and who owns which slot; what a round does is the engine's business, what becomes of a
request's tokens that of `running.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from .readback import Round
from .requests import Piece, Request
from .running import Running, warn_if_nothing_accepted

if TYPE_CHECKING:
    from .engine import Engine

BUSY = "the engine is still busy with a stream that was not finished; exhaust or close it first"


def serve(engine: Engine, requests: Sequence[Request], plain: bool) -> Generator[tuple[int, Piece], None, None]:
    """Run requests, as many at a time as there are slots; each piece with its request's index.

    Closing the generator early frees the engine.

    Raises:
        ValueError: the engine is serving already.
    """
    if engine.busy:
        raise ValueError(BUSY)
    engine.busy = True
    engine.readback.clear()
    try:
        yield from _Serving(engine, requests, plain).run()
    finally:
        engine.readback.clear()
        for slot in range(engine.state.slots):
            engine.state.retire(slot)
        engine.busy = False


class _Serving:
    """State of one `serve`.

    Attributes:
        waiting: requests without a slot, with their indices.
        running: by slot.
        late: a round that is here, and is looked at once the device has its next one.
        prefilled_at: when the last prefill had run.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], plain: bool) -> None:
        self.engine, self.plain = engine, plain
        self.waiting = deque(enumerate(requests))
        self.running: dict[int, Running] = {}
        self.late: Round | None = None
        self.prefilled_at = 0.0

    def run(self) -> Iterator[tuple[int, Piece]]:
        """Until all are done."""
        readback = self.engine.readback
        while self.waiting or self.running:
            idle = [s for s in range(self.engine.state.slots) if s not in self.running][: len(self.waiting)]
            if idle:
                yield from self._admit(idle)
            if self.running:
                self._launch()
            yield from self._look_at_late()
            if len(readback) > readback.lag:
                self.late = readback.pop()
                if self.late.ended or not self.engine.runs_ahead:
                    yield from self._look_at_late()

    def _admit(self, idle: list[int]) -> Iterator[tuple[int, Piece]]:
        """Look at everything that was launched, then put the next requests into idle slots.

        First tokens are looked at late, like rounds: the device goes on with the next prompt meanwhile.
        """
        engine = self.engine
        yield from self._look_at_late()
        while len(engine.readback):
            yield from self._look(engine.readback.pop())
        begun: deque[tuple[int, Running]] = deque()
        for slot in idle:
            index, request = self.waiting.popleft()
            begun.append((slot, Running.start(index, request, engine, self.plain)))
            engine.prefill(slot, request, self.plain)
            engine.readback.push({slot: index})
            if engine.readback.full:
                yield from self._start(*begun.popleft())
        while begun:
            yield from self._start(*begun.popleft())

    def _start(self, slot: int, live: Running) -> Iterator[tuple[int, Piece]]:
        """Look at the oldest first token."""
        first = self.engine.readback.pop()
        live.begin(self.prefilled_at)
        self.prefilled_at = live.first_token_at
        self.running[slot] = live
        yield from self._take(slot, first, is_first=True)

    def _launch(self) -> None:
        engine, running = self.engine, self.running
        unseen = (len(engine.readback) + (self.late is not None)) * (engine.state.depth + 1)
        bound = max(live.committed for live in running.values()) + unseen
        engine.launch(len(running), bound, self.plain, all(live.greedy for live in running.values()))
        engine.readback.push({slot: live.index for slot, live in running.items()})

    def _look_at_late(self) -> Iterator[tuple[int, Piece]]:
        late, self.late = self.late, None
        if late is not None:
            yield from self._look(late)

    def _look(self, found: Round) -> Iterator[tuple[int, Piece]]:
        """Take over a round's tokens."""
        for slot, index in found.owners.items():
            # A slot may have ended, or changed hands, while the round was in flight.
            if slot in self.running and self.running[slot].index == index:
                yield from self._take(slot, found, is_first=False)

    def _take(self, slot: int, found: Round, is_first: bool) -> Iterator[tuple[int, Piece]]:
        live = self.running[slot]
        piece = live.take(found.tokens[slot], found.reasons[slot], is_first)
        if piece.completion is not None:
            del self.running[slot]
            self.engine.state.retire(slot)
            warn_if_nothing_accepted(piece.completion, self.engine.config.draft.name)
        yield live.index, piece
