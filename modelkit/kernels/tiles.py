"""Block sizes and split counts of the tree-attention kernel: host constants, from shapes alone."""

from __future__ import annotations

from typing import NamedTuple

import triton

MAX_SPLITS = 128
KEYS_PER_SPLIT = 16384  # of several slots, a full one is cut at least this fine: it may be the only long one


class Tile(NamedTuple):
    """What a program works on: query vectors, keys a step, padded head dim; the figures suit Hopper's shared memory."""

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int  # loads in flight of the context loop
    min_blocks: int  # key blocks a range has at least: a short context uses fewer ranges
    per_sm: int  # programs a multiprocessor is to have; more would fit, but each makes sums to combine


def choose_tile(R: int, width: int, slots: int, G: int, head_dim: int, itemsize: int = 2) -> Tile:
    """Tile for R rows of `slots` slots, up to `width` rows each, with G query heads a KV head."""
    vectors = width * G
    block_d = max(16, triton.next_power_of_2(head_dim))
    if itemsize > 2:  # fp32 is not for speed: small tiles, so that any head dim fits
        return Tile(16 if vectors <= 16 else 32, 32, block_d, 4, 1, 1, 1)
    block_m = min(64, max(16, triton.next_power_of_2(vectors)))
    # Among many slots that step plainly, the few that draft take several tiles.
    block_m = min(block_m, max(16, triton.next_power_of_2(2 * -(-R * G // slots))))
    if block_d <= 64:  # few bytes a key: more and shorter programs
        return Tile(16, 32, block_d, 2, 4, 1, 3) if vectors <= 128 else Tile(min(block_m, 32), 64, block_d, 4, 4, 1, 2)
    if block_d > 128:
        return Tile(16, 32, block_d, 4, 3, 1, 2) if block_m == 16 else Tile(block_m, 32, block_d, 8, 2, 1, 1)
    return Tile(64, 64, block_d, 4, 3, 2, 2) if block_m == 64 else Tile(block_m, 64, block_d, 4, 4, 1, 2)


def tile_count(R: int, width: int, slots: int, G: int, block_m: int) -> int:
    """Most tiles that the rows of all slots can need: exactly ceil(R * G / block_m) for one slot."""
    return min((R * G + slots * (block_m - 1)) // block_m, slots * -(-width * G // block_m))


def choose_splits(
    R: int, width: int, slots: int, Hkv: int, G: int, capacity: int, sms: int = 132, *, head_dim: int = 128,
    window: int = 0, itemsize: int = 2,
) -> int:  # fmt: skip
    """Ranges to split the keys into: one wave of programs, from host constants.

    R rows (padding included) of `slots` slots, up to `width` rows and `capacity` committed positions each, on a GPU of
    `sms` multiprocessors; `head_dim`, `window` (0 for none) and `itemsize` (bytes) are the layer's.
    """
    tile = choose_tile(R, width, slots, G, head_dim, itemsize)
    keys = min(capacity, window + width) if window else capacity
    blocks = -(-keys // tile.block_n) + -(-width // tile.block_n)
    fill = max(1, sms * tile.per_sm // (tile_count(R, width, slots, G, tile.block_m) * Hkv))
    if tile.block_d <= 64:  # few bytes a key: a range may well have some more of them
        fill = min(fill, max(16, blocks // 8))
    below = 1 << (fill.bit_length() - 1)
    fill = below if fill < below * 9 // 8 else fill  # the combine kernel pads to a power of two
    least = -(-keys // KEYS_PER_SPLIT) if slots > 1 else 1
    return max(1, min(max(fill, least), blocks, MAX_SPLITS))
