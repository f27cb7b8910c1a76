"""Are two outputs of one prompt (greedy, or of one seed) the same, and if not, is it a bug or rounding?

fp32: they must be identical. Lower precisions: rows computed at another width round differently, so at the first
difference the two tokens must be so close in both runs that the measured width noise explains the swap.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from modelkit.model import Transformer
from modelkit.rows import chain
from sampling import HostContext, NodeContext, Sampler, SamplingParams, SlotParams
from sampling.gumbel import Gumbel
from sampling.host import processed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Outcome.

    Attributes:
        identical: token for token.
        first_difference: index of the first token that differs, None if identical.
        gap: how far either token is from being the choice in either width at that place: the difference of logits or,
            where tokens are sampled, of the scores whose argmax they are, or the distance to a filter's border. See
            `shortfall`. Once it is more than is allowed it may be larger yet: that is not looked into.
        noise: largest logit difference between the two widths anywhere on this text, in the gap's unit.
    """

    identical: bool
    first_difference: int | None = None
    gap: float = 0.0
    noise: float = 0.0

    @property
    def allowed(self) -> float:
        """The largest gap that the noise explains: each of the two tokens may move by so much."""
        return 2 * self.noise

    @property
    def explained(self) -> bool:
        """Identical, or a near-tie that the noise of the width explains."""
        return self.identical or self.gap <= self.allowed

    def __str__(self) -> str:
        if self.identical:
            return "yes"
        verdict = "a near-tie, explained by" if self.explained else "NOT explained by"
        return (
            f"no, from token {self.first_difference} on: logit gap {self.gap:.4g}, {verdict} the difference of up to "
            f"{self.noise:.4g} between the widths"
        )


def compare(
    model: Transformer, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int], width: int,
    sampler: Sampler | None = None, params: SamplingParams | None = None, narrow: int = 1,
) -> Comparison:  # fmt: skip
    """Compare two outputs of one prompt.

    Args:
        model: the target.
        prompt_ids: the prompt.
        a: tokens emitted by the run of the wider forwards.
        b: tokens emitted by the other.
        width: rows of a forward of the wider run.
        sampler: what chose the tokens, where it was not the argmax.
        params: of the request, its seed included.
        narrow: rows of a forward of the other run.
    """
    if list(a) == list(b):
        return Comparison(identical=True)
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if first == min(len(a), len(b)):  # one is a prefix of the other: a stop or a limit acted differently
        return Comparison(identical=False, first_difference=first, gap=float("inf"))
    # The noise is measured over the whole of one output; up to `first` it is the other's, too.
    text = list(prompt_ids) + list(b)
    widths = [teacher_forced(model, text, len(prompt_ids), rows) for rows in (width, narrow)]
    noise = float((widths[0] - widths[1]).abs().max())
    rows = [after_host(sampler, prompt_ids, a[:first], logits[first]) for logits in widths]
    unit, chosen = 1.0, _same
    if isinstance(sampler, Gumbel) and params is not None and not sampler.always_argmax(params):
        unit = max(params.repetition_penalty, 1 / params.repetition_penalty) / (params.temperature or 1.0)
        chosen = functools.partial(scores, sampler, params, prompt_ids, a[:first])
    outcome = Comparison(identical=False, first_difference=first, noise=noise * unit)
    gaps = [shortfall(chosen, row, token, unit, outcome.allowed) for row in rows for token in (a[first], b[first])]
    return dataclasses.replace(outcome, gap=max(gaps))


def _same(logits: Tensor) -> Tensor:
    return logits


def shortfall(
    chosen: Callable[[Tensor], Tensor], logits: Tensor, token: int, unit: float, enough: float = float("inf")
) -> float:
    """By how much logits have to move against each other for a token to be the choice.

    It has to be kept by the filters, and each token with a better score has to come down to it or to be removed by
    them. Filters measure a token by those that are better: of noise, the worst for it is that which raises all these.

    Args:
        chosen: logits [V] to the scores whose argmax is the choice, -inf for what is removed.
        logits: [V].
        token: which.
        unit: of scores, in logits.
        enough: what is more than this is not measured to the end: with all better tokens, thousands in a wide
            distribution, it takes minutes.

    Returns:
        0 for the choice itself; in the scores' unit. inf: nothing of the kind would help.
    """
    into = _least(lambda by: bool(chosen(_lowered(logits, token, by))[token] > -torch.inf))
    if into == torch.inf:
        return into
    logits = _lowered(logits, token, into)
    score, worst = chosen(logits), into * unit
    for other in score.argsort(descending=True).tolist():
        ahead = float(score[other] - score[token])
        if worst > enough or not ahead > worst:
            break
        out = _least(functools.partial(_removed, chosen, logits, other))
        worst = max(worst, min(ahead, out * unit))
    return worst


def _removed(chosen: Callable[[Tensor], Tensor], logits: Tensor, token: int, by: float) -> bool:
    return bool(chosen(_raised(logits, token, by))[token] == -torch.inf)


def _lowered(logits: Tensor, token: int, by: float) -> Tensor:
    """With all that is better than a token brought down."""
    return torch.where(logits > logits[token], logits - by, logits)


def _raised(logits: Tensor, token: int, by: float) -> Tensor:
    """With all that is better than a token, or becomes so, brought up."""
    raised = torch.where(logits > logits[token] - by, logits + by, logits)
    raised[token] = logits[token]
    return raised


def _least(holds: Callable[[float], bool]) -> float:
    """The least of the numbers from which on something holds, to a part in 500; inf if it is beyond 64."""
    if holds(0.0):
        return 0.0
    high = 2.0**-10
    while not holds(high):
        high *= 2
        if high > 64:
            return float("inf")
    low = high / 2 if high > 2.0**-10 else 0.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def scores(
    sampler: Gumbel, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], logits: Tensor
) -> Tensor:
    """What the sampler takes the argmax of after prompt and output, given the target's logits [V]; fp32 [V]."""
    device = logits.device
    slots = SlotParams(slots=1, vocab_size=len(logits), device=device, features=params.features)
    slots.admit(0, params, torch.tensor(prompt, device=device))
    if output:
        slots.record(torch.tensor([output], device=device), torch.tensor([len(output)], device=device))
    root = NodeContext(**_root([*prompt, *output], device), params=slots)
    return sampler.noisy(logits[None], root).score[0]


def after_host(sampler: Sampler | None, prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
    """Logits [V] after prompt and output as the sampler's host processors leave them, if it has any."""
    processors = getattr(sampler, "host_processors", ())
    if not processors:
        return logits
    root = _root([*prompt, *output], torch.device("cpu"))
    return processed(logits[None], HostContext(**root, prompts=[prompt], outputs=[output]), processors).logits[0]


def _root(text: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Fields of a `NodeContext` of one row, the text's last token."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return {
        "token": zero + text[-1], "parent": zero - 1, "depth": zero, "position": zero + len(text) - 1, "slot": zero,
        "local": zero, "valid": zero == 0, "ancestors": torch.ones(1, 1, dtype=torch.int32, device=device),
        "slots": 1, "max_depth": 0,
    }  # fmt: skip


@torch.no_grad()
def teacher_forced(model: Transformer, text: Sequence[int], prompt: int, width: int) -> Tensor:
    """Logits after each token from the prompt's last on, computed `width` rows at a time, fp32 [T, V].

    Args:
        model: the target.
        text: prompt and continuation.
        prompt: how many of them are the prompt; it is run in one chunk.
        width: rows a forward, the last one padded to it: what a row's sums look like depends on the rows beside it.
    """
    cache = model.new_cache(slots=1, capacity=len(text) + width, scratch=max(prompt, width))
    ids = torch.tensor(text, device=model.device)
    found, start, size = [], 0, prompt
    while start < len(text):
        real = min(size, len(text) - start)
        chunk = torch.nn.functional.pad(ids[start : start + real], (0, size - real))
        at = torch.full((1,), start, dtype=torch.int64, device=model.device)
        rows = chain(token=chunk[None], start=at, count=torch.full_like(at, real), rows=size, bound=start)
        hidden = model(rows, cache).hidden[:real]
        found.append(model.whole_head(hidden if start else hidden[-1:]).float())
        cache.commit(rows.rectangle(), torch.full_like(at, real))
        start, size = start + real, width
    return torch.cat(found)
