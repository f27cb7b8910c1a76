"""A request's sampling parameters, and those of all slots as tensors.

`SamplingParams` is what a caller asks for, checked. `SlotParams` holds one row a slot on the device, so that requests
of one batch may differ and a change of values never compiles anything again. Which features exist at all (and cost
something) is fixed when it is built. Knows no strategy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .vocabulary import Vocabulary, Whole

# What an engine can be built with besides the temperature, by the name the config uses.
FEATURES = ("top_k", "top_p", "min_p", "penalties", "logit_bias")
MAX_SEED = 2**63 - 1
MOST_BIAS = 1e6  # more than any two logits differ by


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose a request's tokens. Names and meanings are vLLM's and transformers'.

    Attributes:
        temperature: 0 is greedy: the argmax, whatever the filters say.
        top_k: keep the k most probable tokens, and all that are as probable as the k-th; 0, or the vocabulary's size
            and more, is off.
        top_p: keep the fewest most probable tokens whose mass reaches top_p, and all that are as probable as the last
            of them; 1 is off.
        min_p: keep tokens at least min_p times as probable as the most probable one; 0 is off.
        repetition_penalty: divides positive logits, multiplies negative ones, of tokens of the prompt or the output; 1
            is off.
        presence_penalty: subtracted from the logits of tokens of the output; 0 is off.
        frequency_penalty: subtracted once for every time a token is in the output; 0 is off.
        logit_bias: added to the logits of token ids.
        banned_token_ids: never emitted.
        seed: makes the output repeatable; None draws one from the operating system.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: must be 0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p}: must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p = {self.min_p}: must be in [0, 1]")
        if not 0.01 <= self.repetition_penalty <= 10.0:
            raise ValueError(f"repetition_penalty = {self.repetition_penalty}: must be in [0.01, 10], 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be in [-2, 2], 0 is off")
        for token, bias in (self.logit_bias or {}).items():
            if not abs(bias) <= MOST_BIAS:
                raise ValueError(
                    f"logit_bias of token {token} is {bias}: must be in [-{MOST_BIAS:g}, {MOST_BIAS:g}] "
                    "(banned_token_ids bans)"
                )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed = {self.seed}: must be in 0..{MAX_SEED}")

    def check_ids(self, vocab_size: int) -> None:
        """Refuse token ids that the vocabulary does not have."""
        for name, ids in (("logit_bias", self.logit_bias or {}), ("banned_token_ids", self.banned_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name}: token id {token} is not in 0..{vocab_size - 1}")

    @property
    def features(self) -> tuple[str, ...]:
        """Which of FEATURES these values need."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        needed = (
            self.top_k > 0,
            self.top_p < 1.0,
            self.min_p > 0.0,
            penalties,
            bool(self.logit_bias or self.banned_token_ids),
        )
        return tuple(name for name, use in zip(FEATURES, needed, strict=True) if use)

    @property
    def is_argmax(self) -> bool:
        """The tokens are the argmax of the target's own logits: greedy, and nothing changes the order."""
        return self.temperature == 0.0 and not {"penalties", "logit_bias"} & set(self.features)


class SlotParams(nn.Module):
    """Sampling parameters of S slots; row S belongs to padding rows.

    Attributes (all buffers; those of a feature that is not built in are missing):
        temperature: fp32 [S + 1]. seed: int64 [S + 1].
        top_k: int64 [S + 1]. top_p: fp64 [S + 1]. min_p: fp32 [S + 1].
        repetition_penalty, presence_penalty, frequency_penalty: fp32 [S + 1].
        in_prompt: bool [S + 1, V]. output_count: int32 [S + 1, V], how often each token was emitted.
        logit_bias: fp32 [S + 1, V], -inf bans. V is this process's part of the vocabulary.
        low_bits: int64 [], 2^32 - 1; a tensor because inductor refuses such a constant where it counts in int32.

    Args:
        slots: S.
        vocab_size: of the whole vocabulary.
        device: of the target.
        features: which of FEATURES requests may use.
        vocabulary: the part of it that the logits are for; None is all.
    """

    def __init__(
        self, *, slots: int, vocab_size: int, device: torch.device, features: tuple[str, ...] = (),
        vocabulary: Vocabulary | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.slots, self.vocab_size, self.features = slots, vocab_size, frozenset(features)
        self.vocabulary: Vocabulary = Whole(vocab_size) if vocabulary is None else vocabulary

        def buffer(name: str, dtype: torch.dtype, fill: float, *shape: int) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device), persistent=False)

        buffer("low_bits", torch.int64, 2**32 - 1)
        buffer("temperature", torch.float32, 0.0, slots + 1)
        buffer("seed", torch.int64, 0, slots + 1)
        if "top_k" in self.features:
            buffer("top_k", torch.int64, 0, slots + 1)
        if "top_p" in self.features:
            buffer("top_p", torch.float64, 1.0, slots + 1)
        if "min_p" in self.features:
            buffer("min_p", torch.float32, 0.0, slots + 1)
        if "penalties" in self.features:
            buffer("repetition_penalty", torch.float32, 1.0, slots + 1)
            buffer("presence_penalty", torch.float32, 0.0, slots + 1)
            buffer("frequency_penalty", torch.float32, 0.0, slots + 1)
            buffer("in_prompt", torch.bool, False, slots + 1, self.vocabulary.size)
            buffer("output_count", torch.int32, 0, slots + 1, self.vocabulary.size)
        if "logit_bias" in self.features:
            buffer("logit_bias", torch.float32, 0.0, slots + 1, self.vocabulary.size)

    low_bits: Tensor
    temperature: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    in_prompt: Tensor
    output_count: Tensor
    logit_bias: Tensor

    def admit(self, slot: int, params: SamplingParams, prompt: Tensor) -> None:
        """A request begins in a slot (host side, between rounds).

        Args:
            slot: which.
            params: its parameters; they need no feature that is not built in.
            prompt: int64 [P].
        """
        assert self.features.issuperset(params.features), "Sampler.params refuses such requests"
        self.temperature[slot].fill_(min(params.temperature, torch.finfo(torch.float32).max))
        self.seed[slot].fill_(params.seed or 0)
        for name in ("top_k", "top_p", "min_p"):
            if name in self.features:
                getattr(self, name)[slot].fill_(min(getattr(params, name), MAX_SEED))
        if "penalties" in self.features:
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                getattr(self, name)[slot].fill_(getattr(params, name))
            times = torch.zeros(self.vocabulary.size, dtype=torch.int64, device=prompt.device)
            self.in_prompt[slot] = times.index_add_(0, *self.vocabulary.own(prompt, torch.ones_like(prompt))) > 0
            self.output_count[slot].fill_(0)
        if "logit_bias" in self.features:
            self.logit_bias[slot].fill_(0.0)
            biases = {**(params.logit_bias or {}), **dict.fromkeys(params.banned_token_ids, -math.inf)}
            for token, bias in biases.items():
                if 0 <= token - self.vocabulary.first < self.vocabulary.size:
                    self.logit_bias[slot, token - self.vocabulary.first].fill_(bias)

    def record(self, token: Tensor, count: Tensor) -> None:
        """Count emitted tokens, for the penalties; on the device, in fixed shapes.

        Args:
            token: int64 [S, M], the first `count` of each slot are real.
            count: int64 [S].
        """
        if "penalties" in self.features:
            real = torch.arange(token.shape[1], device=token.device) < count[:, None]
            self.output_count[:-1].scatter_add_(1, *self.vocabulary.own(token.clamp(min=0), real.to(torch.int32)))
