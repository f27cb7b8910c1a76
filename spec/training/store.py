"""Training data on disk: safetensors shards and a manifest that says which target wrote them, and how.

A shard counts once the manifest names it; both are put in place by a rename, so that an interrupted run leaves nothing
that looks complete. Knows files, not how text is made or packed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from modelkit.config import read_json
from modelkit.loading import checkpoint_files, read_tensors

from .packing import Corpus

MANIFEST = "manifest.json"
FORMAT = 1
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


def write_atomically(path: Path, content: str) -> None:
    """A text file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)


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
        self.manifest: dict[str, Any] = {"format": FORMAT, "target": target, "recipe": None, "shards": []}
        if (folder / MANIFEST).is_file():
            self.manifest = read_json(folder / MANIFEST)
            self._check(target)
        elif folder.is_dir() and any(folder.iterdir()):
            # An interrupted first shard is ours; anything else may be the user's.
            strange = [p.name for p in folder.iterdir() if not p.name.endswith(".partial")]
            if [name for name in strange if not name.startswith("shard-")]:
                raise ValueError(f"data folder {folder} has no {MANIFEST} but holds {strange[0]}; give another folder")

    def _check(self, target: dict[str, str]) -> None:
        if self.manifest.get("format") != FORMAT:
            raise ValueError(f"{self.folder}: data of format {self.manifest.get('format')!r}; known: {FORMAT}")
        if other := [name for name, value in target.items() if self.manifest["target"].get(name) != value]:
            raise ValueError(
                f"data folder {self.folder} was written by another target (its {' and '.join(other)} differ): a "
                "drafter must learn from its own target's text; give another folder"
            )

    @property
    def shards(self) -> int:
        """How many are complete."""
        return len(self.manifest["shards"])

    @property
    def documents(self) -> int:
        """How many the complete shards hold."""
        return sum(shard["documents"] for shard in self.manifest["shards"])

    @property
    def tokens(self) -> int:
        """How many supervised ones the complete shards hold."""
        return sum(shard["answer_tokens"] for shard in self.manifest["shards"])

    def use_recipe(self, recipe: dict[str, Any]) -> None:
        """Note how documents are made; shards that were made another way are refused."""
        known = self.manifest["recipe"]
        if known is not None and known != recipe:
            changed = [name for name in recipe if known.get(name) != recipe[name]]
            raise ValueError(
                f"data folder {self.folder} was begun with other settings ({', '.join(changed)}); give another folder, "
                "or the settings it was begun with"
            )
        self.manifest["recipe"] = recipe

    def add(self, documents: Sequence[Document]) -> None:
        """Write the next shard."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"shard-{self.shards:05d}.safetensors"
        tokens = [token for document in documents for token in (*document.prompt, *document.answer)]
        sizes = [len(document.prompt) + len(document.answer) for document in documents]
        tensors = {
            "token": torch.tensor(tokens, dtype=torch.int32),
            "offset": torch.tensor([0, *sizes]).cumsum(0),
            "prompt": torch.tensor([len(document.prompt) for document in documents], dtype=torch.int64),
        }
        partial = self.folder / (name + ".partial")
        save_file(tensors, partial)
        os.replace(partial, self.folder / name)
        answers = sum(len(document.answer) for document in documents)
        entry = {"file": name, "documents": len(documents), "tokens": len(tokens), "answer_tokens": answers}
        self.manifest["shards"].append(entry)
        write_atomically(self.folder / MANIFEST, json.dumps(self.manifest, indent=1))

    def load(self) -> Corpus:
        """All complete shards.

        Raises:
            ValueError: there are none, or a file is missing or damaged.
        """
        if not self.documents:
            raise ValueError(f"data folder {self.folder} holds no document; write some with --only data")
        parts = []
        for shard in self.manifest["shards"]:
            file = self.folder / shard["file"]
            if not file.is_file():
                raise ValueError(f"{file}, which the manifest names, is missing")
            parts.append(dict(read_tensors([file])))
        sizes = torch.cat([part["offset"][1:] - part["offset"][:-1] for part in parts])
        return Corpus(
            token=torch.cat([part["token"] for part in parts]),
            offset=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
            prompt=torch.cat([part["prompt"] for part in parts]),
        )
