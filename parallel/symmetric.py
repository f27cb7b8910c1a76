"""Sums through symmetric memory: GPUs of one machine read each other's buffers, without NCCL's set-up per call.

Measured on 4 H200 over NVLink, in a graph of nothing else: 8 KiB 7.1 us against NCCL's 15.0; 256 KiB one-shot 10.8,
two-shot 8.9, NCCL 16.6 (the reason for `ONE_SHOT_BYTES`). As `flashtree bench` times them, one behind the other: 8 KiB
9.2 against 12.4, 256 KiB 12.6 against 14.1. Each group has one buffer for good, so that graphs may hold its address;
the kernels wait for all processes before they read and before they return. An operator of its own hides the buffer
from the compiler, which would otherwise track it as a graph's output. FLASHTREE_SYMMETRIC=0 leaves all sums to NCCL.

FLASHTREE_FUSED_SUMS=1 has the sums of layers done by the kernel that adds them to the stream and norms it
(`kernels/sum_add_norm.py`). Its protocol was tested between processes on a CPU; it has not been run on GPUs yet.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .kernels.sum_add_norm import Mailboxes

ONE_SHOT_BYTES = 256 * 1024
MOST_BYTES = 4 * 1024 * 1024
MOST_ROWS = 160  # of `sum_add_norm`
DTYPES = (torch.bfloat16, torch.float32)

_buffers: dict[str, Tensor] = {}
_mailboxes: dict[tuple[str, int], Mailboxes] = {}


def prepare(group: dist.ProcessGroup) -> bool:
    """Make the group's buffer; whether all its processes could. All of them must call at the same time."""
    name = group.group_name
    if name in _buffers:
        return True
    ranks = dist.get_process_group_ranks(group)
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    possible = os.environ.get("FLASHTREE_SYMMETRIC") != "0" and len({rank // machine for rank in ranks}) == 1
    if possible:
        try:
            buffer, _ = _rendezvous(group, MOST_BYTES)
        except (RuntimeError, ImportError):
            possible = False
    everybody = torch.tensor([int(possible)], device="cuda")
    dist.all_reduce(everybody, dist.ReduceOp.MIN, group=group)
    if possible := bool(everybody.item()):
        _buffers[name] = buffer
    keep_in_order()
    return possible


def _rendezvous(group: dist.ProcessGroup, size: int) -> tuple[Tensor, list[int]]:
    """This process's buffer of so many bytes, and the addresses of everybody's."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    buffer: Tensor = symmetric_memory.empty((size,), dtype=torch.uint8, device=device)
    return buffer, symmetric_memory.rendezvous(buffer, group).buffer_ptrs


def fits(x: Tensor) -> bool:
    """Whether `symmetric_all_reduce` takes such a tensor."""
    size = x.numel() * x.element_size()
    return x.dtype in DTYPES and 0 < size <= MOST_BYTES and size % 16 == 0


def prepare_rows(group: dist.ProcessGroup, width: int) -> bool:
    """Make the group's mailboxes for `sum_add_norm`, if that is asked for; all its processes call at the same time."""
    key = group.group_name, width
    if os.environ.get("FLASHTREE_FUSED_SUMS") != "1" or not width or width % 4:
        return False
    if key in _mailboxes:
        return True
    from .kernels.sum_add_norm import Mailboxes

    memory, addresses = _rendezvous(group, Mailboxes.size(dist.get_world_size(group), width, MOST_ROWS))
    memory.zero_()
    torch.cuda.synchronize()
    dist.barrier(group)  # nobody writes into a mailbox that is still to be cleared
    _mailboxes[key] = Mailboxes(
        addresses=torch.tensor(addresses, dtype=torch.int64, device=memory.device),
        epochs=torch.zeros(MOST_ROWS, dtype=torch.int32, device=memory.device), rank=dist.get_rank(group), width=width,
        memory=memory,
    )  # fmt: skip
    return True


@functools.cache
def keep_in_order() -> None:
    """Have compiled steps make collectives in the order of the program, the sums of this file among them.

    It is the same in all processes, but the graphs of pipeline stages are not. Inductor moves operators towards their
    users; from then on it keeps the order of the collectives that it knows, and moves anything else past them, to save
    memory or behind a fusion. Two processes that end up with different orders wait for each other's kernels for ever.
    """
    from torch._inductor import config, ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    def lowered(operator: Any, *arguments: Any) -> Any:
        made: Any = ir._CollectiveKernel.create_out_of_place(operator, *arguments)
        return [ir.TensorBox.create(one) for one in made] if isinstance(made, list) else ir.TensorBox.create(made)

    config.reorder_for_locality = False
    for operator in (torch.ops.flashtree.symmetric_all_reduce.default, torch.ops.flashtree.sum_add_norm.default):
        add_layout_constraint(operator, constrain_to_fx_strides)
        register_lowering(operator, type_promotion_kind=None)(functools.partial(lowered, operator))


@torch.library.custom_op("flashtree::symmetric_all_reduce", mutates_args=())
def symmetric_all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of everybody's x.

    Args:
        x: contiguous; see `fits`.
        group: name of a group that `prepare` has made a buffer for.
    """
    flat = x.view(-1)
    buffer = _buffers[group].view(x.dtype)[: flat.numel()]
    if flat.numel() * flat.element_size() <= ONE_SHOT_BYTES:
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, flat, "sum", group)
    else:
        buffer.copy_(flat)
        total = torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", group).clone()
    return total.view(x.shape)


@symmetric_all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("flashtree::sum_add_norm", mutates_args=())
def sum_add_norm(addend: Tensor, x: Tensor, weight: Tensor, eps: float, group: str) -> list[Tensor]:
    """total = x + the sum of everybody's addend, and norm(total).

    Args:
        addend: [splits, R, H], this process's share, contiguous; at most `MOST_ROWS` rows.
        x: [R, H], contiguous.
        weight: [H] of the norm.
        eps: of the norm.
        group: name of a group that `prepare_rows` has made mailboxes for.

    Returns:
        total and normed, [R, H] each.
    """
    return _mailboxes[group, x.shape[1]].sum_add_norm(addend, x, weight, eps)


@sum_add_norm.register_fake
def _(addend: Tensor, x: Tensor, weight: Tensor, eps: float, group: str) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]
