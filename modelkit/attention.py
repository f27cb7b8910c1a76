"""Attention over flat rows: the plain-PyTorch definition that every kernel is compared with.

A row sees two segments: the context of its slot (through the block table, up to the committed length) and those rows
of its own slot whose ancestor bit it carries. One softmax spans both. The context is read once for all rows.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import KVCache, LayerView
from .rows import Rows, unpack_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class DensePlan:
    """What all layers of one kind (one window, one set of ancestor bits) share in a forward.

    Attributes:
        mask: [S, 1, G * N, T + N], 0 or -inf, added to the scores (T = context bound, 0 without a cache; the query
            heads of a group are rows beside each other, so K and V are never repeated).
        group: G, query heads a KV head.
        rectangle: int64 [S, N] row indices, or None when rows are uniform.
        flat: int64 [R] position of each row in [S * N], or None when rows are uniform.
    """

    mask: Tensor
    group: int
    slots: int
    width: int
    bound: int
    rectangle: Tensor | None
    flat: Tensor | None

    @classmethod
    def prepare(
        cls,
        rows: Rows,
        cache: KVCache | None,
        window: int | None,
        *,
        group: int,
        dtype: torch.dtype,
        ancestors: Tensor | None = None,
    ) -> DensePlan:
        """Build the mask.

        Args:
            rows: the forward's rows.
            cache: the context, or None for none.
            window: keys at a distance of `window` positions or more are hidden; None sees all.
            group: query heads a KV head.
            dtype: of the queries.
            ancestors: int32 [R, W] in place of `rows.ancestors` (a drafter's layers differ in causality).
        """
        slots, width = rows.slots, rows.width
        bound = rows.bound if cache is not None else 0
        rectangle = None if rows.uniform else rows.rectangle()
        flat = None if rows.uniform else rows.slot.clamp(max=slots - 1) * width + rows.local()

        def square(flat_rows: Tensor) -> Tensor:
            return flat_rows.view(slots, width, *flat_rows.shape[1:]) if rectangle is None else flat_rows[rectangle]

        position = square(rows.position)
        seen = unpack_bits(square(rows.ancestors if ancestors is None else ancestors), width)
        if window is not None:
            seen = seen & ((position[:, :, None] - position[:, None, :]).abs() < window)
        # Keeping the diagonal makes every softmax finite, padding rows included.
        seen = seen | torch.eye(width, dtype=torch.bool, device=seen.device)
        if cache is not None and bound:
            key = torch.arange(bound, device=seen.device)
            context = (key < cache.length[:-1, None])[:, None, :].expand(slots, width, bound)
            if window is not None:
                context = context & (position[:, :, None] - key < window)
            seen = torch.cat([context, seen], -1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))
        mask = mask[:, None, None].expand(-1, -1, group, -1, -1).reshape(slots, 1, group * width, -1)
        return cls(
            mask=mask, group=group, slots=slots, width=width, bound=bound, rectangle=rectangle, flat=flat
        )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerView | None, scale: float) -> Tensor:
        """Attention output of every row.

        Args:
            q: [R, Hq, D], rotated.
            k: [R, Hkv, D], the rows' own keys, rotated.
            v: [R, Hkv, D], their values.
            layer: the context; None with a plan made without a cache.
            scale: softmax scale.

        Returns:
            [R, Hq, D].
        """
        kv_heads, dim = k.shape[1:]
        if self.rectangle is not None:
            q, k, v = q[self.rectangle], k[self.rectangle], v[self.rectangle]
        query = q.reshape(self.slots, self.width, kv_heads, self.group, dim).permute(0, 2, 3, 1, 4)
        query = query.reshape(self.slots, kv_heads, self.group * self.width, dim)
        keys = k.reshape(self.slots, self.width, kv_heads, dim).transpose(1, 2)
        values = v.reshape(self.slots, self.width, kv_heads, dim).transpose(1, 2)
        if layer is not None and self.bound:
            context_k, context_v = layer.context(self.bound)
            keys, values = torch.cat([context_k, keys], 2), torch.cat([context_v, values], 2)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, scale=scale)
        out = out.view(self.slots, kv_heads, self.group, self.width, dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(self.slots * self.width, kv_heads * self.group, dim)
        return out if self.flat is None else out[self.flat]
