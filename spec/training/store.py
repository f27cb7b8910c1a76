"""Training data on disk: numbered safetensors shards, and a manifest that says which target writes them, and how.

A shard is whole as soon as it is there: a rename puts it in place, and its header says what it holds. So processes that
share the writing need not talk, and an interrupted run leaves nothing that looks complete. Knows files, not how text is
made or packed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from modelkit.config import read_json
from modelkit.loading import checkpoint_files, read_tensors

from .packing import Corpus

MANIFEST = "manifest.json"
FORMAT = 2
HEADER = "shard"
PROBED_BYTES = 1 << 20


def target_identity(folder: Path) -> dict[str, str]:
    """What tells one target from another: hashes of config, tokenizer, and the beginning of the weight files."""
    config = json.dumps(read_json(folder / "config.json"), sort_keys=True).encode()
    tokenizer = [folder / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")]
    weights = hashlib.sha256()
    for file in checkpoint_files(folder):
        weights.update(str(file.stat().st_size).encode())
        with file.open("rb") as opened:
            weights.update(opened.read(PROBED_BYTES))
    return {
        "config": hashlib.sha256(config).hexdigest(),
        "tokenizer": hashlib.sha256(b"\0".join(f.read_bytes() for f in tokenizer if f.is_file())).hexdigest(),
        "weights": weights.hexdigest(),
    }


@contextlib.contextmanager
def put_in_place(path: Path) -> Iterator[Path]:
    """A file that is there whole or not at all, whoever else writes it at the same time: gives the name to write to."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: str) -> None:
    """A text file, by `put_in_place`."""
    with put_in_place(path) as partial:
        partial.write_text(content, encoding="utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """Token ids of prompt and answer; only the answer is supervised."""

    prompt: list[int]
    answer: list[int]


class Store:
    """A folder of shards.

    Args:
        folder: made when the first shard is written.
        target: see `target_identity`.

    Raises:
        ValueError: the folder holds data of another target or tokenizer, or files without a manifest.
    """

    def __init__(self, folder: Path, target: dict[str, str]) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = {"format": FORMAT, "target": target, "recipe": None}
        files = folder.iterdir() if folder.is_dir() else ()
        strange = [file.name for file in files if not file.name.endswith(".partial")]
        if not self._begun() and strange:
            raise ValueError(f"data folder {folder} has no {MANIFEST} but holds {strange[0]}; give another folder")

    def _begun(self) -> bool:
        """Whether there is a manifest, which is read then, and must be one of our target."""
        if not (self.folder / MANIFEST).is_file():
            return False
        target, self.manifest = self.manifest["target"], read_json(self.folder / MANIFEST)
        if self.manifest.get("format") != FORMAT:
            raise ValueError(f"{self.folder}: data of format {self.manifest.get('format')!r}; known: {FORMAT}")
        if other := [name for name, value in target.items() if self.manifest["target"].get(name) != value]:
            raise ValueError(
                f"data folder {self.folder} was written by another target (its {' and '.join(other)} differ): a "
                "drafter must learn from its own target's text; give another folder"
            )
        return True

    def file(self, number: int) -> Path:
        """Where a shard is, or will be."""
        return self.folder / f"shard-{number:05d}.safetensors"

    @property
    def shards(self) -> list[Path]:
        """Those that are there, in order."""
        return sorted(self.folder.glob("shard-*.safetensors"))

    def _count(self, what: str) -> int:
        """A figure of the shards' headers, added up.

        Raises:
            ValueError: a file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        total = 0
        for file in self.shards:
            try:
                with safe_open(file, framework="pt") as opened:
                    total += json.loads(opened.metadata()[HEADER])[what]
            except (SafetensorError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file} is damaged ({error}): delete it, and it is written again") from error
        return total

    @property
    def documents(self) -> int:
        """How many the shards hold."""
        return self._count("documents")

    @property
    def tokens(self) -> int:
        """How many supervised ones the shards hold."""
        return self._count("answer_tokens")

    def use_recipe(self, recipe: dict[str, Any]) -> None:
        """Note how documents are made; shards that were made another way are refused."""
        if not self._begun():  # a run beside us may have since we looked
            self.manifest["recipe"] = recipe
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / MANIFEST, json.dumps(self.manifest, indent=1))
        known = self.manifest["recipe"]
        if known != recipe:
            changed = [name for name in recipe if known.get(name) != recipe[name]]
            raise ValueError(
                f"data folder {self.folder} was begun with other settings ({', '.join(changed)}); give another folder, "
                "or the settings it was begun with"
            )

    def add(self, number: int, documents: Sequence[Document]) -> None:
        """Write a shard."""
        from safetensors.torch import save_file

        tokens = [token for document in documents for token in (*document.prompt, *document.answer)]
        sizes = [len(document.prompt) + len(document.answer) for document in documents]
        tensors = {
            "token": torch.tensor(tokens, dtype=torch.int32),
            "offset": torch.tensor([0, *sizes]).cumsum(0),
            "prompt": torch.tensor([len(document.prompt) for document in documents], dtype=torch.int64),
        }
        answers = sum(len(document.answer) for document in documents)
        # One entry: of several, safetensors leaves the order to chance.
        header = json.dumps({"documents": len(documents), "answer_tokens": answers})
        with put_in_place(self.file(number)) as partial:
            save_file(tensors, partial, metadata={HEADER: header})

    def load(self) -> Corpus:
        """All shards.

        Raises:
            ValueError: there are none, or a file is damaged.
        """
        if not self.documents:
            raise ValueError(f"data folder {self.folder} holds no document; write some with --only data")
        parts = [dict(read_tensors([file])) for file in self.shards]
        sizes = torch.cat([part["offset"][1:] - part["offset"][:-1] for part in parts])
        return Corpus(
            token=torch.cat([part["token"] for part in parts]),
            offset=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
            prompt=torch.cat([part["prompt"] for part in parts]),
        )
