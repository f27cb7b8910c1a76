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
        document: int64 [N], the same number for blocks of the same document.
    """

    loss: Tensor
    right: Tensor
    real: Tensor
    document: Tensor


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

    def backward(self, logits: Tensor, gradient: Tensor, hidden: Tensor) -> Tensor:
        """Gradient of the hidden states, in their dtype, for one of the logits that `logits` gave for them."""
        if self.cap is not None:
            gradient = gradient * (1 - (logits / self.cap).square())
        return ((gradient * self.multiplier).to(self.weight.dtype) @ self.weight).to(hidden.dtype)


ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]


def make_chunk_loss(loss: Loss, head: Head, soft: float = 0.0) -> ChunkLoss:
    """The weighted sum over each of a chunk of blocks, with its gradient.

    A position's cross-entropy is with its token, by a share of `soft` with the target's distribution there. The head is
    frozen, so what training wants of the logits is the gradient of the hidden states alone: made at once, while the
    logits are there, it needs neither to keep them nor to compute them again.

    Returns:
        A function (hidden [N, L, H], label int64 [N, L], real bool [N, L], teacher [N, L, H] or None) -> (sums [N],
        their gradient [N, L, H] in the dtype of `hidden`, right bool [N, L]). The head makes the target's distributions
        of `teacher`.
    """

    def chunk_loss(
        hidden: Tensor, label: Tensor, real: Tensor, teacher: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = head.logits(hidden)
        scaled = logits.log_softmax(-1)
        nll = -scaled.gather(-1, label[..., None])[..., 0]
        weights = loss.weights(nll, real)
        wanted = (torch.arange(logits.shape[-1], device=label.device) == label[..., None]).float()
        entropy = nll
        if teacher is not None:
            wanted = (1 - soft) * wanted + soft * head.logits(teacher).softmax(-1)
            entropy = -(wanted * scaled).sum(-1)
        gradient = head.backward(logits, (scaled.exp() - wanted) * weights[..., None], hidden)
        return (entropy * weights).sum(-1), gradient, (logits.argmax(-1) == label) & real

    return chunk_loss


class _Known(torch.autograd.Function):
    """A loss whose gradient has been computed already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer.to(gradient.dtype), None, None


def lengths(right: Tensor, real: Tensor) -> Tensor:
    """Acceptance length of a greedy chain from each anchor, fp32 [N]; arguments as in `Outcome`."""
    return 1 + (right & real).float().cumprod(1).sum(1)


def mean_of_document(length: Tensor, counted: Tensor, document: Tensor) -> Tensor:
    """For each block, the mean length of its document's counted blocks, fp32 [N]; 0 where there are none.

    Args:
        length: fp32 [N].
        counted: bool [N].
        document: int64 [N], below N.
    """
    total = torch.zeros_like(length).index_add_(0, document, length * counted)
    count = torch.zeros_like(length).index_add_(0, document, counted.to(length.dtype))
    return (total / count.clamp(min=1))[document]


def balanced(right: Tensor, real: Tensor, document: Tensor, power: float) -> Tensor:
    """What blocks weigh, fp32 [N], on average 1: the mean acceptance length m of their document, to minus `power`.

    Decoding takes 1 / m rounds a token, so with m the rounds fall by 1 / m squared: text that is easy to draft, loops
    most of all, has little left to save, and anchors drawn evenly over all text are mostly there.
    """
    length, labelled = lengths(right, real), real.any(1)
    # Blocks that the end of a text cuts short look like rejections: they count where there are no others.
    mean, any_mean = (mean_of_document(length, kind, document) for kind in (real.all(1), labelled))
    mean = torch.where(mean > 0, mean, any_mean)
    weight = torch.where(labelled, mean.clamp(min=1) ** -power, 0)
    return weight * labelled.sum() / weight.sum().clamp(min=1e-6)


def block_loss(
    hidden: Tensor, label: Tensor, real: Tensor, document: Tensor, *, loss: Loss, chunk_loss: ChunkLoss,
    chunk_blocks: int, balance: float = 0.0, teacher: Tensor | None = None,
) -> Outcome:  # fmt: skip
    """Loss of all blocks; the logits of at most `chunk_blocks` blocks are in memory at once, and are computed once.

    Args:
        hidden: [N, L, H], the drafter's output at the positions behind the anchors.
        label: int64 [N, L], the tokens there; anything where `real` is False.
        real: bool [N, L].
        document: int64 [N], below N, the same for blocks of the same document.
        loss: the strategy.
        chunk_loss: see `make_chunk_loss`.
        chunk_blocks: blocks of a chunk.
        balance: see `balanced`.
        teacher: [N, L, H], the target's hidden states that predict the labels; see `make_chunk_loss`.
    """
    # Contiguous: what a compiled chunk gets has one layout, whatever it was cut out of.
    with torch.no_grad():
        states, label, real = hidden.detach().contiguous(), label.contiguous(), real.contiguous()
        chunks = (slice(start, start + chunk_blocks) for start in range(0, len(label), chunk_blocks))
        parts = [chunk_loss(states[at], label[at], real[at], None if teacher is None else teacher[at]) for at in chunks]
        sums, gradients, right = (torch.cat(part) for part in zip(*parts, strict=True))
        share = balanced(right, real, document, balance) / loss.normaliser(real)
        total = (sums * share).sum()
        gradient = gradients * share.to(hidden.dtype)[:, None, None]
    known: Tensor = _Known.apply(hidden, total, gradient)  # type: ignore[no-untyped-call]
    return Outcome(loss=known, right=right, real=real, document=document)


def acceptance(outcome: Outcome) -> tuple[Tensor, Tensor]:
    """How a greedy chain would fare on the text, from the rows alone.

    Only blocks with a label at every position count: at the end of a text shorter ones would look like rejections.

    Returns:
        fp32 [L], share of right tokens at each depth whatever came before; and the mean acceptance length, a scalar.
    """
    length, blocks = whole_lengths(outcome)
    right = outcome.right & outcome.real.all(1, keepdim=True)
    return right.sum(0) / blocks.clamp(min=1), torch.where(blocks > 0, length / blocks.clamp(min=1), 1.0)


def whole_lengths(outcome: Outcome) -> Tensor:
    """Sum of the acceptance lengths of the blocks with a label at every position, and how many they are; fp32 [2]."""
    whole = outcome.real.all(1)
    return torch.stack([(lengths(outcome.right, outcome.real) * whole).sum(), whole.sum().float()])


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
