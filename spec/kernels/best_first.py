"""The best-first tree in one kernel: a slot a program, a node a lane, no heap.

Every node of the growing tree offers one candidate, the best of its children that are not in the tree yet. A pop takes
the greatest offer of all lanes; then two lanes make new ones, the new node's (its best child) and its parent's (its
next child). So children must be sorted by score: marginals are, edges the wrapper sorts.
Bound: latency of one pop after another, so nothing in the loop but the pop, and tokens and ancestors come after it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelkit.kernels.launch import launch, release, wait
from modelkit.rows import words

from ..types import Proposal, Tree

NOTHING = tl.constexpr(-(2**31))  # less than the key of any score
AHEAD = tl.constexpr(2**31 - 1)  # greater than any


@triton.jit
def _ordered(bits):
    """Bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _grow_kernel(
    step_ptr, order_ptr, ids_ptr, root_ptr, token_ptr, parent_ptr, depth_ptr, valid_ptr, ancestors_ptr,
    L: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr, ROUNDS: tl.constexpr,
    HAS_EDGE: tl.constexpr, SPINE: tl.constexpr, DISCOUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SPINE: best children of best children go ahead of all others; DISCOUNT: added to steps from other nodes."""
    slot = tl.program_id(0).to(tl.int64)
    table = slot * (L * K * K if HAS_EDGE else L * K)
    step_ptr += table
    order_ptr += table
    node = tl.arange(0, BLOCK)
    # Of each node: score of its path, depth, candidate, parent, and the rank of the child that it offers.
    path = tl.zeros((BLOCK,), tl.float32)
    depth = tl.zeros((BLOCK,), tl.int32)
    candidate = tl.zeros((BLOCK,), tl.int32)
    parent = tl.zeros((BLOCK,), tl.int32)
    rank = tl.zeros((BLOCK,), tl.int32)
    # Its offer: the child's score, and what orders equal scores and names the child.
    score = tl.full((BLOCK,), NOTHING, tl.int32)
    name = tl.full((BLOCK,), -1, tl.int32)
    renew = node == 0
    # With a spine: whether the node is on it, and the score of the path to what it offers.
    on_spine = node == 0
    offer = tl.zeros((BLOCK,), tl.float32)
    wait(PDL)
    for new in range(1, NODES):
        row = depth * K + candidate if HAS_EDGE else depth
        at = row * K + rank
        some = renew & (depth < L) & (rank < K)
        step = tl.load(step_ptr + at, mask=some, other=float("-inf"))
        child = tl.load(order_ptr + at, mask=some, other=0) if HAS_EDGE else rank
        if SPINE:
            step += tl.where(on_spine, 0.0, DISCOUNT)
        total = path + step
        key = tl.where(total > float("-inf"), _ordered(total.to(tl.int32, bitcast=True)), NOTHING)
        if SPINE:
            key = tl.where((key > NOTHING) & on_spine & (rank == 0), AHEAD, key)
            offer = tl.where(renew, total, offer)
        score = tl.where(renew, key, score)
        # The lesser depth first, then the lower node; 9, 10 and 10 bits.
        name = tl.where(renew, ((511 - depth) << 20) | ((1023 - node) << 10) | child, name)
        best = tl.max(score, 0)
        first = tl.max(tl.where(score == best, name, -1), 0)
        found = best > NOTHING
        giver = 1023 - ((first >> 10) & 1023)
        is_new, is_giver = (node == new) & found, (node == giver) & found
        if SPINE:
            path = tl.where(is_new, tl.sum(tl.where(is_giver, offer, 0.0), 0), path)
            on_spine = on_spine | (is_new & (best == AHEAD))
        else:
            path = tl.where(is_new, _ordered(best).to(tl.float32, bitcast=True), path)
        depth = tl.where(is_new, 512 - (first >> 20), depth)
        candidate = tl.where(is_new, first & 1023, candidate)
        parent = tl.where(is_new, giver, parent)
        rank += is_giver.to(tl.int32)
        renew = is_new | is_giver
    release(PDL)
    inside, is_root, found = node < NODES, node == 0, depth > 0
    token = tl.load(ids_ptr + (slot * L + depth - 1) * K + candidate, mask=found, other=0)
    out = slot * NODES + node
    tl.store(token_ptr + out, tl.where(is_root, tl.load(root_ptr + slot), token), mask=inside)
    tl.store(parent_ptr + out, tl.where(is_root, -1, parent).to(tl.int64), mask=inside)
    tl.store(depth_ptr + out, tl.where(found | is_root, depth, 1).to(tl.int64), mask=inside)
    tl.store(valid_ptr + out, found | is_root, mask=inside)
    for word in range(WORDS):
        known = tl.where(node // 32 == word, 1 << (node % 32), 0)
        above = parent
        for _ in range(ROUNDS):  # doubling, as in `Tree.make`
            known |= tl.gather(known, above, 0)
            above = tl.gather(above, above, 0)
        tl.store(ancestors_ptr + out * WORDS + word, known, mask=inside)


@torch.library.custom_op("flashtree::best_first_tree", mutates_args=())
def _grow(
    step: Tensor, order: Tensor | None, ids: Tensor, root: Tensor, budget: int, off_spine: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots, depth, k = ids.shape
    nodes = budget + 1
    token, parent, level, valid, ancestors = _outputs(root, nodes)
    block = triton.next_power_of_2(nodes)
    launch(
        _grow_kernel, (slots,),
        step, step if order is None else order, ids, root, token, parent, level, valid, ancestors,
        L=depth, K=k, NODES=nodes, WORDS=words(nodes), ROUNDS=min(depth, budget).bit_length(),
        HAS_EDGE=order is not None, SPINE=off_spine is not None, DISCOUNT=math.log(off_spine or 1.0), BLOCK=block,
        num_warps=max(1, block // 256),
    )  # fmt: skip
    return token, parent, level, valid, ancestors


def _outputs(root: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Token, parent, depth, valid and ancestors of a `Tree`."""
    shape = (root.shape[0], nodes)
    token, parent, depth = (root.new_empty(shape) for _ in range(3))
    valid = root.new_empty(shape, dtype=torch.bool)
    return token, parent, depth, valid, root.new_empty((*shape, words(nodes)), dtype=torch.int32)


@_grow.register_fake
def _(
    step: Tensor, order: Tensor | None, ids: Tensor, root: Tensor, budget: int, off_spine: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(root, budget + 1)


def best_first_tree(proposal: Proposal, root: Tensor, budget: int, off_spine: float | None = None) -> Tree:
    """`BestFirst.build`, `SpineFirst`'s too: the same nodes, in the order they are found in; ties may fall to others.

    Args:
        proposal: the drafter's.
        root: int64 [S], the anchors.
        budget: nodes besides the root, at most `MAX_BUDGET`.
        off_spine: see `SpineFirst`; None: no path goes ahead.
    """
    step, order = proposal.score, None
    if proposal.edge is not None:
        # The first depth as if all its candidates' parents were alike: one table for all depths.
        first = proposal.score[:, :1, None, :].expand_as(proposal.edge[:, :1])
        step, index = torch.cat([first, proposal.edge[:, 1:]], 1).sort(dim=-1, descending=True, stable=True)
        order = index.int()
    token, parent, depth, valid, ancestors = _grow(
        step.contiguous(), order, proposal.ids.contiguous(), root.contiguous(), budget, off_spine
    )
    return Tree(token=token, parent=parent, depth=depth, valid=valid, ancestors=ancestors)
