"""The Triton backend without Triton: its kernels replaced by their meaning, so that its use of borders runs on a CPU.

Attention, commit and a drafter's context rows are the reference's; what is under test is which kernel gets what, and
where sums are taken.
"""

import sys
from types import ModuleType
from unittest import mock

import torch
import torch.nn.functional as F

from modelkit.backend import Reference


def normed(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_norm(x, addend, weight, eps):
    total = x if addend is None else addend.sum(0) if x is None else x + addend.sum(0)
    return [total.new_empty(0) if x is None or addend is None else total, normed(total, weight, eps)]


def swiglu(y):
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def few_rows_linear(x, weight, bias, gated):
    assert x.is_contiguous() and 2 <= x.shape[0] <= 64
    y = F.linear(x, weight, bias)
    return swiglu(y)[None] if gated else torch.stack([y * 0.25, y * 0.75])


def one_row_linear(x, weight, bias, norm, residual, eps, gated):
    assert x.shape[0] == 1
    y = F.linear(x if norm is None else normed(x, norm, eps), weight, bias)
    y = swiglu(y) if gated else y
    return y if residual is None else y + residual


def rotary_store(qkv, cos, sin, q_norm, k_norm, eps, scratch_k, scratch_v, heads):
    rows, (kv_heads, dim) = qkv.shape[1], scratch_k.shape[1:]
    q, k, v = qkv.sum(0).view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)

    def rotated(x, norm):
        low, high = (x if norm is None else normed(x, norm, eps)).chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([low * c - high * s, high * c + low * s], -1)

    scratch_k[:rows], scratch_v[:rows] = rotated(k, k_norm), v
    return rotated(q, q_norm)


KERNELS = {
    "add_norm": {"add_norm": add_norm},
    "commit": {"commit_rows": None},
    "context": {"append_context": None},
    "few_rows": {"few_rows_linear": few_rows_linear, "fits": lambda x, weight: 2 <= x.shape[0] <= 64},
    "freeze": {"freeze": lambda tensors: tensors},
    "linear": {"one_row_linear": one_row_linear},
    "rotary": {"rotary_store": rotary_store},
    "top_candidates": {"MAX_CANDIDATES": 16, "top_candidates": lambda x, k: Reference().top_candidates(x, k)},
    "tree_attention": {"choose_splits": None, "tree_attention": None},
}


def triton_backend():
    """A class as `TritonBackend` is; its name is its own, so that samplers and trees keep to PyTorch."""
    modules = {}
    for name, content in KERNELS.items():
        modules[f"modelkit.kernels.{name}"] = module = ModuleType(name)
        module.__dict__.update(content)
    with mock.patch.dict(sys.modules, modules):
        from modelkit.kernels.backend import TritonBackend
    sys.modules.pop("modelkit.kernels.backend", None)
    parts = {name: getattr(Reference, name) for name in ("plan", "commit", "append_context")} | {"name": "stand-ins"}
    return type("StandIns", (TritonBackend,), parts)
