"""Prompts from the command line, a text file, standard input or JSONL; all read and checked before anything runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from .text import Prompt, encode

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedPrompt:
    """A prompt and the id it carries in outputs."""

    id: str
    prompt: Prompt


def read_prompts(texts: list[str], file: str | None, limit: int | None = None) -> list[NamedPrompt]:
    """Collect prompts.

    Args:
        texts: given on the command line; they come first.
        file: "-" is standard input; a name that ends in .jsonl holds an object a line with "prompt" (text), "messages"
            or "token_ids", and maybe "id"; any other file is one prompt.
        limit: take only so many.

    Raises:
        ValueError: nothing given, a file that cannot be read, or a bad line (its number is named).
    """
    found = [NamedPrompt(id=str(n), prompt=text) for n, text in enumerate(texts)]
    if file == "-":
        found += _parse(_text(sys.stdin.buffer.read(), "standard input"), "standard input", jsonl=None)
    elif file is not None:
        path = Path(file).expanduser()
        if not path.exists() or path.is_dir():
            raise ValueError(f"prompt file {path} {'is a folder' if path.is_dir() else 'does not exist'}")
        content = _text(path.read_bytes(), f"prompt file {path}")
        found += _parse(content, str(path), jsonl=path.suffix.lower() in (".jsonl", ".ndjson"))
    if not found:
        raise ValueError("no prompt: give --prompt TEXT, --prompt-file FILE, or pipe text in")
    return found[:limit]


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _parse(content: str, where: str, jsonl: bool | None) -> list[NamedPrompt]:
    if jsonl is None:  # standard input: JSONL if its first line is an object
        jsonl = content.lstrip().startswith("{") and _is_object(content.lstrip().split("\n", 1)[0])
    if not jsonl:
        if not content.strip():
            raise ValueError(f"{where} is empty")
        return [NamedPrompt(id=where, prompt=content.rstrip("\n"))]
    prompts = []
    for number, line in enumerate(content.split("\n"), 1):  # splitlines would cut at U+2028 inside a string
        if line.strip():
            prompts.append(_parse_line(line, number, f"{where}, line {number}"))
    return prompts


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _parse_line(line: str, number: int, where: str) -> NamedPrompt:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not a JSON object")
    keys = [key for key in ("prompt", "messages", "token_ids") if key in record]
    if len(keys) != 1:
        raise ValueError(f"{where}: needs exactly one of 'prompt', 'messages', 'token_ids', has {keys or list(record)}")
    prompt = record[keys[0]]
    if not isinstance(prompt, str if keys[0] == "prompt" else list):
        raise ValueError(f"{where}: '{keys[0]}' must be {'text' if keys[0] == 'prompt' else 'a list'}")
    return NamedPrompt(id=str(record.get("id", number - 1)), prompt=prompt)


def as_chat(prompts: list[NamedPrompt]) -> list[NamedPrompt]:
    """Texts as one user turn each; token ids and messages stay as they are."""
    return [
        dataclasses.replace(p, prompt=[{"role": "user", "content": p.prompt}]) if isinstance(p.prompt, str) else p
        for p in prompts
    ]


def pick_prompts(files: Sequence[str], limit: int) -> list[NamedPrompt]:
    """Prompts of several files in turn, `limit` in all, texts as one user turn each."""
    if limit < 1:
        raise ValueError(f"--limit {limit}: must be at least 1")
    each = [as_chat(read_prompts([], file)) for file in files]
    return in_turn(each)[:limit]


def in_turn(groups: Sequence[Sequence[T]]) -> list[T]:
    """The first of each group, then the second ones, and so on; groups that are at their end are passed over."""
    return [group[i] for i in range(max(map(len, groups))) for group in groups if i < len(group)]


def encode_all(prompts: Sequence[NamedPrompt], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt."""
    return [encode(p.prompt, tokenizer, vocab_size) for p in prompts]
