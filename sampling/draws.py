"""What strategies share that draw their candidates: the draws, the target's law at each row, uniforms, final draws.

Noise is keyed by seed, absolute position and depth. A position that one round drafted and did not emit is drafted again
by the next one, at a lesser depth, with other noise: what the first round learnt from its draws cannot leak into the
second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import NodeContext
from .config import Sampling
from .filters import cut
from .noise import gumbel_noise, uniform_noise
from .params import SlotParams

# Streams of noise: what is drafted, whether it is accepted, what comes instead. 0 and 1 are `gumbel` and `token_match`.
DRAFT, TEST, INSTEAD = 2, 3, 4


def stream_at(stream: int, depth: Tensor) -> Tensor:
    """The number of a stream at depths int64 [R]."""
    return stream + (depth << 8)


class Drawn(Sampling):
    """Base of the strategies whose candidates are drawn from the drafter's law.

    Drafters call what they know as `perturb`; in rounds that sample, that is `draw`. Candidates that a drafter finds
    without it are a function of the text (`NodeContext.draws` is None then).
    """

    def draw(self, logits: Tensor, position: Tensor, depth: Tensor, params: SlotParams) -> tuple[Tensor, Tensor]:
        """Scores whose best k are k draws without replacement, in the order drawn, and the law they are drawn from.

        The law is the drafter's at the request's temperature, cut by its min-p, top-k and top-p. Any law would do; this
        one is the likest to the target's. (Gumbel top-k trick: W. Kool et al., arXiv 1903.06059.)

        Args:
            logits: [S, D, V].
            position: int64 [S, D], absolute positions of the tokens proposed.
            depth: int64 [D], the same from the anchor on: its next token has 1.
            params: of the slots. At temperature 0 the candidates are the best ones, undisturbed.

        Returns:
            Scores and log-probabilities, fp32 [S, D, V].
        """
        slots, depths, vocabulary = logits.shape
        slot = torch.arange(slots, device=logits.device)[:, None].expand(slots, depths).flatten()
        temperature = params.temperature[slot][:, None]
        x = logits.float().flatten(0, 1)
        x = (x - x.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
        log_q = cut(x, params, slot).log_softmax(-1)
        stream = stream_at(DRAFT, depth.expand(slots, depths).flatten())
        noise = gumbel_noise(params.seed[slot], position.flatten(), vocabulary, params.low_bits, stream)
        score = log_q + torch.where(temperature > 0, noise, 0.0)
        return score.view(logits.shape), log_q.view(logits.shape)


def target_law(score: Tensor, nodes: NodeContext) -> Tensor:
    """Probabilities [R, V] of the token after each row, from its filtered scores; at temperature 0 the best has all."""
    assert nodes.params is not None
    vocabulary = torch.arange(score.shape[-1], device=score.device)
    best = (vocabulary == score.argmax(-1, keepdim=True)).float()
    return torch.where(nodes.params.temperature[nodes.slot][:, None] > 0, score.softmax(-1), best)


def uniforms(nodes: NodeContext, size: int) -> Tensor:
    """Uniforms fp32 [R, size] for the tests of each row's children."""
    assert nodes.params is not None
    seed, low_bits = nodes.params.seed[nodes.slot], nodes.params.low_bits
    return uniform_noise(seed, nodes.position + 1, size, low_bits, stream_at(TEST, nodes.depth + 1))


def pick(weight: Tensor, nodes: NodeContext) -> Tensor:
    """A token int64 [R] after each row, drawn from weights [R, V] that need not sum to 1."""
    assert nodes.params is not None
    seed, low_bits = nodes.params.seed[nodes.slot], nodes.params.low_bits
    stream = stream_at(INSTEAD, nodes.depth + 1)
    return (weight.log() + gumbel_noise(seed, nodes.position + 1, weight.shape[-1], low_bits, stream)).argmax(-1)


def or_else(residual: Tensor, total: Tensor, p: Tensor) -> Tensor:
    """The residual [..., V] with its sum [...], or the law p where rounding has left nothing of it."""
    return torch.where(((total > 0) & total.isfinite())[..., None], residual, p)
