"""The law of one token, by the book: one row, fp64, sorted. What `filters.py` is compared with; no round runs it.

Imports nothing of the code it judges but the parameters' names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .params import SamplingParams


def law(logits: Tensor, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> Tensor:
    """Probabilities fp64 [V] of the next token.

    Args:
        logits: [V], the target's.
        params: of the request. At temperature 0 the first of the best tokens has all the mass.
        prompt: token ids of the prompt.
        output: token ids emitted so far.
    """
    x = logits.double().clone()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in params.banned_token_ids:
        x[token] = -torch.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if params.temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    p = ((x - x.max()) / params.temperature).softmax(-1)
    p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    if 0 < params.top_k < len(p):
        p = torch.where(p >= p.sort(descending=True).values[params.top_k - 1], p, 0.0)
    p = p / p.sum()
    if params.top_p < 1.0:
        best = p.sort(descending=True).values
        # The first place where the mass is enough, with room for the rounding of a sum that should be equal to top_p.
        last = int((best.cumsum(0) < params.top_p - 1e-12).sum())
        p = torch.where(p >= best[last], p, 0.0)
    return p / p.sum()
