"""Blocks at random anchors of packed texts, and the drafter's forward over all of them at once.

The layers are the inference code's own: only where keys and values come from differs.
Source: DFlash, arXiv 2602.06036, section 4.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from modelkit.backend import Plan, Stream
from modelkit.layers import Block
from modelkit.rope import rotary_angles, rotate

from ..draft.dflash_model import DFlashModel
from .attention import Attend, PackedPlan, Visibility, Visible
from .packing import Batch, Tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(Tensors):
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


def places(batch: Batch) -> Tensor:
    """Where anchors may be, bool [S, T]: the supervised tokens whose next one is supervised too.

    Those are where serving may put one: the anchor is a token that the target has written.
    """
    supervised, document = batch.supervised, batch.document
    fits = torch.zeros_like(supervised)
    fits[:, :-1] = supervised[:, :-1] & supervised[:, 1:] & (document[:, :-1] == document[:, 1:])
    return fits


def draw_anchors(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchors of each sequence, uniform among the `places`.

    Args:
        batch: S sequences of T tokens.
        count: A.
        generator: of the CPU, so that all devices draw the same.

    Returns:
        int64 [S, A], rising, 0 where a sequence has fewer; and bool [S, A], whether it is one.
    """
    fits = places(batch)
    key = torch.rand(fits.shape, generator=generator).to(fits.device)
    key, index = torch.where(fits, key, -1.0).topk(min(count, fits.shape[1]), dim=1)
    index = torch.where(key >= 0, index, fits.shape[1]).sort(1).values
    drawn = index < fits.shape[1]
    missing = count - drawn.shape[1]
    return F.pad(torch.where(drawn, index, 0), (0, missing)), F.pad(drawn, (0, missing))


def next_anchors(batch: Batch, blocks: Blocks, length: Tensor) -> tuple[Tensor, Tensor]:
    """Where the rounds after these blocks begin: behind what each of them gets right, every place once.

    Evenly drawn anchors are mostly where text is easy, and serving passes that in few rounds. Anchors that follow one
    another as rounds do are where serving puts them, after a few steps from anywhere.

    Args:
        batch: S sequences of T tokens.
        blocks: A blocks a sequence.
        length: acceptance length of a chain from each anchor, [S * A].

    Returns:
        As `draw_anchors`.
    """
    end = batch.token.shape[1]
    after = (blocks.anchor + length.long().view_as(blocks.anchor)).clamp(max=end - 1)
    same = batch.document.gather(1, after) == batch.document.gather(1, blocks.anchor)
    kept = blocks.real.any(2) & same & places(batch).gather(1, after)
    after = torch.where(kept, after, end).sort(1).values
    after[:, 1:] = torch.where(after[:, 1:] == after[:, :-1], end, after[:, 1:])
    after = after.sort(1).values
    return torch.where(after < end, after, 0), after < end


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


def documents(batch: Batch, blocks: Blocks) -> Tensor:
    """A number for each block, below their number, the same for those of the same document; int64 [S * A]."""
    document = batch.document.gather(1, blocks.anchor)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]  # anchors rise
    return begins.flatten().long().cumsum(0) - 1


def teacher_rows(hidden: Tensor, blocks: Blocks) -> Tensor:
    """The target's hidden states from which it predicts the tokens behind the anchors.

    Those of the token before each: with all of the text up to there, of which the drafter sees what is before the
    anchor.

    Args:
        hidden: [S, T, H].
        blocks: A blocks of B tokens a sequence.

    Returns:
        [S * A, B - 1, H]; anything beyond the end of a sequence.
    """
    slots, length, width = hidden.shape
    offset = torch.arange(blocks.token.shape[2] - 1, device=hidden.device)
    row = (blocks.anchor[:, :, None] + offset).clamp(max=length - 1)
    row = row + torch.arange(slots, device=hidden.device)[:, None, None] * length
    return hidden.reshape(-1, width)[row].flatten(0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockVisibility(Visibility):
    """What row q of a sequence's A * B block rows sees of its T context rows and the A * B block rows behind them.

    Attributes:
        anchor: int64 [S, A].
        block: B.
        causal: a row sees only the rows before it in its own block.
    """

    anchor: Tensor
    block: int
    causal: bool

    def function(self) -> Visible:
        """See `Visibility.function`."""
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

    @property
    def keys(self) -> int:
        """T + A * B."""
        return self.document.shape[1] + self.rows


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
            BlockVisibility(
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
        plan: Plan = PackedPlan(slots, attend[kind], (k, v))
        stream = block(stream, block_angles, plan, model.backend, None, index)
    return model.backend.normed(stream, model.norm).view(*blocks.token.shape, -1)
