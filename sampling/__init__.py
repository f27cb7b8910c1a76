"""Sampling strategies: from the target's logits to the emitted tokens."""

from . import block_verification as _block_verification  # each import registers a strategy
from . import greedy as _greedy
from . import gumbel as _gumbel
from . import rejection as _rejection
from . import token_match as _token_match
from . import typical as _typical
from .base import FAULTS, SAMPLERS, Acceptance, Draws, NodeContext, Sampler, walk
from .draws import Drawn
from .host import HostContext
from .params import SamplingParams, SlotParams

__all__ = [
    "FAULTS", "SAMPLERS", "Acceptance", "Drawn", "Draws", "HostContext", "NodeContext", "Sampler", "SamplingParams",
    "SlotParams", "walk",
]  # fmt: skip
del _block_verification, _greedy, _gumbel, _rejection, _token_match, _typical
