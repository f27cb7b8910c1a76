"""Embedding and head of which each process holds some rows: reductions over the vocabulary, a small collective each.

Implements `sampling.vocabulary.Vocabulary` and `modelkit.borders.Vocabulary` without importing them. Logits stay where
they are; what travels is a few numbers a row. Only `gather` makes whole logits, for those who cannot do without.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .collectives import Group

Candidates = tuple[Tensor, Tensor]


class VocabularyShard:
    """Our part of the vocabulary.

    Args:
        group: the processes that share it, in the order of their parts.
        starts: the first id of each process's part, and the vocabulary's size.
    """

    # Filters look for a threshold in so many bits at a time; 2^8 numbers a row travel for each.
    digit_bits = 8

    def __init__(self, group: Group, starts: list[int]) -> None:
        assert len(starts) == group.size + 1 and starts[-1] < 2**24, "ids travel as fp32"
        self._group, self._starts = group, starts
        self.whole_size, self.first = starts[-1], starts[group.rank]
        self.size = starts[group.rank + 1] - self.first
        self.gathers = False

    def embed(self, token: Tensor, weight: Tensor) -> Tensor:
        """Whole embeddings [.., H]: the process that has the row gives it, the others zeros."""
        index, inside = self.own(token, torch.ones_like(token))
        return self._group.all_reduce(F.embedding(index, weight) * inside[..., None].to(weight.dtype))

    def gathering(self) -> None:
        """From now on give out whole logits; nobody needs the reductions then."""
        self.gathers = True

    def deliver(self, logits: Tensor) -> Tensor:
        """Our part of the logits, or all of them if `gathers` is set."""
        return self.gather(logits) if self.gathers else logits

    def gather(self, logits: Tensor) -> Tensor:
        """Our part [.., V of this process] -> [.., V]."""
        widest = max(b - a for a, b in zip(self._starts, self._starts[1:], strict=False))
        parts = self._group.all_gather(F.pad(logits, (0, widest - self.size))).unbind(0)
        sizes = [b - a for a, b in zip(self._starts, self._starts[1:], strict=False)]
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def own(self, token: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of global ids (0 where they are not ours) and their weights (then 0 as well); equal shapes."""
        inside = (token >= self.first) & (token < self.first + self.size)
        return torch.where(inside, token - self.first, 0), torch.where(inside, weight, 0)

    def amax(self, x: Tensor) -> Tensor:
        """The greatest of [.., V], [.., 1]; NaN if there is one."""
        return self._group.all_gather(x.amax(-1, keepdim=True)).amax(0)

    def argmax(self, x: Tensor) -> Tensor:
        """Its id, int64 [R]; the lowest of equals."""
        return self.best(x)[0]

    def best(self, x: Tensor) -> Candidates:
        """Ids int64 [R] and values [R] of the greatest."""
        index = x.argmax(-1, keepdim=True)
        value = x.gather(-1, index)
        pair = torch.cat([value.float(), (index + self.first).float()], -1)
        everybody = self._group.all_gather(pair)  # [processes, R, 2]
        winner = everybody[..., 0].argmax(0)[None, :, None].expand(1, -1, 2)
        found = everybody.gather(0, winner)[0]
        return found[:, 1].long(), found[:, 0]

    def add(self, x: Tensor) -> Tensor:
        """The sum over all parts of what each has summed over its own, of any shape."""
        return self._group.all_reduce(x)

    def top_candidates(self, logits: Tensor, k: int, local: object) -> Candidates:
        """Each process's best k, and of those the best, with log-probabilities by everybody's normaliser."""
        if self.gathers:
            return local(logits, k)  # type: ignore[operator, no-any-return]
        few = min(k, self.size)
        ids, score = local(logits, few)  # type: ignore[operator]
        value = logits.gather(-1, ids).float()
        normaliser = value[..., :1] - score[..., :1]
        pad = (0, k - few)
        message = torch.cat(
            [F.pad(value, pad, value=-torch.inf), F.pad((ids + self.first).float(), pad), normaliser], -1
        )
        everybody = self._group.all_gather(message).movedim(0, -2)  # [.., processes, 2 k + 1]
        best, place = everybody[..., :k].flatten(-2).topk(k, -1)
        found = everybody[..., k : 2 * k].flatten(-2).gather(-1, place).long()
        return found, best - everybody[..., -1].logsumexp(-1, keepdim=True)
