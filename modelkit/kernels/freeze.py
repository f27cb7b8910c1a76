"""Values that every layer's kernels read, made once.

The compiler recomputes cheap values (positions, masks' bits, angles) in front of every operator that reads them, a
small kernel each; the outputs of an opaque operator it leaves alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("flashtree::freeze", mutates_args=())
def freeze(values: list[Tensor]) -> list[Tensor]:
    """Contiguous copies of the values."""
    return [value.clone(memory_format=torch.contiguous_format) for value in values]


@freeze.register_fake
def _(values: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in values]
