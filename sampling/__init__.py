"""Sampling strategies: from the target's logits to the emitted tokens."""

from . import greedy as _greedy  # each import registers a strategy
from . import gumbel as _gumbel
from . import token_match as _token_match
from .base import FAULTS, SAMPLERS, Acceptance, NodeContext, Sampler, walk
from .params import SamplingParams, SlotParams

__all__ = ["FAULTS", "SAMPLERS", "Acceptance", "NodeContext", "Sampler", "SamplingParams", "SlotParams", "walk"]
del _greedy, _gumbel, _token_match
