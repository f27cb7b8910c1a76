"""A proposal as the sampler wants it: the drafter's logits changed before candidates are taken, or candidates drawn.

Knows no drafter: only what goes in and out of `propose`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from sampling import Drawn, Draws, Sampler, SlotParams

from ..types import Proposal
from .base import Perturb


def perturbed(propose: Callable[[Perturb], Proposal], sampler: Sampler, length: Tensor, params: SlotParams) -> Proposal:
    """What a drafter proposes in a round that samples.

    Args:
        propose: the drafter's, waiting for its `perturb`.
        sampler: of the engine.
        length: int64 [S], positions of the anchors.
        params: of the slots.

    Raises:
        ValueError: the candidates would have to be drawn and cannot be.
    """
    laws: dict[int, Tensor] = {}

    def perturb(logits: Tensor, depth: int = 0) -> Tensor:
        after = torch.arange(1, logits.shape[1] + 1, device=logits.device) + depth
        position = length[:, None] + after
        if not isinstance(sampler, Drawn):
            return sampler.perturb(logits, position, params)
        score, laws[depth] = sampler.draw(logits, position, after, params)
        return score

    proposal = propose(perturb)
    if not laws:
        return proposal  # of a drafter without logits
    return with_draws(proposal, [laws[depth] for depth in sorted(laws)], params.temperature[:-1] > 0)


def with_draws(proposal: Proposal, laws: list[Tensor], sampled: Tensor) -> Proposal:
    """Add the law of the draws, and scores that do not depend on what was drawn.

    A draw is accepted more often than the best token would be drawn again, max q, and less often than always, as if the
    drafter were right; a is taken as the geometric mean of the two. Rank i is reached if all before it were rejected,
    so it is worth a (1 - a)^(i - 1). A drafter that was asked for one depth after another may have built each law on
    draws of the depths before, so the first depth's scores serve them all.

    Args:
        proposal: candidates in draw order.
        laws: log-probabilities [S, D, V] of one call of `perturb` each, from the first depth on.
        sampled: bool [S]; the others' candidates are the best ones and keep their scores.
    """
    if proposal.edge is not None:
        raise ValueError("this drafter's candidates depend on their parents (edge): no sampler can draw them yet")
    log_q = torch.cat(laws, 1)
    assert log_q.shape[1] == proposal.depth, "a law for each depth"
    log_a = log_q.amax(-1, keepdim=True) / 2
    if len(laws) > 1:
        log_a = log_a[:, :1].expand(-1, proposal.depth, -1)
    rank = torch.arange(proposal.candidates, device=log_q.device)
    score = log_a + torch.where(rank > 0, rank * torch.log1p(-log_a.exp()), 0.0)
    score = torch.where(sampled[:, None, None], score, proposal.score)
    return dataclasses.replace(proposal, score=score, draws=Draws(ids=proposal.ids, log_q=log_q))
