"""From the target's logits of every row to the scores that a strategy samples from.

In this order, each step on the result of the one before (vLLM's order):

    0. host processors (`host.py`)
    1. logits as fp32                         5. user processors
    2. logit bias and banned tokens           6. temperature
    3. repetition penalty                     7. min-p
    4. frequency, then presence penalty       8. top-k
                                              9. top-p, of the mass that is left

Penalties see each row's own text: the prompt, what was emitted, and the row's ancestors in its tree. Min-p, top-k and
top-p keep everything down to some probability, so each is a threshold and no row is ever sorted: scores are compared by
their bits, which order like the numbers, and the smallest threshold with enough tokens (or mass) is digit by digit.
Mass is counted in integers, so that the order of summation cannot matter. Tokens that tie with the last one kept are
kept too: what is kept depends on the row alone, never on the tree or on the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .base import ALL_BANNED, BAD_PROCESSOR, NOT_FINITE, NodeContext
from .params import SlotParams
from .vocabulary import Vocabulary

Processor = Callable[[Tensor, NodeContext], Tensor]

# Bits of +inf in fp32: no token is farther from the best one.
FARTHEST = 0x7F800000
# The greatest power of two whose sums over any vocabulary (< 2^18) stay exact in fp64 too, which kernels use.
MASS_ONE = 2.0**35
DISTANCE_BITS = 31


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filtered:
    """Rows ready to be sampled from.

    Attributes:
        score: fp32 [R, V], log-probabilities up to a constant of the row, at the request's temperature; the best is 0,
            what the filters removed is -inf. A temperature of 0 counts as 1 here: no filter removes the best.
        fault: int64 [R], 0 or one of NOT_FINITE, ALL_BANNED, BAD_PROCESSOR; such a row's scores mean nothing.
    """

    score: Tensor
    fault: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed:
    """Logits after steps 1 to 5.

    Attributes:
        x: [R, V]; the target's own, of their own dtype, where nothing changes them.
        fault: int64 [R], what was wrong before the processors.
        processed: whether there are any.
    """

    x: Tensor
    fault: Tensor
    processed: bool

    def faults(self, best: Tensor) -> Tensor:
        """All that is wrong, int64 [R], with the greatest logit of each row (NaN where one is NaN)."""
        worse = best.isnan() | (best == torch.inf)
        fault = torch.where((self.fault == 0) & worse, BAD_PROCESSOR if self.processed else NOT_FINITE, self.fault)
        return torch.where((fault == 0) & (best == -torch.inf), ALL_BANNED, fault)


def changed(logits: Tensor, nodes: NodeContext, processors: tuple[Processor, ...] = ()) -> Changed:
    """Steps 1 to 5; arguments as in `filtered`."""
    params = nodes.params
    assert params is not None, "the rows come without sampling parameters"
    x = logits
    fault = torch.zeros_like(nodes.slot)
    if "logit_bias" in params.features:
        x = x.float() + params.logit_bias[nodes.slot]
    if "penalties" in params.features:
        x = penalised(x.float(), nodes, params)
    if processors:
        x = x.float()
        best = x.amax(-1)
        fault = torch.where(best.isnan() | (best == torch.inf), NOT_FINITE, fault)
        for process in processors:
            x = checked(process(x, nodes), x, processor_name(process))
    return Changed(x=x, fault=fault, processed=bool(processors))


def processor_name(process: Callable[..., Tensor]) -> str:
    """What messages call a processor that was not given by name."""
    return getattr(process, "__qualname__", None) or type(process).__qualname__


def checked(given: Tensor, before: Tensor, name: str) -> Tensor:
    """A processor's result, laid out as kernels want it; shapes are those of the trace, so this costs a round nothing.

    Raises:
        ValueError: it is not the logits' shape.
    """
    what = f"{type(given).__name__} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    if not isinstance(given, Tensor) or given.shape != before.shape:
        raise ValueError(f"processor '{name}' must return logits {list(before.shape)}, it returned {what}")
    return given.float().contiguous()


def filtered(logits: Tensor, nodes: NodeContext, processors: tuple[Processor, ...] = ()) -> Filtered:
    """Steps 1 to 9.

    Args:
        logits: [R, V], the target's.
        nodes: the rows, with their slots' parameters.
        processors: step 5; each `(fp32 logits [R, V], nodes) -> logits`.
    """
    params = nodes.params
    rows = changed(logits, nodes, processors)
    assert params is not None
    x = rows.x.float()
    best = params.vocabulary.amax(x)  # NaN if there is one
    fault = rows.faults(best[:, 0])
    temperature = params.temperature[nodes.slot]
    score = (x - best) / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return Filtered(score=cut(score, params, nodes.slot), fault=fault)


def cut(score: Tensor, params: SlotParams, slot: Tensor) -> Tensor:
    """Scores fp32 [R, V] whose best is 0, with -inf for what min-p, top-k and top-p remove; slot: int64 [R]."""
    if params.features.isdisjoint(("min_p", "top_k", "top_p")):
        return score
    far = score.abs().view(torch.int32)  # distance to the best, as bits
    return score.masked_fill(far > threshold(score, far, params, slot)[:, None], -torch.inf)


def penalised(x: Tensor, nodes: NodeContext, params: SlotParams) -> Tensor:
    """Logits [R, V] after the repetition, frequency and presence penalties of each row's own text."""
    slot = nodes.slot
    count = params.output_count[slot].scatter_add(1, *params.vocabulary.own(*path_tokens(nodes)))
    seen = params.in_prompt[slot] | (count > 0)
    repeated = params.repetition_penalty[slot][:, None]
    x = torch.where(seen, torch.where(x > 0, x / repeated, x * repeated), x)
    x = x - params.frequency_penalty[slot][:, None] * count
    return x - params.presence_penalty[slot][:, None] * (count > 0)


def path_tokens(nodes: NodeContext) -> tuple[Tensor, Tensor]:
    """Tokens that each row's path adds to the slot's text, and which of them are real.

    The root is the last token emitted (or the prompt's last): it is part of the text already.

    Returns:
        token: int64 [R, M], M = min(R, 32 W).
        real: int32 [R, M], 1 where row j of the slot is an ancestor or the row itself, and not the root.
    """
    rows, words = nodes.ancestors.shape
    index = torch.arange(rows, device=nodes.token.device)
    bit = torch.arange(min(rows, 32 * words), device=nodes.token.device)
    set_bit = (nodes.ancestors[:, bit // 32] >> (bit % 32).to(torch.int32)) & 1
    row = ((index - nodes.local)[:, None] + bit).clamp(max=rows - 1)
    return nodes.token[row], set_bit * (nodes.depth[row] > 0)


def threshold(score: Tensor, far: Tensor, params: SlotParams, slot: Tensor) -> Tensor:
    """The largest distance to the best token, as bits, that min-p, top-k and top-p leave; int32 [R]."""
    last = min_p_limit(params, slot)
    if "top_k" in params.features:
        k = params.top_k[slot]
        kth = nearest(far, None, k.clamp(max=params.vocabulary.whole_size), params.vocabulary)
        last = torch.where(k > 0, torch.minimum(last, kth), last)
    if "top_p" in params.features:
        p = params.top_p[slot]
        mass = (score.exp() * MASS_ONE).to(torch.int64).masked_fill(far > last[:, None], 0)
        needed = (p * params.vocabulary.add(mass.sum(-1))).ceil().to(torch.int64)
        last = torch.where(p < 1.0, torch.minimum(last, nearest(far, mass, needed, params.vocabulary)), last)
    return last


def min_p_limit(params: SlotParams, slot: Tensor) -> Tensor:
    """The largest distance that min-p leaves, as bits, int32 [R]; all of them where it is off."""
    if "min_p" not in params.features:
        return torch.full_like(slot, FARTHEST, dtype=torch.int32)
    return params.min_p[slot].log().abs().view(torch.int32)


def nearest(far: Tensor, mass: Tensor | None, needed: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The smallest distance within which there is enough mass: its bits from the top, a digit a pass, without a sort.

    Args:
        far: int32 [R, V], 0..FARTHEST.
        mass: int64 [R, V]; None counts tokens.
        needed: int64 [R], at most all there is.
        vocabulary: which of its columns these are.

    Returns:
        int32 [R].
    """
    found = torch.zeros_like(far[:, 0])
    left = needed
    # At most as many counters a row as tokens: 3 digits of up to 11 bits, or more of fewer bits.
    digit_bits = min(max(vocabulary.whole_size.bit_length() - 1, 1), vocabulary.digit_bits)
    for top in range(DISTANCE_BITS, 0, -digit_bits):
        shift = max(top - digit_bits, 0)
        bits, size = top - shift, 1 << (top - shift)
        # Tokens whose higher digits are those found so far, counted by this digit.
        near = (far >> (shift + bits)) == (found >> (shift + bits))[:, None]
        weight = near.to(torch.int64) if mass is None else torch.where(near, mass, 0)
        digit = ((far >> shift) & (size - 1)).to(torch.int64)
        count = torch.zeros(far.shape[0], size, dtype=torch.int64, device=far.device).scatter_add(1, digit, weight)
        within = vocabulary.add(count).cumsum(-1)
        first = (within < left[:, None]).sum(-1, keepdim=True).clamp(max=size - 1)
        before = torch.where(first > 0, within.gather(1, (first - 1).clamp(min=0)), 0)[:, 0]
        left = left - before
        found = found | (first[:, 0] << shift).to(torch.int32)
    return found
