"""What the benches at fixed shapes time: the command line, checked, and the engine and prompts it asks for."""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from typing import Any

from modelkit.config import ModelConfig, read_json
from modelkit.registry import unknown_name

from .config import GenerateConfig, load_config
from .engine import Engine
from .sources import drafter_shape, shape_file, target_shapes, target_source

MARGIN = 256  # positions behind the context, for what the timed rounds commit
FIRST_TOKEN = "first token"
PARTS = (
    FIRST_TOKEN,
    "plain step",
    "verify",
    "attention",
    "draft",
    "tree",
    "accept",
    "commit",
    "round",
    "prefill chunk",
)


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers by comma.

    Raises:
        ValueError: something else, or a number below 1.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text}: not a list of whole numbers by comma") from None
    if min(found) < 1:
        raise ValueError(f"{option} {text}: numbers must be at least 1")
    return found


def with_shape(source: str, overrides: dict[str, Any], shape: str | None) -> GenerateConfig:
    """The config with `--shape` worked in: the target's path and, for a dflash drafter, the shape's own drafter.

    A shape without one is drafted for by n-grams, unless the command line says what drafts: the config's drafter is
    another target's.

    Args:
        source: of the config.
        overrides: of the command line; they win.
        shape: a shipped name or a config.json; None changes nothing.

    Raises:
        ValueError: no such shape.
    """
    if shape is None:
        return load_config(source, overrides)
    if shape_file(shape) is None:
        raise unknown_name("shape", shape, target_shapes())
    changes = {"target.path": shape} | overrides
    drafter = overrides.get("draft.name") or load_config(source).draft.name
    own = drafter_shape(shape)
    if drafter == "dflash" and own is not None:
        changes.setdefault("draft.path", own)
    elif drafter == "dflash" and not any(key.startswith("draft.") for key in overrides):
        changes["draft.name"] = "ngram"
    return load_config(source, changes)


def uses_random_weights(config: GenerateConfig) -> bool:
    """Whether the target or the drafter is a shape."""
    paths = (config.target.path, str(getattr(config.draft.config, "path", "")))
    return any(shape_file(path) is not None for path in paths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is timed.

    Attributes:
        rows: nodes a slot of the verifications, the root counted.
        contexts: committed lengths.
        batches: numbers of slots.
        room: positions a slot needs.
        parts: of PARTS, those that are timed; first tokens of requests are timed once.
    """

    rows: list[int]
    contexts: list[int]
    batches: list[int]
    room: int
    parts: tuple[str, ...]

    @classmethod
    def read(cls, arguments: argparse.Namespace, config: GenerateConfig) -> Plan:
        """From the command line; context lengths default to those of 1024 and 8192 that the target has room for.

        Raises:
            ValueError: not numbers, or the target or a forward has no room for them.
        """
        source = target_source(config.target.path, tell)
        file = source if source.is_file() else source / "config.json"
        limit = ModelConfig.from_dict(read_json(file), str(file)).max_position_embeddings
        rows, batches = numbers(arguments.rows, "--rows"), numbers(arguments.batch, "--batch")
        if arguments.context is None:
            contexts = [n for n in (1024, 8192) if n < limit] or [limit // 2]
        else:
            contexts = numbers(arguments.context, "--context")
        if max(contexts) >= limit:
            raise ValueError(f"--context {max(contexts)}: must be below the {limit} positions the target was made for")
        parts = PARTS if arguments.parts is None else tuple(part.strip() for part in arguments.parts.split(","))
        for part in parts:
            if part not in PARTS:
                raise unknown_name("part", part, PARTS)
        most = config.engine.prefill_chunk
        if max(rows) * max(batches) > most:
            raise ValueError(
                f"--rows {max(rows)} with --batch {max(batches)}: a forward has room for {most} rows "
                "(engine.prefill_chunk); set that higher"
            )
        room = min(max(contexts) + MARGIN, limit)
        return cls(rows=rows, contexts=contexts, batches=batches, room=room, parts=parts)

    def engine(self, config: GenerateConfig, batch: int) -> Engine:
        """An engine of so many slots with room for the longest context."""
        sized = load_config(config, {"engine.slots": batch, "engine.max_model_len": self.room})
        return Engine(sized, progress=tell, random_weights=True)


def random_prompts(engine: Engine, length: int) -> list[list[int]]:
    """Token ids for every slot, the same at each call."""
    draw = random.Random(length)
    vocab = engine.target.config.vocab_size
    return [draw.choices(range(vocab), k=length) for _ in range(engine.state.slots)]


def tell(line: str) -> None:
    """A line about progress."""
    print(line, file=sys.stderr, flush=True)
