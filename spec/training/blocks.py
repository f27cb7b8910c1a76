"""Blocks at random anchors of packed texts, and the drafter's forward over all of them at once.

What a row of a block may see is one function of indices, `Visibility.function`; the dense mask and flex attention's are
made from it. The layers are the inference code's own: only where keys and values come from differs.
Source: DFlash, arXiv 2602.06036, section 4.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelkit.backend import Plan, Stream
from modelkit.cache import LayerView
from modelkit.layers import Block
from modelkit.rope import rotary_angles, rotate

from ..draft.dflash_model import DFlashModel
from .packing import Batch

FLEX_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """A of them in each of the batch's sequences, B tokens each.

    Attributes:
        anchor: int64 [S, A], index of the anchor in its sequence, rising; 0 where there is no block.
        token: int64 [S, A, B], what the drafter reads: the anchor, then masks.
        position: int64 [S, A, B], within the document.
        label: int64 [S, A, B], the document's tokens at the same positions.
        real: bool [S, A, B], rows whose label counts: behind the anchor, inside the document, supervised.
    """

    anchor: Tensor
    token: Tensor
    position: Tensor
    label: Tensor
    real: Tensor


def draw_anchors(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchors of each sequence, uniform among the supervised tokens whose next one is supervised too.

    Those are where serving may put one: the anchor is a token that the target has written.

    Args:
        batch: S sequences of T tokens.
        count: A.
        generator: of the CPU, so that all devices draw the same.

    Returns:
        int64 [S, A], rising, 0 where a sequence has fewer; and bool [S, A], whether it is one.
    """
    supervised, document = batch.supervised, batch.document
    fits = torch.zeros_like(supervised)
    fits[:, :-1] = supervised[:, :-1] & supervised[:, 1:] & (document[:, :-1] == document[:, 1:])
    key = torch.rand(fits.shape, generator=generator).to(fits.device)
    key, index = torch.where(fits, key, -1.0).topk(min(count, fits.shape[1]), dim=1)
    index = torch.where(key >= 0, index, fits.shape[1]).sort(1).values
    drawn = index < fits.shape[1]
    missing = count - drawn.shape[1]
    return F.pad(torch.where(drawn, index, 0), (0, missing)), F.pad(drawn, (0, missing))


def make_blocks(batch: Batch, anchor: Tensor, drawn: Tensor, *, block: int, mask_token: int) -> Blocks:
    """Blocks at anchors [S, A].

    Args:
        batch: S sequences of T tokens.
        anchor: int64 [S, A].
        drawn: bool [S, A], False where there is no anchor; such a block has no label.
        block: B.
        mask_token: id behind the anchor.
    """
    length = batch.token.shape[1]
    offset = torch.arange(block, device=anchor.device)
    index = anchor[:, :, None] + offset
    inside, index = index < length, index.clamp(max=length - 1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, index.flatten(1)).view(index.shape)

    own = at(batch.document) == at(batch.document)[:, :, :1]
    label = at(batch.token)
    return Blocks(
        anchor=anchor, token=torch.where(offset == 0, label, mask_token), label=label,
        position=batch.position.gather(1, anchor)[:, :, None] + offset,
        real=drawn[:, :, None] & inside & own & at(batch.supervised) & (offset > 0),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """What row q of a sequence's A * B block rows sees of its T context rows and the A * B block rows behind them.

    Attributes:
        document: int64 [S, T].
        anchor: int64 [S, A].
        block: B.
        causal: a row sees only the rows before it in its own block.
        window: positions at this distance and more are hidden; None hides none.
    """

    document: Tensor
    anchor: Tensor
    block: int
    causal: bool
    window: int | None

    def function(self) -> Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]:
        """(sequence, head, q, key) -> whether row `q` sees `key`, of whatever indices broadcast.

        It holds tensors and numbers only, which is what flex attention can trace.
        """
        document, first, size, causal, window = self.document, self.anchor, self.block, self.causal, self.window
        length, blocks = document.shape[1], first.shape[1]

        def visible(sequence: Tensor, head: Tensor | None, q: Tensor, key: Tensor) -> Tensor:
            # Clamped: flex attention asks for rows beyond the last one too.
            anchor = first[sequence, (q // size).clamp(max=blocks - 1)]
            context = document[sequence, key.clamp(max=length - 1)] == document[sequence, anchor]
            context = context & (key < anchor)
            other = key - length
            own = (key >= length) & (other // size == q // size)
            if causal:
                own = own & (other <= q)
            if window is not None:
                context = context & (anchor + q % size - key < window)
                own = own & ((q - other).abs() < window)
            return context | own

        return visible

    @property
    def rows(self) -> int:
        """A * B."""
        return self.anchor.shape[1] * self.block

    def dense(self) -> Tensor:
        """bool [S, 1, A * B, T + A * B]."""
        device, (slots, length) = self.document.device, self.document.shape
        sequence = torch.arange(slots, device=device)[:, None, None]
        q = torch.arange(self.rows, device=device)[:, None]
        key = torch.arange(length + self.rows, device=device)
        return self.function()(sequence, None, q, key)[:, None]


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def dense_attention(visibility: Visibility) -> Attend:
    """Attention (q [S, Hq, Q, D], k, v [S, Hkv, K, D], scale) -> [S, Hq, Q, D] behind a dense mask."""
    mask = visibility.dense()

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # Repeated heads: with a mask, grouped ones leave CUDA nothing but the path that writes all scores out.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return attend


def flex_attention(visibility: Visibility, kernel: Callable[..., Any]) -> Attend:
    """The same by flex attention, which skips what no row of a tile sees.

    Args:
        visibility: what rows see.
        kernel: `torch.nn.attention.flex_attention.flex_attention`, compiled or not.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    device, (slots, length) = visibility.document.device, visibility.document.shape
    mask = create_block_mask(
        visibility.function(), slots, None, visibility.rows, length + visibility.rows, device=str(device),
        BLOCK_SIZE=FLEX_BLOCK,
    )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out: Tensor = kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        return out

    return attend


class ContextPlan:
    """A layer's attention: keys and values of the context in front of the block rows' own."""

    def __init__(self, k: Tensor, v: Tensor, attend: Attend) -> None:
        """`k`, `v`: [S, T, Hkv, D] of the context, k rotated."""
        self.k, self.v, self.attention = k, v, attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerView | None, scale: float) -> Tensor:
        """See `modelkit.backend.Plan`; the rows are those of all blocks, sequence by sequence."""
        assert layer is None, "training keeps no cache"
        slots, dtype = self.k.shape[0], v.dtype

        def heads(rows: Tensor) -> Tensor:
            return rows.view(slots, -1, *rows.shape[1:])

        keys, values = torch.cat([self.k, heads(k)], 1), torch.cat([self.v, heads(v)], 1)
        query, keys, values = (x.to(dtype).transpose(1, 2) for x in (heads(q), keys, values))
        return self.attention(query, keys, values, scale).transpose(1, 2).reshape(q.shape)


def draft_hidden(
    model: DFlashModel, features: Tensor, embedded: Tensor, batch: Batch, blocks: Blocks,
    attention: Callable[[Visibility], Attend],
) -> Tensor:  # fmt: skip
    """The drafter's output at every block row, [S, A, B, H], after its final norm.

    Args:
        model: the drafter.
        features: [S, T, K * H], the target's taps at every token.
        embedded: [S, A, B, H], the target's embeddings of `blocks.token`, scaled.
        batch: S sequences of T tokens.
        blocks: A blocks of B tokens a sequence.
        attention: makes a layer kind's attention, `dense_attention` or `flex_attention`.
    """
    config, layers = model.config, model.config.model
    slots, length = batch.token.shape
    context = model.hidden_norm(model.fc(features)).flatten(0, 1)

    def angles(position: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(model.inverse_frequencies, layers.rope.attention_factor, position.flatten(), torch.float32)

    context_angles, block_angles = angles(batch.position), angles(blocks.position)
    kinds = list(zip(layers.windows, config.causal, strict=True))
    attend = {
        kind: attention(
            Visibility(
                document=batch.document, anchor=blocks.anchor, block=config.block_size, window=kind[0], causal=kind[1]
            )
        )
        for kind in dict.fromkeys(kinds)
    }
    stream = Stream(x=embedded.flatten(0, 2))
    for index, (block, kind) in enumerate(zip(model.layers, kinds, strict=True)):
        assert isinstance(block, Block)
        k, v = block.self_attn.project_context(context)
        k = rotate(k, *context_angles)
        k, v = (x.view(slots, length, *x.shape[1:]) for x in (k, v))
        plan: Plan = ContextPlan(k, v, attend[kind])
        stream = block(stream, block_angles, plan, model.backend, None, index)
    return model.backend.normed(stream, model.norm).view(*blocks.token.shape, -1)
