"""Sum over processes, residual addition and RMS norm in one launch, by memory that all GPUs of a machine can write.

A program a row. It sums its own process's splits, writes the row into everybody's mailbox, raises a flag there, waits
for everybody's flags in its own mailbox, and adds the rows in the order of the ranks, so that all processes get the
same bits. Mailboxes have two halves, which a row uses in turn: who writes into one for the second time has seen the
flags of the time between, and a process raises those only after its kernel before has ended, which read the first. So
nobody waits for others to have read.

Bound: latency; a write over NVLink and back, 2 to 3 us each.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelkit.kernels.launch import launch, release, wait


@triton.jit
def _sum_add_norm_kernel(
    addend, x, weight, total, normed, mailboxes, epochs, R,
    eps: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, WORLD: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, FLAGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < H
    kind = tl.pointer_type(x.dtype.element_ty)
    gain = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(mailboxes + RANK)
    wait(PDL)
    value = tl.load(x + row * H + i, mask=inside, other=0.0)
    part = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        part += tl.load(addend + (split * R + row) * H + i, mask=inside, other=0.0).to(tl.float32)
    epoch = tl.load(epochs + row) + 1
    half = (epoch & 1).to(tl.int64) * WORLD * ROWS
    for peer in tl.static_range(WORLD):
        theirs = (tl.load(mailboxes + peer) + (half + RANK * ROWS + row) * (H * 4)).to(kind)
        tl.store(tl.multiple_of(theirs, 16) + i, part.to(x.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # all of the row is written before its flags are
    for peer in tl.static_range(WORLD):
        flag = (tl.load(mailboxes + peer) + FLAGS).to(tl.pointer_type(tl.int32)) + row * WORLD + RANK
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    release(PDL)
    for peer in tl.static_range(WORLD):
        flag = (own + FLAGS).to(tl.pointer_type(tl.int32)) + row * WORLD + peer
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen - epoch < 0:  # a difference, as epochs wrap around
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    tl.store(epochs + row, epoch)
    added = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(WORLD):
        theirs = tl.multiple_of((own + (half + peer * ROWS + row) * (H * 4)).to(kind), 16)
        added += tl.load(theirs + i, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    # As one after the other: the sum is rounded, then the addition.
    value = (value.to(tl.float32) + added.to(value.dtype).to(tl.float32)).to(value.dtype)
    tl.store(total + row * H + i, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    wide = wide.to(value.dtype).to(tl.float32) * gain
    tl.store(normed + row * H + i, wide.to(value.dtype), mask=inside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mailboxes:
    """What the processes of a group share for rows of one width.

    Attributes:
        addresses: int64 [processes], of everybody's mailbox as this process sees it: `size` bytes each, zeros at first,
            at a multiple of 16.
        epochs: int32 [most rows], how often each was summed; zeros at first.
        rank: of this process in the group.
        width: H, a multiple of 4.
        memory: of this process's mailbox, to keep it.
    """

    addresses: Tensor
    epochs: Tensor
    rank: int
    width: int
    memory: Tensor

    @staticmethod
    def flags_at(processes: int, width: int, rows: int) -> int:
        """Bytes of a mailbox in front of its flags: room for rows of 4 bytes a number, whatever their dtype."""
        return 2 * processes * rows * width * 4

    @classmethod
    def size(cls, processes: int, width: int, rows: int) -> int:
        """Bytes of a mailbox for at most so many rows a call."""
        return cls.flags_at(processes, width, rows) + rows * processes * 4

    def sum_add_norm(self, addend: Tensor, x: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
        """total = x + the sum of everybody's addend, and norm(total); every process calls it with as many rows.

        Args:
            addend: [splits, R, H], this process's share; R at most that of `epochs`.
            x: [R, H], the same in all processes.
            weight: [H] of the norm.
            eps: of the norm.

        Returns:
            total and normed, [R, H] each.
        """
        rows, most, processes = x.shape[0], self.epochs.shape[0], self.addresses.shape[0]
        total, normed = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(self.width)
        launch(
            _sum_add_norm_kernel, (rows,), addend, x, weight, total, normed, self.addresses, self.epochs, rows,
            eps=eps, H=self.width, SPLITS=addend.shape[0], BLOCK=block, WORLD=processes, RANK=self.rank, ROWS=most,
            FLAGS=self.flags_at(processes, self.width, most), num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
        return [total, normed]
