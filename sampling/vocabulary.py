"""The vocabulary dimension of logits, which a process may hold a part of: every reduction over it goes through here.

Strategies call these instead of `x.amax(-1)` and its like, and work on parts without knowing. `Whole` is one process
that has it all: the plain operations, nothing more.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Vocabulary(Protocol):
    """Reductions over all of the vocabulary, of logits [.., V] of which this process has some columns.

    Attributes:
        whole_size: V.
        first: id of our first column.
        size: our columns.
        digit_bits: how many bits at a time a search for a threshold may count; each costs 2^bits numbers a row.
    """

    whole_size: int
    first: int
    size: int
    digit_bits: int

    def amax(self, x: Tensor) -> Tensor:
        """The greatest, [.., 1]; NaN if there is one."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Its id, int64 [R]; the lowest of equals."""
        ...

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both of [R, V]: ids int64 [R] and values [R]."""
        ...

    def add(self, x: Tensor) -> Tensor:
        """The sum over everybody's columns of what each has summed over its own; any shape."""
        ...

    def own(self, token: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of ids and the weights of what is to happen there: 0 for ids that are not ours. Equal shapes."""
        ...


class Whole:
    """All of the vocabulary in one process.

    Args:
        size: V.
    """

    digit_bits = 11

    def __init__(self, size: int) -> None:
        self.whole_size, self.first, self.size = size, 0, size

    def amax(self, x: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return x.amax(-1, keepdim=True)

    def argmax(self, x: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return x.argmax(-1)

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Vocabulary`."""
        token = x.argmax(-1)  # a NaN counts as the greatest
        return token, x.gather(1, token[:, None])[:, 0]

    def add(self, x: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return x

    def own(self, token: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `Vocabulary`."""
        return token, weight
