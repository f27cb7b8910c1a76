"""A training run as data: `TrainingConfig`, read as `spec/config.py` reads a `GenerateConfig`.

Knows names and ranges only; what has to be compared with a target or with data is refused where those are known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from modelkit.loading import DTYPES
from modelkit.registry import parse_config

from ..config import CompileConfig, Strategy, TargetConfig, read_tables, shipped_configs
from .loss import LOSSES

DEFAULT_LOSS = "dpace"


def at_least(config: Any, least: int, *names: str) -> None:
    """Refuse fields below a bound; None is let through."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name} = {value}: must be at least {least}")


def check_temperatures(name: str, values: tuple[float, ...]) -> None:
    """Refuse a list without any, and what is no temperature."""
    if not values or not all(0 <= value < math.inf for value in values):
        raise ValueError(f"{name} = {list(values)}: must be a list of temperatures, 0 (greedy) or more")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Text that the target writes.

    Attributes:
        folder: where shards and manifest are kept; a run that finds some there writes what is missing.
        documents: how many to write, a multiple of `shard_documents`.
        prompts: a prompt file (.jsonl or text); None: the target makes up the user's turns too.
        openings: what made-up user turns begin with, in turn; "" leaves the beginning to the target too.
        prompt_temperatures: of made-up user turns, in turn.
        temperatures: of answers, in turn.
        max_prompt_tokens: longest prompt, the chat template's tokens counted; documents with longer ones are left out.
        max_new_tokens: longest answer.
        loop_rounds: an answer that ends in a loop keeps so many rounds of it, see `training/loops.py`; None keeps all.
        slots: documents written at the same time.
        shard_documents: documents a shard; an interrupted run loses at most the shard it was writing.
        seed: of all draws.
    """

    folder: str
    documents: int = 20_480
    prompts: str | None = None
    openings: tuple[str, ...] = ("",)
    prompt_temperatures: tuple[float, ...] = (0.8, 1.0)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_prompt_tokens: int = 160
    max_new_tokens: int = 512
    loop_rounds: int | None = 3
    slots: int = 16
    shard_documents: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (
            "documents",
            "loop_rounds",
            "max_prompt_tokens",
            "max_new_tokens",
            "slots",
            "shard_documents",
        )
        at_least(self, 1, *counts)
        if self.documents % self.shard_documents:
            raise ValueError(
                f"documents = {self.documents}: must be a multiple of shard_documents = {self.shard_documents}"
            )
        for name in ("prompt_temperatures", "temperatures"):
            check_temperatures(name, getattr(self, name))
        if not self.openings:
            raise ValueError('openings = []: must be a list of texts; [""] for none')
        if self.prompts is None and 0.0 in self.prompt_temperatures:
            raise ValueError("prompt_temperatures: at 0 every made-up user turn would be the same one")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed = {self.seed}: must be in 0..{2**31 - 1}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShapeConfig:
    """The drafter's shape; its hidden size, vocabulary, norms and rotary embedding are the target's.

    Attributes:
        mask_token_id: a row of the target's vocabulary that texts do not use.
        layers: Qwen3 blocks.
        block_size: tokens of a block, the anchor counted.
        target_layer_ids: tapped layers; None takes five spread as published drafters spread them.
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim: None takes the target's.
        causal: block rows see only the rows before them.
        sliding_window: a row sees so many positions; None sees all.
    """

    mask_token_id: int
    layers: int = 4
    block_size: int = 16
    target_layer_ids: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    causal: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
        at_least(self, 1, "layers", *sizes)
        at_least(self, 2, "block_size")
        at_least(self, 0, "mask_token_id")
        taps = self.target_layer_ids
        if taps is not None and (not taps or len(set(taps)) < len(taps)):
            raise ValueError(f"target_layer_ids = {list(taps)}: must be a list of different layers")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimiserConfig:
    """How to train; a "step" is an optimiser step of every process.

    Attributes:
        steps: of the whole run; the learning rate falls along a cosine over them.
        sequence_length: tokens of a packed sequence.
        sequences: of a step and process.
        anchors: blocks of a sequence; drawn anew whenever it is read.
        soft_labels: share of the target's distribution in what a position is trained for; the rest is its token.
        balance: how much less blocks of documents weigh that are drafted well already: their acceptance length to minus
            this power; 0 weighs all alike, 2 is what the number of rounds asks for. See `loss.balanced`.
        optimiser: "muon" or "adamw", of matrices; norms get AdamW. Good rates are of a size.
        learning_rate: at its highest.
        warmup: part of the steps over which the rate rises.
        weight_decay: of matrices.
        clip: largest norm of the gradient.
        seed: of weights, order and anchors.
        held_out: part of the prompts whose documents are not trained on but measured at the end.
        checkpoint_every: steps between checkpoints; one is written at the end too.
        log_every: steps between lines of log.jsonl.
        chunk_blocks: blocks whose logits are in memory at once.
        attention: "auto" is "flex" (flex attention) on CUDA devices and "dense" (a mask) elsewhere.
        compile: compile attention and the loss; None: on CUDA devices.
    """

    steps: int
    sequence_length: int = 1024
    sequences: int = 8
    anchors: int = 64
    soft_labels: float = 0.0
    balance: float = 0.0
    optimiser: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    held_out: float = 0.02
    checkpoint_every: int = 500
    log_every: int = 10
    chunk_blocks: int = 256
    attention: Literal["auto", "flex", "dense"] = "auto"
    compile: bool | None = None

    def __post_init__(self) -> None:
        counts = ("sequence_length", "sequences", "anchors", "checkpoint_every", "log_every", "chunk_blocks")
        at_least(self, 1, "steps", *counts)
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup = {self.warmup}: must be in [0, 1)")
        if not 0 <= self.balance <= 4:
            raise ValueError(f"balance = {self.balance}: must be in [0, 4]")
        if not 0 <= self.soft_labels <= 1:
            raise ValueError(f"soft_labels = {self.soft_labels}: must be in [0, 1]")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out = {self.held_out}: must be in [0, 1)")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay = {self.weight_decay}: must be 0 or more")
        if not 0 <= self.seed < 2**23:  # the step stands in the lower 40 bits of 63
            raise ValueError(f"seed = {self.seed}: must be in 0..{2**23 - 1}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutputConfig:
    """The drafter's folder, in the published format, with the run's checkpoint beside the weights."""

    folder: str
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}; known: {', '.join(DTYPES)}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What the finished drafter is measured on, in the real engine.

    Attributes:
        prompts: prompt files; none: nothing is measured.
        limit: prompts in all, taken from the files in turn.
        max_new_tokens: of each prompt.
        budgets: of the trees.
        trees: policies that take a budget, beside the chain.
        ngram: also decode with n-grams and the first of the trees, to see what the text itself gives away.
        samplers: sampling strategies; chain and trees are measured with each of them that serves them.
        temperatures: of the target. At 0 every strategy is greedy decoding, which is measured once.
        slots: prompts at the same time.
    """

    prompts: tuple[str, ...] = ()
    limit: int = 24
    max_new_tokens: int = 256
    budgets: tuple[int, ...] = (15, 31, 63)
    trees: tuple[str, ...] = ("best_first", "spine_first")
    ngram: bool = True
    samplers: tuple[str, ...] = ("gumbel",)
    temperatures: tuple[float, ...] = (0.0,)
    slots: int = 8

    def __post_init__(self) -> None:
        at_least(self, 1, "limit", "max_new_tokens", "slots")
        if any(budget < 1 for budget in self.budgets):
            raise ValueError(f"budgets = {list(self.budgets)}: must be at least 1 each")
        check_temperatures("temperatures", self.temperatures)
        if not self.samplers:
            raise ValueError("samplers = []: must be a list of sampling strategies")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """A complete run. Build it with `load_training_config`; `compile` is the engine's, as `generate` has it."""

    target: TargetConfig
    data: DataConfig
    drafter: ShapeConfig
    loss: Strategy
    train: OptimiserConfig
    output: OutputConfig
    evaluate: EvaluateConfig
    compile: CompileConfig

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        if self.drafter.block_size > self.train.sequence_length:
            raise ValueError(
                f"[drafter] block_size = {self.drafter.block_size} does not fit into [train] sequence_length = "
                f"{self.train.sequence_length}"
            )


def load_training_config(
    source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> TrainingConfig:
    """Resolve a config.

    Args:
        source: a shipped name ("train-smollm2"), a TOML path, or tables.
        overrides: dotted keys to values, {"train.steps": 100}.

    Raises:
        ValueError: no such config, not TOML, an unknown table, key or name, or a value out of range.
    """
    tables = read_tables(source, overrides, shipped_configs(training=True), {"loss": DEFAULT_LOSS})
    fields = [field.name for field in dataclasses.fields(TrainingConfig)]
    for name, table in tables.items():
        if name not in fields:
            raise ValueError(f"unknown table [{name}]; known: {', '.join(fields)}")
        if not isinstance(table, Mapping):
            raise ValueError(f"[{name}] must be a table, got {table!r}")
    loss, config = LOSSES.config({"name": DEFAULT_LOSS} | dict(tables.get("loss", {})))

    def read(kind: type[Any], name: str) -> Any:
        return parse_config(kind, tables.get(name, {}), f"[{name}]")

    return TrainingConfig(
        target=read(TargetConfig, "target"), data=read(DataConfig, "data"), drafter=read(ShapeConfig, "drafter"),
        loss=Strategy(name=loss, config=config), train=read(OptimiserConfig, "train"),
        output=read(OutputConfig, "output"), evaluate=read(EvaluateConfig, "evaluate"),
        compile=read(CompileConfig, "compile"),
    )  # fmt: skip
