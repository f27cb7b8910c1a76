"""A request and its outcome, as the caller sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from .stats import Stats

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Per-request sampling, in the names everyone uses. None leaves the config's value.

    Attributes:
        temperature: 0 decodes greedily.
        top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
        seed: makes sampled output repeatable.
    """

    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.temperature is not None and not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: must be 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p}: must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p = {self.min_p}: must be in [0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt, ready to run.

    Attributes:
        prompt_ids: token ids.
        max_new_tokens: most tokens to emit; what the engine's context leaves room for, if that is less.
        stop_ids: token ids that end the output (and belong to it).
        stop: strings that end the output (and do not belong to it).
    """

    prompt_ids: list[int]
    max_new_tokens: int
    stop_ids: list[int]
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Outcome of a request.

    Attributes:
        token_ids: what was emitted, the stop token included.
        text: decoded, special tokens left out; None if the target has no tokenizer.
        finish_reason: "stop" (stop token or string) or "length" (token limit or context limit).
        stats: see `Stats`.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    stats: Stats


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A step of a streamed completion.

    Attributes:
        text: new text, "" while characters are held back.
        token_ids: new tokens.
        completion: set on the last piece.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None


def stop_tuple(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; empty ones are refused."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for s in strings:
        if not isinstance(s, str) or not s:
            raise ValueError(f"stop string {s!r}: must be a string that is not empty")
    return strings
