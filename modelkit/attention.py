"""Attention over flat rows: the plain-PyTorch definition that every kernel is compared with.

A row sees two segments: the context of its slot (through the block table, up to the committed length) and those rows
of its own slot whose ancestor bit it carries. One softmax spans both. The context is read once for all rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .cache import KVCache, LayerView
from .rows import Rows, unpack_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class DensePlan:
    """What all layers of one kind (one window, one set of ancestor bits) share in a forward.

    Attributes:
        hidden: bool [S, 1, 1, N, T + N], True where a key must not be seen (T = context bound, 0 without a cache).
        rectangle: int64 [S, N] row indices, or None when rows are uniform.
        flat: int64 [R] position of each row in [S * N], or None when rows are uniform.
    """

    hidden: Tensor
    slots: int
    width: int
    bound: int
    rectangle: Tensor | None
    flat: Tensor | None

    @classmethod
    def prepare(
        cls, rows: Rows, cache: KVCache | None, window: int | None, ancestors: Tensor | None = None
    ) -> DensePlan:
        """Build the masks.

        Args:
            rows: the forward's rows.
            cache: the context, or None for none.
            window: keys at a distance of `window` positions or more are hidden; None sees all.
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
        return cls(
            hidden=~seen[:, None, None], slots=slots, width=width, bound=bound, rectangle=rectangle, flat=flat
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
        group = q.shape[1] // kv_heads
        if self.rectangle is not None:
            q, k, v = q[self.rectangle], k[self.rectangle], v[self.rectangle]
        query = q.reshape(self.slots, self.width, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        query = query.reshape(self.slots, kv_heads, group * self.width, dim)
        keys = k.reshape(self.slots, self.width, kv_heads, dim).transpose(1, 2)
        values = v.reshape(self.slots, self.width, kv_heads, dim).transpose(1, 2)
        scores = query @ keys.transpose(-1, -2)
        if layer is not None and self.bound:
            context_k, context_v = layer.context(self.bound)
            scores = torch.cat([query @ context_k.transpose(-1, -2), scores], -1)
        scores = scores.view(self.slots, kv_heads, group, self.width, -1).float() * scale
        weights = scores.masked_fill(self.hidden, float("-inf")).softmax(-1).to(q.dtype)
        weights = weights.view(self.slots, kv_heads, group * self.width, -1)
        out = weights[..., self.bound :] @ values
        if layer is not None and self.bound:
            out = out + weights[..., : self.bound] @ context_v
        out = out.view(self.slots, kv_heads, group, self.width, dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(self.slots * self.width, kv_heads * group, dim)
        return out if self.flat is None else out[self.flat]
