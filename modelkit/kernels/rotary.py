"""qk-norm, rotary embedding and the scratch write of fresh K/V, one launch for all heads of all rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, release, wait


@triton.jit
def norm_and_turn(
    low, high, low_weight, high_weight, cos, sin,
    D: tl.constexpr, EPS: tl.constexpr, HAS_NORM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """RMS norm and rotary embedding of heads, given in halves [R, D / 2] in fp32.

    Rounded as the reference does it: normalised, rounded, then weighted, and rounded again.
    """
    if HAS_NORM:
        gain = tl.rsqrt(tl.sum(low * low + high * high, 1) / D + EPS)[:, None]
        low = ((low * gain).to(DTYPE).to(tl.float32) * low_weight).to(DTYPE).to(tl.float32)
        high = ((high * gain).to(DTYPE).to(tl.float32) * high_weight).to(DTYPE).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _rotary_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_ptr, v_ptr, R,
    eps: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None], tl.program_id(1)
    half: tl.constexpr = D // 2
    i = tl.arange(0, BLOCK)[None, :]
    inside = (row < R) & (i < half)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    low_weight, high_weight = tl.full([1, BLOCK], 1.0, tl.float32), tl.full([1, BLOCK], 1.0, tl.float32)
    if HAS_NORM:
        weight = tl.where(head < HQ, q_norm_ptr.to(tl.int64), k_norm_ptr.to(tl.int64)).to(q_norm_ptr.dtype)
        low_weight = tl.load(weight + i, mask=i < half, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + half + i, mask=i < half, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    cos = tl.load(cos_ptr + row * half + i, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row * half + i, mask=inside, other=0.0)
    low = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    high = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        source = qkv_ptr + ((split * R + row) * (HQ + 2 * HKV) + head) * D + i
        low += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    low, high = low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)
    if head >= HQ + HKV:
        out = v_ptr + (row * HKV + head - HQ - HKV) * D + i
    else:
        low, high = norm_and_turn(low, high, low_weight, high_weight, cos, sin, D, eps, HAS_NORM, DTYPE)
        out = (q_ptr + (row * HQ + head) * D if head < HQ else k_ptr + (row * HKV + head - HQ) * D) + i
    tl.store(out, low.to(DTYPE), mask=inside)
    tl.store(out + half, high.to(DTYPE), mask=inside)


@torch.library.custom_op("flashtree::rotary_store", mutates_args={"scratch_k", "scratch_v"})
def rotary_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    scratch_k: Tensor, scratch_v: Tensor, heads: int,
) -> Tensor:  # fmt: skip
    """Split qkv into heads, norm and rotate q and k, write k and v to the scratch.

    Args:
        qkv: [splits, R, (Hq + 2 Hkv) * D] contiguous, summed over the first dimension.
        cos: fp32 [R, D / 2], with sin the angles of the rows.
        sin: fp32 [R, D / 2].
        q_norm: [D] or None, with k_norm the per-head norms.
        k_norm: [D] or None.
        eps: of the norms.
        scratch_k: [>= R, Hkv, D], written in rows 0..R-1.
        scratch_v: likewise.
        heads: Hq.

    Returns:
        q [R, Hq, D].
    """
    splits, rows = qkv.shape[:2]
    kv_heads, dim = scratch_k.shape[1:]
    q = torch.empty(rows, heads, dim, dtype=scratch_k.dtype, device=qkv.device)
    unused = q if q_norm is None else q_norm
    block_r = 1 if rows <= 64 else 8
    launch(
        _rotary_kernel, (triton.cdiv(rows, block_r), heads + 2 * kv_heads),
        qkv, cos, sin, unused, unused if k_norm is None else k_norm, q, scratch_k, scratch_v, rows,
        eps=eps, HQ=heads, HKV=kv_heads, D=dim, SPLITS=splits, BLOCK_R=block_r,
        BLOCK=triton.next_power_of_2(dim // 2), HAS_NORM=q_norm is not None, num_warps=min(block_r, 4),
    )  # fmt: skip
    return q


@rotary_store.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    scratch_k: Tensor, scratch_v: Tensor, heads: int,
) -> Tensor:  # fmt: skip
    return scratch_k.new_empty(qkv.shape[1], heads, scratch_k.shape[2])
