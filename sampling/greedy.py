"""Greedy decoding: the target's argmax at every row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from .base import SAMPLERS, Acceptance, NodeContext, walk


@SAMPLERS.register("greedy")
class Greedy:
    """Emits exactly what plain greedy decoding emits; the tree only decides how many tokens a round yields."""

    lossless: ClassVar[bool] = True

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """Greedy has one temperature, 0."""

        temperature: float = 0.0

        def __post_init__(self) -> None:
            """Refuse a temperature that greedy decoding would ignore."""
            _check_temperature(self.temperature)

    def __init__(self, config: Config) -> None:
        self.config = config

    def accept(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """Argmax of each row (the lowest id of equals), then the walk."""
        return walk(logits.argmax(-1), nodes)

    def check(self, *, temperature: float | None) -> None:
        """Only 0 is greedy."""
        _check_temperature(temperature or 0.0)


def _check_temperature(temperature: float) -> None:
    if temperature != 0.0:
        known = ", ".join(SAMPLERS.names())
        raise ValueError(f"temperature = {temperature}: sampler 'greedy' decodes at 0 only; samplers: {known}")
