"""Token matching: each row's token is drawn from the target's law on its own, and a draft is accepted if it equals it.

The rule of the DDTree reference (arXiv 2604.12989). As exact as `gumbel`, and as repeatable, but the drafter does not
see the noise: drafts are right only as often as two independent draws agree.
"""

from __future__ import annotations

from typing import ClassVar

from .base import SAMPLERS
from .config import Sampling
from .gumbel import Gumbel


@SAMPLERS.register("token_match")
class TokenMatch(Gumbel):
    """Exact sampling with noise of its own."""

    stream: ClassVar[int] = 1
    perturb = Sampling.perturb  # the drafter does not see the noise
