"""Residual addition and RMS norm in one launch; sums a projection's splits on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, release, wait


@triton.jit
def _add_norm_kernel(
    addend, x, weight, total, normed, R,
    eps: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, HAS_X: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < H
    gain = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    DTYPE: tl.constexpr = normed.dtype.element_ty
    value = tl.zeros([BLOCK], DTYPE)
    if HAS_X:
        value = tl.load(x + row * H + i, mask=inside, other=0.0)
    if SPLITS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            added += tl.load(addend + (split * R + row) * H + i, mask=inside, other=0.0).to(tl.float32)
        # As the reference: the projection is rounded, then the sum.
        value = (value.to(tl.float32) + added.to(DTYPE).to(tl.float32)).to(DTYPE)
        if HAS_X:
            tl.store(total + row * H + i, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    wide = wide.to(DTYPE).to(tl.float32) * gain
    tl.store(normed + row * H + i, wide.to(DTYPE), mask=inside)


@torch.library.custom_op("flashtree::add_norm", mutates_args=())
def add_norm(x: Tensor | None, addend: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    """total = x + sum(addend), normed = norm(total).

    Args:
        x: [R, H], the residual stream; None: nothing, the addend is the total.
        addend: [splits, R, H], what is to be added to it, or None.
        weight: [H] of the norm.
        eps: of the norm.

    Returns:
        total [R, H] (empty without x or without an addend), normed [R, H].
    """
    total, normed = _outputs(x, addend, weight)
    rows, hidden = normed.shape
    block = triton.next_power_of_2(hidden)
    launch(
        _add_norm_kernel, (rows,), normed if addend is None else addend, normed if x is None else x, weight, total,
        normed, rows, eps=eps, H=hidden, SPLITS=0 if addend is None else addend.shape[0], HAS_X=x is not None,
        BLOCK=block, num_warps=max(1, min(16, block // 128)),
    )  # fmt: skip
    return [total, normed]


def _outputs(x: Tensor | None, addend: Tensor | None, weight: Tensor) -> list[Tensor]:
    if x is not None:
        normed = torch.empty_like(x)
    else:
        assert addend is not None, "nothing to norm"
        normed = weight.new_empty(addend.shape[1:])
    return [normed.new_empty(0) if x is None or addend is None else torch.empty_like(normed), normed]


@add_norm.register_fake
def _(x: Tensor | None, addend: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    return _outputs(x, addend, weight)
