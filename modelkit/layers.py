"""Blocks of a decoder: norm, attention with optional qk-norm and biases, gated MLP. Single-device code.

Parameter names are those of published checkpoints, so a name map is hardly needed. Nothing here knows of caches beyond
handing fresh K/V to one, of trees, or of parallel layouts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .backend import Angles, Plan, Reference, Stream
from .borders import Border
from .cache import KVCache
from .config import ModelConfig
from .functional import linear, rms_norm


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] -> [.., size]."""
        return rms_norm(x, self.weight, self.eps)


def fuse_linear(parts: list[nn.Linear]) -> nn.Linear:
    """One linear whose output is the parts' outputs side by side: one GEMM instead of several."""
    fused = nn.Linear(parts[0].in_features, sum(p.out_features for p in parts), bias=False, device="meta")
    fused.weight = nn.Parameter(torch.cat([p.weight for p in parts]), requires_grad=False)
    if parts[0].bias is not None:
        fused.bias = nn.Parameter(torch.cat([p.bias for p in parts]), requires_grad=False)
    return fused


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; sees the cache through a plan.

    Attributes:
        heads, kv_heads: of this process.
        enter, leave: borders that a layout has set, of the normed input and of the output before it is added.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.scale = dim**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.qkv_proj: nn.Linear | None = None
        self.enter: Border | None = None
        self.leave: Border | None = None

    def fuse(self) -> None:
        """Replace q, k, v by one projection (after loading and sharding)."""
        self.qkv_proj = fuse_linear([self.q_proj, self.k_proj, self.v_proj])
        del self.q_proj, self.k_proj, self.v_proj

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of rows [R, H] before rotation: q [R, Hq, D], k and v [R, Hkv, D]."""
        if self.qkv_proj is not None:
            heads = linear(x, self.qkv_proj).view(x.shape[0], -1, self.dim)
            q, k, v = heads.tensor_split((self.heads, self.heads + self.kv_heads), 1)
        else:
            q, k, v = (linear(x, p).view(x.shape[0], -1, self.dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self._normed(q, self.q_norm), self._normed(k, self.k_norm), v

    def project_context(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """K (before rotation) and V [.., Hkv, D] of rows [.., H], by the weights of `project`, not fused."""
        k, v = (p(x).view(*x.shape[:-1], -1, self.dim) for p in (self.k_proj, self.v_proj))
        return self._normed(k, self.k_norm), v

    def context_weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight [2 * Hkv * D, H] and bias of K and V side by side, out of the fused projection."""
        assert self.qkv_proj is not None, "fuse() was not called"
        first, bias = self.heads * self.dim, self.qkv_proj.bias
        return self.qkv_proj.weight[first:], None if bias is None else bias[first:]

    @staticmethod
    def _normed(heads: Tensor, norm: RMSNorm | None) -> Tensor:
        return heads if norm is None else norm(heads)

    def forward(
        self,
        stream: Stream,
        norm: RMSNorm,
        angles: Angles,
        plan: Plan,
        backend: Reference,
        cache: KVCache | None,
        layer: int,
    ) -> Stream:
        """The stream with this layer's attention added; leaves the rows' K/V in the cache's scratch."""
        q, k, v = backend.attention_input(self, stream, norm, angles, cache, layer)
        mixed = plan.attend(q, k, v, None if cache is None else cache.view(layer), self.scale)
        return backend.attention_output(self, mixed.reshape(q.shape[0], -1), stream)


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202); `enter` and `leave` as those of `Attention`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.gate_up_proj: nn.Linear | None = None
        self.enter: Border | None = None
        self.leave: Border | None = None

    def fuse(self) -> None:
        """Replace gate and up by one projection."""
        self.gate_up_proj = fuse_linear([self.gate_proj, self.up_proj])
        del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """Rows [R, H] -> [R, H]."""
        if self.enter is not None:
            x = self.enter(x)
        if self.gate_up_proj is not None:
            gate, up = linear(x, self.gate_up_proj).chunk(2, -1)
        else:
            gate, up = linear(x, self.gate_proj), linear(x, self.up_proj)
        out = linear(F.silu(gate) * up, self.down_proj)
        return out if self.leave is None else self.leave(out)


class Block(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, stream: Stream, angles: Angles, plan: Plan, backend: Reference, cache: KVCache | None, layer: int
    ) -> Stream:
        """The residual stream after this layer."""
        stream = self.self_attn(stream, self.input_layernorm, angles, plan, backend, cache, layer)
        return backend.mlp(self.mlp, stream, self.post_attention_layernorm)


def fuse_projections(module: nn.Module) -> None:
    """Fuse qkv and gate/up everywhere below `module`; done last, after loading and sharding."""
    for child in module.modules():
        if isinstance(child, Attention | MLP):
            child.fuse()
