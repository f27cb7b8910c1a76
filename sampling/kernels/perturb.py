"""Gumbel noise on a drafter's logits, and what other kernels of sampling share: row maxima and the noise itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelkit.kernels.launch import launch, release, wait

from ..noise import FACTORS

CHUNK = 2048  # ids of a program
FIRST_FACTOR, SECOND_FACTOR = (tl.constexpr(factor) for factor in FACTORS)


@triton.jit
def _row_start(row, outer_stride, inner_stride, INNER: tl.constexpr):
    """Where row `row` of [outer, INNER, V] begins."""
    return (row // INNER) * outer_stride + (row % INNER) * inner_stride


@triton.jit
def best_kernel(
    x, best, vocabulary, outer_stride, inner_stride, INNER: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Each chunk's greatest value; NaN where there is one."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x += _row_start(row, outer_stride, inner_stride, INNER)
    wait(PDL)
    value = tl.load(x + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    release(PDL)
    worse = tl.max((value != value).to(tl.int32), 0)
    tl.store(best + row * tl.num_programs(1) + chunk, tl.where(worse > 0, float("nan"), tl.max(value, 0)))


@triton.jit
def row_best(best, row, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The row's greatest value, NaN if any chunk's is."""
    chunk = tl.arange(0, BLOCK_C)
    values = tl.load(best + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    return tl.where(tl.max((values != values).to(tl.int32), 0) > 0, float("nan"), tl.max(values, 0))


@triton.jit
def _mix(x):
    """`noise.mix` in the arithmetic that it emulates."""
    x = x ^ (x >> 16)
    x = x * FIRST_FACTOR
    x = x ^ (x >> 15)
    x = x * SECOND_FACTOR
    return x ^ (x >> 15)


@triton.jit
def _log1p(x):
    """log(1 + x) for -1 < x <= 0, also where 1 + x rounds to 1."""
    wide = 1.0 + x
    return tl.where(wide == 1.0, x, tl.log(wide) * (x / tl.where(wide == 1.0, 1.0, wide - 1.0)))


@triton.jit
def noise(token, first, second):
    """`noise.gumbel_noise` of token ids under a row's key."""
    bits = _mix(_mix(token.to(tl.uint32) ^ first) ^ second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -tl.log(-_log1p(-uniform))


@triton.jit
def _perturb_kernel(
    x, best, temperature, keys, out, vocabulary, outer_stride, inner_stride,
    INNER: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`Gumbel.perturb` of one chunk of a row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    wait(PDL)
    release(PDL)
    heat = tl.load(temperature + row)
    value = tl.load(x + _row_start(row, outer_stride, inner_stride, INNER) + token, mask=inside, other=0.0).to(
        tl.float32
    )
    if heat > 0.0:
        first, second = tl.load(keys + row * 2).to(tl.uint32), tl.load(keys + row * 2 + 1).to(tl.uint32)
        value = tl.div_rn(value - row_best(best, row, CHUNKS, BLOCK_C), heat) + noise(token, first, second)
    tl.store(out + row * vocabulary + token, value, mask=inside)


@torch.library.custom_op("flashtree::perturb_logits", mutates_args=())
def perturb_logits(x: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """A drafter's logits with the noise that its tokens will meet; see `Gumbel.perturb`.

    Args:
        x: [S, D, V]; the last dimension contiguous.
        temperature: fp32 [S * D]; 0 leaves a row as it is.
        keys: int64 [S * D, 2], see `noise.row_keys`.

    Returns:
        fp32 [S, D, V].
    """
    slots, depth, vocabulary = x.shape
    rows, chunks = slots * depth, triton.cdiv(vocabulary, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=x.device)
    out = torch.empty(slots, depth, vocabulary, dtype=torch.float32, device=x.device)
    where = (vocabulary, x.stride(0), x.stride(1))
    launch(best_kernel, (rows, chunks), x, best, *where, INNER=depth, CHUNK=CHUNK, num_warps=4)
    launch(
        _perturb_kernel, (rows, chunks), x, best, temperature, keys, out, *where,
        INNER=depth, CHUNKS=chunks, BLOCK_C=triton.next_power_of_2(chunks), CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return out


@perturb_logits.register_fake
def _(x: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)
