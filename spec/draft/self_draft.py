"""The target as its own drafter: every spine token is right, nothing is gained. For tests and debugging.

Full acceptance is the cheapest way to reach every border of a block: stop tokens inside it, limits, cache ends.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from modelkit.model import Transformer
from modelkit.rows import chain

from ..state import RoundState
from ..types import Proposal
from .base import DRAFTERS, BlockConfig, Perturb, unperturbed


@DRAFTERS.register("self")
class SelfDrafter:
    """Greedy decoding by the target itself, the block run anew for each depth (no state of its own)."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(BlockConfig):
        """`wrong_every`: spoil the spine at every so manieth depth, to force rejections; 0 never does."""

        wrong_every: int = 0

    def __init__(self, config: Config, *, target: Transformer, slots: int, capacity: int, candidates: int) -> None:
        self.config, self.target, self.candidates = config, target, candidates
        if candidates > target.config.vocab_size:
            self.candidates = target.config.vocab_size
        self.block = config.resolved_block_size(8)
        self.taps: tuple[int, ...] = ()
        self.features, self.depth, self.rows = 0, self.block - 1, slots * self.block

    def propose(self, state: RoundState, bound: int, perturb: Perturb = unperturbed) -> Proposal:
        """Run the growing chain once a depth; rows not yet drafted hold token 0 and are seen by nobody before them."""
        slots = state.slots
        token = torch.cat([state.anchor[:, None], state.anchor.new_zeros(slots, self.depth)], 1)
        whole = torch.full_like(state.anchor, self.block)
        ids, scores = [], []
        for depth in range(self.depth):
            rows = chain(token=token, start=state.length, count=whole, rows=slots * self.block, bound=bound)
            hidden = self.target(rows, state.cache).hidden.view(slots, self.block, -1)[:, depth]
            logits = self.target.head(hidden)
            score, best = self._best(logits, depth, perturb)
            token = token.clone()
            token[:, depth + 1] = best[:, 0]
            if self.config.wrong_every and (depth + 1) % self.config.wrong_every == 0:
                score, best = self._best(self._spoiled(logits), depth, perturb)
            ids.append(best)
            scores.append(score)
        return Proposal(ids=torch.stack(ids, 1), score=torch.stack(scores, 1))

    def _best(self, logits: Tensor, depth: int, perturb: Perturb) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids [S, k] of the candidates, by the logits [S, V] of a depth."""
        best, score = self.target.top_candidates(perturb(logits[:, None], depth)[:, 0], self.candidates)
        return score, best

    def _spoiled(self, logits: Tensor) -> Tensor:
        """The best k logits pass their places on, the k-th becomes the best; with k = 1 the next id takes its place.

        Within a process's part of the vocabulary, where there are parts.
        """
        if self.candidates == 1:
            return logits.roll(1, -1)
        best, ids = logits.topk(min(self.candidates, logits.shape[-1]), -1)
        return logits.scatter(-1, ids.roll(1, -1), best)

    def ingest(self, features: Tensor, count: Tensor) -> None:
        """Nothing to take."""

    def reset(self, slot: int) -> None:
        """Nothing to forget."""
