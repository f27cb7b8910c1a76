"""Values that pass between the steps of a round. Frozen; tensors are padded to fixed shapes on the model's device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from modelkit.rows import WORD, Rows, flatten, pack_bits, words
from sampling import Draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a drafter thinks comes after each slot's anchor.

    Attributes:
        ids: int64 [S, L, k], candidate tokens of each depth; distinct within a depth unless `edge` tells them apart.
        score: fp32 [S, L, k], log-probability of each candidate. Without `edge` it holds whatever the parent is (the
            marginals of a block drafter) and falls along k; with `edge` it is used at the first depth only, in any
            order. -inf: no candidate.
        edge: fp32 [S, L, k, k] or None, log-probability of candidate j at depth d after candidate i at depth d - 1,
            `edge[:, d, i, j]`; depth 0 is unused.
        draws: set if the candidates were drawn: `ids` are in the order of the draws then, and the scores are those of
            ranks, not of what was drawn. A tree that takes its shape from the scores alone, and of each parent's
            children only leading ranks, leaves sampling exact; see docs/concepts/sampling.md.
    """

    ids: Tensor
    score: Tensor
    edge: Tensor | None = None
    draws: Draws | None = None

    @property
    def depth(self) -> int:
        """L."""
        return self.ids.shape[1]

    @property
    def candidates(self) -> int:
        """k."""
        return self.ids.shape[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """A draft tree a slot. Node 0 is the root (the anchor); parents come before children; siblings differ in token.

    Attributes:
        token: int64 [S, N].
        parent: int64 [S, N], -1 for the root.
        depth: int64 [S, N].
        valid: bool [S, N]; an invalid node holds no candidate and is never accepted, nor is anything below it.
        ancestors: int32 [S, N, W], bit j % 32 of word j // 32: node j is the node itself or an ancestor of it.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    valid: Tensor
    ancestors: Tensor

    def flat(self, length: Tensor, active: Tensor, rows: int, bound: int) -> Rows:
        """The nodes of all trees as rows behind the committed lengths.

        Args:
            length: int64 [S], committed positions.
            active: bool [S]; the rows of other slots are not valid.
            rows: R, see `flatten`.
            bound: see `Rows.bound`.
        """
        return flatten(
            token=self.token, parent=self.parent, valid=self.valid & active[:, None], ancestors=self.ancestors,
            position=length[:, None] + self.depth, count=torch.where(active, self.token.shape[1], 0), rows=rows,
            bound=bound,
        )  # fmt: skip

    @classmethod
    def root_only(cls, anchor: Tensor) -> Tree:
        """Trees of the anchors [S] alone: a plain step."""
        one = torch.ones_like(anchor)[:, None]
        own = one.int()[:, :, None]
        return cls(token=anchor[:, None], parent=-one, depth=one - 1, valid=one.bool(), ancestors=own)

    @classmethod
    def line(cls, *, token: Tensor, valid: Tensor) -> Tree:
        """Trees of one path: the parent of every node is the one before it."""
        slots, nodes = token.shape
        node = torch.arange(nodes, device=token.device).expand(slots, nodes)
        seen = torch.ones(nodes, nodes, dtype=torch.bool, device=token.device).tril()
        return cls(
            token=token, parent=node - 1, depth=node, valid=valid, ancestors=pack_bits(seen).expand(slots, -1, -1)
        )

    @classmethod
    def make(cls, *, token: Tensor, parent: Tensor, depth: Tensor, valid: Tensor, max_depth: int) -> Tree:
        """Complete a tree from its parents.

        Args:
            token: see the class.
            parent: see the class.
            depth: see the class.
            valid: see the class.
            max_depth: L, a host constant.
        """
        slots, nodes = token.shape
        node = torch.arange(nodes, dtype=torch.int32, device=token.device)[:, None]
        word = torch.arange(words(nodes), device=token.device)
        own = torch.where(node // WORD == word, torch.ones_like(node) << node % WORD, 0)
        ancestors = own.expand(slots, -1, -1)
        jump = parent.clamp(min=0)
        # Doubling: after i rounds a node knows its 2^i nearest ancestors.
        for _ in range(max_depth.bit_length()):
            ancestors = ancestors | ancestors.gather(1, jump[:, :, None].expand_as(ancestors))
            jump = jump.gather(1, jump)
        return cls(token=token, parent=parent, depth=depth, valid=valid, ancestors=ancestors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """What the target says about a round's rows.

    Attributes:
        rows: R rows, the trees' nodes laid out flat.
        logits: [R, V] after each row; as host processors left them, if there are any.
        taps: [R, K * H], features of the tapped layers; None when nothing is tapped.
        fault: int64 [R], what host processors found or made wrong, an index into `sampling.FAULTS`; None without them.
    """

    rows: Rows
    logits: Tensor
    taps: Tensor | None
    fault: Tensor | None = None
