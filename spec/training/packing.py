"""Documents packed into sequences of one length, in an order that step and seed alone decide.

Nothing here is drawn on the way: the batch of a step can be made without those before it, so a run that is resumed sees
what it would have seen. Knows token ids and nothing of models.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

PADDING = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents side by side.

    Attributes:
        token: int32 [N].
        offset: int64 [D + 1], where documents begin.
        prompt: int64 [D], tokens at a document's beginning that are not supervised.
    """

    token: Tensor
    offset: Tensor
    prompt: Tensor

    @property
    def documents(self) -> int:
        """D."""
        return self.prompt.shape[0]

    def split(self, part: float) -> tuple[Corpus, Corpus]:
        """Most documents, and about `part` of them; all answers to one prompt are on the same side.

        The side is a function of the prompt's tokens, so it stays the same when documents are added.
        """
        text, begin = self.token.numpy(), self.offset.tolist()
        prompts = [text[at : at + n].tobytes() for at, n in zip(begin, self.prompt.tolist(), strict=False)]
        aside = torch.tensor([zlib.crc32(prompt) < part * 2**32 for prompt in prompts], dtype=torch.bool)
        return self._only(~aside), self._only(aside)

    def _only(self, wanted: Tensor) -> Corpus:
        size = self.offset[1:] - self.offset[:-1]
        offset = torch.nn.functional.pad(size[wanted].cumsum(0), (1, 0))
        return Corpus(token=self.token[wanted.repeat_interleave(size)], offset=offset, prompt=self.prompt[wanted])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensors:
    """Tensors that travel together; the fields of its subclasses."""

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{field.name: change(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def to(self, device: torch.device) -> Self:
        """The same on a device; from pinned memory it arrives behind what is queued there, and nobody waits."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """The same in pinned memory of the host."""
        return self._each(lambda tensor: tensor.pin_memory())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch(Tensors):
    """S packed sequences of T tokens.

    Attributes:
        token: int64 [S, T]; 0 at the unused end.
        document: int64 [S, T], number of the document within its sequence; `PADDING` at the unused end.
        position: int64 [S, T], within the document.
        supervised: bool [S, T], tokens the drafter is to predict.
    """

    token: Tensor
    document: Tensor
    position: Tensor
    supervised: Tensor


class Batches:
    """Step number -> batch, for one of several processes.

    Each epoch shuffles the documents, fills sequences with them one after another (a document longer than a sequence is
    cut, one that does not fit any more begins the next), and leaves out what does not make a whole step.

    Args:
        corpus: all documents.
        length: T.
        sequences: S.
        seed: of the order.
        rank, world: which of how many processes this is; each gets other sequences.

    Raises:
        ValueError: no document has two supervised tokens in a row within T, or they do not fill one step.
    """

    def __init__(
        self, corpus: Corpus, *, length: int, sequences: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        self.corpus, self.length, self.sequences, self.seed = corpus, length, sequences, seed
        self.rank, self.world = rank, world
        size = (corpus.offset[1:] - corpus.offset[:-1]).clamp(max=length)
        usable = (size - corpus.prompt >= 2).nonzero()[:, 0]
        if not len(usable):
            raise ValueError(
                f"no supervised token: none of {corpus.documents} documents has two answer tokens within "
                f"sequence_length = {length}"
            )
        self._usable, self._size = usable, size
        self._epochs: list[int] = []  # steps of the epochs before each
        self._packed: tuple[int, list[list[int]]] = (-1, [])
        if not self._steps(0):
            raise ValueError(
                f"{len(usable)} documents fill {len(self._pack(0))} sequences of {length} tokens; one step takes "
                f"{sequences * world}: write more documents, or make [train] sequences or sequence_length smaller"
            )

    def _pack(self, epoch: int) -> list[list[int]]:
        """Document numbers of each sequence."""
        if self._packed[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = self._usable[torch.randperm(len(self._usable), generator=generator)]
            packed: list[list[int]] = []
            room = 0
            for document, size in zip(order.tolist(), self._size[order].tolist(), strict=True):
                if size > room:
                    packed.append([])
                    room = self.length
                packed[-1].append(document)
                room -= size
            self._packed = (epoch, packed)
        return self._packed[1]

    def _steps(self, epoch: int) -> int:
        return len(self._pack(epoch)) // (self.sequences * self.world)

    @property
    def steps_of_an_epoch(self) -> int:
        """Of the first one; others may differ by a few."""
        return self._steps(0)

    def place(self, step: int) -> tuple[int, int]:
        """Epoch of a step, and its number within it."""
        while not self._epochs or step >= self._epochs[-1]:
            before = self._epochs[-1] if self._epochs else 0
            self._epochs.append(before + max(self._steps(len(self._epochs)), 1))
        epoch = next(i for i, end in enumerate(self._epochs) if step < end)
        return epoch, step - (self._epochs[epoch - 1] if epoch else 0)

    def __getitem__(self, step: int) -> Batch:
        """The batch of a step."""
        epoch, number = self.place(step)
        packed = self._pack(epoch)
        first = (number * self.world + self.rank) * self.sequences
        chosen = [packed[i % len(packed)] for i in range(first, first + self.sequences)]
        index = torch.tensor([document for documents in chosen for document in documents])
        count = torch.tensor([len(documents) for documents in chosen])
        row, begin = torch.arange(len(count)).repeat_interleave(count), count.cumsum(0) - count
        size = self._size[index]
        start = size.cumsum(0) - size
        # Of each token: its document among these, and its place in the document and in the batch.
        owner = torch.arange(len(index)).repeat_interleave(size)
        position = torch.arange(len(owner)) - start[owner]
        at = (row * self.length + start - start[begin][row])[owner] + position

        def spread(values: Tensor, empty: int) -> Tensor:
            whole = torch.full((self.sequences * self.length,), empty, dtype=values.dtype)
            return whole.index_put_((at,), values).view(self.sequences, self.length)

        return Batch(
            token=spread(self.corpus.token[self.corpus.offset[index][owner] + position].long(), 0),
            document=spread((torch.arange(len(index)) - begin[row])[owner], PADDING), position=spread(position, 0),
            supervised=spread(position >= self.corpus.prompt[index][owner], False),
        )  # fmt: skip
