"""How a block's operations run: the plain-PyTorch reference, or kernels. One explicit choice a model, no fallback.

A backend owns the parts of a layer that kernels fuse differently; the reference is the definition that every other one
is compared with. Backends with kernels live in `modelkit/kernels` and are imported only when they are asked for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from .attention import DensePlan
from .borders import FusedSum
from .cache import KVCache, LayerView
from .functional import linear
from .rope import rotary_angles, rotate
from .rows import Rows

if TYPE_CHECKING:
    from .context import ContextHeads
    from .layers import MLP, Attention, RMSNorm

Angles = tuple[Tensor, Tensor]


@dataclasses.dataclass(kw_only=True)
class Stream:
    """Residual stream of a forward; its last addition may be left to the kernel that reads it next.

    Attributes:
        x: [R, H].
        addend: [splits, R, H], what is still to be added to x, summed over the first dimension; None: nothing.
        over: the addend is this process's share only, and this border's sum makes it whole.
    """

    x: Tensor
    addend: Tensor | None = None
    over: FusedSum | None = None

    def value(self) -> Tensor:
        """[R, H] with everything added."""
        if self.addend is None:
            return self.x
        added = self.addend.sum(0).to(self.x.dtype)
        return self.x + (added if self.over is None else self.over(added))


class Plan(Protocol):
    """What layers of one kind share in a forward; made by `Backend.plan`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerView | None, scale: float) -> Tensor:
        """Attention of rows [R, Hq, D] over their context and their own slot's visible rows."""
        ...


class Reference:
    """Plain PyTorch."""

    name = "reference"

    def plan(
        self, rows: Rows, cache: KVCache | None, window: int | None, *, group: int, dtype: torch.dtype,
        ancestors: Tensor | None = None,
    ) -> Plan:  # fmt: skip
        """Prepare attention; see `DensePlan.prepare`."""
        return DensePlan.prepare(rows, cache, window, group=group, dtype=dtype, ancestors=ancestors)

    def reads_bound(self, width: int) -> bool:
        """Whether attention of `width` rows a slot reads the cache up to `Rows.bound` rather than what is committed."""
        return True

    def angles(self, inverse_frequencies: Tensor, scale: float, position: Tensor, dtype: torch.dtype) -> Angles:
        """Cosines and sines of the rows, in whatever form `attention_input` wants."""
        return rotary_angles(inverse_frequencies, scale, position, dtype)

    def normed(self, stream: Stream, norm: RMSNorm) -> Tensor:
        """Norm of the stream, [R, H]; makes an addition that was left open."""
        normed: Tensor = norm(stream.x)
        return normed

    def attention_input(
        self, attention: Attention, stream: Stream, norm: RMSNorm, angles: Angles, cache: KVCache | None, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, projections, qk-norm and rotation of all rows; K/V also go to the cache's scratch.

        Returns:
            q [R, Hq, D], k and v [R, Hkv, D].
        """
        x = self.normed(stream, norm)
        if attention.enter is not None:
            x = attention.enter(x)[: angles[0].shape[0]]
        q, k, v = attention.project(x)
        q, k = rotate(q, *angles), rotate(k, *angles)
        if cache is not None:
            cache.write_scratch(layer, k, v)
        return q, k, v

    def attention_output(self, attention: Attention, mixed: Tensor, stream: Stream) -> Stream:
        """The stream with the output projection of [R, Hq * D] added."""
        out = linear(mixed, attention.o_proj)
        return Stream(x=stream.x + (out if attention.leave is None else attention.leave(out)))

    def normed_linear(self, x: Tensor, layer: nn.Linear, norm: RMSNorm) -> Tensor:
        """norm(layer(x)) of rows [R, K], [R, N]."""
        normed: Tensor = norm(layer(x))
        return normed

    def append_context(self, x: Tensor, heads: ContextHeads, count: Tensor, cache: KVCache) -> None:
        """Write K and V of context rows behind the committed lengths, in all layers, and lengthen them.

        Args:
            x: [S, P, H], what the heads project.
            heads: of the cache's layers.
            count: int64 [S], how many of a slot's P rows are real; what does not fit is dropped.
            cache: whose context they are.
        """
        slots, width = x.shape[:2]
        position = (cache.length[:-1, None] + torch.arange(width, device=x.device)).flatten()
        angles = rotary_angles(heads.frequencies, heads.factor, position, x.dtype)
        page, offset = cache.destination(count, width)
        k, v = heads.project(x.flatten(0, 1))
        k = rotate(k.flatten(1, 2), *angles).view_as(k)
        k, v = (both.view(slots, width, *both.shape[1:]) for both in (k, v))
        for layer in range(heads.layers):
            cache.append(layer, k[:, :, layer], v[:, :, layer], page, offset)
        cache.advance(count)

    def commit(self, cache: KVCache, path: Tensor, count: Tensor) -> None:
        """See `KVCache.commit`."""
        cache.commit(path, count)

    def mlp(self, mlp: MLP, stream: Stream, norm: RMSNorm) -> Stream:
        """The stream with the feed-forward's output added."""
        fed: Tensor = mlp(self.normed(stream, norm))
        return Stream(x=stream.x + fed)

    def top_candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best tokens of each row, best first, and their log-probabilities.

        Args:
            logits: [..., V].
            k: at most V.

        Returns:
            ids int64 [..., k] and log-probabilities fp32 [..., k]. Which of equals come first is topk's affair here;
            the kernels take the lowest ids.
        """
        wide = logits.float()
        best, ids = wide.topk(k, -1)
        return ids, best - wide.logsumexp(-1, keepdim=True)


def make_backend(name: str, device: torch.device) -> Reference:
    """A backend by name.

    Args:
        name: "reference", "triton", or "auto": triton on CUDA devices, the reference elsewhere.
        device: where the model lives.

    Raises:
        ValueError: an unknown name, or a backend that this device cannot run.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "reference"
    if name == "reference":
        return Reference()
    if name != "triton":
        raise ValueError(f"unknown kernels '{name}'; known: auto, reference, triton")
    if device.type != "cuda":
        raise ValueError(f"kernels 'triton' need a CUDA device, the model is on '{device}'; use 'reference'")
    from .kernels.backend import TritonBackend

    return TritonBackend()
