"""The table of drafters and what one must offer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

from torch import Tensor

from modelkit.registry import Registry

from ..state import RoundState
from ..types import Proposal

MAX_BLOCK = 257


class Perturb(Protocol):
    """See `sampling.base.Sampler.perturb`."""

    def __call__(self, logits: Tensor, depth: int = 0) -> Tensor:
        """Logits [S, D, V] for the tokens `depth + 1` and on behind the anchor."""
        ...


def unperturbed(logits: Tensor, depth: int = 0) -> Tensor:
    """Logits as they are: what greedy decoding wants."""
    return logits


class Drafter(Protocol):
    """A strategy that proposes what follows each slot's anchor.

    Built as `cls(config, target=, slots=, capacity=, candidates=)`.

    Attributes:
        taps: target layers (0-based) whose output the drafter needs; () for none.
        features: K * H, width of those outputs side by side.
        depth: L, how many tokens after the anchor it proposes.
        rows: rows of the target's cache scratch it uses itself in `propose` (0 for most).
    """

    Config: ClassVar[type[Any]]
    taps: tuple[int, ...]
    features: int
    depth: int
    rows: int

    def propose(self, state: RoundState, bound: int, perturb: Perturb = unperturbed) -> Proposal:
        """Candidates for every slot, on the device and in fixed shapes.

        Args:
            state: anchors, tokens, committed lengths, and the features of the rows committed last.
            bound: host-known upper bound of every committed length.
            perturb: the sampler's change of logits [S, D, V], D depths from the given one (0) on; call it before
                candidates are taken and scored. The candidates must be the best of what it returns, best first: for
                some samplers they are draws, from the logits that a depth was last called with.
        """
        ...

    def ingest(self, features: Tensor, count: Tensor) -> None:
        """Take the tapped features of prompt rows just committed; never called for a drafter that taps nothing.

        The rows follow those of the last call, in the slot that `reset` named last. On the device and in fixed shapes.

        Args:
            features: [1, P, K * H].
            count: int64 [1], how many of the P are real; the others are padding.
        """
        ...

    def reset(self, slot: int) -> None:
        """Forget one slot: a new request begins there (host side)."""
        ...


DRAFTERS: Registry[Drafter] = Registry("draft")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Length of a draft, in the two spellings users know. Base of the drafters' configs.

    Attributes:
        block_size: tokens of a block, the anchor counted.
        num_speculative_tokens: the same without the anchor.
    """

    block_size: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes out of range and pairs that disagree."""
        given = self.block_size
        if self.num_speculative_tokens is not None:
            implied = self.num_speculative_tokens + 1
            if given is not None and given != implied:
                raise ValueError(
                    f"block_size = {given} (anchor counted) and num_speculative_tokens = "
                    f"{self.num_speculative_tokens} (anchor not counted) disagree; give one of them"
                )
            given = implied
        if given is not None and not 2 <= given <= MAX_BLOCK:
            raise ValueError(f"block_size = {given}: tokens of a block, the anchor counted, must be in 2..{MAX_BLOCK}")

    def resolved_block_size(self, default: int) -> int:
        """The block size asked for, or the default."""
        if self.block_size is not None:
            return self.block_size
        return default if self.num_speculative_tokens is None else self.num_speculative_tokens + 1
