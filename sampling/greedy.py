"""Greedy decoding: the target's argmax at every row."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import NOT_FINITE, SAMPLERS, Acceptance, NodeContext, walk, with_fault
from .host import GivenProcessor, host_processors
from .params import SamplingParams, SlotParams
from .vocabulary import Whole


@SAMPLERS.register("greedy")
class Greedy:
    """Emits exactly what plain greedy decoding emits; the tree only decides how many tokens a round yields."""

    lossless: ClassVar[bool] = True
    chains_only: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = True
    use_kernels = False  # set by the engine where kernels may run
    features: tuple[str, ...] = ()

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """Greedy has one temperature, 0; for `host_processors` see `SamplingConfig`."""

        temperature: float = 0.0
        host_processors: tuple[GivenProcessor, ...] = ()

        def __post_init__(self) -> None:
            """Refuse a temperature that greedy decoding would ignore."""
            _check(SamplingParams(), self.temperature)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.host_processors = host_processors(config.host_processors)

    def params(self, **changes: Any) -> SamplingParams:
        """Temperature 0 only, and nothing that changes the order of the logits."""
        temperature = changes.pop("temperature", 0.0)
        params = SamplingParams(**changes)
        _check(params, temperature)
        return params

    def always_argmax(self, params: SamplingParams) -> bool:
        """Always."""
        return True

    def perturb(self, logits: Tensor, position: Tensor, params: SlotParams) -> Tensor:
        """Nothing to change."""
        return logits

    def accept(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """Argmax of each row (the lowest id of equals), then the walk."""
        return accept_argmax(logits, nodes, self.use_kernels)


def accept_argmax(logits: Tensor, nodes: NodeContext, use_kernels: bool) -> Acceptance:
    """The walk along each row's argmax; a row whose best logit is not finite is a fault."""
    if use_kernels:
        from .kernels.choose import argmax_tokens

        target, best = argmax_tokens(logits)
    else:
        own = Whole(logits.shape[-1]) if nodes.params is None else nodes.params.vocabulary
        target, best = own.best(logits)
    return with_fault(walk(target, nodes), torch.where(best.isfinite(), 0, NOT_FINITE))


def _check(params: SamplingParams, temperature: float) -> None:
    known = f"samplers: {', '.join(SAMPLERS.names())}"
    if temperature != 0.0:
        raise ValueError(f"temperature = {temperature}: sampler 'greedy' decodes at 0 only; {known}")
    if not params.is_argmax:
        raise ValueError(f"{', '.join(params.features)}: sampler 'greedy' takes the argmax of the logits only; {known}")
