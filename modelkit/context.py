"""K and V of rows that enter a cache by their projection alone: no queries, no attention, nothing before or after.

A block drafter's context is such rows: every layer projects the same features. Knows attention layers, no cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functional import rms_norm
from .layers import Attention


class ContextHeads(nn.Module):
    """How several attention layers make K and V of context rows, by one projection.

    The weights are copies, made from fused layers: changing those later changes nothing here.

    Attributes:
        weight: [layers * 2 * Hkv * D, H], of each layer the rows of K and then those of V; bias: its bias, or None.
        norms: [layers, D], of K's heads; None: they are not normed.
        frequencies: fp32 [D / 2], of the rotary embedding; factor: what its cosines and sines are multiplied by.
        width: most rows a slot of the forwards that read the context.

    Args:
        attentions: the layers, all of one shape.
        frequencies: see above.
        factor: see above.
        width: see above.
    """

    def __init__(self, attentions: list[Attention], frequencies: Tensor, factor: float, width: int) -> None:
        super().__init__()
        first, parts = attentions[0], [attention.context_weights() for attention in attentions]
        biases = [bias for _, bias in parts if bias is not None]
        norms: list[Tensor] = [attention.k_norm.weight for attention in attentions if attention.k_norm is not None]
        self.layers, self.kv_heads, self.dim = len(attentions), first.kv_heads, first.dim
        self.eps = 0.0 if first.k_norm is None else first.k_norm.eps
        self.factor, self.width = factor, width
        self.register_buffer("weight", torch.cat([weight for weight, _ in parts]).detach(), persistent=False)
        self.register_buffer("bias", torch.cat(biases).detach() if biases else None, persistent=False)
        self.register_buffer("norms", torch.stack(norms).detach() if norms else None, persistent=False)
        self.register_buffer("frequencies", frequencies, persistent=False)

    weight: Tensor
    bias: Tensor | None
    norms: Tensor | None
    frequencies: Tensor

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """K (before rotation) and V of rows [R, H], [R, layers, Hkv, D] each."""
        heads = F.linear(x, self.weight, self.bias).view(-1, self.layers, 2, self.kv_heads, self.dim)
        k, v = heads.unbind(2)
        return k if self.norms is None else rms_norm(k, self.norms[:, None], self.eps), v
