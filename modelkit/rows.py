"""Flat rows: the one shape of every forward (prefill chunk, plain step, draft tree, any mix of them).

A forward takes R rows of S slots. `row_offset` says which rows belong to which slot; what a row may see of its own
slot's rows is a bit set. R, the width and the context bound are host constants; everything else lives on the device.

Shape letters, used all over flashtree:
    S slots   R rows of a forward   N rows of one slot (tree budget + 1)   W = ceil(N / 32) bit words
    L draft depth (block size - 1)   k candidates a depth   K tapped layers   H hidden size   V vocabulary   D head dim
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

WORD = 32


def words(n: int) -> int:
    """Bit words needed for n rows."""
    return -(-n // WORD)


def pack_bits(visible: Tensor) -> Tensor:
    """Bool [..., n] -> int32 words [..., ceil(n / 32)]; bit j % 32 of word j // 32 is visible[..., j]."""
    n = visible.shape[-1]
    padded = torch.nn.functional.pad(visible.long(), (0, words(n) * WORD - n))  # inductor cannot pad bools on a CPU
    weights = torch.ones(WORD, dtype=torch.int64, device=visible.device) << torch.arange(WORD, device=visible.device)
    grouped = padded.view(*visible.shape[:-1], words(n), WORD)
    return (grouped * weights).sum(-1).to(torch.int32)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Inverse of `pack_bits`: int32 words [..., W] -> bool [..., n]."""
    bit = torch.arange(n, device=packed.device)
    return ((packed[..., bit // WORD] >> (bit % WORD).to(torch.int32)) & 1).bool()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one forward, grouped by slot in slot order; all tensors on the model's device.

    Attributes:
        token: int64 [R], input token ids.
        position: int64 [R], absolute positions (committed length + depth): what rotary embedding and windows use.
        slot: int64 [R], owner; padding rows carry S, the dummy slot.
        parent: int64 [R], row index of the parent, -1 for a slot's first row.
        valid: bool [R], False for padding and for tree nodes that hold no candidate.
        ancestors: int32 [R, W], bit j: sees row `row_offset[slot] + j`. A row sees itself.
        row_offset: int64 [S + 1].
        width: most rows of one slot (N), a host constant.
        bound: upper bound of every slot's committed length, a host constant; the dense reference reads so much.
    """

    token: Tensor
    position: Tensor
    slot: Tensor
    parent: Tensor
    valid: Tensor
    ancestors: Tensor
    row_offset: Tensor
    width: int
    bound: int

    @property
    def count(self) -> int:
        """R, padding included."""
        return self.token.shape[0]

    @property
    def slots(self) -> int:
        """S."""
        return self.row_offset.shape[0] - 1

    @property
    def uniform(self) -> bool:
        """Every slot has exactly `width` rows, so rows reshape to [S, width] without an index."""
        return self.count == self.slots * self.width

    def local(self) -> Tensor:
        """Index of each row within its slot [R]; padding rows get 0."""
        index = torch.arange(self.count, device=self.token.device)
        if self.uniform:
            return index % self.width
        owner = self.slot.clamp(max=self.slots - 1)
        return torch.where(self.slot < self.slots, index - self.row_offset[owner], 0).clamp(0, self.width - 1)

    def rectangle(self) -> Tensor:
        """Row index of each (slot, local row) [S, width]; where a slot has fewer rows its own last one repeats."""
        local = torch.arange(self.width, device=self.token.device)
        last = (self.row_offset[1:] - self.row_offset[:-1] - 1).clamp(min=0)
        own = torch.minimum(local, last[:, None])
        return (self.row_offset[:-1, None] + own).clamp(max=self.count - 1)


def flatten(
    *,
    token: Tensor,
    parent: Tensor,
    valid: Tensor,
    ancestors: Tensor,
    position: Tensor,
    count: Tensor,
    rows: int,
    bound: int,
) -> Rows:
    """Lay per-slot nodes out as flat rows, on the device and in fixed shapes.

    Args:
        token: int64 [S, N].
        parent: int64 [S, N], local index of the parent, -1 for the first.
        valid: bool [S, N].
        ancestors: int32 [S, N, W], bit j: sees node j of its slot (itself included), see `pack_bits`.
        position: int64 [S, N].
        count: int64 [S], nodes each slot takes part with (0 = idle); ignored when `rows` equals S * N.
        rows: R, at least the sum of `count`.
        bound: see `Rows.bound`.
    """
    slots, width = token.shape
    device = token.device
    if rows == slots * width:
        slot = torch.arange(slots, device=device).repeat_interleave(width, output_size=rows)
        start = torch.arange(0, rows + 1, width, device=device)
        flat_parent = torch.where(parent < 0, -1, parent + start[:-1, None])
        return Rows(
            token=token.reshape(-1), position=position.reshape(-1), slot=slot, parent=flat_parent.reshape(-1),
            valid=valid.reshape(-1), ancestors=ancestors.reshape(rows, -1), row_offset=start, width=width, bound=bound,
        )  # fmt: skip
    end = count.cumsum(0)
    start = torch.nn.functional.pad(end, (1, 0))
    index = torch.arange(rows, device=device)
    slot = (index[:, None] >= end).sum(-1)  # not searchsorted: inductor of torch 2.11 cannot compile it here
    used = slot < slots
    owner = slot.clamp(max=slots - 1)
    local = (index - start[owner]).clamp(0, width - 1)
    flat_parent = torch.where(parent[owner, local] < 0, -1, parent[owner, local] + start[owner])
    return Rows(
        token=torch.where(used, token[owner, local], 0), position=torch.where(used, position[owner, local], 0),
        slot=slot, parent=torch.where(used, flat_parent, -1), valid=used & valid[owner, local],
        ancestors=ancestors[owner, local], row_offset=start, width=width, bound=bound,
    )  # fmt: skip


def chain(*, token: Tensor, start: Tensor, count: Tensor, rows: int, bound: int, causal: bool = True) -> Rows:
    """Rows of plain text: each slot's tokens in order (a prefill chunk, a plain step, a drafter's block).

    Args:
        token: int64 [S, N].
        start: int64 [S], position of each slot's first token.
        count: int64 [S], how many of the N tokens are real; the others are padding rows that commit ignores.
        rows: R: S * N, or fewer to leave idle slots out.
        bound: see `Rows.bound`.
        causal: False lets every row of a slot see all of them (a bidirectional block).
    """
    slots, width = token.shape
    local = torch.arange(width, device=token.device)
    inside = local[None, :] < count[:, None]
    full = torch.ones(width, width, dtype=torch.bool, device=token.device)
    visible = (full.tril() if causal else full)[None] & inside[:, None, :]
    ancestors = pack_bits(visible | torch.eye(width, dtype=torch.bool, device=token.device))
    return flatten(
        token=token, parent=(local - 1).expand(slots, width), valid=inside, ancestors=ancestors,
        position=start[:, None] + local, count=count, rows=rows, bound=bound,
    )  # fmt: skip
