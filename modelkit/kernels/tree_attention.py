"""Tree attention over flat rows: split over the context, each context byte read from device memory once (Triton).

The meaning is `modelkit.attention.DensePlan.attend`, with one softmax over the context and the slot's own rows, plus
optional attention sinks. Knows rows, the block table and committed lengths; knows no cache object, model or plan.

How it works. The rows of a slot times the G query heads of a KV head are one list of query vectors, cut into tiles of
`block_m`. A program takes one tile, one KV head and one of `splits` equal ranges of key blocks: first the context's,
then those of the slot's own rows. The tiles of a slot that read the same keys lie next to each other in the grid, so
that only the first read leaves the L2. Slot, length and range come from device memory, the grid from host constants.
A second kernel combines the ranges' sums, maxima and denominators. Source: Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .combine import COMBINED, LOWEST, combine_kernel, key_ranges
from .launch import launch, release, wait
from .tiles import MAX_SPLITS, choose_splits, choose_tile, tile_count

__all__ = ["choose_splits", "tree_attention"]

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _context_offset(
    block, first_page, table_row, head, committed,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where the keys of one context block begin in the pages, int64 [BLOCK_N]."""
    lane = tl.arange(0, BLOCK_N)
    if PAGES == 1:
        page = first_page
        inner = block * BLOCK_N + lane
    elif PAGE % BLOCK_N == 0:
        page = tl.load(table_row + (block * BLOCK_N) // PAGE)
        inner = (block * BLOCK_N) % PAGE + lane
    else:
        key = block * BLOCK_N + lane
        page = tl.load(table_row + key // PAGE, mask=key < committed, other=0)
        inner = key % PAGE
    return page * (KV_HEADS * PAGE * DIM) + (head * PAGE + inner) * DIM


@triton.jit
def _load_rows(at, offset, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """Vectors [N, BLOCK_D] at element offsets [N]; zeros beyond DIM and, if MASKED, where not `inside` [N]."""
    dim = tl.arange(0, BLOCK_D)
    at = at + offset[:, None] + dim[None, :]
    if MASKED or DIM < BLOCK_D:
        keep = (dim < DIM)[None, :]
        if MASKED:
            keep = keep & inside[:, None]
        return tl.load(at, mask=keep, other=0.0, eviction_policy=EVICT)
    else:
        return tl.load(at, eviction_policy=EVICT)


@triton.jit
def _update(q, k, v, seen, acc, top, total, SCALE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax, in base 2; SCALE is positive and holds log2(e)."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    new = tl.maximum(top, tl.max(score, 1) * SCALE)
    weight = tl.exp2(score * SCALE - new[:, None])
    keep = tl.exp2(top - new)
    total = total * keep + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return acc, new, total


@triton.jit
def _attend_context(
    first, last, query, where, k_pages, v_pages, table_row, first_page, head, committed, acc, top, total,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, WINDOW: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVICT: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Context blocks first .. last - 1; only if MASKED may they reach past the committed length or the window."""
    for block in tl.range(first, last, num_stages=STAGES):
        offset = _context_offset(block, first_page, table_row, head, committed, KV_HEADS, DIM, PAGE, PAGES, BLOCK_N)
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = key < committed
        keys = _load_rows(k_pages, offset, inside, DIM, BLOCK_D, MASKED, EVICT)
        values = _load_rows(v_pages, offset, inside, DIM, BLOCK_D, MASKED, EVICT)
        seen = inside[None, :]
        if WINDOW > 0:
            seen = seen & (where[:, None] - key[None, :] < WINDOW)
        acc, top, total = _update(query, keys, values, seen, acc, top, total, SCALE, MASKED, PRECISION)
    return acc, top, total


@triton.jit
def _attend_rows(
    first, last, query, where, own, inside, row, start, count, k, v, position, ancestors, head, acc, top, total,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Blocks first .. last - 1 of the slot's own rows: ancestors and self."""
    for block in tl.range(first, last, num_stages=1):
        lane = tl.arange(0, BLOCK_N)
        other = block * BLOCK_N + lane  # row within the slot
        offset = ((start + other) * KV_HEADS + head) * DIM
        keys = _load_rows(k, offset, other < count, DIM, BLOCK_D, True, "")
        values = _load_rows(v, offset, other < count, DIM, BLOCK_D, True, "")
        bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for i in tl.static_range(BLOCK_N // 32):
            index = block * (BLOCK_N // 32) + i
            word = tl.load(ancestors + row * WORDS + index, mask=inside & (index < WORDS), other=0)
            bits = tl.where((lane // 32 == i)[None, :], word[:, None], bits)
        seen = ((bits >> (lane % 32)[None, :]) & 1) != 0
        if WINDOW > 0:
            there = tl.load(position + start + other, mask=other < count, other=0).to(tl.int32)
            seen = seen & (tl.abs(where[:, None] - there[None, :]) < WINDOW)
        seen = (seen | (other[None, :] == own[:, None])) & (other < count)[None, :]
        acc, top, total = _update(query, keys, values, seen, acc, top, total, SCALE, True, PRECISION)
    return acc, top, total


@triton.jit
def _attend_kernel(
    q, k, v, k_pages, v_pages, table, length, position, ancestors, row_offset, sinks, out, partial, stats,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, STAGES: tl.constexpr, MIN_BLOCKS: tl.constexpr, ONE_TILE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Rows and lengths were made long before, see `KernelPlan`: they are read before the launch before is waited for.
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    PRECISION: tl.constexpr = "ieee" if q.dtype.element_ty == tl.float32 else "tf32"
    # Partial sums are rewritten by every layer: leave them the L2, unless other tiles read the same context.
    EVICT: tl.constexpr = "evict_first" if ONE_TILE else ""
    dim = tl.arange(0, BLOCK_D)

    if SLOTS == 1:
        slot, local = 0, tile
        start = tl.load(row_offset).to(tl.int32)
        count = tl.load(row_offset + 1).to(tl.int32) - start
    else:
        slots = tl.arange(0, BLOCK_SLOTS)
        starts = tl.load(row_offset + slots, mask=slots < SLOTS, other=0).to(tl.int32)
        counts = tl.load(row_offset + slots + 1, mask=slots < SLOTS, other=0).to(tl.int32) - starts
        tiles = (counts * GROUP + BLOCK_M - 1) // BLOCK_M
        before = tl.cumsum(tiles, 0) - tiles
        owns = (before <= tile) & (tile < before + tiles)
        slot = tl.sum(tl.where(owns, slots, 0), 0)
        local = tile - tl.sum(tl.where(owns, before, 0), 0)
        start = tl.sum(tl.where(owns, starts, 0), 0)
        count = tl.sum(tl.where(owns, counts, 0), 0)
    vector = local * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = vector < count * GROUP
    own = vector // GROUP  # row within the slot
    row = start + own
    vector = row * HEADS + head * GROUP + vector % GROUP  # index among all [R * Hq]

    committed = tl.load(length + slot).to(tl.int32)
    context = (committed + BLOCK_N - 1) // BLOCK_N
    oldest, where = 0, row  # without a window
    if WINDOW > 0:
        where = tl.load(position + row, mask=inside, other=2**31 - 1).to(tl.int32)
        oldest = tl.minimum(tl.maximum(tl.min(where, 0) - WINDOW + 1, 0) // BLOCK_N, context)
    blocks = context - oldest + (count + BLOCK_N - 1) // BLOCK_N
    ranges = key_ranges(blocks, SPLITS, MIN_BLOCKS)
    first = oldest + blocks * split // ranges
    end = oldest + blocks * (split + 1) // ranges
    table_row = table + slot * PAGES
    first_page = tl.load(table_row)

    wait(PDL)
    release(PDL)
    if SPLITS == 1:  # no combine kernel: padding rows get their zeros here
        for padding in range(tl.load(row_offset + SLOTS).to(tl.int32) + tile, ROWS, tl.num_programs(0)):
            for i in tl.static_range(GROUP):
                place = out + (padding * HEADS + head * GROUP + i) * DIM + dim
                tl.store(place, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=dim < DIM)
    if local * BLOCK_M >= count * GROUP:  # no slot needs this tile
        return
    at_stats = split * (ROWS * HEADS) + vector
    if SPLITS > 1:  # noqa: SIM102 - a branch of the compiler's around one of the device's
        if split >= ranges:  # nothing to do: no sum is written, and none is read
            if WINDOW > 0:  # else the combine kernel knows the ranges itself
                tl.store(stats + at_stats, tl.full([BLOCK_M], LOWEST, tl.float32), mask=inside)
                tl.store(stats + SPLITS * ROWS * HEADS + at_stats, tl.zeros([BLOCK_M], tl.float32), mask=inside)
            return

    query = _load_rows(q, vector * DIM, inside, DIM, BLOCK_D, True, "")
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # one more key of the first range, with no value
        sink = tl.load(sinks + vector % HEADS, mask=inside, other=0.0) * LOG2E
        top = tl.where(split == 0, tl.maximum(sink, LOWEST), top)
        total = tl.where(split == 0, 1.0, total)
    full = 0  # blocks below this one need no mask
    if WINDOW == 0:
        full = committed // BLOCK_N
        acc, top, total = _attend_context(
            first, tl.minimum(end, full), query, where, k_pages, v_pages, table_row, first_page, head, committed,
            acc, top, total, KV_HEADS, DIM, PAGE, PAGES, WINDOW, SCALE, BLOCK_N, BLOCK_D, EVICT, PRECISION,
            MASKED=False, STAGES=STAGES,
        )  # fmt: skip
    acc, top, total = _attend_context(
        tl.maximum(first, full), tl.minimum(end, context), query, where, k_pages, v_pages, table_row, first_page,
        head, committed, acc, top, total, KV_HEADS, DIM, PAGE, PAGES, WINDOW, SCALE, BLOCK_N, BLOCK_D, EVICT, PRECISION,
        MASKED=True, STAGES=STAGES if WINDOW > 0 else 1,
    )  # fmt: skip
    acc, top, total = _attend_rows(
        tl.maximum(first, context) - context, tl.maximum(end, context) - context, query, where, own, inside, row, start,
        count, k, v, position, ancestors, head, acc, top, total, KV_HEADS, DIM, WORDS, WINDOW, SCALE, BLOCK_M, BLOCK_N,
        BLOCK_D, PRECISION,
    )  # fmt: skip

    cover = inside[:, None] & (dim < DIM)[None, :]
    at = vector[:, None] * DIM + dim[None, :]
    if SPLITS == 1:
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=cover)
    else:
        tl.store(stats + at_stats, top, mask=inside)
        tl.store(stats + SPLITS * ROWS * HEADS + at_stats, total, mask=inside)
        tl.store(partial + split.to(tl.int64) * (ROWS * HEADS * DIM) + at, acc, mask=cover)


@torch.library.custom_op("flashtree::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, length: Tensor, position: Tensor,
    ancestors: Tensor, row_offset: Tensor, width: int, scale: float, window: int = 0, splits: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention output of every row: `DensePlan.attend`, in one pass over the context.

    Args:
        q: [R, Hq, D], bf16, fp16 or fp32, rotated.
        k: [R or more, Hkv, D], the rows' own keys, rotated.
        v: [R or more, Hkv, D], their values.
        k_pages: [P, Hkv, page_size, D], the context's keys, contiguous.
        v_pages: [P, Hkv, page_size, D], its values, contiguous.
        table: int64 [S + 1, pages a slot], contiguous.
        length: int64 [S + 1], committed positions. Like `table`, `position` and `row_offset`, not written by the launch
            right before.
        position: int64 [R], read with a window only.
        ancestors: int32 [R, W], bit j: sees row `row_offset[slot] + j`. A row sees itself whatever its bits say.
        row_offset: int64 [S + 1]; rows from `row_offset[S]` on are padding.
        width: most rows of one slot.
        scale: softmax scale, positive.
        window: keys at a distance of `window` positions or more are hidden; 0 sees all.
        splits: ranges the keys are split into, see `choose_splits`; 1 needs no second kernel.
        sinks: fp32 [Hq], logits that count in the softmax's denominator only.

    Returns:
        [R, Hq, D], contiguous, of q's dtype; zeros in padding rows.

    Raises:
        ValueError: arguments that the kernel would read wrongly.
    """
    # Checked here and not in front of the operator, where the compiler would trace it anew for every layer.
    _check(q, k, v, k_pages, v_pages, table, length, position, ancestors, row_offset, sinks)
    _check_numbers(q, k_pages, ancestors, width, scale, window, splits)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    length, position = length.contiguous(), position.contiguous()
    ancestors, row_offset = ancestors.contiguous(), row_offset.contiguous()
    R, Hq, D = q.shape
    Hkv, page = k_pages.shape[1], k_pages.shape[2]
    slots, group = row_offset.shape[0] - 1, Hq // Hkv
    tile = choose_tile(R, width, slots, group, D, q.element_size())
    # Triton gives the page numbers, which the addresses depend on, every other stage.
    stages = tile.stages if table.shape[1] == 1 else 2 * tile.stages - 1
    out = torch.empty((R, Hq, D), dtype=q.dtype, device=q.device)
    partial = stats = q  # not touched with one range
    if splits > 1:
        partial = torch.empty((splits, R * Hq, D), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, splits, R * Hq), dtype=torch.float32, device=q.device)
    launch(
        _attend_kernel, (tile_count(R, width, slots, group, tile.block_m), Hkv, splits),
        q, k, v, k_pages, v_pages, table, length, position, ancestors, row_offset, q if sinks is None else sinks,
        out, partial, stats,
        ROWS=R, SLOTS=slots, KV_HEADS=Hkv, GROUP=group, DIM=D, PAGE=page, PAGES=table.shape[1],
        WORDS=ancestors.shape[1], WINDOW=window, SCALE=scale * math.log2(math.e), SPLITS=splits,
        HAS_SINKS=sinks is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=tile.block_d,
        STAGES=stages, MIN_BLOCKS=tile.min_blocks, ONE_TILE=width * group <= tile.block_m,
        BLOCK_SLOTS=triton.next_power_of_2(slots), num_warps=tile.warps,
    )  # fmt: skip
    if splits > 1:
        chunk = max(1, min(triton.next_power_of_2(splits), COMBINED // tile.block_d))
        launch(
            combine_kernel, (R * Hq,),
            partial, stats, length, row_offset, out, ROWS=R, SLOTS=slots, HEADS=Hq, DIM=D, WINDOW=window, SPLITS=splits,
            BLOCK_N=tile.block_n, MIN_BLOCKS=tile.min_blocks, BLOCK_SLOTS=triton.next_power_of_2(slots),
            BLOCK_D=tile.block_d, CHUNK=chunk, num_warps=max(1, min(4, chunk * tile.block_d // 1024)),
        )  # fmt: skip
    return out


@tree_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, length: Tensor, position: Tensor,
    ancestors: Tensor, row_offset: Tensor, width: int, scale: float, window: int = 0, splits: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _check(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, length: Tensor, position: Tensor,
    ancestors: Tensor, row_offset: Tensor, sinks: Tensor | None,
) -> None:  # fmt: skip
    R, Hq, D = q.shape
    P, Hkv, page_size, _ = k_pages.shape
    S = row_offset.shape[0] - 1
    shapes = {
        "k": (k, (R, Hkv, D), q.dtype), "v": (v, (R, Hkv, D), q.dtype),
        "k_pages": (k_pages, (P, Hkv, page_size, D), q.dtype), "v_pages": (v_pages, (P, Hkv, page_size, D), q.dtype),
        "table": (table, (S + 1, table.shape[1]), torch.int64), "length": (length, (S + 1,), torch.int64),
        "position": (position, (R,), torch.int64), "ancestors": (ancestors, (R, ancestors.shape[1]), torch.int32),
        "row_offset": (row_offset, (S + 1,), torch.int64),
    }  # fmt: skip
    if sinks is not None:
        shapes["sinks"] = (sinks, (Hq,), torch.float32)
    for name, (given, shape, dtype) in shapes.items():
        if name in "kv":  # a scratch buffer may hold more rows than this forward has
            shape = (max(R, given.shape[0]), *shape[1:])
        if tuple(given.shape) != shape or given.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {list(shape)}, got {given.dtype} {list(given.shape)}")
        if name in ("k_pages", "v_pages", "table") and not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {given.stride()}")


def _check_numbers(
    q: Tensor, k_pages: Tensor, ancestors: Tensor, width: int, scale: float, window: int, splits: int
) -> None:
    Hq, (_, Hkv, page_size, D) = q.shape[1], k_pages.shape
    if Hq % Hkv:
        raise ValueError(f"query heads must be a multiple of the {Hkv} KV heads, got {Hq}")
    if Hkv * page_size * D >= 2**31:
        raise ValueError(f"a page must hold fewer than 2^31 elements, got {Hkv} x {page_size} x {D}")
    if not 1 <= width <= 32 * ancestors.shape[1]:
        raise ValueError(f"width must be 1 to {32 * ancestors.shape[1]}, what the ancestor bits hold, got {width}")
    if scale <= 0 or window < 0:
        raise ValueError(f"scale must be positive and window 0 (none) or more, got {scale} and {window}")
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits must be 1 to {MAX_SPLITS}, got {splits}")
