"""K and V of context rows for all layers at once: norm of K's heads, rotary embedding, and the write to the pages.

Layers have pages of their own, so their addresses are passed as a table, and the compiler sees no write. What is read
of the pages later in the same step has to depend on the counts that the operator gives back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import TRITON_TYPES, launch, release, wait
from .rotary import norm_and_turn


@triton.jit
def _append_kernel(
    projected, count, length, table, addresses, norms, frequencies, kept, R, page_stride, head_stride,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, CAPACITY: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr,
    HAS_NORM: tl.constexpr, DTYPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.program_id(1)
    buffer, head = part // HKV, part % HKV  # K and V of each layer in turn
    half: tl.constexpr = D // 2
    i = tl.arange(0, BLOCK)
    inside = i < half
    is_key = buffer % 2 == 0
    pages = tl.load(addresses + buffer * 2).to(tl.pointer_type(DTYPE))
    frequency = tl.load(frequencies + i, mask=inside, other=0.0)
    low_weight, high_weight = tl.full([1, BLOCK], 1.0, tl.float32), tl.full([1, BLOCK], 1.0, tl.float32)
    if HAS_NORM:
        weight = norms + buffer // 2 * D + i
        low_weight = tl.load(weight, mask=inside, other=0.0).to(tl.float32)[None, :]
        high_weight = tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    wait(PDL)
    release(PDL)
    slot, step = row // WIDTH, row % WIDTH
    new = tl.load(count + slot, mask=row < R, other=0)
    position = tl.load(length + slot, mask=row < R, other=0) + step
    if part == 0:
        tl.store(kept + slot, new, mask=(row < R) & (step == 0))
    real = (step < new) & (position < CAPACITY)
    position = tl.where(real, position, 0)
    page = tl.load(table + slot * PAGES + position // PAGE, mask=real, other=0)
    cover = real[:, None] & inside[None, :]
    low = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    high = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        source = projected + ((split * R + row)[:, None] * PARTS + part) * D + i[None, :]
        low += tl.load(source, mask=cover, other=0.0).to(tl.float32)
        high += tl.load(source + half, mask=cover, other=0.0).to(tl.float32)
    low, high = low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)
    if is_key:
        angle = position.to(tl.float32)[:, None] * frequency[None, :]
        cos, sin = tl.cos(angle) * FACTOR, tl.sin(angle) * FACTOR
        low, high = norm_and_turn(low, high, low_weight, high_weight, cos, sin, D, EPS, HAS_NORM, DTYPE)
    place = pages + (page * page_stride + head * head_stride + position % PAGE * D)[:, None] + i[None, :]
    tl.store(place, low.to(DTYPE), mask=cover)
    tl.store(place + half, high.to(DTYPE), mask=cover)


@torch.library.custom_op("flashtree::append_context", mutates_args=())
def append_context(
    projected: Tensor, count: Tensor, length: Tensor, table: Tensor, addresses: Tensor, pages: Tensor,
    norms: Tensor | None, frequencies: Tensor, eps: float, factor: float, capacity: int,
) -> Tensor:  # fmt: skip
    """Write K and V of rows behind their slots' committed lengths, in all layers.

    Args:
        projected: [splits, S * P, layers * 2 * Hkv * D] contiguous, summed over the first dimension: of each layer K's
            heads, then V's.
        count: int64 [S], how many of a slot's P rows are real.
        length: int64 [S + 1], committed positions.
        table: int64 [S + 1, pages a slot], contiguous.
        addresses: int64 [2 * layers, 2], where the pages of K and V of each layer begin, in the first column.
        pages: of one layer [.., Hkv, page_size, D], contiguous, for sizes and dtype.
        norms: [layers, D] of K's heads, or None.
        frequencies: fp32 [D / 2], of the rotary embedding.
        eps: of the norms.
        factor: what cosines and sines are multiplied by.
        capacity: rows at this position or behind are dropped.

    Returns:
        `count` again; what depends on it comes after the writes.
    """
    splits, rows = projected.shape[:2]
    kv_heads, page_size, dim = pages.shape[1:]
    parts = addresses.shape[0] * kv_heads
    count = count.contiguous()
    kept = torch.empty_like(count)
    block_r = 1 if rows <= 64 else 8
    launch(
        _append_kernel, (triton.cdiv(rows, block_r), parts),
        projected, count, length, table, addresses, frequencies if norms is None else norms, frequencies, kept, rows,
        kv_heads * page_size * dim, page_size * dim,
        WIDTH=rows // count.shape[0], PARTS=parts, HKV=kv_heads, D=dim, SPLITS=splits, PAGE=page_size,
        PAGES=table.shape[1], CAPACITY=capacity, EPS=eps, FACTOR=factor, HAS_NORM=norms is not None,
        DTYPE=TRITON_TYPES[pages.dtype], BLOCK_R=block_r, BLOCK=triton.next_power_of_2(dim // 2),
        num_warps=1 if block_r == 1 else 4,
    )  # fmt: skip
    return kept


@append_context.register_fake
def _(
    projected: Tensor, count: Tensor, length: Tensor, table: Tensor, addresses: Tensor, pages: Tensor,
    norms: Tensor | None, frequencies: Tensor, eps: float, factor: float, capacity: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(count, memory_format=torch.contiguous_format)
