"""Prompt lookup: propose what followed earlier occurrences of the last few tokens. Works with any target.

All matches of the longest suffixes are used at once: continuations that share a prefix share a node, and a node's
probability is the weight of the matches that go through it. (Prompt lookup decoding, A. Saxena 2023; weights over
several matches as in SuffixDecoding, arXiv 2411.04975.) Text that repeats with a period is continued periodically.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from modelkit.model import Transformer

from ..state import RoundState
from ..types import Proposal
from .base import DRAFTERS, BlockConfig, Perturb, unperturbed


@DRAFTERS.register("ngram")
class NgramDrafter:
    """Drafts from the request's own tokens; no model."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(BlockConfig):
        """Settings.

        Attributes:
            prompt_lookup_max: longest suffix compared; longer matches weigh more.
            prompt_lookup_min: shortest match that counts.
            confidence: probability that a match goes on for one more token, which decides depth against width.
        """

        prompt_lookup_max: int = 5
        prompt_lookup_min: int = 1
        confidence: float = 0.85

        def __post_init__(self) -> None:
            BlockConfig.__post_init__(self)
            if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= 32:
                raise ValueError(
                    f"prompt_lookup_min = {self.prompt_lookup_min}, prompt_lookup_max = {self.prompt_lookup_max}: "
                    "must be 1 <= min <= max <= 32"
                )
            if not 0.0 < self.confidence < 1.0:
                raise ValueError(f"confidence = {self.confidence}: must be between 0 and 1")

    def __init__(self, config: Config, *, target: Transformer, slots: int, capacity: int, candidates: int) -> None:
        self.config, self.candidates = config, candidates
        self.taps: tuple[int, ...] = ()
        self.features, self.rows = 0, 0
        self.depth = config.resolved_block_size(8) - 1

    def propose(self, state: RoundState, bound: int, perturb: Perturb = unperturbed) -> Proposal:
        """Match, take the best places, read on from them, merge equal prefixes. There are no logits to perturb."""
        # `bound` covers the committed length; one token more, the anchor, is known.
        tokens = state.tokens[:, : bound + 1]
        # An idle slot may hold more tokens than the active ones that `bound` speaks of.
        total = state.total.clamp(max=tokens.shape[1])
        place, weight = self._best_matches(tokens, total)
        distance = (total[:, None] - place).clamp(min=1)
        step = torch.arange(self.depth, device=tokens.device)
        read = place[:, None, :] + step[:, None] % distance[:, None, :]
        ids = tokens.gather(1, read.flatten(1).clamp(max=tokens.shape[1] - 1)).view(read.shape)
        return self._merge(ids, weight)

    def _best_matches(self, tokens: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """The k places [S, k] right after the best matches of the suffix, and their weights (0: no match)."""
        slots, length = tokens.shape
        index = torch.arange(length, device=tokens.device)
        matched = torch.zeros(slots, length, dtype=torch.int64, device=tokens.device)
        alive = torch.ones(slots, length, dtype=torch.bool, device=tokens.device)
        for back in range(1, self.config.prompt_lookup_max + 1):
            suffix = tokens.gather(1, (total - back).clamp(min=0)[:, None])
            before = torch.nn.functional.pad(tokens, (back, 0), value=-1)[:, :length]
            alive = alive & (before == suffix) & (total[:, None] > back)
            matched = matched + alive
        usable = (index >= 1) & (index < total[:, None]) & (matched >= self.config.prompt_lookup_min)
        # Longest match first, then the most recent. 32 bits are enough, and topk takes half as long over them.
        key = torch.where(usable, matched * length + index, -1).to(torch.int32)
        key = torch.nn.functional.pad(key, (0, max(self.candidates - length, 0)), value=-1)
        best, place = key.topk(self.candidates, -1)
        weight = torch.where(best >= 0, 4.0 ** (best // length).float(), 0.0)
        return place, weight

    def _merge(self, ids: Tensor, weight: Tensor) -> Proposal:
        """Continuations [S, L, k] with weights [S, k] as a proposal with edges along shared prefixes."""
        matches = ids.shape[2]
        same = (ids[:, :, :, None] == ids[:, :, None, :]).long().cumprod(1).bool()  # share d + 1 tokens
        exists = weight > 0
        same = same & exists[:, None, :, None] & exists[:, None, None, :]
        earlier = torch.ones(matches, matches, dtype=torch.bool, device=ids.device).tril(-1)
        first = exists[:, None] & ~(same & earlier).any(-1)  # [S, L, k]: stands for its prefix
        mass = (same * weight[:, None, None, :]).sum(-1)
        total = weight.sum(-1)[:, None, None].expand_as(mass[:, :1])
        above = torch.cat([total, mass[:, :-1]], 1)
        score = (mass / above.clamp(min=1e-30)).log() + math.log(self.config.confidence)
        score = torch.where(first, score, -torch.inf)
        linked = same[:, :-1] & first[:, :-1, :, None]  # i at depth d - 1 stands for j's prefix
        edge = torch.where(linked, score[:, 1:, None, :], -torch.inf)
        unused = torch.full_like(same[:, :1], -torch.inf, dtype=score.dtype)
        return Proposal(ids=ids, score=score, edge=torch.cat([unused, edge], 1))

    def ingest(self, features: Tensor, count: Tensor) -> None:
        """Nothing to take: the tokens are in the round state."""

    def reset(self, slot: int) -> None:
        """Nothing to forget."""
