"""The token after every row: min-p, top-k, top-p, Gumbel noise and argmax without a sort and without a [R, V] result.

The meaning is `filters.threshold` and `Gumbel.noisy`: tokens are kept up to a distance from the best one.

Top-k's distance is found digit by digit, four bits a pass, each pass a launch over (rows, chunks of the vocabulary)
whose programs first decide the digit before from what all chunks have counted.

Top-p's distance is never found. A token is kept exactly if the mass of the tokens nearer than it is less than is
needed, so the noisy argmax of all tokens is looked at first: a draw from the whole law, which is kept with probability
top_p or more. If it is not kept, nothing as far away as it is, and the next candidate is the noisy argmax of what is
nearer. One pass finds the mass nearer than a candidate and the next candidate together. `PASSES` of them run over the
whole device; the few rows still open after that go on in one program each, as long as it takes. Mass is whole numbers
in fp64, whose sums are exact in any order.
Bound: the logits' bytes once from memory, and from the L2 once for each pass that a row takes part in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelkit.kernels.launch import launch, release, wait

from .. import filters
from .perturb import best_kernel, noise, row_best

CHUNK = 2048  # ids of a program; more of them would take registers that other programs need
DIGITS = tl.constexpr(16)
SHIFTS = tuple(range(28, -1, -4))
FARTHEST = tl.constexpr(filters.FARTHEST)
MASS_ONE = tl.constexpr(filters.MASS_ONE)
NOBODY = tl.constexpr(2**31 - 1)
# Of the whole device: the first candidate and four measures. Of a flat law they leave one row in 200 000 open at
# top_p = 0.9, one in 180 at 0.5, one in 5 at 0.1.
PASSES = 5


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
def _score(at, inside, top, divisor):
    """Scores of the tokens at addresses, the best is 0; -inf outside."""
    value = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(value - top, divisor)


@triton.jit
def _far(score):
    """Distance to the best token as bits, which order like the number."""
    return tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def _decide(
    counts, found, base, needed, wanted, row,
    PASS: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """State behind pass PASS - 1: the digits found so far, how many lie below them, and how many are needed."""
    chunk, digit = tl.arange(0, BLOCK_C), tl.arange(0, DIGITS)
    at = (row * CHUNKS + chunk)[:, None] * DIGITS + digit[None, :]
    within = tl.sum(tl.load(counts + at, mask=(chunk < CHUNKS)[:, None], other=0), 0)
    below = tl.load(base + (PASS - 1) * ROWS + row)
    within += below
    need = tl.minimum(wanted, tl.max(within, 0)).to(tl.int32) if PASS == 1 else tl.load(needed + row)
    chosen = tl.minimum(tl.sum((within < need).to(tl.int32), 0), DIGITS - 1)
    prefix = tl.load(found + (PASS - 1) * ROWS + row) | (chosen << SHIFT)
    below = tl.maximum(below, tl.max(tl.where(digit < chosen, within, 0), 0))
    return prefix, below, need


@triton.jit
def _pass_kernel(
    x, best, temperature, limit, wanted, counts_before, counts, found, base, needed, vocabulary, stride,
    PASS: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count tokens by the digit at SHIFT; only chunks with tokens in the digit's range do."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    release(PDL)
    want = tl.load(wanted + row)
    if want > 0:
        prefix, below, need = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        if PASS > 0:
            prefix, below, need = _decide(
                counts_before, found, base, needed, want, row, PASS, SHIFT + 4, ROWS, CHUNKS, BLOCK_C
            )
        if chunk == 0:
            tl.store(found + PASS * ROWS + row, prefix)
            tl.store(base + PASS * ROWS + row, below)
            if PASS > 0:
                tl.store(needed + row, need)
        top = row_best(best, row, CHUNKS, BLOCK_C)
        heat = tl.load(temperature + row)
        last = tl.load(limit + row)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocabulary
        far = _far(_score(x + row * stride + token, inside, top, tl.where(heat > 0.0, heat, 1.0)))
        part = (far - prefix) >> SHIFT
        counted = inside & (far >= prefix) & (part < DIGITS) & (far <= last)
        digit = tl.arange(0, DIGITS)
        sums = tl.zeros([DIGITS], tl.int32)
        if tl.max(counted.to(tl.int32), 0) > 0:
            for i in tl.static_range(DIGITS):
                sums = tl.where(digit == i, tl.sum((counted & (part <= i)).to(tl.int32), 0), sums)
        tl.store(counts + (row * CHUNKS + chunk) * DIGITS + digit, sums)


@triton.jit
def _limit_kernel(
    wanted, counts, found, base, needed, limit, result,
    PASS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last distance kept, once all digits are counted."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    want = tl.load(wanted + row)
    last = tl.load(limit + row)
    if want > 0:
        prefix, _, _ = _decide(counts, found, base, needed, want, row, PASS, 0, ROWS, CHUNKS, BLOCK_C)
        last = tl.minimum(last, prefix)
    tl.store(result + row, last)


@triton.jit
def _merged(value, index, at, BLOCK_C: tl.constexpr, CHUNKS: tl.constexpr):
    """The token of the greatest value over a row's chunks, the lowest of equals; NOBODY if there is none."""
    chunk = tl.arange(0, BLOCK_C)
    values = tl.load(value + at + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    whose = tl.load(index + at + chunk, mask=chunk < CHUNKS, other=NOBODY)
    return tl.min(tl.where(values == tl.max(values, 0), whose, NOBODY), 0)


@triton.jit
def _summed(mass, at, BLOCK_C: tl.constexpr, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, BLOCK_C)
    return tl.sum(tl.load(mass + at + chunk, mask=chunk < CHUNKS, other=0.0), 0)


@triton.jit
def _consider(x, token, vocabulary, top, heat, nearer, first, second, MASS: tl.constexpr):
    """Of the tokens nearer to the best one than `nearer`: their mass, the best noisy score and whose it is."""
    inside = token < vocabulary
    score = _score(x + token, inside, top, tl.where(heat > 0.0, heat, 1.0))
    kept = inside & (_far(score) < nearer)
    mass, highest, whose = tl.zeros([], tl.float64), float("-inf"), NOBODY
    if tl.max(kept.to(tl.int32), 0) > 0:
        if MASS:
            mass = tl.sum(tl.where(kept, tl.floor(tl.exp(score) * MASS_ONE).to(tl.float64), 0.0), 0)
        noisy = score
        if heat > 0.0:
            noisy = score + noise(token, first, second)
        noisy = tl.where(kept, noisy, float("-inf"))
        highest = tl.max(noisy, 0)
        whose = tl.min(tl.where(kept & (noisy == highest), token, NOBODY), 0)
    return mass, highest, whose


@triton.jit
def _settled(
    value, index, mass, candidate, part, row,
    PASS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Where a row stands before pass PASS >= 1.

    Returns:
        token: the candidate at hand.
        done: whether that is the row's token.
        need: the mass that must not be reached by what is nearer than the row's token.
    """
    need = tl.maximum(tl.ceil(part * _summed(mass, row * CHUNKS, BLOCK_C, CHUNKS)), 1.0)
    done = part >= 1.0
    place = ((PASS - 1) * ROWS + row) * CHUNKS
    if PASS == 1:
        token = _merged(value, index, place, BLOCK_C, CHUNKS)
    else:
        # The pass before has taken its own candidate's measure, unless that was settled already (-1 - token).
        token = tl.load(candidate + (PASS - 1) * ROWS + row)
        settled = token < 0
        token = tl.where(settled, -1 - token, token)
        done = settled | (_summed(mass, place, BLOCK_C, CHUNKS) < need)
        if not done:
            token = _merged(value, index, place, BLOCK_C, CHUNKS)
    return token, done | (token == NOBODY), need


@triton.jit
def _distance(x, token, top, heat):
    """Bits of a token's distance to the best one."""
    return _far(_score(x + token, token >= 0, top, tl.where(heat > 0.0, heat, 1.0)))


@triton.jit
def _candidate_kernel(
    x, best, temperature, limit, keys, top_p, value, index, mass, candidate, vocabulary, stride,
    PASS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    MASS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One pass over one chunk of a row: the first over what min-p and top-k leave, others below a candidate."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait(PDL)
    release(PDL)
    top = row_best(best, row, CHUNKS, BLOCK_C)
    heat = tl.load(temperature + row)
    nearer = tl.load(limit + row) + 1
    done = False
    if PASS > 0:
        part = tl.load(top_p + row)
        token, done, _ = _settled(value, index, mass, candidate, part, row, PASS, ROWS, CHUNKS, BLOCK_C)
        if chunk == 0:
            tl.store(candidate + PASS * ROWS + row, tl.where(done, -1 - token, token))
        if not done:
            nearer = tl.minimum(nearer, _distance(x + row * stride, token, top, heat))
    if not done:
        first, second = tl.load(keys + row * 2).to(tl.uint32), tl.load(keys + row * 2 + 1).to(tl.uint32)
        own = chunk * CHUNK + tl.arange(0, CHUNK)
        weight, highest, whose = _consider(x + row * stride, own, vocabulary, top, heat, nearer, first, second, MASS)
        place = (PASS * ROWS + row) * CHUNKS + chunk
        tl.store(value + place, highest)
        tl.store(index + place, whose)
        if MASS:
            tl.store(mass + place, weight)


@triton.jit
def _settle_kernel(
    x, best, temperature, limit, keys, top_p, value, index, mass, candidate, result, greatest, vocabulary, stride,
    PASS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The row's token; rows that are still open go on pass by pass."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    top = row_best(best, row, CHUNKS, BLOCK_C)
    heat = tl.load(temperature + row)
    part = tl.load(top_p + row)
    token, done, need = _settled(value, index, mass, candidate, part, row, PASS, ROWS, CHUNKS, BLOCK_C)
    first, second = tl.load(keys + row * 2).to(tl.uint32), tl.load(keys + row * 2 + 1).to(tl.uint32)
    going = tl.where(done, 0, 1)
    while going > 0:
        nearer = _distance(x + row * stride, token, top, heat)
        weight, highest, whose = tl.zeros([], tl.float64), float("-inf"), NOBODY
        for chunk in range(CHUNKS):
            own = chunk * CHUNK + tl.arange(0, CHUNK)
            more, high, who = _consider(x + row * stride, own, vocabulary, top, heat, nearer, first, second, True)
            weight += more
            whose = tl.where(high > highest, who, whose)
            highest = tl.maximum(high, highest)
        open = (weight >= need) & (whose != NOBODY)
        token = tl.where(open, whose, token)
        going = tl.where(open, 1, 0)
    tl.store(result + row, tl.where(token < vocabulary, token, 0).to(tl.int64))
    tl.store(greatest + row, top)


@triton.jit
def _merge_kernel(
    best, value, index, token, greatest, vocabulary, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    release(PDL)
    chosen = _merged(value, index, row * CHUNKS, BLOCK_C, CHUNKS)
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
    launch(best_kernel, (rows, chunks), x, best, vocabulary, 0, x.stride(0), INNER=rows, CHUNK=CHUNK, num_warps=4)
    if top_k is not None:
        limit = _top_k_limit(x, best, temperature, limit, top_k, sizes)
    passes = 1 if top_p is None else PASSES
    value = torch.empty(passes, rows, chunks, dtype=torch.float32, device=x.device)
    index = torch.empty(passes, rows, chunks, dtype=torch.int32, device=x.device)
    token, row_best = torch.empty(rows, dtype=torch.int64, device=x.device), torch.empty_like(best[:, 0])
    mass = torch.empty(passes, rows, chunks, dtype=torch.float64, device=x.device)
    candidate = torch.empty(passes, rows, dtype=torch.int32, device=x.device)
    shared = (x, best, temperature, limit, keys, top_p, value, index, mass, candidate)
    for number in range(passes):
        launch(
            _candidate_kernel, (rows, chunks), *shared, vocabulary, x.stride(0),
            PASS=number, ROWS=rows, CHUNK=CHUNK, MASS=top_p is not None, num_warps=8, **sizes,
        )  # fmt: skip
    if top_p is None:
        launch(_merge_kernel, (rows,), best, value, index, token, row_best, vocabulary, num_warps=1, **sizes)
    else:
        launch(
            _settle_kernel, (rows,), *shared, token, row_best, vocabulary, x.stride(0),
            PASS=passes, ROWS=rows, CHUNK=CHUNK, num_warps=8, **sizes,
        )  # fmt: skip
    return token, row_best


def _top_k_limit(
    x: Tensor, best: Tensor, temperature: Tensor, limit: Tensor, top_k: Tensor, sizes: dict[str, int]
) -> Tensor:
    """`limit` after top-k, int32 [R]; arguments as in `choose_tokens`, best: [R, chunks]."""
    rows, chunks = best.shape
    counts = torch.empty(2, rows, chunks, DIGITS.value, dtype=torch.int32, device=x.device)
    found, base = (torch.empty(len(SHIFTS), rows, dtype=torch.int32, device=x.device) for _ in range(2))
    needed, result = torch.empty_like(base[0]), torch.empty_like(limit)
    for number, shift in enumerate(SHIFTS):
        launch(
            _pass_kernel, (rows, chunks), x, best, temperature, limit, top_k, counts[1 - number % 2],
            counts[number % 2], found, base, needed, x.shape[1], x.stride(0),
            PASS=number, SHIFT=shift, ROWS=rows, CHUNK=CHUNK, num_warps=4, **sizes,
        )  # fmt: skip
    launch(
        _limit_kernel, (rows,), top_k, counts[1 - len(SHIFTS) % 2], found, base, needed, limit, result,
        PASS=len(SHIFTS), ROWS=rows, num_warps=1, **sizes,
    )  # fmt: skip
    return result


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
