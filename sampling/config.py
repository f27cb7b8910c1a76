"""What strategies that sample have in common: their config, the requests they serve, the processors they run.

Knows neither noise nor trees.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any, ClassVar

from torch import Tensor

from .base import Acceptance, NodeContext
from .greedy import accept_argmax
from .host import GivenProcessor, find_processor, host_processors
from .params import FEATURES, MAX_SEED, SamplingParams, SlotParams


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Defaults of requests, and what an engine is built with. Base of the sampling strategies' configs.

    Attributes:
        temperature, top_k, top_p, min_p, seed: defaults of a request; see `SamplingParams`.
        repetition_penalty, presence_penalty, frequency_penalty: the same.
        filters: what requests may use: any of top_k, top_p, min_p, penalties, logit_bias (banned token ids included).
            What is not listed costs nothing. None is top_k, top_p, min_p and whatever the defaults above need.
        processors: callables `(logits [R, V], NodeContext) -> logits`, or their "module:name", that run on the device
            in every round, in this order; traceable and of fixed shapes.
        host_processors: callables `(logits fp32 [R, V], HostContext) -> logits`, or their "module:name", that run on
            the CPU before everything else; any Python, and slow. See `host.py`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    filters: tuple[str, ...] | None = None
    processors: tuple[GivenProcessor, ...] = ()
    host_processors: tuple[GivenProcessor, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values out of range and defaults that the filters leave out."""
        for name in self.filters or ():
            if name not in FEATURES:
                raise ValueError(f"filters: unknown '{name}'; known: {', '.join(FEATURES)}")
        check_features(self.params(), self.features)

    @property
    def features(self) -> tuple[str, ...]:
        """`filters`, resolved."""
        if self.filters is not None:
            return self.filters
        return tuple(dict.fromkeys(("top_k", "top_p", "min_p", *self.params().features)))

    def params(self, **changes: Any) -> SamplingParams:
        """The defaults, changed."""
        fields = {field.name for field in dataclasses.fields(SamplingParams)}
        defaults = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in fields}
        return SamplingParams(**{**defaults, **changes})


def check_features(params: SamplingParams, features: tuple[str, ...]) -> None:
    """Refuse parameters that need what was not built in."""
    for name in params.features:
        if name not in features:
            listed = ", ".join(f'"{known}"' for known in (*features, name))
            raise ValueError(f"{name}: this engine is built without it; set [sampling] filters = [{listed}]")


class Sampling:
    """Base of the strategies that sample; how they choose is theirs: `sampled`."""

    Config: ClassVar[type[SamplingConfig]] = SamplingConfig
    lossless: ClassVar[bool] = True
    chains_only: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = False
    use_kernels = False  # set by the engine where kernels may run

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self.features = config.features
        self.processors = tuple(find_processor(given, "processors") for given in config.processors)
        self.host_processors = host_processors(config.host_processors)

    def params(self, **changes: Any) -> SamplingParams:
        """The config's parameters, changed; without a seed, one from the operating system."""
        params = self.config.params(**changes)
        check_features(params, self.features)
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED + 1))
        return params

    def always_argmax(self, params: SamplingParams) -> bool:
        """At temperature 0, unless penalties, biases or processors reorder the logits."""
        return params.is_argmax and not self.processors

    def perturb(self, logits: Tensor, position: Tensor, params: SlotParams) -> Tensor:
        """The drafter keeps its own best candidates."""
        return logits

    def accept(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """The argmax where nobody wants more, else `sampled`."""
        return accept_argmax(logits, nodes, self.use_kernels) if nodes.greedy else self.sampled(logits, nodes)

    def sampled(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """`accept` of a round in which some request samples."""
        raise NotImplementedError
