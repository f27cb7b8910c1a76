"""Copy accepted scratch rows behind the committed length, all layers in one launch.

Layers have buffers of their own, so their addresses are passed as a table; the operator hides those writes from the
compiler. That is sound where it is used: it reads what a forward has written through `path` and `count`, which depend
on the forward's logits, and nothing reads the pages later in the same step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import TRITON_TYPES


@triton.jit
def _commit_kernel(
    table_ptr, path_ptr, page_ptr, offset_ptr, page_stride, head_stride,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    entry, buffer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(path_ptr + entry)
    if row >= 0:
        page, offset = tl.load(page_ptr + entry), tl.load(offset_ptr + entry)
        pages = tl.load(table_ptr + buffer * 2).to(tl.pointer_type(DTYPE))
        scratch = tl.load(table_ptr + buffer * 2 + 1).to(tl.pointer_type(DTYPE))
        i = tl.arange(0, BLOCK)
        inside = i < HKV * D
        head, d = i // D, i % D
        value = tl.load(scratch + row * HKV * D + i, mask=inside)
        tl.store(pages + page * page_stride + head * head_stride + offset * D + d, value, mask=inside)


@torch.library.custom_op("flashtree::commit_rows", mutates_args={"done"})
def commit_rows(done: Tensor, table: Tensor, path: Tensor, page: Tensor, offset: Tensor, sample: Tensor) -> None:
    """Copy rows of every layer.

    Args:
        done: any small buffer; named as mutated so that the compiler keeps the call.
        table: int64 [2 * layers, 2], addresses of pages and scratch, K and V of each layer.
        path: int64 [S, P], scratch rows; -1 is skipped.
        page: int64 [S, P], where each goes.
        offset: int64 [S, P], where each goes within the page.
        sample: pages of one layer [pages, Hkv, page_size, D], for sizes and dtype.
    """
    heads, page_size, dim = sample.shape[1:]
    _commit_kernel[(path.numel(), table.shape[0])](
        table, path.contiguous(), page, offset, heads * page_size * dim, page_size * dim,
        HKV=heads, D=dim, BLOCK=triton.next_power_of_2(heads * dim),
        DTYPE=TRITON_TYPES[sample.dtype], num_warps=4,
    )  # fmt: skip


@commit_rows.register_fake
def _(done: Tensor, table: Tensor, path: Tensor, page: Tensor, offset: Tensor, sample: Tensor) -> None:
    return None
