"""What a block's rows are trained for: weights of the positions, and the loss over the vocabulary in chunks.

Row j of a block is compared with the token at the same position. Knows hidden states and labels, not how they came.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from modelkit.functional import soft_cap
from modelkit.registry import Registry


class Loss(Protocol):
    """How much each position of a block counts."""

    Config: ClassVar[type[Any]]

    def weights(self, nll: Tensor, real: Tensor) -> Tensor:
        """Weights [N, L] of the positions behind the anchors.

        Args:
            nll: fp32 [N, L], cross-entropy of each position, without gradient.
            real: bool [N, L], positions that have a label.
        """
        ...

    def normaliser(self, real: Tensor) -> Tensor:
        """What the weighted sum over all blocks is divided by; a scalar above 0."""
        ...


LOSSES: Registry[Loss] = Registry("loss")


@LOSSES.register("decay")
class PositionDecay:
    """Weight exp(-(k - 1) / gamma) at depth k; the weighted mean. Source: DFlash, arXiv 2602.06036, section 4.2."""

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """The paper takes gamma 7 for blocks of 16, 5 for 10, 4 for 8."""

        gamma: float = 7.0

        def __post_init__(self) -> None:
            if not self.gamma > 0:
                raise ValueError(f"gamma = {self.gamma}: must be positive")

    def __init__(self, config: Config) -> None:
        self.gamma = config.gamma

    def weights(self, nll: Tensor, real: Tensor) -> Tensor:
        """See the class."""
        return (-torch.arange(real.shape[1], device=real.device) / self.gamma).exp() * real

    def normaliser(self, real: Tensor) -> Tensor:
        """The weights' sum."""
        return self.weights(real.float(), real).sum().clamp(min=1e-6)


@LOSSES.register("dpace")
class DPace:
    """Weights from the drafter's own confidence q, as the expected acceptance length depends on each position.

    The derivative of sum_k q_1 .. q_k by log q_j is the sum of those products from k = j on; q is smoothed towards 1,
    so that positions behind a weak one still learn. The mean over blocks. Source: D-PACE, arXiv 2605.18810.
    """

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """`alpha`: share of the smoothing, 0 takes the confidence as it is, 1 forgets it."""

        alpha: float = 0.5

        def __post_init__(self) -> None:
            if not 0 <= self.alpha <= 1:
                raise ValueError(f"alpha = {self.alpha}: must be in [0, 1]")

    def __init__(self, config: Config) -> None:
        self.alpha = config.alpha

    def weights(self, nll: Tensor, real: Tensor) -> Tensor:
        """See the class."""
        smooth = self.alpha + (1 - self.alpha) * (-nll).exp()
        reached = torch.where(real, smooth, 1.0).cumprod(1) * real
        return reached.flip(1).cumsum(1).flip(1) * real

    def normaliser(self, real: Tensor) -> Tensor:
        """Blocks with a label."""
        return real.any(1).sum().clamp(min=1).float()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A batch's loss and what its rows got right.

    Attributes:
        loss: scalar.
        right: bool [N, L], the drafter's best token is the label.
        real: bool [N, L], positions that have a label.
    """

    loss: Tensor
    right: Tensor
    real: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The target's frozen head as the drafter uses it.

    Attributes:
        weight: [V, H].
        multiplier: of the logits.
        cap: of the logits, see `soft_cap`.
    """

    weight: Tensor
    multiplier: float
    cap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [.., V] of hidden states [.., H]."""
        return soft_cap(F.linear(hidden, self.weight).float() * self.multiplier, self.cap)


ChunkLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def make_chunk_loss(loss: Loss, head: Head) -> ChunkLoss:
    """The weighted sum over a chunk of blocks as a function (hidden [N, L, H], label [N, L], real) -> (sum, right)."""

    def chunk_loss(hidden: Tensor, label: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        logits = head.logits(hidden)
        nll = F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none").view(label.shape)
        weights = loss.weights(nll.detach(), real).detach()
        return (nll * weights).sum(), (logits.detach().argmax(-1) == label) & real

    return chunk_loss


def block_loss(
    hidden: Tensor, label: Tensor, real: Tensor, *, loss: Loss, chunk_loss: ChunkLoss, chunk_blocks: int
) -> Outcome:
    """Loss of all blocks; the logits of at most `chunk_blocks` blocks are in memory at once, backwards too.

    Args:
        hidden: [N, L, H], the drafter's output at the positions behind the anchors.
        label: int64 [N, L], the tokens there; anything where `real` is False.
        real: bool [N, L].
        loss: the strategy.
        chunk_loss: see `make_chunk_loss`.
        chunk_blocks: blocks of a chunk.
    """
    parts = []
    for start in range(0, len(label), chunk_blocks):
        chunk = slice(start, start + chunk_blocks)
        parts.append(
            checkpoint(
                chunk_loss, hidden[chunk], label[chunk], real[chunk], use_reentrant=False, preserve_rng_state=False
            )
        )
    total = torch.stack([part[0] for part in parts]).sum()
    return Outcome(loss=total / loss.normaliser(real), right=torch.cat([part[1] for part in parts]), real=real)


def acceptance(outcome: Outcome) -> tuple[Tensor, Tensor]:
    """How a greedy chain would fare on the text, from the rows alone.

    Only blocks with a label at every position count: at the end of a text shorter ones would look like rejections.

    Returns:
        fp32 [L], share of right tokens at each depth whatever came before; and the mean acceptance length, a scalar.
    """
    whole = outcome.real.all(1, keepdim=True)
    blocks = whole.sum().clamp(min=1)
    right = outcome.right & whole
    return right.sum(0) / blocks, 1 + right.long().cumprod(1).sum() / blocks


def spine_counts(outcome: Outcome) -> Tensor:
    """How often a depth's token is right behind right ones only, and behind the first wrong one.

    A draft that goes on below a sibling stands behind the first wrong token of the spine, so the ratio of the two
    shares is what `spine_first` discounts with. The first depth has nothing before it and does not count.

    Returns:
        int64 [2, 2]: rows behind right ones, behind the first wrong one; columns how many, how many of them right.
    """
    right, real = outcome.right & outcome.real, outcome.real
    so_far = right.long().cumprod(1).bool()
    on = so_far[:, :-1]
    start = torch.ones_like(on[:, :1])
    off = torch.cat([start, on[:, :-1]], 1) & ~on & real[:, :-1]
    pairs = [torch.stack([(kind & real[:, 1:]).sum(), (kind & right[:, 1:]).sum()]) for kind in (on, off)]
    return torch.stack(pairs)
