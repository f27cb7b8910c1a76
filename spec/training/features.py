"""What the frozen target knows of packed texts: the outputs of its tapped layers, in one forward.

The layers are the inference code's own; only attention is that of packed sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from modelkit.backend import Stream
from modelkit.model import Transformer

from .attention import Attend, PackedPlan, TextVisibility, Visibility, dense_attention
from .packing import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """Of S sequences of T tokens.

    Attributes:
        taps: [S, T, K * H], the tapped layers' outputs side by side.
        hidden: [S, T, H], what the head makes the next token's logits from; None if nobody asked.
    """

    taps: Tensor
    hidden: Tensor | None


def target_features(
    target: Transformer, taps: tuple[int, ...], batch: Batch,
    attention: Callable[[Visibility], Attend] = dense_attention, hidden: bool = False,
) -> Features:  # fmt: skip
    """Features at every token; documents do not see each other.

    Args:
        target: whole, on one device.
        taps: 0-based layer ids, in the order of the features.
        batch: S sequences of T tokens.
        attention: makes a layer kind's attention, `dense_attention` or `flex_attention`.
        hidden: also the hidden states; without them, layers behind the last tap are not run.
    """
    slots, length = batch.token.shape
    assert target.inverse_frequencies is not None, "prepare() was not called"
    angles = target.backend.angles(
        target.inverse_frequencies, target.config.rope.attention_factor, batch.position.flatten(), target.dtype
    )
    plans = {
        window: PackedPlan(slots, attention(TextVisibility(document=batch.document, window=window)))
        for window in dict.fromkeys(target.windows)
    }
    stream, tapped = Stream(x=target.embed(batch.token.flatten())), {}
    for index in target.own if hidden else range(max(taps) + 1):
        plan = plans[target.config.windows[index]]
        stream = target.layers[index](stream, angles, plan, target.backend, None, index)
        if index in taps:
            tapped[index] = stream.value()

    def sequences(rows: Tensor) -> Tensor:
        return rows.view(slots, length, -1)

    return Features(
        taps=sequences(torch.cat([tapped[index] for index in taps], -1)),
        hidden=sequences(target.backend.normed(stream, target.norm)) if hidden else None,
    )
