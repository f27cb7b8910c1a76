"""The k best tokens of every row of logits and their log-probabilities, without sorting the vocabulary.

The vocabulary is cut into groups of neighbouring ids. The first kernel reads the logits once and keeps the maximum of
each group, and the softmax's sum of each chunk. The k best tokens lie in the k groups of the greatest maxima (lower
groups first among equals), so the second kernel, a program a row, picks those groups, reads them again and picks the
tokens. Bound: bytes of the logits over the memory's bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, release, wait

MAX_CANDIDATES = 64
CHUNK = 4096  # ids of a program of the first kernel
NOTHING = tl.constexpr(-(2**63))  # a key below those of all numbers


@triton.jit
def _key(x, number, inside):
    """int64 keys of distinct numbers (< 2^31): greater x first, then the lower number; NaN counts as -inf."""
    # 0.0 makes -0.0 equal to 0.0.
    bits = (tl.where(x == x, x, float("-inf")) + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(inside, (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64), NOTHING)


@triton.jit
def _number(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _row_start(row, INNER: tl.constexpr, outer_stride, inner_stride):
    return (row // INNER).to(tl.int64) * outer_stride + (row % INNER).to(tl.int64) * inner_stride


@triton.jit
def _groups_kernel(
    logits_ptr, best_ptr, stats_ptr, vocabulary, outer_stride, inner_stride,
    INNER: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = logits_ptr + _row_start(row, INNER, outer_stride, inner_stride) + token
    wait(PDL)
    x = tl.load(at, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 1)
    top = tl.max(best, 0)
    base = tl.where(top == float("-inf"), 0.0, top)  # a chunk without candidates adds nothing, not NaN
    total = tl.sum(tl.sum(tl.exp(x - base), 1), 0)
    release(PDL)
    tl.store(best_ptr + row * GROUPS + group, best, mask=group < GROUPS)
    stats_ptr += (row * tl.num_programs(1) + chunk) * 2
    tl.store(stats_ptr, top)
    tl.store(stats_ptr + 1, total)


@triton.jit
def _merge_kernel(
    logits_ptr, best_ptr, stats_ptr, ids_ptr, score_ptr, vocabulary, outer_stride, inner_stride,
    INNER: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group, chunk, rank = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_CHUNKS), tl.arange(0, BLOCK_K)
    logits_ptr += _row_start(row, INNER, outer_stride, inner_stride)
    stats_ptr += (row * CHUNKS + chunk) * 2
    wait(PDL)
    best = tl.load(best_ptr + row * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    top = tl.load(stats_ptr, mask=chunk < CHUNKS, other=float("-inf"))
    total = tl.load(stats_ptr + 1, mask=chunk < CHUNKS, other=0.0)
    chosen = _number(tl.topk(_key(best, group, group < GROUPS), BLOCK_K))
    # With fewer groups than candidates some of them are none: their tokens are outside the vocabulary.
    token = tl.minimum(chosen, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = token < vocabulary
    x = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    found = tl.topk(tl.reshape(_key(x, token, inside), (BLOCK_K * GROUP,)), BLOCK_K)
    release(PDL)
    base = tl.max(top, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    normalizer = tl.log(tl.sum(total * tl.exp(top - base), 0)) + base
    tl.store(ids_ptr + row * K + rank, _number(found).to(tl.int64), mask=rank < K)
    tl.store(score_ptr + row * K + rank, _value(found) - normalizer, mask=rank < K)


def group_size(vocabulary: int, block_k: int) -> int:
    """Ids of a group: what leaves the second kernel the fewest keys to compare."""
    return min((32, 64, 128, 256), key=lambda size: triton.next_power_of_2(-(-vocabulary // size)) + block_k * size)


@torch.library.custom_op("flashtree::top_candidates", mutates_args=())
def _top_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    outer, inner, vocabulary = logits.shape
    rows, block_k = outer * inner, triton.next_power_of_2(max(k, 2))  # tl.topk takes no 1
    group = group_size(vocabulary, block_k)
    groups, chunks = triton.cdiv(vocabulary, group), triton.cdiv(vocabulary, CHUNK)
    best = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    stats = torch.empty(rows, chunks, 2, dtype=torch.float32, device=logits.device)
    ids = torch.empty(outer, inner, k, dtype=torch.int64, device=logits.device)
    score = torch.empty(outer, inner, k, dtype=torch.float32, device=logits.device)
    where = (vocabulary, logits.stride(0), logits.stride(1))
    launch(
        _groups_kernel, (rows, chunks), logits, best, stats, *where,
        INNER=inner, GROUPS=groups, GROUP=group, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    block_groups = max(triton.next_power_of_2(groups), block_k)
    launch(
        _merge_kernel, (rows,), logits, best, stats, ids, score, *where,
        INNER=inner, GROUPS=groups, GROUP=group, CHUNKS=chunks, K=k, BLOCK_GROUPS=block_groups,
        BLOCK_CHUNKS=triton.next_power_of_2(chunks), BLOCK_K=block_k, num_warps=8,
    )  # fmt: skip
    return ids, score


@_top_candidates.register_fake
def _(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:2], k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


def top_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`Reference.top_candidates`; logits may be a slice of rows, which is not copied.

    Args:
        logits: [..., V], bf16, fp16 or fp32.
        k: at most `MAX_CANDIDATES` and V.

    Returns:
        ids int64 [..., k], lowest id first among equals, and log-probabilities fp32 [..., k]. With NaN in a row its
        log-probabilities are NaN and its ids are any of the vocabulary.

    Raises:
        ValueError: k out of range.
    """
    vocabulary = logits.shape[-1]
    if not 1 <= k <= min(MAX_CANDIDATES, vocabulary):
        raise ValueError(f"k must be 1 to {min(MAX_CANDIDATES, vocabulary)}, got {k}")
    rows = logits if logits.dim() == 3 else logits.reshape(1, -1, vocabulary)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    ids, score = _top_candidates(rows, k)
    return ids.view(*logits.shape[:-1], k), score.view(*logits.shape[:-1], k)
