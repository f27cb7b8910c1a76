"""Attention over packed sequences: what a row may see as one function of indices, and two ways to compute with it.

The dense mask and flex attention's block mask are made from the same function. Knows nothing of drafters and targets.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from modelkit.cache import LayerView

FLEX_BLOCK = 128

Visible = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility(abc.ABC):
    """What rows see of S sequences.

    Attributes:
        document: int64 [S, T], the document that each token is of.
        window: positions at this distance and more are hidden; None hides none.
    """

    document: Tensor
    window: int | None

    @abc.abstractmethod
    def function(self) -> Visible:
        """(sequence, head, row, key) -> whether the row sees the key, of whatever indices broadcast.

        It holds tensors and numbers only, which is what flex attention can trace.
        """

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Rows of a sequence."""

    @property
    @abc.abstractmethod
    def keys(self) -> int:
        """Keys of a sequence."""

    def dense(self) -> Tensor:
        """bool [S, 1, rows, keys]."""
        device = self.document.device
        sequence = torch.arange(self.document.shape[0], device=device)[:, None, None]
        row = torch.arange(self.rows, device=device)[:, None]
        return self.function()(sequence, None, row, torch.arange(self.keys, device=device))[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextVisibility(Visibility):
    """Text: a token sees itself and those before it in its document."""

    def function(self) -> Visible:
        """See `Visibility.function`."""
        document, window, last = self.document, self.window, self.rows - 1

        def visible(sequence: Tensor, head: Tensor | None, row: Tensor, key: Tensor) -> Tensor:
            # Clamped: flex attention asks for rows beyond the last one too.
            same = document[sequence, row.clamp(max=last)] == document[sequence, key.clamp(max=last)]
            seen = same & (key <= row)
            return seen if window is None else seen & (row - key < window)

        return visible

    @property
    def rows(self) -> int:
        """T."""
        return self.document.shape[1]

    @property
    def keys(self) -> int:
        """T."""
        return self.document.shape[1]


def dense_attention(visibility: Visibility) -> Attend:
    """Attention (q [S, Hq, rows, D], k, v [S, Hkv, keys, D], scale) -> [S, Hq, rows, D] behind a dense mask."""
    mask = visibility.dense()

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # Repeated heads: with a mask, grouped ones leave CUDA nothing but the path that writes all scores out.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return attend


def flex_attention(visibility: Visibility) -> Attend:
    """The same by flex attention, which skips what no row of a tile sees; fast only where it is compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = visibility.document.device
    mask = create_block_mask(
        visibility.function(), visibility.document.shape[0], None, visibility.rows, visibility.keys,
        device=str(device), BLOCK_SIZE=FLEX_BLOCK,
    )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    return attend


def attention_of(name: str, device: torch.device) -> Callable[[Visibility], Attend]:
    """The attention path by name.

    Raises:
        ValueError: flex attention on a device where it has no backward.
    """
    if name == "auto":
        name = "flex" if device.type == "cuda" else "dense"
    if name == "dense":
        return dense_attention
    if device.type != "cuda":
        raise ValueError(f"attention = 'flex': flex attention has no backward on '{device}'; use 'dense'")
    return flex_attention


class PackedPlan:
    """A layer's attention of S sequences' rows, one after another; see `modelkit.backend.Plan`."""

    def __init__(self, slots: int, attend: Attend, context: tuple[Tensor, Tensor] | None = None) -> None:
        """`context`: k (rotated) and v [S, T, Hkv, D] in front of the rows' own."""
        self.slots, self.attention, self.context = slots, attend, context

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerView | None, scale: float) -> Tensor:
        """See `modelkit.backend.Plan`."""
        assert layer is None, "training keeps no cache"
        query, keys, values = (rows.view(self.slots, -1, *rows.shape[1:]) for rows in (q, k, v))
        if self.context is not None:
            keys, values = (torch.cat(pair, 1) for pair in zip(self.context, (keys, values), strict=True))
        # In memory of their own: of a fused projection's parts, inductor's flex attention on CPUs reads the wrong ones.
        query, keys, values = (x.to(v.dtype).transpose(1, 2).contiguous() for x in (query, keys, values))
        return self.attention(query, keys, values, scale).transpose(1, 2).reshape(q.shape)
