"""The two kernels of `few_rows`: large layers through the tensor memory accelerator, small ones by plain loads."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import release, wait


@triton.jit
def _biases(
    bias, n, N, first, SWIGLU: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):
    """What the sums [BLOCK_N, BLOCK_R] of a range start from, and those of the up projection."""
    acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=(n < N) & first, other=0.0).to(tl.float32)[:, None]
        if SWIGLU:
            acc_up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    return acc, acc_up


@triton.jit
def _store(y, acc, acc_up, n, N, row, R, split, SWIGLU: tl.constexpr):
    """Write a range's sums [BLOCK_N, BLOCK_R] to y [splits, R, N]."""
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    place = y + (split * R + row)[:, None] * N + n[None, :]
    tl.store(place, tl.trans(acc).to(y.dtype.element_ty), mask=(row < R)[:, None] & (n < N)[None, :])


@triton.jit
def few_rows_kernel(
    x_tiles, w_tiles, bias, y, R, N,
    K: tl.constexpr, SPLITS: tl.constexpr, SWIGLU: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Both operands through descriptors, `STAGES` steps of columns in flight."""
    first_n, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.arange(0, BLOCK_R)
    n = first_n + tl.arange(0, BLOCK_N)
    acc, acc_up = _biases(bias, n, N, split == 0, SWIGLU, HAS_BIAS, BLOCK_N, BLOCK_R)
    wait(PDL)
    release(PDL)
    for block in tl.range(blocks * split // SPLITS, blocks * (split + 1) // SPLITS, num_stages=STAGES):
        x = tl.trans(x_tiles.load([0, block * BLOCK_K]))
        acc = tl.dot(w_tiles.load([first_n, block * BLOCK_K]), x, acc)
        if SWIGLU:
            acc_up = tl.dot(w_tiles.load([N + first_n, block * BLOCK_K]), x, acc_up)
    _store(y, acc, acc_up, n, N, row, R, split, SWIGLU)


@triton.jit
def small_few_rows_kernel(
    x, w, bias, y, R, N,
    K: tl.constexpr, BLOCKS: tl.constexpr, SWIGLU: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's weights are in its registers before the input is there.

    Small layers are bound by latencies: what counts is how soon after the launch before the result is out. Weights are
    loaded while that launch still runs, then all of the input at once, and no descriptor has to be fetched first.
    """
    n, split = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = split * BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    at = w + tl.minimum(n, N - 1)[:, None] * K + k[None, :]
    weights = ()
    for part in tl.static_range(2 if SWIGLU else 1):
        for block in tl.static_range(BLOCKS):
            inside = (k + block * BLOCK_K < K)[None, :]
            tile = tl.load(at + part * N * K + block * BLOCK_K, mask=inside, other=0.0)
            weights += (tile,)  # type: ignore[assignment]
    acc, acc_up = _biases(bias, n, N, split == 0, SWIGLU, HAS_BIAS, BLOCK_N, BLOCK_R)
    wait(PDL)
    release(PDL)
    at = x + row[:, None] * K + k[None, :]
    inputs = ()
    for block in tl.static_range(BLOCKS):
        inside = (row < R)[:, None] & (k + block * BLOCK_K < K)[None, :]
        tile = tl.load(at + block * BLOCK_K, mask=inside, other=0.0)
        inputs += (tile,)  # type: ignore[assignment]
    for block in tl.static_range(BLOCKS):
        columns = tl.trans(inputs[block])
        acc = tl.dot(weights[block], columns, acc)
        if SWIGLU:
            acc_up = tl.dot(weights[BLOCKS + block], columns, acc_up)
    _store(y, acc, acc_up, n, N, row, R, split, SWIGLU)
