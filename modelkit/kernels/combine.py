"""The second kernel of `tree_attention`: the sums that ranges of keys have made of a query vector, put together."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import release, wait

LOWEST = tl.constexpr(-1.0e30)  # finite, so that a row which sees nothing in a range makes no NaN
COMBINED = 1024  # elements of the ranges' sums that a program holds at a time


@triton.jit
def key_ranges(blocks, SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Ranges that so many key blocks are cut into; programs of further ones have nothing to do."""
    return tl.maximum(tl.minimum(SPLITS, (blocks + MIN_BLOCKS - 1) // MIN_BLOCKS), 1)


@triton.jit
def combine_kernel(
    partial, stats, length, row_offset, out,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a query vector; how many ranges there are it works out as the first kernel did, or reads off them."""
    vector = tl.program_id(0)
    row = vector // HEADS
    dim = tl.arange(0, BLOCK_D)
    used = row < tl.load(row_offset + SLOTS)
    ranges = SPLITS
    if WINDOW == 0:
        slots = tl.arange(0, BLOCK_SLOTS)
        first = tl.load(row_offset + slots, mask=slots < SLOTS, other=0).to(tl.int32)
        end = tl.load(row_offset + slots + 1, mask=slots < SLOTS, other=0).to(tl.int32)
        committed = tl.load(length + slots, mask=slots < SLOTS, other=0).to(tl.int32)
        blocks = (committed + BLOCK_N - 1) // BLOCK_N + (end - first + BLOCK_N - 1) // BLOCK_N
        blocks = tl.sum(tl.where((first <= row) & (row < end), blocks, 0), 0)
        ranges = key_ranges(blocks, SPLITS, MIN_BLOCKS)
    wait(PDL)
    release(PDL)
    top = tl.full([], LOWEST, tl.float32)
    whole = tl.zeros([], tl.float32)
    result = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, ranges, CHUNK):  # all loads of a chunk at once, none waits for another
        split = start + tl.arange(0, CHUNK)
        at = split * (ROWS * HEADS) + vector
        written = used & (split < ranges)
        tops = tl.load(stats + at, mask=written, other=LOWEST)
        totals = tl.load(stats + SPLITS * (ROWS * HEADS) + at, mask=written, other=0.0)
        place = partial + at[:, None].to(tl.int64) * DIM + dim[None, :]
        sums = tl.load(place, mask=written[:, None] & (dim < DIM)[None, :], other=0.0)
        if WINDOW > 0:  # ranges with nothing to do have written no sum
            sums = tl.where((totals != 0)[:, None], sums, 0.0)
        highest = tl.maximum(top, tl.max(tops, 0))
        weight, keep = tl.exp2(tops - highest), tl.exp2(top - highest)
        result = result * keep + tl.sum(sums * weight[:, None], 0)
        whole = whole * keep + tl.sum(totals * weight, 0)
        top = highest
    whole = tl.where(used, whole, 1.0)
    tl.store(out + vector * DIM + dim, (result / whole).to(out.dtype.element_ty), mask=dim < DIM)
