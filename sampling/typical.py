"""Typical acceptance, LOSSY: a draft is accepted if the target finds it likely enough, whatever its law would draw.

Source: Medusa, Cai et al., arXiv 2401.10774, section 2.3.1. Outputs do not follow the target's law: likely drafts are
emitted more often than they should, and nothing corrects it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from .base import SAMPLERS, Acceptance, NodeContext, walk, with_fault
from .config import Sampling, SamplingConfig
from .draws import pick, target_law
from .filters import filtered


@SAMPLERS.register("typical")
class Typical(Sampling):
    """Lossy: accepts drafts that are likely enough. At temperature 0 it is greedy decoding."""

    lossless: ClassVar[bool] = False

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config(SamplingConfig):
        """A draft x is accepted if p(x) > min(epsilon, delta * exp(-entropy of p)).

        Attributes:
            epsilon: a draft as probable as this is always accepted.
            delta: how much less is enough where the target itself is unsure.
        """

        epsilon: float = 0.09
        delta: float = 0.3

        def __post_init__(self) -> None:
            SamplingConfig.__post_init__(self)
            for name in ("epsilon", "delta"):
                if not 0.0 < getattr(self, name) <= 1.0:
                    raise ValueError(f"{name} = {getattr(self, name)}: must be in (0, 1]")

    def sampled(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """Each row's most probable child, if it is likely enough; else a draw from p. Then the walk."""
        rows = filtered(logits, nodes, self.processors)
        p = target_law(rows.score, nodes)
        entropy = -(p * p.clamp(min=1e-38).log()).sum(-1)
        assert isinstance(self.config, Typical.Config)
        enough = (self.config.delta * (-entropy).exp()).clamp(max=self.config.epsilon)
        up = nodes.parent.clamp(min=0)
        likely = p[up].gather(1, nodes.token[:, None])[:, 0]
        candidate = nodes.valid & (nodes.parent >= 0) & (likely > enough[up])
        # The most probable child of each row, then the token of the first row that is it.
        best = torch.zeros_like(likely).scatter_reduce(0, up, torch.where(candidate, likely, 0.0), "amax")
        is_best = candidate & (likely == best[up])
        token = torch.full_like(nodes.token, -1).scatter_reduce(0, up, torch.where(is_best, nodes.token, -1), "amax")
        return with_fault(walk(torch.where(token < 0, pick(p, nodes), token), nodes), rows.fault)
