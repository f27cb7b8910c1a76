"""Linear layers for 2 to 64 rows: each weight is read once, at bandwidth, in a launch that overlaps its neighbours'.

y.T = W @ x.T on the tensor cores: tiles of the weight are the large operand, so that few rows waste nothing. Both
operands come through the tensor memory accelerator. The columns are split among programs until the GPU is full; the
splits' sums are left to the kernel that reads them anyway (norm, rotary embedding), in a fixed order.
Bound: bytes of W over the memory's bandwidth; measured against cuBLAS in docs/benchmarks/notebook.md.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import launch, release, wait

MOST_ROWS = 64
PROGRAMS = 192  # enough of them to fill 132 multiprocessors; more only make more sums


@triton.jit
def _few_rows_kernel(
    x_tiles, w_tiles, bias, y, R, N,
    K: tl.constexpr, SPLITS: tl.constexpr, SWIGLU: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first_n, split = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.arange(0, BLOCK_R)
    n = first_n + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=(n < N) & (split == 0), other=0.0).to(tl.float32)[:, None]
        if SWIGLU:
            acc_up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    wait(PDL)
    for block in tl.range(blocks * split // SPLITS, blocks * (split + 1) // SPLITS, num_stages=STAGES):
        x = tl.trans(x_tiles.load([0, block * BLOCK_K]))
        acc = tl.dot(w_tiles.load([first_n, block * BLOCK_K]), x, acc)
        if SWIGLU:
            acc_up = tl.dot(w_tiles.load([N + first_n, block * BLOCK_K]), x, acc_up)
    release(PDL)
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    place = y + (split * R + row)[:, None] * N + n[None, :]
    tl.store(place, tl.trans(acc).to(y.dtype.element_ty), mask=(row < R)[:, None] & (n < N)[None, :])


class Tile(NamedTuple):
    """How a launch is cut: weights a program, columns a step, steps in flight, ranges of columns."""

    block_n: int
    block_k: int
    stages: int
    splits: int


def choose_tile(n_out: int, k: int, swiglu: bool) -> Tile:
    """Cut of a launch; the best of 70 tried on an H200 lie within 2 %, so one rule does for all shapes."""
    if swiglu:  # what follows the sum is not linear: one range
        return Tile(64, 64, 4, 1)
    tiles = triton.cdiv(n_out, 64)
    return Tile(64, 64, 6, max(1, min(PROGRAMS // tiles, 8, triton.cdiv(k, 128))))


@functools.cache
def _available() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether this device has a tensor memory accelerator (compute capability 9 and newer)."""
    return _available()


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows_linear` may be called; else a library's GEMM is the better or the only way."""
    if not available() or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return 2 <= x.shape[0] <= MOST_ROWS and weight.shape[1] % 8 == 0


def _out_shape(x: Tensor, weight: Tensor, swiglu: bool) -> tuple[int, int, int]:
    n_out = weight.shape[0] // 2 if swiglu else weight.shape[0]
    return choose_tile(n_out, weight.shape[1], swiglu).splits, x.shape[0], n_out


@torch.library.custom_op("flashtree::few_rows_linear", mutates_args=())
def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, swiglu: bool) -> Tensor:
    """x @ weight.T + bias as a few partial sums, or silu(gate) * up of it.

    Args:
        x: [R, K], 2 to 64 rows, bf16 or fp16, K a multiple of 8.
        weight: [N, K] contiguous; with `swiglu` the gate's rows, then the up projection's, [2 N, K].
        bias: [N] (or [2 N]), or None.
        swiglu: silu(gate) * up.

    Returns:
        fp32 [splits, R, N], to be summed over the first dimension; with `swiglu` [1, R, N] of x's dtype.
    """
    splits, rows, n_out = _out_shape(x, weight, swiglu)
    k = weight.shape[1]
    tile = choose_tile(n_out, k, swiglu)
    y = torch.empty(splits, rows, n_out, dtype=x.dtype if swiglu else torch.float32, device=x.device)
    block_r = max(16, triton.next_power_of_2(rows))
    launch(
        _few_rows_kernel, (triton.cdiv(n_out, tile.block_n), splits),
        TensorDescriptor.from_tensor(x, [block_r, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        weight if bias is None else bias, y, rows, n_out,
        K=k, SPLITS=splits, SWIGLU=swiglu, HAS_BIAS=bias is not None,
        BLOCK_R=block_r, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.stages, num_warps=4,
    )  # fmt: skip
    return y


@few_rows_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, swiglu: bool) -> Tensor:
    shape = _out_shape(x, weight, swiglu)
    return x.new_empty(shape, dtype=x.dtype if swiglu else torch.float32)
