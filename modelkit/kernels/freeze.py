"""Values that every layer's kernels read, made once.

The compiler recomputes cheap values (positions, masks' bits, angles) in front of every operator that reads them, a
small kernel each; the outputs of an opaque operator it leaves alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, release, wait

BLOCK = 1024
MOST_VALUES = 4


@triton.jit
def _copy(source, to, i, size):
    tl.store(to + i, tl.load(source + i, mask=i < size, other=0), mask=i < size)


@triton.jit
def _copy_kernel(
    first, second, third, fourth, to_first, to_second, to_third, to_fourth, size, second_size, third_size, fourth_size,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    release(PDL)
    if tl.program_id(0) == 0:
        _copy(first, to_first, i, size)
    elif tl.program_id(0) == 1:
        _copy(second, to_second, i, second_size)
    elif tl.program_id(0) == 2:
        _copy(third, to_third, i, third_size)
    else:
        _copy(fourth, to_fourth, i, fourth_size)


@torch.library.custom_op("flashtree::freeze", mutates_args=())
def freeze(values: list[Tensor]) -> list[Tensor]:
    """Contiguous copies of up to four values, in one launch."""
    if not 1 <= len(values) <= MOST_VALUES:
        raise ValueError(f"freeze takes 1 to {MOST_VALUES} values, got {len(values)}")
    values = [value.contiguous() for value in values]
    copies = [torch.empty_like(value) for value in values]
    missing = MOST_VALUES - len(values)
    sizes = [value.numel() for value in values] + [0] * missing
    launch(
        _copy_kernel, (len(values), max(1, triton.cdiv(max(sizes), BLOCK))),
        *values, *values[:1] * missing, *copies, *copies[:1] * missing, *sizes, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return copies


@freeze.register_fake
def _(values: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in values]
