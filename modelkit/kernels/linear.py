"""Linear layers for one row: each weight is read once, at bandwidth, with the neighbours' work folded in.

y = f(norm(x) @ W.T + b) + residual, one kernel: the RMS norm of x as a prologue (each program sums the squares of the
row it multiplies anyway), SwiGLU over the two halves of W or the residual's addition as an epilogue.
Bound: bytes of W over the memory's bandwidth. Several rows: `few_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, release, wait


@triton.jit
def _one_row_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, n_out,
    eps: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_in = n < n_out
    w_tile = w_ptr + tl.where(n_in, n, 0)[:, None].to(tl.int64) * K + k[None, :]
    up_tile = w_tile + n_out * K
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    # Weights do not depend on the kernel before: the first of them are on their way before its results are waited for.
    w = tl.load(w_tile, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)
        if SWIGLU:
            bias_up = tl.load(bias_ptr + n_out + n, mask=n_in, other=0.0).to(tl.float32)
    wait(PDL)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + n, mask=n_in, other=0.0).to(tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        if start > 0:
            if K % BLOCK_K == 0:
                w = tl.load(w_tile + start, eviction_policy="evict_first")
            else:
                w = tl.load(w_tile + start, mask=(k + start < K)[None, :], other=0.0, eviction_policy="evict_first")
        if K % BLOCK_K == 0:
            x = tl.load(x_ptr + start + k).to(tl.float32)
        else:
            x = tl.load(x_ptr + start + k, mask=k + start < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            if K % BLOCK_K == 0:
                x = x * tl.load(norm_ptr + start + k).to(tl.float32)
            else:
                x = x * tl.load(norm_ptr + start + k, mask=k + start < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if SWIGLU:
            if K % BLOCK_K == 0:
                up = tl.load(up_tile + start, eviction_policy="evict_first")
            else:
                up = tl.load(up_tile + start, mask=(k + start < K)[None, :], other=0.0, eviction_policy="evict_first")
            acc_up += up.to(tl.float32) * x[None, :]
    release(PDL)
    y = tl.sum(acc, 1)
    gain = 1.0
    if HAS_NORM:
        gain = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y = y * gain
    if HAS_BIAS:
        y += bias
    if SWIGLU:
        up_y = tl.sum(acc_up, 1) * gain
        if HAS_BIAS:
            up_y += bias_up
        y = y / (1.0 + tl.exp(-y)) * up_y
    if HAS_RESIDUAL:
        y += residual
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n_in)


def tile(n_out: int, k: int, swiglu: bool) -> tuple[int, int, int]:
    """Weights a program, columns a step, warps: what an H200 took least time for, docs/benchmarks/notebook.md."""
    if not swiglu and (n_out > 4096 or (n_out == 4096 and k <= 2048)):
        return 4, 512, 2
    return 2, 1024, 4


@torch.library.custom_op("flashtree::one_row_linear", mutates_args=())
def one_row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None, eps: float,
    swiglu: bool,
) -> Tensor:  # fmt: skip
    """y = f(norm(x) @ weight.T + bias) + residual for one row.

    Args:
        x: [1, K].
        weight: [N, K] contiguous; with `swiglu` the gate's rows, then the up projection's, [2 N, K].
        bias: [N] (or [2 N]), or None.
        norm: RMS norm weight [K] applied to x first, or None.
        residual: [1, N] added at the end, or None.
        eps: of the norm.
        swiglu: silu(gate) * up.

    Returns:
        [1, N].
    """
    k = x.shape[1]
    n_out = weight.shape[0] // 2 if swiglu else weight.shape[0]
    y = torch.empty(1, n_out, dtype=x.dtype, device=x.device)
    n, step, warps = tile(n_out, k, swiglu)
    launch(
        _one_row_kernel, (triton.cdiv(n_out, n),),
        x, weight, weight if bias is None else bias, weight if norm is None else norm,
        x if residual is None else residual, y, n_out,
        eps=eps, K=k, HAS_BIAS=bias is not None, HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None,
        SWIGLU=swiglu, BLOCK_N=n, BLOCK_K=step, num_warps=warps,
    )  # fmt: skip
    return y


@one_row_linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None, eps: float,
    swiglu: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(1, weight.shape[0] // 2 if swiglu else weight.shape[0])
