"""KV cache addressed through a block table, with a scratch segment for rows that are not committed yet.

A forward writes fresh K/V into scratch only; `commit` copies the accepted rows behind the committed length. So a
tree of any width never needs free places in the cache, and rejected rows leave no trace. The last slot (S) is a
dummy: writes that must not land anywhere land there.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer's cache as attention sees it.

    Attributes:
        k, v: pages [P, Hkv, page_size, D].
        table: int64 [S + 1, pages a slot], page numbers.
        length: int64 [S + 1], committed positions.
        scratch_k: [most rows of a forward, Hkv, D], fresh keys of the forward at hand.
        scratch_v: their values.
        contiguous: each slot's pages lie in slot order, one a slot.
    """

    k: Tensor
    v: Tensor
    scratch_k: Tensor
    scratch_v: Tensor
    table: Tensor
    length: Tensor
    contiguous: bool

    def context(self, bound: int) -> tuple[Tensor, Tensor]:
        """K and V of positions 0..bound-1 of every real slot, [S, Hkv, bound, D] each (a view where pages allow it)."""
        slots = self.table.shape[0] - 1
        if self.contiguous:
            return self.k[:slots, :, :bound], self.v[:slots, :, :bound]
        page_size = self.k.shape[2]
        pages = self.table[:slots, : -(-bound // page_size)]

        def gather(stored: Tensor) -> Tensor:
            # Cut first: where a page is a whole slot, most of it may not be wanted.
            read = stored[:, :, :bound][pages].transpose(1, 2)  # [S, Hkv, pages, page_size, D]
            return read.reshape(slots, stored.shape[1], -1, stored.shape[3])[:, :, :bound]

        return gather(self.k), gather(self.v)


class LayerCache(nn.Module):
    """Buffers of one layer: pages and scratch, each a tensor of its own (views of a stacked one cost copies)."""

    def __init__(self, pages: int, heads: int, page_size: int, head_dim: int, scratch: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(pages, heads, page_size, head_dim, dtype=dtype), persistent=False)
            empty = torch.zeros(scratch, heads, head_dim, dtype=dtype)
            self.register_buffer(f"scratch_{name}", empty, persistent=False)

    k: Tensor
    v: Tensor
    scratch_k: Tensor
    scratch_v: Tensor


class KVCache(nn.Module):
    """Cache of all layers for S slots plus the dummy.

    Args:
        layers, heads, head_dim: of the model (heads = KV heads).
        slots: S.
        capacity: positions a slot can hold.
        scratch: most rows of a forward.
        page_size: positions a page; None gives each slot one page of `capacity` positions (the static layout).
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        slots: int,
        capacity: int,
        scratch: int,
        dtype: torch.dtype,
        page_size: int | None = None,
    ) -> None:
        super().__init__()
        self.capacity, self.page_size = capacity, page_size or capacity
        per_slot = -(-capacity // self.page_size)
        pages = (slots + 1) * per_slot
        self.layers = nn.ModuleList(
            LayerCache(pages, heads, self.page_size, head_dim, scratch, dtype) for _ in range(layers)
        )
        self.contiguous = page_size is None
        self._pages: dict[int, list[Tensor]] = {}  # by slot, where slots have one each
        self.register_buffer("table", torch.arange(pages).view(slots + 1, per_slot), persistent=False)
        self.register_buffer("length", torch.zeros(slots + 1, dtype=torch.int64), persistent=False)

        self.register_buffer("committed", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.register_buffer("addresses", self._buffer_addresses(), persistent=False)

    table: Tensor
    length: Tensor
    committed: Tensor
    addresses: Tensor

    def _buffer_addresses(self) -> Tensor:
        """Device addresses of pages and scratch, int64 [2 * layers, 2]: K and V of each layer in turn.

        For a kernel that commits all layers at once; the cache must stay where it was made.
        """
        pairs = []
        for layer in self.all_layers():
            pairs += [
                [layer.k.data_ptr(), layer.scratch_k.data_ptr()],
                [layer.v.data_ptr(), layer.scratch_v.data_ptr()],
            ]
        return torch.tensor(pairs)

    @property
    def slots(self) -> int:
        """S, the dummy not counted."""
        return self.table.shape[0] - 1

    def layer(self, index: int) -> LayerCache:
        """One layer's buffers."""
        stored = self.layers[index]
        assert isinstance(stored, LayerCache)
        return stored

    def all_layers(self) -> list[LayerCache]:
        """Every layer's buffers, in order."""
        return [self.layer(index) for index in range(len(self.layers))]

    def set_table(self, table: Tensor) -> None:
        """Use another assignment of pages to slots, int64 [S + 1, pages a slot] (a permutation of the pages)."""
        self.table.copy_(table)
        self.contiguous = False

    def view(self, layer: int) -> LayerView:
        """What attention reads of one layer."""
        stored = self.layer(layer)
        return LayerView(
            k=stored.k, v=stored.v, scratch_k=stored.scratch_k, scratch_v=stored.scratch_v, table=self.table,
            length=self.length, contiguous=self.contiguous,
        )  # fmt: skip

    def destination(self, count: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Page and offset behind the committed length for `width` entries a slot; entries past `count` go to the dummy.

        Args:
            count: int64 [S].
            width: entries a slot, a host constant.

        Returns:
            page, offset, both int64 [S, width].
        """
        step = torch.arange(width, device=count.device)
        position = self.length[:-1, None] + step
        keep = (step < count[:, None]) & (position < self.capacity)
        position = torch.where(keep, position, 0)
        slot = torch.arange(self.slots, device=count.device)[:, None]
        page = torch.where(keep, self.table[slot, position // self.page_size], self.table[-1, 0])
        return page, position % self.page_size

    def commit(self, path: Tensor, count: Tensor) -> None:
        """Copy accepted scratch rows behind the committed length and advance it.

        Args:
            path: int64 [S, P], row indices of each slot's accepted path, root first; entries past `count` are ignored.
            count: int64 [S], rows to commit.
        """
        page, offset = self.destination(count, path.shape[1])
        row = path.clamp(min=0)
        for layer in self.all_layers():
            layer.k[page, :, offset] = layer.scratch_k[row]
            layer.v[page, :, offset] = layer.scratch_v[row]
        self.advance(count)

    def write_scratch(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep fresh rows [R, Hkv, D] of a layer until commit."""
        stored = self.layer(layer)
        stored.scratch_k[: k.shape[0]].copy_(k)
        stored.scratch_v[: v.shape[0]].copy_(v)

    def advance(self, count: Tensor) -> None:
        """Lengthen each slot by what was written to its `destination`, int64 [S]."""
        self.length[:-1] = (self.length[:-1] + count).clamp(max=self.capacity)

    def append(self, layer: int, k: Tensor, v: Tensor, page: Tensor, offset: Tensor) -> None:
        """Write rows [S, P, Hkv, D] straight to a `destination` (no scratch); the caller advances `length`."""
        stored = self.layer(layer)
        stored.k[page, :, offset] = k
        stored.v[page, :, offset] = v

    def reset(self, slot: int) -> None:
        """Forget one slot's content; its pages are zeroed, so that not even a NaN outlives a request."""
        self.length[slot].fill_(0)
        if self.contiguous:  # one page, whose number is known here: all layers in one launch
            if slot not in self._pages:
                self._pages[slot] = [pages[slot] for layer in self.all_layers() for pages in (layer.k, layer.v)]
            torch._foreach_zero_(self._pages[slot])
            return
        pages = self.table[slot]
        for layer in self.all_layers():  # assigning a number to an index would copy it to the device, and wait
            layer.k.index_fill_(0, pages, 0)
            layer.v.index_fill_(0, pages, 0)


class Lane(KVCache):
    """One slot of a cache as a cache of one slot, whichever slot that is at the moment: what a prefill runs in.

    Pages and scratch are those of the whole cache; commits lengthen the slot there as well.

    Args:
        whole: the cache; its block table is read anew by every `enter`.
    """

    def __init__(self, whole: KVCache) -> None:
        nn.Module.__init__(self)
        self.whole = whole
        self.capacity, self.page_size, self.contiguous = whole.capacity, whole.page_size, False
        self.layers = whole.layers
        for name, buffer in (
            ("table", whole.table[[0, -1]]), ("length", whole.length[[0, -1]]), ("committed", whole.committed),
            ("addresses", whole.addresses), ("slot", torch.zeros_like(whole.length[:1])),
        ):  # fmt: skip
            self.register_buffer(name, buffer, persistent=False)

    slot: Tensor

    def enter(self, slot: int) -> None:
        """Turn to a slot (host side)."""
        self.slot.fill_(slot)
        self.table[0].copy_(self.whole.table[slot])
        self.length[:1].copy_(self.whole.length[slot : slot + 1])

    def advance(self, count: Tensor) -> None:
        """Lengthen the slot, here and in the whole cache; `count` is int64 [1]."""
        super().advance(count)
        entry = torch.arange(self.whole.length.shape[0], device=count.device)  # not index_add_: 13 kernels
        self.whole.length += torch.where(entry == self.slot, count, 0)
