"""Requests go through an engine's slots: admitted, run round by round, their tokens looked at one round late.

Knows what is launched when and who owns which slot; what a round does is the engine's business, what becomes of a
request's tokens that of `running.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
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
    engine.readback.begin()
    try:
        yield from _Serving(engine, requests, plain).run()
    finally:
        # A layout's other processes may still read this one's memory; a round of one process ends unseen.
        engine.readback.end(wait=engine.from_first is not None)
        for slot in range(engine.state.slots):
            engine.state.retire(slot)
        engine.busy = False


def _greedy(running: Iterable[Running]) -> bool:
    return all(live.greedy for live in running)


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
                yield from self._launch()
            while len(readback) > readback.lag:
                yield from self._look_at_late()
                self.late = readback.pop()
                if self.late.first or self.late.ended or not self.engine.runs_ahead:
                    yield from self._look_at_late()

    def _admit(self, idle: list[int]) -> Iterator[tuple[int, Piece]]:
        """Look at everything that was launched, then put the next requests into idle slots.

        First tokens are looked at while the device goes on, like rounds; at once where there is nothing to go on with,
        or where its step would have to be compiled first.
        """
        engine = self.engine
        yield from self._look_at_late()
        yield from self._look_at(0)
        for slot in idle:
            yield from self._make_room()
            index, request = self.waiting.popleft()
            self.running[slot] = Running.start(index, request, engine, self.plain)
            engine.prefill(slot, request, self.plain)
            engine.readback.push({slot: index}, first=True)
        running = self.running.values()
        over = all(live.request.max_new_tokens == 1 for live in running)
        if over or not engine.runs_ahead or not engine.has_step(len(running), self.plain, _greedy(running)):
            yield from self._look_at(0)

    def _launch(self) -> Iterator[tuple[int, Piece]]:
        yield from self._make_room()
        engine, running = self.engine, self.running
        if not running:
            return
        unseen = (len(engine.readback) + (self.late is not None)) * (engine.state.depth + 1)
        bound = max(live.committed for live in running.values()) + unseen
        engine.launch(len(running), bound, self.plain, _greedy(running.values()))
        engine.readback.push({slot: live.index for slot, live in running.items()})

    def _make_room(self) -> Iterator[tuple[int, Piece]]:
        """Look at the oldest where the ring holds no more."""
        while self.engine.readback.full:
            yield from self._look(self.engine.readback.pop())

    def _look_at(self, most: int) -> Iterator[tuple[int, Piece]]:
        """Look at the oldest until at most so many are in flight."""
        while len(self.engine.readback) > most:
            yield from self._look(self.engine.readback.pop())

    def _look_at_late(self) -> Iterator[tuple[int, Piece]]:
        late, self.late = self.late, None
        if late is not None:
            yield from self._look(late)

    def _look(self, found: Round) -> Iterator[tuple[int, Piece]]:
        """Take over a round's tokens."""
        for slot, index in found.owners.items():
            # A slot may have ended, or changed hands, while the round was in flight.
            if slot in self.running and self.running[slot].index == index:
                yield from self._take(slot, found)

    def _take(self, slot: int, found: Round) -> Iterator[tuple[int, Piece]]:
        live = self.running[slot]
        if found.first:
            live.begin(self.prefilled_at)
            self.prefilled_at = live.first_token_at
        piece = live.take(found.tokens[slot], found.reasons[slot], found.first)
        if piece.completion is not None:
            del self.running[slot]
            self.engine.state.retire(slot)
            warn_if_nothing_accepted(piece.completion, self.engine.config.draft.name)
        yield live.index, piece
