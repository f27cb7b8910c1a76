"""Prompts to token ids and back: chat templates, incremental decoding, stop strings.

The only file that touches a tokenizer. Knows nothing of models or rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def load_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, or None if it has none (prompts are token ids then)."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise ValueError(f"{folder}: the tokenizer cannot be loaded ({type(error).__name__}: {error})") from None


def encode(prompt: Prompt, tokenizer: Any | None, vocab_size: int) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: raw text (special tokens added as the tokenizer does), token ids, or chat messages (the chat template
            is applied with a generation prompt, and no second BOS).
        tokenizer: of the target.
        vocab_size: ids must be below it.

    Raises:
        ValueError: an empty prompt, ids out of range, text without a tokenizer, messages without a chat template.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the target folder has no tokenizer: give prompts as token ids")
        if not prompt:
            raise ValueError("the prompt is empty")
        _check_text(prompt)
        ids = list(tokenizer(prompt)["input_ids"])
    elif isinstance(prompt, int):
        raise ValueError(f"not a prompt: {prompt!r} (one list of token ids must stand in a list: [[1, 2, 3]])")
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise ValueError(f"not a prompt: {prompt!r} ({type(prompt).__name__})")
    elif not len(prompt):
        raise ValueError("the prompt is empty")
    elif all(isinstance(item, Mapping) for item in prompt):
        ids = _encode_chat(prompt, tokenizer)  # type: ignore[arg-type]
    elif all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt):
        ids = [int(item) for item in prompt]  # type: ignore[arg-type]
    else:
        raise ValueError("a prompt is a string, a list of token ids, or a list of {'role', 'content'} messages")
    if not ids:
        raise ValueError("the prompt is empty: the tokenizer makes no token of it")
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ValueError(f"token id {i} is outside the target's vocabulary of {vocab_size}")
    return ids


def _encode_chat(messages: Sequence[Mapping[str, str]], tokenizer: Any | None) -> list[int]:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target's tokenizer has no chat template: give text or token ids")
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a chat message needs 'role' and 'content' strings, got {dict(message)!r}")
        _check_text(message["content"])
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    # The template writes its own special tokens; adding the tokenizer's would double the BOS.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid text: {error.reason} at character {error.start}") from None


class TextStream:
    """Text of a growing list of tokens, released only once later tokens cannot change it.

    Held back are incomplete characters (byte-level pieces) and whatever may be the beginning of a stop string.

    Args:
        tokenizer: None yields no text.
        stop: strings; the text ends before the first of them that appears.
    """

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._settled = 0  # tokens whose text is final
        self._prefix = 0  # first token of the window that is decoded again
        self._released = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens until a stop string appears; returns the text that can be shown now.

        Tokens after the one that completes a stop string are dropped; `ids` keeps those that count.
        """
        if not self.stopped and not self._all_at_once(ids):
            for token in ids:
                if self.stopped:
                    break
                self.ids.append(token)
                self._advance()
        return self._release(self._safe_end())

    def _all_at_once(self, ids: Sequence[int]) -> bool:
        """Add the tokens if that makes no difference to one by one: two calls of the tokenizer, however many.

        It does where a stop string appears, where the text is incomplete, and where there is a replacement character:
        some decoders let an invalid byte spoil the valid ones before it.
        """
        count, before = len(self.ids), (self.text, self._prefix, self._settled)
        self.ids += ids
        self._advance()
        complete = self.tokenizer is None or self._settled == len(self.ids)
        if complete and not self.stopped and "\ufffd" not in self.text[len(before[0]) :]:
            return True
        self.text, self._prefix, self._settled = before
        self.ids, self.stopped = self.ids[:count], False
        return False

    def finish(self) -> str:
        """Release what was held back; call once, when no more tokens come."""
        if not self.stopped and self.tokenizer is not None:
            whole = self._decode(self._prefix, len(self.ids))
            self.text += whole[len(self._decode(self._prefix, self._settled)) :]
            self._settled = len(self.ids)
            self._cut()
        return self._release(len(self.text))

    def _decode(self, start: int, end: int) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(self.ids[start:end], skip_special_tokens=True))

    def _advance(self) -> None:
        if self.tokenizer is None:
            return
        before = self._decode(self._prefix, self._settled)
        whole = self._decode(self._prefix, len(self.ids))
        if whole.endswith("\ufffd") or len(whole) <= len(before):
            return
        self.text += whole[len(before) :]
        self._prefix, self._settled = self._settled, len(self.ids)
        self._cut()

    def _cut(self) -> None:
        places = [p for p in (self.text.find(s, max(self._released - len(s), 0)) for s in self.stop) if p >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _safe_end(self) -> int:
        if self.stopped:
            return len(self.text)
        held = 0
        for stop in self.stop:
            for n in range(min(len(stop) - 1, len(self.text)), 0, -1):
                if self.text.endswith(stop[:n]):
                    held = max(held, n)
                    break
        return len(self.text) - held

    def _release(self, end: int) -> str:
        piece = self.text[self._released : end]
        self._released = max(self._released, end)
        return piece
