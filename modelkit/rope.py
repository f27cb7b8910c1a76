"""Rotary position embedding: the frequencies a config asks for, and turning heads by them.

Half ("neox") layout: dimension i is paired with i + D/2. No tables: angles are made from the rows' positions once a
forward, so no position is out of range.
Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's scaling as published in its config.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Keys of each type besides theta: needed, optional.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    ),
}
ROPE_TYPES = tuple(_KEYS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Parameters of one rotary embedding; names as in config.json's `rope_parameters`."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        """Refuse what would make no angles."""
        for name in ("theta", "factor"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"rope {name} {value} is not a positive number")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> RopeConfig:
        """Read the RoPE keys of a config.json, in the older and the newer (`rope_parameters`) spelling.

        Raises:
            ValueError: theta is missing (a default would silently change results), an unknown type, or a type's key
                is missing.
        """
        nested, older = config.get("rope_parameters"), config.get("rope_scaling")
        if nested and older and nested != older:
            raise ValueError(f"{where}: rope_parameters and rope_scaling are both given and disagree")
        scaling = dict(nested or older or {})
        theta = scaling.pop("rope_theta", None) or config.get("rope_theta")
        if theta is None:
            raise ValueError(f"{where}: no rope_theta, neither at the top level nor in rope_parameters")
        kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        scaling.pop("type", None)
        if kind not in ROPE_TYPES:
            raise ValueError(f"{where}: unknown rope type '{kind}'; known: {', '.join(ROPE_TYPES)}")
        if float(scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError(f"{where}: partial_rotary_factor other than 1 is not implemented")
        read = {key: value for key, value in scaling.items() if value is not None}
        needed, optional = _KEYS[kind]
        if missing := needed - read.keys():
            raise ValueError(f"{where}: rope type '{kind}' needs {', '.join(sorted(missing))}")
        if unknown := read.keys() - needed - optional:
            raise ValueError(f"{where}: rope type '{kind}' has unknown parameters: {', '.join(sorted(unknown))}")
        mscale, mscale_all = read.pop("mscale", None), read.pop("mscale_all_dim", None)
        if kind == "yarn" and "attention_factor" not in read:
            read["attention_factor"] = _yarn_attention_factor(float(read["factor"]), mscale, mscale_all)
        read["factor"] = float(read.get("factor", 1.0))
        return cls(theta=float(theta), type=kind, **read)

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Angles per position step, fp32 [head_dim / 2]."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain = 1.0 / (self.theta**exponent)
        if self.type == "linear":
            return plain / self.factor
        if self.type == "llama3":
            return self._llama3(plain)
        if self.type == "yarn":
            return self._yarn(exponent, head_dim)
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long wavelengths slowed by `factor`, short ones kept, a smooth blend between."""
        turns = self.original_max_position_embeddings / (2 * math.pi / plain)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * plain / self.factor + smooth * plain

    def _yarn(self, exponent: Tensor, head_dim: int) -> Tensor:
        """YaRN section 3.2: interpolate below `beta_slow` turns, extrapolate above `beta_fast`, ramp between."""

        def dimension(turns: float) -> float:
            span = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return head_dim * math.log(span) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high = high + 0.001 if low == high else high
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        frequency = self.theta**exponent
        return ramp / (self.factor * frequency) + (1 - ramp) / frequency


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def rotary_angles(
    inverse_frequencies: Tensor, scale: float, position: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine for a list of rows.

    Args:
        inverse_frequencies: fp32 [D / 2].
        scale: YaRN's factor on both (1 otherwise).
        position: absolute positions [R].
        dtype: the model's dtype; angles are made in fp32 and rounded to it.

    Returns:
        cos [R, 1, D] and sin [R, 1, D], the first half of sin negated so that `rotate` needs no negation of its own.
    """
    angle = position.float()[:, None] * inverse_frequencies[None, :]
    cos, sin = angle.cos() * scale, angle.sin() * scale
    both = torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
    return both[0][:, None, :], both[1][:, None, :]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads [R, h, D] by their rows' angles."""
    half = heads.shape[-1] // 2
    swapped = heads.roll(half, -1)
    return heads * cos + swapped * sin
