"""The token after every row: min-p, top-k, top-p, Gumbel noise and argmax without a sort and without a [R, V] result.

The meaning is `filters.threshold` and `Gumbel.noisy`: tokens are kept up to a distance from the best one, and the least
distance with enough tokens (top-k) or mass (top-p) is found digit by digit, four bits a pass. A pass is a launch over
(rows, chunks of the vocabulary) whose programs first decide the digit before from what all chunks have counted. Only
chunks with tokens in the digit's range count anything, so all passes but the first read the logits from the L2 and do
little else; rows without the filter do nothing. Mass is whole numbers in fp64, whose sums are exact in any order.
Bound: the logits' bytes once from memory, and once from the L2 for each pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelkit.kernels.launch import launch, release, wait

from .. import filters
from .perturb import CHUNK, best_kernel, noise, row_best

DIGITS = tl.constexpr(16)
SHIFTS = tuple(range(28, -1, -4))
FARTHEST = tl.constexpr(filters.FARTHEST)
MASS_ONE = tl.constexpr(filters.MASS_ONE)
NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def _argmax_kernel(x, best, value, index, vocabulary, stride, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """`best_kernel`, and whose the greatest value is."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    number = tl.load(x + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    release(PDL)
    worse = tl.max((number != number).to(tl.int32), 0)
    highest = tl.max(number, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best + place, tl.where(worse > 0, float("nan"), highest))
    tl.store(value + place, highest)
    tl.store(index + place, tl.min(tl.where(number == highest, token, NOBODY), 0))


@triton.jit
def _score(x, at, inside, top, divisor):
    """Scores of tokens, the best is 0; -inf outside."""
    value = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(value - top, divisor)


@triton.jit
def _far(score):
    """Distance to the best token as bits, which order like the number."""
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def _decide(
    counts, found, base, needed, wanted, row,
    PASS: tl.constexpr, SHIFT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """State behind pass PASS - 1: the digits found so far, what lies below them, and how much is needed."""
    chunk, digit = tl.arange(0, BLOCK_C), tl.arange(0, DIGITS)
    at = (row * CHUNKS + chunk)[:, None] * DIGITS + digit[None, :]
    within = tl.sum(tl.load(counts + at, mask=(chunk < CHUNKS)[:, None], other=0.0), 0)
    below = tl.load(base + (PASS - 1) * ROWS + row)
    within += below
    if PASS == 1:
        need = tl.ceil(wanted * tl.max(within, 0)) if WHOLE else tl.minimum(wanted, tl.max(within, 0))
    else:
        need = tl.load(needed + row)
    chosen = tl.minimum(tl.sum((within < need).to(tl.int32), 0), DIGITS - 1)
    prefix = tl.load(found + (PASS - 1) * ROWS + row) | (chosen << SHIFT)
    below = tl.maximum(below, tl.max(tl.where(digit < chosen, within, 0.0), 0))
    return prefix, below, need


@triton.jit
def _pass_kernel(
    x, best, temperature, limit, wanted, counts_before, counts, found, base, needed, vocabulary, stride,
    PASS: tl.constexpr, SHIFT: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count tokens (or, if WHOLE, their mass) by the digit at SHIFT. WHOLE: `wanted` is a part of the whole mass."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    release(PDL)
    want = tl.load(wanted + row).to(tl.float64)
    active = want < 1.0 if WHOLE else want > 0.0
    if active:
        prefix, below, need = tl.zeros([], tl.int32), tl.zeros([], tl.float64), tl.zeros([], tl.float64)
        if PASS > 0:
            prefix, below, need = _decide(
                counts_before, found, base, needed, want, row, PASS, SHIFT + 4, WHOLE, ROWS, CHUNKS, BLOCK_C
            )
        if chunk == 0:
            tl.store(found + PASS * ROWS + row, prefix)
            tl.store(base + PASS * ROWS + row, below)
            if PASS > 0:
                tl.store(needed + row, need)
        top = row_best(best, row, CHUNKS, BLOCK_C)
        heat = tl.load(temperature + row)
        divisor = tl.where(heat > 0.0, heat, 1.0)
        last = tl.load(limit + row)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocabulary
        score = _score(x + row * stride, token, inside, top, divisor)
        far = _far(score)
        part = (far - prefix) >> SHIFT
        counted = inside & (far >= prefix) & (part < DIGITS) & (far <= last)
        digit = tl.arange(0, DIGITS)
        sums = tl.zeros([DIGITS], tl.float64)
        if tl.max(counted.to(tl.int32), 0) > 0:
            weight = counted.to(tl.float64)
            if WHOLE:
                weight = tl.where(counted, tl.floor(tl.exp(score) * MASS_ONE).to(tl.float64), 0.0)
            for i in tl.static_range(DIGITS):
                sums = tl.where(digit == i, tl.sum(tl.where(part <= i, weight, 0.0), 0), sums)
        tl.store(counts + (row * CHUNKS + chunk) * DIGITS + digit, sums)


@triton.jit
def _limit_kernel(
    wanted, counts, found, base, needed, limit, result,
    PASS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The last distance kept, once all digits are counted."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    want = tl.load(wanted + row).to(tl.float64)
    last = tl.load(limit + row)
    active = want < 1.0 if WHOLE else want > 0.0
    if active:
        prefix, _, _ = _decide(counts, found, base, needed, want, row, PASS, 0, WHOLE, ROWS, CHUNKS, BLOCK_C)
        last = tl.minimum(last, prefix)
    tl.store(result + row, last)


@triton.jit
def _choose_kernel(
    x, best, temperature, limit, keys, value, index, vocabulary, stride,
    CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk's best noisy score among the tokens kept, and whose it is."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    release(PDL)
    top = row_best(best, row, CHUNKS, BLOCK_C)
    heat = tl.load(temperature + row)
    last = tl.load(limit + row)
    first, second = tl.load(keys + row * 2).to(tl.uint32), tl.load(keys + row * 2 + 1).to(tl.uint32)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    score = _score(x + row * stride, token, inside, top, tl.where(heat > 0.0, heat, 1.0))
    kept = inside & (_far(score) <= last)
    highest, whose = float("-inf"), NOBODY
    if tl.max(kept.to(tl.int32), 0) > 0:
        noisy = score
        if heat > 0.0:
            noisy = score + noise(token, first, second)
        noisy = tl.where(kept, noisy, float("-inf"))
        highest = tl.max(noisy, 0)
        whose = tl.min(tl.where(kept & (noisy == highest), token, NOBODY), 0)
    tl.store(value + row * CHUNKS + chunk, highest)
    tl.store(index + row * CHUNKS + chunk, whose)


@triton.jit
def _merge_kernel(
    best, value, index, token, greatest, vocabulary, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    wait(PDL)
    release(PDL)
    values = tl.load(value + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    whose = tl.load(index + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=NOBODY)
    chosen = tl.min(tl.where(values == tl.max(values, 0), whose, NOBODY), 0)
    tl.store(token + row, tl.where(chosen < vocabulary, chosen, 0).to(tl.int64))
    tl.store(greatest + row, row_best(best, row, CHUNKS, BLOCK_C))


@torch.library.custom_op("flashtree::choose_tokens", mutates_args=())
def choose_tokens(
    x: Tensor, temperature: Tensor, keys: Tensor, limit: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The noisy argmax of every row among the tokens that its filters keep.

    Args:
        x: [R, V], logits after biases, penalties and processors; rows contiguous.
        temperature: fp32 [R]; 0 is no noise.
        keys: int64 [R, 2], see `noise.row_keys`.
        limit: int32 [R], bits of the greatest distance to the best token that min-p leaves; `FARTHEST` is all.
        top_k: int64 [R], 0 is off; None: no row uses it.
        top_p: fp64 [R], 1 is off; None: no row uses it.

    Returns:
        token int64 [R], the lowest id of equals, and the best logit of each row, fp32 [R]: where that is not finite the
        token means nothing.
    """
    rows, vocabulary = x.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    sizes = {"CHUNKS": chunks, "BLOCK_C": triton.next_power_of_2(chunks)}
    best = torch.empty(rows, chunks, dtype=torch.float32, device=x.device)
    where = (vocabulary, x.stride(0))
    launch(best_kernel, (rows, chunks), x, best, vocabulary, 0, x.stride(0), INNER=rows, CHUNK=CHUNK, num_warps=4)
    for wanted, whole in ((top_k, False), (top_p, True)):
        if wanted is None:
            continue
        counts = torch.empty(2, rows, chunks, DIGITS.value, dtype=torch.float64, device=x.device)
        found = torch.empty(len(SHIFTS), rows, dtype=torch.int32, device=x.device)
        base = torch.empty(len(SHIFTS), rows, dtype=torch.float64, device=x.device)
        needed, result = torch.empty_like(base[0]), torch.empty_like(limit)
        for number, shift in enumerate(SHIFTS):
            launch(
                _pass_kernel, (rows, chunks), x, best, temperature, limit, wanted, counts[1 - number % 2],
                counts[number % 2], found, base, needed, *where,
                PASS=number, SHIFT=shift, WHOLE=whole, ROWS=rows, CHUNK=CHUNK, num_warps=4, **sizes,
            )  # fmt: skip
        launch(
            _limit_kernel, (rows,), wanted, counts[1 - len(SHIFTS) % 2], found, base, needed, limit, result,
            PASS=len(SHIFTS), WHOLE=whole, ROWS=rows, num_warps=1, **sizes,
        )  # fmt: skip
        limit = result
    value, index = torch.empty_like(best), torch.empty(rows, chunks, dtype=torch.int32, device=x.device)
    token, row_best = torch.empty(rows, dtype=torch.int64, device=x.device), torch.empty_like(best[:, 0])
    launch(
        _choose_kernel, (rows, chunks), x, best, temperature, limit, keys, value, index, *where,
        CHUNK=CHUNK, num_warps=8, **sizes,
    )  # fmt: skip
    launch(_merge_kernel, (rows,), best, value, index, token, row_best, vocabulary, num_warps=1, **sizes)
    return token, row_best


@choose_tokens.register_fake
def _(
    x: Tensor, temperature: Tensor, keys: Tensor, limit: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.int64), x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("flashtree::argmax_tokens", mutates_args=())
def argmax_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest of every row, by chunks of the vocabulary side by side.

    Args:
        x: [R, V]; rows contiguous.

    Returns:
        as `choose_tokens`.
    """
    rows, vocabulary = x.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    best, value = (torch.empty(rows, chunks, dtype=torch.float32, device=x.device) for _ in range(2))
    index = torch.empty(rows, chunks, dtype=torch.int32, device=x.device)
    token, row_best = torch.empty(rows, dtype=torch.int64, device=x.device), torch.empty_like(best[:, 0])
    launch(
        _argmax_kernel, (rows, chunks), x, best, value, index, vocabulary, x.stride(0), CHUNK=CHUNK, num_warps=4
    )  # fmt: skip
    launch(
        _merge_kernel, (rows,), best, value, index, token, row_best, vocabulary,
        CHUNKS=chunks, BLOCK_C=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return token, row_best


@argmax_tokens.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.int64), x.new_empty(x.shape[0], dtype=torch.float32)
