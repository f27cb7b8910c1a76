"""Sampling strategies: from the target's logits to the emitted tokens."""

from . import greedy as _greedy  # registers the strategy
from .base import SAMPLERS, Acceptance, NodeContext, Sampler, walk

__all__ = ["SAMPLERS", "Acceptance", "NodeContext", "Sampler", "walk"]
del _greedy
