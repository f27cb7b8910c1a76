"""What the frozen target knows of packed texts: the outputs of its tapped layers, in one forward.

The layers are the inference code's own; only attention is that of packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from modelkit.backend import Stream
from modelkit.model import Transformer

from .attention import Attend, PackedPlan, TextVisibility, Visibility, dense_attention
from .packing import Batch


def target_features(
    target: Transformer, taps: tuple[int, ...], batch: Batch,
    attention: Callable[[Visibility], Attend] = dense_attention,
) -> Tensor:  # fmt: skip
    """The tapped layers' outputs at every token; documents do not see each other, and layers behind the last tap rest.

    Args:
        target: whole, on one device.
        taps: 0-based layer ids, in the order of the features.
        batch: S sequences of T tokens.
        attention: makes a layer kind's attention, `dense_attention` or `flex_attention`.

    Returns:
        [S, T, K * H].
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
    for index in range(max(taps) + 1):
        plan = plans[target.config.windows[index]]
        stream = target.layers[index](stream, angles, plan, target.backend, None, index)
        if index in taps:
            tapped[index] = stream.value()
    return torch.cat([tapped[index] for index in taps], -1).view(slots, length, -1)
