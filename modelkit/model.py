"""The one Transformer: embedding, blocks, final norm, head, assembled from a `ModelConfig`.

One forward over flat rows serves prefill, plain decoding and tree verification. Knows nothing of drafting.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .backend import Plan, Reference, Stream
from .borders import Border, Layout, Stage, Vocabulary
from .cache import KVCache
from .config import ModelConfig
from .functional import linear, soft_cap
from .layers import Attention, Block, RMSNorm
from .rows import Rows, chain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Result of a forward.

    Attributes:
        hidden: [R, H], after the final norm: what `Transformer.head` takes.
        taps: [R, K * H], residual streams after the tapped layers side by side; None when none was asked for.
    """

    hidden: Tensor
    taps: Tensor | None


class Transformer(nn.Module):
    """Decoder-only model of any supported family. Parameter names are the checkpoint's, less the prefix `model.`.

    Attributes:
        own: layers that this process runs, the only ones whose caches it has.
        layout: what spread the model over processes; None: nothing did. It has set the four below (see `borders`).
        enter: of the residual stream, from the embedding; leave: of normed hidden states and tapped features.
        stage: where layers are spread.
        vocabulary: where embedding and head are spread.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.tie()
        self.register_buffer("inverse_frequencies", None, persistent=False)
        self.backend = Reference()
        self.own = range(config.num_hidden_layers)
        self.layout: Layout | None = None
        self.enter: Border | None = None
        self.leave: Border | None = None
        self.stage: Stage | None = None
        self.vocabulary: Vocabulary | None = None

    inverse_frequencies: Tensor | None

    def tie(self) -> None:
        """Make the head the embedding (same storage); called again after loading replaced the embedding."""
        self.lm_head.weight = self.embed_tokens.weight

    def prepare(self) -> None:
        """Make what is computed rather than loaded, on the model's device."""
        config = self.config
        frequencies = config.rope.inverse_frequencies(config.head_dim)
        self.inverse_frequencies = frequencies.to(self.embed_tokens.weight.device)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return self.embed_tokens.weight.dtype

    @property
    def attention(self) -> Attention:
        """Of the first layer here; all are alike."""
        return attentions(self.layers, self.own)[0]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the layers here."""
        return tuple(self.config.windows[index] for index in self.own)

    def new_cache(self, *, slots: int, capacity: int, scratch: int, page_size: int | None = None) -> KVCache:
        """An empty cache of this model's shape on its device; see `KVCache`."""
        with self.device:
            return KVCache(
                layers=len(self.own), heads=self.attention.kv_heads, head_dim=self.config.head_dim, slots=slots,
                capacity=capacity, scratch=scratch, page_size=page_size, dtype=self.dtype,
            )  # fmt: skip

    def forward(self, rows: Rows, cache: KVCache | None, taps: tuple[int, ...] = ()) -> Output:
        """Run all layers on flat rows; fresh K/V stays in the cache's scratch until `KVCache.commit`.

        Args:
            rows: R rows; see `Rows`.
            cache: their context; None for none at all.
            taps: 0-based layer ids whose output (the residual stream after the layer, also for the last one before
                the final norm) is wanted, in the order of the result's features.
        """
        assert self.inverse_frequencies is not None, "prepare() was not called"
        rope = self.config.rope
        angles = self.backend.angles(self.inverse_frequencies, rope.attention_factor, rows.position, self.dtype)
        plans = self.plans(rows, cache)
        stream = entering(self.embed(rows.token), self.enter, self.stage)
        tapped: dict[int, Stream] = {}
        for index in self.own:
            plan = plans[self.config.windows[index]]
            stream = self.layers[index](stream, angles, plan, self.backend, cache, index - self.own.start)
            if index in taps:
                tapped[index] = stream
        last = stream if self.stage is None else Stream(x=self.stage.leave(stream.value()))
        hidden = self.backend.normed(last, self.norm)
        features = None
        if taps:
            features = torch.cat([tapped[i].value() if i in tapped else torch.zeros_like(stream.x) for i in taps], -1)
            features = features if self.stage is None else self.stage.collect(features)
            features = features if self.leave is None else self.leave(features)[: rows.count]
        if self.leave is not None:
            hidden = self.leave(hidden)[: rows.count]
        return Output(hidden=hidden, taps=features)

    def plans(self, rows: Rows, cache: KVCache | None) -> dict[int | None, Plan]:
        """What the layers of one window share in a forward, by window."""
        group = self.attention.heads // self.attention.kv_heads
        return {
            window: self.backend.plan(rows, cache, window, group=group, dtype=self.dtype)
            for window in dict.fromkeys(self.windows)
        }

    def embed(self, token: Tensor) -> Tensor:
        """Embeddings [.., H] of token ids."""
        if self.vocabulary is not None:
            return self.vocabulary.embed(token, self.embed_tokens.weight)
        embedded: Tensor = self.embed_tokens(token)
        return embedded

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [.., V] of normed hidden states [.., H], soft-capped where the config says so.

        Of this process's part of the vocabulary, where there is such a thing and `vocabulary` does not gather them.
        """
        return self.deliver(self._own_logits(hidden))

    def whole_head(self, hidden: Tensor) -> Tensor:
        """As `head`, but of the whole vocabulary wherever its parts are."""
        logits = self._own_logits(hidden)
        return logits if self.vocabulary is None else self.vocabulary.gather(logits)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        return soft_cap(linear(hidden, self.lm_head), self.config.final_logit_softcapping)

    def deliver(self, logits: Tensor) -> Tensor:
        """What this process's rows of the head give [.., V], as samplers and drafters want it."""
        return logits if self.vocabulary is None else self.vocabulary.deliver(logits)

    def top_candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best tokens of logits as `head` gives them; see `Reference.top_candidates`."""
        if self.vocabulary is None:
            return self.backend.top_candidates(logits, k)
        return self.vocabulary.top_candidates(logits, k, self.backend.top_candidates)

    @torch.no_grad()
    def score(self, token_ids: Tensor) -> Tensor:
        """One full forward, no cache kept; for evaluation and tests.

        Args:
            token_ids: int64 [B, T], no padding.

        Returns:
            logits [B, T, V].

        Raises:
            ValueError: not a 2-D integer tensor, or an id outside the vocabulary.
        """
        if token_ids.dim() != 2 or token_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"token_ids must be an integer tensor [B, T], got {token_ids.dtype} {list(token_ids.shape)}"
            )
        if not token_ids.numel():
            raise ValueError(f"token_ids is empty: {list(token_ids.shape)}")
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.config.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        batch, length = token_ids.shape
        start = torch.zeros(batch, dtype=torch.int64, device=self.device)
        rows = chain(
            token=token_ids.to(self.device).long(), start=start, count=start + length, rows=batch * length, bound=0
        )
        return self.whole_head(self(rows, None).hidden).view(batch, length, -1)


def entering(embedded: Tensor, enter: Border | None, stage: Stage | None) -> Stream:
    """The residual stream that this process's layers start from, out of embeddings [R, H]."""
    x = embedded if enter is None else enter(embedded)
    return Stream(x=x if stage is None else stage.enter(x))


def attentions(layers: nn.ModuleList, own: range) -> list[Attention]:
    """Of the layers of this process."""
    found = []
    for index in own:
        block = layers[index]
        assert isinstance(block, Block)
        found.append(block.self_attn)
    return found
