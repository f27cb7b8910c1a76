"""What a caller asks for and gets: settings, requests, completions. Checks everything before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from modelkit.registry import field_types, read_value, spell_type, unknown_name
from sampling import SamplingParams

from .stats import Stats
from .text import Prompt, encode

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to complete a prompt; None leaves the config's value.

    Attributes:
        max_new_tokens: most tokens a completion; the context limit may end it sooner.
        temperature, top_k, top_p, min_p: see `SamplingParams`, as for the next two lines.
        repetition_penalty, presence_penalty, frequency_penalty: of tokens that are there already.
        logit_bias, banned_token_ids: by token id.
        seed: makes sampled output repeatable; each prompt of a call gets it.
        stop: strings that end a completion and do not belong to it.
        stop_token_ids: ids that end it besides the model's own end tokens, and belong to it.
        ignore_eos: do not end at the model's end tokens.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    banned_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: str | list[Any] | tuple[Any, ...] | None = None
    stop_token_ids: list[Any] | tuple[Any, ...] | None = None
    ignore_eos: bool | None = None

    def __post_init__(self) -> None:
        """Refuse values of another type or out of range."""
        for name, annotation in field_types(type(self)).items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                read_value(annotation, value)
            except TypeError:
                raise ValueError(f"{name} = {value!r} is not a {spell_type(annotation)}") from None
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: must be at least 1")
        SamplingParams(**self.sampling)
        for s in self.stop_strings:
            if not isinstance(s, str) or not s:
                raise ValueError(f"stop string {s!r}: must be a string that is not empty")

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that are given."""
        names = (field.name for field in dataclasses.fields(SamplingParams))
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def changed(settings: Any, changes: Mapping[str, Any]) -> Settings:
    """Settings (None: the defaults) with fields changed by name.

    Raises:
        ValueError: no `Settings`, or an unknown name.
    """
    if settings is not None and not isinstance(settings, Settings):
        raise ValueError(f"settings must be a Settings, got {settings!r}; give single ones by name")
    known = [field.name for field in dataclasses.fields(Settings)]
    for name in changes:
        if name not in known:
            raise unknown_name("setting", name, known)
    return dataclasses.replace(settings or Settings(), **changes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt, ready to run.

    Attributes:
        prompt_ids: token ids.
        max_new_tokens: most tokens to emit; what the engine's context leaves room for, if that is less.
        stop_ids: token ids that end the output (and belong to it).
        stop: strings that end the output (and do not belong to it).
        sampling: how tokens are chosen.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    stop_ids: list[int]
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)


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


def prepare(
    prompts: str | Sequence[Prompt], settings: Settings, *, tokenizer: Any | None, vocab_size: int, capacity: int,
    max_new_tokens: int, eos_ids: Sequence[int], max_stop_ids: int, sampling: Callable[[], SamplingParams],
) -> list[Request]:  # fmt: skip
    """Check prompts and settings and turn them into requests.

    Args:
        prompts: a list of texts, of token-id lists, or of chat-message lists; one text alone is a list of one.
        settings: of the caller.
        tokenizer: of the target, or None.
        vocab_size: of the target.
        capacity: most tokens of a request, prompt and output.
        max_new_tokens: where the settings leave it open.
        eos_ids: the model's end tokens, unless ignored.
        max_stop_ids: most ids a request may stop at.
        sampling: makes each request's sampling parameters (a seed of its own, where the settings give none).

    Raises:
        ValueError: something is not usable; with several prompts the message says which.
    """
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a list of prompts or one text, got {type(prompts).__name__}")
    if not len(prompts):
        raise ValueError("prompts is empty: give a list with at least one prompt")
    if settings.stop_strings and tokenizer is None:
        raise ValueError("the target folder has no tokenizer: stop strings cannot be found, use stop_token_ids")
    for i in settings.stop_token_ids or ():
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
            raise ValueError(f"stop token id {i!r} is not an integer in 0..{vocab_size - 1}")
    stop_ids = list(dict.fromkeys([*eos_ids, *(settings.stop_token_ids or ())]))
    if len(stop_ids) > max_stop_ids:
        raise ValueError(f"{len(stop_ids)} stop ids; at most {max_stop_ids} are possible")
    sampling().check_ids(vocab_size)
    several = [prompts] if isinstance(prompts, str) else prompts
    requests = []
    for number, prompt in enumerate(several):
        try:
            ids = encode(prompt, tokenizer, vocab_size)
            if len(ids) >= capacity:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens; the context of {capacity} (max_model_len) must hold it and one "
                    "new token"
                )
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}" if len(several) > 1 else str(error)) from None
        requests.append(
            Request(
                prompt_ids=ids,
                max_new_tokens=settings.max_new_tokens or max_new_tokens,
                stop_ids=stop_ids,
                stop=settings.stop_strings,
                sampling=sampling(),
            )
        )
    return requests
