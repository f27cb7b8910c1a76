"""The DFlash network: a few Qwen3 blocks that read the target's features as context (arXiv 2602.06036, appendix A.3).

Per layer the same k/v weights serve context features and block tokens; context rows enter them directly after
`hidden_norm(fc(.))` and depend on nothing else, so they are computed once and cached. Knows nothing of rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelkit.backend import Plan, Reference, Stream
from modelkit.borders import Border, Stage
from modelkit.cache import KVCache
from modelkit.context import ContextHeads
from modelkit.layers import Attention, Block, RMSNorm, fuse_projections
from modelkit.model import attentions, entering
from modelkit.rows import Rows, chain

from .dflash_config import DFlashConfig


class FeatureProjection(nn.Linear):
    """`fc`; `leave` is the border of its output."""

    leave: Border | None = None

    def forward(self, features: Tensor) -> Tensor:
        """[.., K * H] -> [.., H]."""
        out = super().forward(features)
        return out if self.leave is None else self.leave(out)


class DFlashModel(nn.Module):
    """Parameters and names of a published drafter; no embedding and no head of its own.

    `own`, `enter`, `leave` and `stage` are those of `modelkit.model.Transformer`.
    """

    def __init__(self, config: DFlashConfig, target_hidden: int) -> None:
        super().__init__()
        model = config.model
        self.config = config
        self.fc = FeatureProjection(len(config.target_layer_ids) * target_hidden, model.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.num_hidden_layers))
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.register_buffer("inverse_frequencies", None, persistent=False)
        self.context: ContextHeads | None = None
        self.backend = Reference()
        self.own = range(model.num_hidden_layers)
        self.enter: Border | None = None
        self.leave: Border | None = None
        self.stage: Stage | None = None

    inverse_frequencies: Tensor

    def fuse(self) -> None:
        """One projection instead of several within the layers, and a copy of their weights for the context of all."""
        fuse_projections(self)
        own, factor = attentions(self.layers, self.own), self.config.model.rope.attention_factor
        self.context = ContextHeads(own, self.inverse_frequencies, factor, self.config.block_size)

    def prepare(self) -> None:
        """Make what is computed rather than loaded; before `fuse`."""
        frequencies = self.config.model.rope.inverse_frequencies(self.config.model.head_dim)
        self.inverse_frequencies = frequencies.to(self.fc.weight.device)

    def ingest(self, features: Tensor, count: Tensor, cache: KVCache) -> None:
        """Append the context K/V of committed rows to the drafter's cache.

        Args:
            features: [S, P, K * H] target taps of the rows behind the cache's length.
            count: int64 [S], how many of the P are real.
            cache: the drafter's own; its length advances by `count`.
        """
        assert self.context is not None, "fuse() was not called"
        slots, width = features.shape[:2]
        x = self.backend.normed_linear(features.flatten(0, 1), self.fc, self.hidden_norm)
        self.backend.append_context(x.view(slots, width, -1), self.context, count, cache)

    def forward(self, embedded: Tensor, rows: Rows, bidirectional: Tensor, cache: KVCache) -> Tensor:
        """Run the block.

        Args:
            embedded: [R, H] input embeddings of anchor and masks, scaled.
            rows: the block as causal rows.
            bidirectional: int32 [R, W], the ancestor bits of layers that are not causal.
            cache: context K/V.

        Returns:
            [R, H] after the final norm.
        """
        plans: dict[tuple[int | None, bool], Plan] = {}
        rope = self.config.model.rope
        stream = entering(embedded, self.enter, self.stage)
        angles = self.backend.angles(self.inverse_frequencies, rope.attention_factor, rows.position, embedded.dtype)
        group = self.attention.heads // self.attention.kv_heads
        for index in self.own:
            kind = self.config.model.windows[index], self.config.causal[index]
            if kind not in plans:
                bits = None if kind[1] else bidirectional
                plans[kind] = self.backend.plan(rows, cache, kind[0], group=group, dtype=embedded.dtype, ancestors=bits)
            stream = self.layers[index](stream, angles, plans[kind], self.backend, cache, index - self.own.start)
        if self.stage is not None:
            stream = Stream(x=self.stage.leave(stream.value()))
        hidden = self.backend.normed(stream, self.norm)
        return hidden if self.leave is None else self.leave(hidden)[: rows.count]

    @property
    def attention(self) -> Attention:
        """Of the first layer here; all are alike."""
        return attentions(self.layers, self.own)[0]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the layers here."""
        return tuple(self.config.model.windows[index] for index in self.own)

    def new_cache(self, *, slots: int, capacity: int, scratch: int) -> KVCache:
        """An empty cache of the context; see `KVCache`."""
        with self.fc.weight.device:
            return KVCache(
                layers=len(self.own), heads=self.attention.kv_heads, head_dim=self.config.model.head_dim, slots=slots,
                capacity=capacity, scratch=scratch, dtype=self.fc.weight.dtype,
            )  # fmt: skip


def block_rows(token: Tensor, start: Tensor, bound: int) -> tuple[Rows, Tensor]:
    """Rows of a block [S, B] at positions start.., and the ancestor bits of bidirectional layers."""
    slots, width = token.shape
    whole = torch.full_like(start, width)
    rows = chain(token=token, start=start, count=whole, rows=slots * width, bound=bound)
    both = chain(token=token, start=start, count=whole, rows=slots * width, bound=bound, causal=False)
    return rows, both.ancestors
