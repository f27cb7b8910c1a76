"""Gumbel sampling: every output is an exact draw from the target's law, and a function of the request and its seed.

The token at absolute position p is argmax(log p + g) with noise g keyed by (seed, p, token id). The drafter's scores
get the same g before its candidates are taken, so that drafts are right more often; the token emitted is the target's
own choice in any case, whatever the tree, so speculation cannot change it. (Daliri et al., arXiv 2408.07978.)
"""

from __future__ import annotations

import dataclasses
import importlib
import secrets
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import SAMPLERS, Acceptance, NodeContext, walk, with_fault
from .filters import Filtered, Processor, changed, filtered, min_p_limit
from .greedy import accept_argmax
from .noise import gumbel_noise, row_keys
from .params import FEATURES, MAX_SEED, SamplingParams, SlotParams


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Defaults of requests, and what an engine is built with. Base of the sampling strategies' configs.

    Attributes:
        temperature, top_k, top_p, min_p, seed: defaults of a request; see `SamplingParams`.
        repetition_penalty, presence_penalty, frequency_penalty: the same.
        filters: what requests may use: any of top_k, top_p, min_p, penalties, logit_bias (banned token ids included).
            What is not listed costs nothing. None is top_k, top_p, min_p and whatever the defaults above need.
        processors: "module:name" of callables `(logits [R, V], NodeContext) -> logits` that run on the device in every
            round, in this order; traceable and of fixed shapes.
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
    processors: tuple[str, ...] = ()

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


@SAMPLERS.register("gumbel")
class Gumbel:
    """Exact sampling with shared noise; at temperature 0 greedy. The default."""

    lossless: ClassVar[bool] = True
    stream: ClassVar[int] = 0
    use_kernels = False  # set by the engine where kernels may run

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config(SamplingConfig):
        """See `SamplingConfig`."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self.features = config.features
        self.processors = tuple(map(find_processor, config.processors))

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
        """The drafter's log-probabilities at the request's temperature, with the noise its tokens will meet."""
        slots, depth, vocabulary = logits.shape
        seed = params.seed[:-1, None].expand(slots, depth).flatten()
        if self.use_kernels:
            from .kernels.perturb import perturb_logits

            keys = row_keys(seed, position.flatten(), params.low_bits, self.stream)
            hot: Tensor = perturb_logits(logits, params.temperature[:-1].repeat_interleave(depth), keys)
            return hot
        temperature = params.temperature[:-1, None, None]
        noise = gumbel_noise(seed, position.flatten(), vocabulary, params.low_bits, self.stream).view(logits.shape)
        logits = logits.float()
        best = logits.amax(-1, keepdim=True)
        sampled = temperature > 0
        return torch.where(sampled, (logits - best) / torch.where(sampled, temperature, 1.0) + noise, logits)

    def accept(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """The noisy argmax of each row, then the walk."""
        if nodes.greedy:
            return accept_argmax(logits, nodes, self.use_kernels)
        if self.use_kernels:
            token, fault = self._chosen(logits, nodes)
        else:
            rows = self.noisy(logits, nodes)
            token, fault = rows.score.argmax(-1), rows.fault
        return with_fault(walk(token, nodes), fault)

    def _chosen(self, logits: Tensor, nodes: NodeContext) -> tuple[Tensor, Tensor]:
        """The argmax of `noisy` and the faults, int64 [R] each, by kernels."""
        from .kernels.choose import choose_tokens

        params, slot = nodes.params, nodes.slot
        assert params is not None
        rows = changed(logits, nodes, self.processors)
        keys = row_keys(params.seed[slot], nodes.position + 1, params.low_bits, self.stream)
        token, best = choose_tokens(
            rows.x, params.temperature[slot], keys,
            min_p_limit(params, slot), params.top_k[slot] if "top_k" in params.features else None,
            params.top_p[slot] if "top_p" in params.features else None,
        )  # fmt: skip
        return token, rows.faults(best)

    def noisy(self, logits: Tensor, nodes: NodeContext) -> Filtered:
        """The filtered scores of each row [R, V] with the noise of the token after it."""
        params = nodes.params
        assert params is not None
        rows = filtered(logits, nodes, self.processors)
        # What follows the row at position p is the token at p + 1.
        seed, sampled = params.seed[nodes.slot], params.temperature[nodes.slot] > 0
        noise = gumbel_noise(seed, nodes.position + 1, logits.shape[-1], params.low_bits, self.stream)
        return Filtered(score=rows.score + torch.where(sampled[:, None], noise, 0.0), fault=rows.fault)


def find_processor(path: str) -> Processor:
    """The callable behind "package.module:name".

    Raises:
        ValueError: it cannot be imported or called.
    """
    module, _, name = path.partition(":")
    try:
        processor: Processor = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"[sampling] processors: '{path}' cannot be imported: {error}") from error
    if not callable(processor):
        raise ValueError(f"[sampling] processors: '{path}' is not callable")
    return processor
