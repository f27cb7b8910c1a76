"""The Triton backend: how a layer's operations map to kernels. What is not named here runs as the reference does."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backend import Angles, Plan, Reference, Stream
from ..borders import Border
from ..cache import KVCache, LayerView
from ..rows import Rows
from .add_norm import add_norm
from .commit import commit_rows
from .context import append_context
from .few_rows import few_rows_linear, fits
from .freeze import freeze
from .linear import one_row_linear
from .rotary import rotary_store
from .top_candidates import MAX_CANDIDATES, top_candidates
from .tree_attention import choose_splits, tree_attention

if TYPE_CHECKING:
    from ..context import ContextHeads
    from ..layers import MLP, Attention, RMSNorm

MAX_WIDTH = 160  # rows a slot that `tree_attention` is used for
MAX_FIRST_WIDTH = 256  # where nothing is committed yet, in half precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """Attention through `tree_attention`: masks stay bits, the context stays in its pages.

    The tensors are copies made when the forward begins: the kernel reads them before it waits for the launch before it.
    """

    position: Tensor
    ancestors: Tensor
    row_offset: Tensor
    length: Tensor
    width: int
    window: int
    splits: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerView | None, scale: float) -> Tensor:
        """See `DensePlan.attend`; a context is needed. Fresh K/V is read where the scratch holds it, without a copy."""
        assert layer is not None
        out: Tensor = tree_attention(
            q, layer.scratch_k, layer.scratch_v, layer.k, layer.v, layer.table, self.length, self.position,
            self.ancestors, self.row_offset, self.width, scale, self.window, self.splits, None,
        )  # fmt: skip
        return out


class TritonBackend(Reference):
    """Kernels for CUDA devices."""

    name = "triton"

    def plan(
        self, rows: Rows, cache: KVCache | None, window: int | None, *, group: int, dtype: torch.dtype,
        ancestors: Tensor | None = None,
    ) -> Plan:  # fmt: skip
        """Nothing to prepare but the split count. Dense are forwards without a cache (`score`), and wide chunks.

        A first chunk may be wider than others: it has no context that each of its tiles would read again.
        """
        widest = MAX_FIRST_WIDTH if rows.bound == 0 and dtype.itemsize == 2 else MAX_WIDTH
        if cache is None or rows.width > widest:
            return super().plan(rows, cache, window, group=group, dtype=dtype, ancestors=ancestors)
        first = cache.layer(0)
        splits = 1 if rows.bound == 0 else choose_splits(
            rows.count, rows.width, rows.slots, first.k.shape[1], group, cache.capacity, head_dim=first.k.shape[3],
            window=window or 0, itemsize=first.k.element_size(),
        )  # fmt: skip
        bits = rows.ancestors if ancestors is None else ancestors
        position, bits, row_offset, length = freeze([rows.position, bits, rows.row_offset, cache.length])
        return KernelPlan(
            position=position, ancestors=bits, row_offset=row_offset, length=length, width=rows.width,
            window=window or 0, splits=splits,
        )  # fmt: skip

    def reads_bound(self, width: int) -> bool:
        """Wide chunks with a context go through PyTorch's attention: their time is arithmetic, not its bytes."""
        return width > MAX_WIDTH

    def angles(self, inverse_frequencies: Tensor, scale: float, position: Tensor, dtype: torch.dtype) -> Angles:
        """fp32 [R, D / 2], one cosine and sine a pair of dimensions."""
        angle = position.float()[:, None] * inverse_frequencies[None, :]
        cos, sin = freeze([angle.cos() * scale, angle.sin() * scale])
        return cos, sin

    def normed(self, stream: Stream, norm: RMSNorm) -> Tensor:
        """Norm and the open addition in one kernel."""
        if stream.addend is None or stream.over is None:
            total, normed = add_norm(stream.x, stream.addend, norm.weight, norm.eps)
        else:
            total, normed = stream.over.add_norm(stream.addend, stream.x, norm.weight, norm.eps)
        if stream.addend is not None:
            stream.x, stream.addend, stream.over = total, None, None
        result: Tensor = normed
        return result

    def attention_input(
        self, attention: Attention, stream: Stream, norm: RMSNorm, angles: Angles, cache: KVCache | None, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One kernel behind the projection does qk-norm, rotation and the scratch write."""
        projection = attention.qkv_proj
        assert projection is not None, "kernels need fused projections"
        rows = angles[0].shape[0]
        if attention.enter is not None:
            qkv = sums(attention.enter(self.normed(stream, norm))[:rows].contiguous(), projection)
        elif rows == 1 and stream.addend is None:
            qkv = one_row_linear(
                stream.x, projection.weight, projection.bias, norm.weight, None, norm.eps, False
            )[None]  # fmt: skip
        else:
            qkv = sums(self.normed(stream, norm), projection)
        if cache is None:
            shape = (rows, attention.kv_heads, attention.dim)
            k, v = stream.x.new_empty(shape), stream.x.new_empty(shape)
        else:
            stored = cache.layer(layer)
            k, v = stored.scratch_k, stored.scratch_v
        q_norm = None if attention.q_norm is None else attention.q_norm.weight
        k_norm = None if attention.k_norm is None else attention.k_norm.weight
        q: Tensor = rotary_store(qkv, *angles, q_norm, k_norm, norm.eps, k, v, attention.heads)
        return q, k[:rows], v[:rows]

    def attention_output(self, attention: Attention, mixed: Tensor, stream: Stream) -> Stream:
        """One row: projection and residual in one kernel. Several: the addition is left to the next norm."""
        return added(stream, mixed, attention.o_proj, attention.leave)

    def normed_linear(self, x: Tensor, layer: nn.Linear, norm: RMSNorm) -> Tensor:
        """The norm's kernel sums what the projection's splits made."""
        if getattr(layer, "leave", None) is not None or not fits(x, layer.weight):
            return super().normed_linear(x, layer, norm)
        normed: Tensor = add_norm(None, few_rows_linear(x, layer.weight, layer.bias, False), norm.weight, norm.eps)[1]
        return normed

    def append_context(self, x: Tensor, heads: ContextHeads, count: Tensor, cache: KVCache) -> None:
        """One projection and one kernel for all layers, whose writes the compiler does not see.

        A `KernelPlan` is made from the length, so attention comes after them. Nothing holds PyTorch's attention back,
        so wide blocks are appended as the reference does it.
        """
        if self.reads_bound(heads.width):
            super().append_context(x, heads, count, cache)
            return
        rows = x.flatten(0, 1)
        if fits(rows, heads.weight):
            projected = few_rows_linear(rows, heads.weight, heads.bias, False)
        else:
            projected = F.linear(rows, heads.weight, heads.bias)[None]
        kept = append_context(
            projected, count, cache.length, cache.table, cache.addresses, cache.layer(0).k, heads.norms,
            heads.frequencies, heads.eps, heads.factor, cache.capacity,
        )  # fmt: skip
        cache.advance(kept)

    def commit(self, cache: KVCache, path: Tensor, count: Tensor) -> None:
        """All layers in one launch."""
        page, offset = cache.destination(count, path.shape[1])
        step = torch.arange(path.shape[1], device=path.device)
        row = torch.where(step < count[:, None], path, -1)
        first = cache.layer(0)
        commit_rows(cache.committed, cache.addresses, row, page, offset, first.k)
        cache.advance(count)

    def mlp(self, mlp: MLP, stream: Stream, norm: RMSNorm) -> Stream:
        """One row: two kernels for norm, gate, up, SwiGLU, down and residual. Several: three."""
        both = mlp.gate_up_proj
        assert both is not None, "kernels need fused projections"
        if stream.x.shape[0] == 1 and stream.addend is None and mlp.enter is None:
            inner = one_row_linear(stream.x, both.weight, both.bias, norm.weight, None, norm.eps, True)
            return added(stream, inner, mlp.down_proj, mlp.leave)
        x = self.normed(stream, norm)
        if mlp.enter is not None:
            x = mlp.enter(x)
        if x.shape[0] == 1:
            inner = one_row_linear(x, both.weight, both.bias, None, None, 0.0, True)
        elif fits(x, both.weight):
            inner = few_rows_linear(x, both.weight, both.bias, True)[0]
        else:
            gate, up = both(x).chunk(2, -1)
            inner = F.silu(gate) * up
        return added(stream, inner, mlp.down_proj, mlp.leave)

    def top_candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Two kernels that read the logits once; many candidates go through a sort."""
        if k > MAX_CANDIDATES:
            return super().top_candidates(logits, k)
        return top_candidates(logits, k)


def sums(x: Tensor, layer: nn.Linear) -> Tensor:
    """layer(x) as partial sums [splits, R, N]."""
    if x.shape[0] == 1:
        out: Tensor = one_row_linear(x, layer.weight, layer.bias, None, None, 0.0, False)[None]
    elif fits(x, layer.weight):
        out = few_rows_linear(x, layer.weight, layer.bias, False)
    else:
        out = layer(x)[None]
    return out


def added(stream: Stream, x: Tensor, layer: nn.Linear, leave: Border | None) -> Stream:
    """The stream with layer(x) added; behind a border the next norm adds it, whole or made whole by the same kernel."""
    if leave is not None:
        share, fuses = sums(x, layer), getattr(leave, "fuses", None)
        if fuses is not None and fuses(stream.x):
            return Stream(x=stream.x, addend=share, over=leave)  # type: ignore[arg-type]
        return Stream(x=stream.x, addend=leave(share.sum(0).to(stream.x.dtype))[None])
    if x.shape[0] == 1:
        out: Tensor = one_row_linear(x, layer.weight, layer.bias, None, stream.x, 0.0, False)
        return Stream(x=out)
    return Stream(x=stream.x, addend=sums(x, layer))
