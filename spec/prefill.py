"""Prefill: a prompt goes through the target in chunks of few fixed sizes, and the first token is chosen behind them.

A chunk is a step without arguments that reads its tokens from buffers, so it is compiled and captured as a round is.
Knows the rows of one slot only; which request and when is the engine's business.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from modelkit.cache import Lane
from modelkit.compile import Step, compile_step
from modelkit.model import Transformer
from modelkit.rows import chain
from sampling import Acceptance, NodeContext
from sampling.host import Scores

from .draft import Drafter
from .host import Host, TwoSteps
from .state import RoundState, sent

SMALL_CHUNK = 64
FIRST_BOUND, BOUND_GROWTH = 2048, 4


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Bucket:
    """What a compiled chunk is specialised for: R, padding included, and the bound of the context it reads."""

    rows: int
    bound: int


class Prefill(nn.Module):
    """Runs prompts through the target, one slot at a time.

    Compiled chunks have one of two sizes. `SMALL_CHUNK` rows cost a large model little more than one, so short prompts
    and short tails take that; everything else is padded to the whole chunk. Attention that reads the context up to a
    host-known bound (`Reference.reads_bound`; with kernels, chunks too wide for the tree kernel) gets one of few
    bounds: none, as most prompts are one chunk, then each `BOUND_GROWTH` times the one before. Always the capacity
    would make an empty context as dear as a full one, exact bounds would cost a graph a chunk. With kernels, the
    default chunk of 256 and a capacity of 8192 that makes four graphs. Eager chunks are exact in both, since they have
    no graph to share.

    Args:
        state: the rounds' state; owns the target's cache.
        target: the model.
        drafter: takes the features of the prompt's rows, if it taps any.
        decide: chooses the first token; see `Engine.decide`.
        host: the sampler's host processors.
        chunk: most rows of a forward.
        mode: see `compile_step`.
    """

    def __init__(
        self, *, state: RoundState, target: Transformer, drafter: Drafter, decide: Callable[..., Acceptance],
        host: Host, chunk: int, mode: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.state, self.target, self.drafter, self.decide, self.host = state, target, drafter, decide, host
        self.chunk, self._mode = chunk, mode
        self.sizes = sorted({min(SMALL_CHUNK, chunk), chunk})
        self.bounds = context_bounds(state.capacity)
        self.lane = Lane(state.cache)
        self._steps: dict[tuple[Bucket, bool], Step] = {}
        self._first_steps: dict[bool, Step] = {}
        whole = functools.partial(torch.zeros, dtype=torch.int64, device=target.device)
        self.register_buffer("token", whole(chunk), persistent=False)
        self.register_buffer("count", whole(1), persistent=False)
        last = torch.zeros(1, target.config.hidden_size, dtype=target.dtype, device=target.device)
        self.register_buffer("last", last, persistent=False)

    token: Tensor
    count: Tensor
    last: Tensor

    def begin(self, slot: int, prompt: list[int], plain: bool) -> None:
        """Put a whole prompt into an emptied slot of the caches (launches only, no waiting)."""
        self.lane.enter(slot)
        ids = sent(prompt, self.target.device)
        for start in range(0, len(prompt), self.chunk):
            piece = ids[start : start + self.chunk]
            self.token[: len(piece)].copy_(piece)
            self.count.fill_(len(piece))
            self.chunk_step(self.bucket(start, len(piece)), plain)()

    def end(self, greedy: bool) -> None:
        """Emit the first token of the prompt that began last, whose slot has been admitted since (launches only)."""
        self.first_step(greedy)()

    def bucket(self, start: int, count: int) -> Bucket:
        """The bucket that runs `count` tokens behind `start` committed ones."""
        if self._mode == "none":
            return Bucket(rows=count, bound=start)
        rows = next(size for size in self.sizes if size >= count)
        needed = start if self.target.backend.reads_bound(rows) else self.state.capacity
        return Bucket(rows=rows, bound=next(bound for bound in self.bounds if bound >= needed))

    def buckets(self, length: int) -> set[Bucket]:
        """All that a prompt of `length` tokens needs."""
        starts = range(0, length, self.chunk)
        return {self.bucket(start, min(self.chunk, length - start)) for start in starts}

    def all_buckets(self) -> set[Bucket]:
        """All that prompts of any length need."""
        starts = range(0, self.state.capacity - 1, self.chunk)
        return {self.bucket(start, size) for start in starts for size in self.sizes}

    def chunk_step(self, bucket: Bucket, plain: bool) -> Step:
        """A chunk as a callable without arguments; compiled on first use."""
        step = functools.partial(self.forward_chunk, bucket.rows, bucket.bound, plain or not self.drafter.taps)
        if self._mode == "none":
            return step
        key = (bucket, plain or not self.drafter.taps)
        if key not in self._steps:
            self._steps[key] = compile_step(step, self._mode)
        return self._steps[key]

    def first_step(self, greedy: bool) -> Step:
        """The first token as a callable without arguments; compiled on first use."""
        if greedy not in self._first_steps and self.host.processors:
            self._first_steps[greedy] = self._first_in_two(greedy)
        elif greedy not in self._first_steps:
            self._first_steps[greedy] = compile_step(functools.partial(self.first_token, greedy), self._mode)
        return self._first_steps[greedy]

    @torch.no_grad()
    def forward_chunk(self, rows: int, bound: int, plain: bool) -> None:
        """Run and commit the `count` tokens of the buffers; rows past them are padding that nothing sees or keeps.

        Args:
            rows: R, at least the count.
            bound: upper bound of the slot's committed length.
            plain: leave the drafter out.
        """
        lane = self.lane
        flat = chain(token=self.token[None, :rows], start=lane.length[:1], count=self.count, rows=rows, bound=bound)
        output = self.target(flat, lane, () if plain else self.drafter.taps)
        # Not the backend's commit: that hides its reads from the compiler, and here nothing ties them to the forward.
        lane.commit(torch.arange(rows, device=self.token.device)[None], self.count)
        if not plain:
            assert output.taps is not None
            self.drafter.ingest(output.taps[None], self.count)
        self.last.copy_(output.hidden[(self.count - 1).clamp(min=0)])

    @torch.no_grad()
    def first_token(self, greedy: bool) -> None:
        """Head and sampler on the prompt's last row, seen as a tree of one root.

        A step of its own: within the chunks it would be paid by every one of them, or double their graphs. With host
        processors it is two, see `first_step`. `greedy`: see `NodeContext`.
        """
        logits = self.target.head(self.last)
        self.state.emit(self.decide(logits, self.root(greedy)))

    def root(self, greedy: bool) -> NodeContext:
        """The prompt's last row."""
        lane, zero = self.lane, torch.zeros_like(self.count)
        return NodeContext(
            token=self.token[(self.count - 1).clamp(min=0)], parent=zero - 1, depth=zero, position=lane.length[:1] - 1,
            slot=lane.slot, local=zero, valid=zero == 0, ancestors=torch.ones_like(zero, dtype=torch.int32)[:, None],
            slots=self.state.slots, max_depth=self.state.depth, params=self.state.sampling, greedy=greedy,
        )  # fmt: skip

    def _first_in_two(self, greedy: bool) -> Step:
        def first() -> Scores:
            return Scores(logits=self.target.head(self.last).float(), fault=torch.zeros_like(self.count))

        def second(scores: Scores) -> None:
            self.state.emit(self.decide(scores.logits, self.root(greedy), scores.fault))

        return TwoSteps(
            first=first, between=lambda scores: self.host.scores(scores.logits, self.root(greedy)), second=second,
            mode=self._mode,
        )  # fmt: skip


def context_bounds(capacity: int) -> list[int]:
    """Bounds of the context that compiled chunks are made for, from none up to the capacity."""
    found, bound = [0], FIRST_BOUND
    while bound < capacity:
        found.append(bound)
        bound *= BOUND_GROWTH
    return [*found, capacity]
