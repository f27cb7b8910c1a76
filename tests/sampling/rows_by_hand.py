"""Rows of hand-made trees with sampling parameters, as the engine lays them out."""

import torch

from modelkit.rows import flatten, pack_bits
from sampling import NodeContext, SlotParams
from sampling.params import FEATURES


def slot_params(several, *, vocab_size, prompts=None, features=FEATURES):
    """SlotParams of `several` SamplingParams, a slot each."""
    params = SlotParams(slots=len(several), vocab_size=vocab_size, device=torch.device("cpu"), features=features)
    for slot, one in enumerate(several):
        params.admit(slot, one, torch.tensor((prompts or [[0]] * len(several))[slot]))
    return params


def trees(tokens, parents, params, *, start, rows=None):
    """The same topology in every slot; `tokens` [S][N], `parents` [N], `start` [S]: the roots' positions."""
    token = torch.tensor(tokens)
    slots, nodes = token.shape
    depth, visible = torch.zeros(nodes, dtype=torch.int64), torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        depth[node] = depth[parents[node]] + 1
        visible[node] |= visible[parents[node]]
    start = torch.as_tensor(start)
    flat = flatten(
        token=token, parent=torch.tensor(parents).expand(slots, nodes), valid=torch.ones_like(token, dtype=torch.bool),
        ancestors=pack_bits(visible.expand(slots, nodes, nodes)), position=start[:, None] + depth,
        count=torch.full((slots,), nodes), rows=rows or slots * nodes, bound=0,
    )  # fmt: skip
    base = torch.cat([start, start.new_zeros(1)])[flat.slot]
    return NodeContext(
        token=flat.token, parent=flat.parent, depth=(flat.position - base).clamp(min=0), position=flat.position,
        slot=flat.slot, local=flat.local(), valid=flat.valid, ancestors=flat.ancestors, slots=slots,
        max_depth=int(depth.max()), width=flat.width if flat.uniform else 0, params=params,
    )  # fmt: skip


def roots(params, *, start=None):
    """One row a slot."""
    return trees([[0]] * params.slots, [-1], params, start=start if start is not None else [5] * params.slots)
