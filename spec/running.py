"""A request while it runs: host-side bookkeeping of its tokens, text and statistics."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import TYPE_CHECKING

from sampling import FAULTS

from .requests import Completion, FinishReason, Piece, Request
from .state import LENGTH, RUNNING, STOPPED
from .stats import Stats
from .text import TextStream

if TYPE_CHECKING:
    from .engine import Engine


@dataclasses.dataclass(kw_only=True)
class Running:
    """One occupied slot as the host knows it.

    Attributes:
        index: the request's number in the caller's list.
        greedy: it wants nothing but the argmax.
        began: when its prefill was begun, and `first_token_at` when that had run.
        emitted: tokens the device has emitted, those behind a stop string included.
    """

    index: int
    request: Request
    text: TextStream
    stats: Stats
    plain: bool
    greedy: bool
    began: float
    first_token_at: float = 0.0
    emitted: int = 0

    @classmethod
    def start(cls, index: int, request: Request, engine: Engine, plain: bool) -> Running:
        """Begin the bookkeeping of a request whose prefill is about to run."""
        stats = Stats(
            prompt_tokens=len(request.prompt_ids),
            draft_tokens_per_step=0 if plain else engine.nodes - 1,
            depth=0 if plain else engine.drafter.depth,
        )
        text = TextStream(engine.tokenizer, request.stop)
        greedy = engine.sampler.always_argmax(request.sampling)
        return cls(
            index=index, request=request, text=text, stats=stats, plain=plain, greedy=greedy, began=time.perf_counter()
        )  # fmt: skip

    def begin(self, others_until: float) -> None:
        """The prefill has run.

        Args:
            others_until: when the prefill before it had run; until then it waited.
        """
        self.first_token_at = time.perf_counter()
        self.stats.prefill_seconds = self.first_token_at - max(self.began, others_until)

    @property
    def committed(self) -> int:
        """Positions in the target's cache: all tokens but the last."""
        return len(self.request.prompt_ids) + self.emitted - 1

    def take(self, tokens: list[int], reason: int, first: bool) -> Piece:
        """Take over a round's tokens.

        Args:
            tokens: as emitted by the device, cut at stop ids and limits there.
            reason: RUNNING, STOPPED, LENGTH, or a fault.
            first: they come from the prefill and do not count as a round.

        Raises:
            RuntimeError: a fault; the message names the step and the place.
        """
        if reason > LENGTH:
            # The round after the one in flight may have been launched already, so the text is what is known by now.
            raise RuntimeError(f"prompt {self.index}, after {self.emitted} tokens: {FAULTS[reason - LENGTH]}")
        self.emitted += len(tokens)
        before = len(self.text.ids)
        piece = self.text.push(tokens)
        kept = self.text.ids[before:]
        if not first and not self.plain:
            self.stats.per_step_accepted.append(max(len(kept) - 1, 0))
        if reason == RUNNING and not self.text.stopped:
            return Piece(text=piece, token_ids=kept)
        piece += self.text.finish()
        self.stats.completion_tokens = len(self.text.ids)
        self.stats.decode_seconds = time.perf_counter() - self.first_token_at
        finish: FinishReason = "stop" if self.text.stopped or reason == STOPPED else "length"
        text = None if self.text.tokenizer is None else self.text.text
        completion = Completion(token_ids=list(self.text.ids), text=text, finish_reason=finish, stats=self.stats)
        return Piece(text=piece, token_ids=kept, completion=completion)


def warn_if_nothing_accepted(completion: Completion, drafter: str) -> None:
    """A drafter of which nothing is ever accepted is more likely miswired than merely bad."""
    stats = completion.stats
    if stats.num_spec_steps >= 20 and not stats.num_accepted_draft_tokens:
        warnings.warn(
            f"not one token of drafter '{drafter}' was accepted in {stats.num_spec_steps} rounds: the output is right, "
            "but nothing is gained; does the drafter fit this target?",
            stacklevel=3,
        )
