"""Block-diffusion drafting: one pass of a small network over [anchor, mask, ...] proposes a whole block.

Source: DFlash, arXiv 2602.06036; checkpoints in z-lab's format. Row j of the block predicts the token at the same
position (no shift); the anchor's own row is thrown away.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from modelkit.cache import Lane
from modelkit.functional import soft_cap
from modelkit.loading import build_on_meta, load_weights, random_weights
from modelkit.model import Transformer

from ..sources import drafter_folder, drafters, shape_file
from ..state import RoundState
from ..types import Proposal
from .base import DRAFTERS, BlockConfig, Perturb, unperturbed
from .dflash_config import DFlashConfig
from .dflash_model import DFlashModel, block_rows


@DRAFTERS.register("dflash")
class DFlashDrafter:
    """A published DFlash drafter folder beside the target it was trained for."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(BlockConfig):
        """`path` is the drafter's folder, or the name of a shipped one; see `spec/sources.py`.

        A block smaller than the trained one is fine; a larger one is refused.
        A shape in place of the folder gets random weights; engines admit it for timing only.
        """

        path: str = ""

        def __post_init__(self) -> None:
            BlockConfig.__post_init__(self)
            if not self.path:
                raise ValueError(
                    "path is missing: the folder of a DFlash drafter (config.json, model.safetensors), or a shipped "
                    f"one, {', '.join(drafters())}"
                )

    def __init__(self, config: Config, *, target: Transformer, slots: int, capacity: int, candidates: int) -> None:
        shape = shape_file(config.path)
        folder = Path(config.path) if shape else drafter_folder(config.path)
        published = DFlashConfig.from_file(shape or folder / "config.json")
        check_target(published, target, folder)
        self.off_spine = published.off_spine
        self.block = config.resolved_block_size(published.block_size)
        if self.block > published.block_size:
            raise ValueError(f"block_size = {self.block}: {folder} was trained with {published.block_size}")
        model = build_on_meta(lambda: DFlashModel(published, target.config.hidden_size))
        assert isinstance(model, DFlashModel)
        layout = None if target.layout is None else target.layout.of_drafter()
        if shape is None:
            load_weights(model, folder, dtype=target.dtype, device=target.device, layout=layout)
        else:
            random_weights(model, dtype=target.dtype, device=target.device, seed=1, layout=layout)
        model.prepare()
        model.fuse()
        model.backend = target.backend
        self.model, self.target, self.published = model.eval(), target, published
        self.taps = published.target_layer_ids
        self.features = len(self.taps) * target.config.hidden_size
        self.depth, self.rows = self.block - 1, 0
        self.candidates = min(candidates, target.config.vocab_size)
        self.cache = self.model.new_cache(slots=slots, capacity=capacity, scratch=slots * self.block)
        with target.device:
            self.lane = Lane(self.cache)

    def ingest(self, features: Tensor, count: Tensor) -> None:
        """Turn a prompt's features into context K/V."""
        self.model.ingest(features, count, self.lane)

    def propose(self, state: RoundState, bound: int, perturb: Perturb = unperturbed) -> Proposal:
        """Catch up with the rows committed last, then one pass over the block."""
        self.model.ingest(state.pending, state.pending_count, self.cache)
        state.pending_count.zero_()
        logits = perturb(self.block_logits(state.anchor, state.length, bound)[:, 1:])
        ids, score = self.target.top_candidates(logits, self.candidates)
        return Proposal(ids=ids, score=score)

    def block_logits(self, anchor: Tensor, start: Tensor, bound: int) -> Tensor:
        """Logits of every block row, the anchor's included, [S, B, V]; of a part of V as those of `Transformer.head`.

        Args:
            anchor: int64 [S].
            start: int64 [S], the anchors' positions (= committed lengths).
            bound: host-known upper bound of `start`.
        """
        published = self.published
        masks = anchor.new_full((anchor.shape[0], self.depth), published.mask_token_id)
        rows, bidirectional = block_rows(torch.cat([anchor[:, None], masks], 1), start, bound)
        embedded = self.target.embed(rows.token) * published.input_embedding_scale
        hidden = self.model(embedded, rows, bidirectional, self.cache)
        logits = F.linear(hidden, self.target.lm_head.weight)
        if published.output_multiplier != 1.0:  # the compiler would copy them for it
            logits = logits * published.output_multiplier
        logits = self.target.deliver(soft_cap(logits, published.final_logit_softcapping))
        return logits.view(anchor.shape[0], self.block, -1)

    def reset(self, slot: int) -> None:
        """Drop a slot's context."""
        self.cache.reset(slot)
        self.lane.enter(slot)


def check_target(published: DFlashConfig, target: Transformer, folder: Path) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        ValueError: hidden size, vocabulary, number of layers or ids do not fit.
    """
    have, theirs = target.config, published.model
    sizes = (
        ("hidden size", theirs.hidden_size, have.hidden_size),
        ("vocabulary", theirs.vocab_size, have.vocab_size),
        ("number of layers", published.num_target_layers, have.num_hidden_layers),
    )
    for what, wanted, found in sizes:
        if wanted not in (None, found):
            raise ValueError(
                f"{folder} drafts for a target whose {what} is {wanted}, this one's is {found}: set [draft] path to "
                'its own drafter, or name = "ngram", which needs none'
            )
    if max(published.target_layer_ids) >= have.num_hidden_layers:
        raise ValueError(
            f"{folder}: target_layer_ids {list(published.target_layer_ids)} go past the target's "
            f"{have.num_hidden_layers} layers"
        )
    if not 0 <= published.mask_token_id < have.vocab_size:
        raise ValueError(f"{folder}: mask_token_id {published.mask_token_id} is outside the vocabulary")
