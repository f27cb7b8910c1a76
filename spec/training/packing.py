"""Documents packed into sequences of one length, in an order that step and seed alone decide.

Nothing here is drawn on the way: the batch of a step can be made without those before it, so a run that is resumed sees
what it would have seen. Knows token ids and nothing of models.
"""

from __future__ import annotations

import dataclasses
import zlib

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
class Batch:
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

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in dataclasses.fields(self)})


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
        self._usable, self._size = usable, size.tolist()
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
            order = self._usable[torch.randperm(len(self._usable), generator=generator)].tolist()
            packed: list[list[int]] = []
            room = 0
            for document in order:
                if self._size[document] > room:
                    packed.append([])
                    room = self.length
                packed[-1].append(document)
                room -= self._size[document]
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
        shape = (self.sequences, self.length)
        whole = {name: torch.zeros(shape, dtype=torch.int64) for name in ("token", "position")}
        document = torch.full(shape, PADDING)
        supervised = torch.zeros(shape, dtype=torch.bool)
        for row, documents in enumerate(chosen):
            place = 0
            for local, index in enumerate(documents):
                size, start = self._size[index], int(self.corpus.offset[index])
                here = slice(place, place + size)
                whole["token"][row, here] = self.corpus.token[start : start + size].long()
                whole["position"][row, here] = torch.arange(size)
                document[row, here] = local
                supervised[row, place + int(self.corpus.prompt[index]) : place + size] = True
                place += size
        return Batch(token=whole["token"], document=document, position=whole["position"], supervised=supervised)
