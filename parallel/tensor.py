"""Tensor and pipeline parallelism, and their product: the tables.

Tensor: heads and inner features of every layer are shared out, two sums a layer (Megatron-LM, arXiv 1909.08053).
Pipeline: whole layers are. In both, the vocabulary's rows of embedding and head are shared out among all processes,
which balances stages by itself.
"""

from __future__ import annotations

import dataclasses

from .base import LAYOUTS
from .mesh import Placements
from .spread import Spread, SpreadConfig, check_processes
from .table import COLUMNS, FEATURES, KV_COLUMNS, ROWS, SUMMANDS, VOCABULARY, WHOLE, Border, Table

LAYERS: dict[str, Placements] = {
    "layers.*.self_attn.q_proj.*": COLUMNS,
    "layers.*.self_attn.k_proj.*": KV_COLUMNS,
    "layers.*.self_attn.v_proj.*": KV_COLUMNS,
    "layers.*.self_attn.o_proj.weight": ROWS,
    "layers.*.self_attn.o_proj.bias": SUMMANDS,  # added once
    "layers.*.mlp.gate_proj.*": COLUMNS,
    "layers.*.mlp.up_proj.*": COLUMNS,
    "layers.*.mlp.down_proj.weight": ROWS,
    "layers.*.mlp.down_proj.bias": SUMMANDS,
    "*norm.weight": WHOLE,
}
OPTIONAL = frozenset({"layers.*.self_attn.o_proj.bias", "layers.*.mlp.down_proj.bias"})
LAYER_BORDERS = {
    "layers.*.self_attn": Border(leave=(SUMMANDS, WHOLE)),
    "layers.*.mlp": Border(leave=(SUMMANDS, WHOLE)),
}
TARGET = Table(
    parameters={"embed_tokens.weight": VOCABULARY, "lm_head.weight": VOCABULARY, **LAYERS},
    borders=LAYER_BORDERS,
    optional=OPTIONAL,
)
DRAFTER = Table(
    parameters={"fc.weight": COLUMNS, **LAYERS},
    borders={"fc": Border(leave=(FEATURES, WHOLE)), **LAYER_BORDERS},
    optional=OPTIONAL,
)


@LAYOUTS.register("tensor")
class Tensor(Spread):
    """Every layer over all processes."""

    target, drafter = TARGET, DRAFTER

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config(SpreadConfig):
        """`degree`: processes; None is all that were started."""

        degree: int | None = None

        def __post_init__(self) -> None:
            check_counts(degree=self.degree)

    def split(self, processes: int) -> tuple[int, int]:
        """One stage."""
        degree = self.config.degree or processes
        check_processes(f"degree = {degree}", degree, processes)
        return 1, degree


@LAYOUTS.register("pipeline")
class Pipeline(Spread):
    """Whole layers over the processes, one stage after another."""

    target, drafter = TARGET, DRAFTER

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config(SpreadConfig):
        """`stages`: processes; None is all that were started."""

        stages: int | None = None

        def __post_init__(self) -> None:
            check_counts(stages=self.stages)

    def split(self, processes: int) -> tuple[int, int]:
        """Degree 1."""
        stages = self.config.stages or processes
        check_processes(f"stages = {stages}", stages, processes)
        return stages, 1


@LAYOUTS.register("tensor_pipeline")
class TensorPipeline(Spread):
    """Stages of several processes each: neighbours (of one machine) share layers, machines follow one another."""

    target, drafter = TARGET, DRAFTER

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config(SpreadConfig):
        """`degree` processes a stage, `stages` of them; None is what the other leaves of those that were started."""

        degree: int | None = None
        stages: int | None = None

        def __post_init__(self) -> None:
            check_counts(degree=self.degree, stages=self.stages)
            if self.degree is None and self.stages is None:
                raise ValueError("degree and stages: give one of them, or both")

    def split(self, processes: int) -> tuple[int, int]:
        """Both; their product is the number of processes."""
        stages, degree = self.config.stages, self.config.degree
        stages = stages or max(processes // degree, 1)
        degree = degree or max(processes // stages, 1)
        check_processes(f"stages = {stages} times degree = {degree}", stages * degree, processes)
        return stages, degree


def check_counts(**counts: int | None) -> None:
    """Refuse numbers of processes below 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} = {count}: must be at least 1")
