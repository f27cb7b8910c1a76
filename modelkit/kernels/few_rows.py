"""Linear layers for 2 to 64 rows: each weight is read once, at bandwidth, in a launch that overlaps its neighbours'.

y.T = W @ x.T on the tensor cores: tiles of the weight are the large operand, so that few rows waste nothing. The
columns are split among programs until the GPU is full; the splits' sums are left to the kernel that reads them anyway
(norm, rotary embedding), in a fixed order.
Bound: bytes of W over the memory's bandwidth; small layers: latencies. Measured in docs/benchmarks/notebook.md.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .few_rows_kernels import few_rows_kernel, small_few_rows_kernel
from .launch import launch

MOST_ROWS = 64
MULTIPROCESSORS = 132
PROGRAMS = 192  # of small steps: enough to fill the multiprocessors; more only make more sums
SMALL = 4_000_000  # weights of a layer that is bound by latencies
SMALL_COLUMNS, SMALL_COLUMNS_SWIGLU = 4096, 640  # of the latter one program holds all, of gate and up


class Tile(NamedTuple):
    """How a launch is cut.

    Attributes:
        block_n: weights a program.
        block_k: columns a step.
        stages: steps in flight; 0: all of them, see `small_few_rows_kernel`.
        splits: ranges of columns.
        rows: most rows a program, where all steps are in flight.
    """

    block_n: int
    block_k: int
    stages: int
    splits: int
    rows: int = MOST_ROWS


def choose_tile(rows: int, n_out: int, k: int, swiglu: bool) -> Tile:
    """Cut of a launch of so many rows (padded): what an H200 took least time for, docs/benchmarks/notebook.md.

    Wide steps keep most bytes in flight, but then two programs (one, with many rows) are all that fits on a
    multiprocessor; a launch has one wave of them. Small layers take all steps at once, see `small_few_rows_kernel`.
    """
    if n_out * k * (2 if swiglu else 1) < SMALL and k <= (SMALL_COLUMNS_SWIGLU if swiglu else SMALL_COLUMNS):
        if swiglu:
            return Tile(16 if rows <= 32 else 32, 128, 0, 1)
        if k < 1024:
            return Tile(16 if rows <= 16 else 32, 256, 0, triton.cdiv(k, 256), 32)
        step = 256 if rows <= 16 else 512
        return Tile(32, step, 0, triton.cdiv(k, step), 32 if rows <= 32 else 16)
    tiles = triton.cdiv(n_out, 64)
    if swiglu:  # what follows the sum is not linear: one range
        return Tile(64, 128 if tiles <= MULTIPROCESSORS and k >= 1024 else 64, 4, 1)
    splits = MULTIPROCESSORS * (2 if rows <= 32 else 1) // tiles
    if splits > 1:
        return Tile(64, 128, 4, max(1, min(splits, 4, k // 256)))
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


def padded(rows: int) -> int:
    """Rows that a program works on."""
    return int(max(16, triton.next_power_of_2(rows)))


def _cut(x: Tensor, weight: Tensor, swiglu: bool) -> tuple[Tile, int]:
    """The tile, and N."""
    n_out = weight.shape[0] // 2 if swiglu else weight.shape[0]
    return choose_tile(padded(x.shape[0]), n_out, weight.shape[1], swiglu), n_out


@torch.library.custom_op("flashtree::few_rows_linear", mutates_args=())
def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, swiglu: bool) -> Tensor:
    """x @ weight.T + bias as a few partial sums, or silu(gate) * up of it.

    Args:
        x: [R, K] contiguous, 2 to 64 rows, bf16 or fp16, K a multiple of 8.
        weight: [N, K] contiguous; with `swiglu` the gate's rows, then the up projection's, [2 N, K].
        bias: [N] (or [2 N]), or None.
        swiglu: silu(gate) * up.

    Returns:
        fp32 [splits, R, N], to be summed over the first dimension; with `swiglu` [1, R, N] of x's dtype.
    """
    (tile, n_out), (rows, k) = _cut(x, weight, swiglu), x.shape
    y = torch.empty(tile.splits, rows, n_out, dtype=x.dtype if swiglu else torch.float32, device=x.device)
    block_r = padded(rows) if tile.stages else min(padded(rows), tile.rows)
    grid = (triton.cdiv(n_out, tile.block_n), tile.splits, triton.cdiv(rows, block_r))
    unused = weight if bias is None else bias
    constants = {
        "K": k, "SWIGLU": swiglu, "HAS_BIAS": bias is not None, "BLOCK_R": block_r, "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k, "num_warps": 4,
    }  # fmt: skip
    if tile.stages == 0:
        blocks = triton.cdiv(triton.cdiv(k, tile.block_k), tile.splits)
        launch(small_few_rows_kernel, grid, x, weight, unused, y, rows, n_out, BLOCKS=blocks, **constants)
        return y
    x_tiles = TensorDescriptor.from_tensor(x, [block_r, tile.block_k])
    w_tiles = TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])
    launch(
        few_rows_kernel, grid, x_tiles, w_tiles, unused, y, rows, n_out, SPLITS=tile.splits, STAGES=tile.stages,
        **constants,
    )  # fmt: skip
    return y


@few_rows_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, swiglu: bool) -> Tensor:
    tile, n_out = _cut(x, weight, swiglu)
    return x.new_empty(tile.splits, x.shape[0], n_out, dtype=x.dtype if swiglu else torch.float32)
