"""Packing: every document once an epoch, and a batch that only step and seed decide."""

import itertools
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from spec.training.packing import PADDING, Batches, Corpus  # noqa: E402


def test_all_answers_to_a_prompt_are_held_out_together():
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, (40, 3), generator=draw).tolist()
    texts = [[*prompts[i % 40], i, i, i] for i in range(200)]
    sizes = torch.tensor([len(text) for text in texts])
    corpus = Corpus(
        token=torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        offset=torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), prompt=torch.full((200,), 3),
    )  # fmt: skip
    sides = corpus.split(0.25)
    found = []
    for side in sides:
        starts = side.offset.tolist()
        found.append([side.token[a:b].tolist() for a, b in itertools.pairwise(starts)])
    assert sorted(found[0] + found[1]) == sorted(texts) and len(found[1]) > 0
    assert not {tuple(text[:3]) for text in found[0]} & {tuple(text[:3]) for text in found[1]}
    assert len(found[1]) % 5 == 0 and 20 <= len(found[1]) <= 80
    assert corpus.split(0.0)[1].documents == 0


LENGTH = 20


def corpus(sizes, prompts):
    """Document i is made of the numbers 100 i, 100 i + 1, ..."""
    token = torch.cat([100 * i + torch.arange(n) for i, n in enumerate(sizes)]).int()
    return Corpus(token=token, offset=torch.tensor([0, *sizes]).cumsum(0), prompt=torch.tensor(prompts))


@pytest.fixture
def documents():
    sizes = [5 + 3 * i % 11 for i in range(40)] + [50, 6, 21]
    return corpus(sizes, [2] * 40 + [3, 5, 2])  # the last but one has a single answer token: useless


def contents(batch):
    """(document number, its tokens, positions, supervised) of every document of a batch."""
    for token, document, position, supervised in zip(*vars(batch).values(), strict=True):
        for number in sorted(set(document.tolist()) - {PADDING}):
            here = document == number
            yield int(token[here][0]) // 100, token[here], position[here], supervised[here]
        assert not supervised[document == PADDING].any()


def test_a_document_stays_whole(documents):
    batches = Batches(documents, length=LENGTH, sequences=4, seed=1)
    for step in range(5):
        for number, token, position, supervised in contents(batches[step]):
            size = min(int(documents.offset[number + 1] - documents.offset[number]), LENGTH)
            assert token.tolist() == [100 * number + i for i in range(size)]
            assert position.tolist() == list(range(size))
            assert supervised.tolist() == [i >= documents.prompt[number] for i in range(size)]


def test_an_epoch_has_each_document_once(documents):
    batches = Batches(documents, length=LENGTH, sequences=1, seed=1)
    orders = []
    for epoch in range(2):
        steps = [step for step in range(200) if batches.place(step)[0] == epoch]
        seen = [number for step in steps for number, *_ in contents(batches[step])]
        assert Counter(seen) == Counter(set(range(43)) - {41})
        orders.append(seen)
    assert orders[0] != orders[1]


def test_a_batch_needs_no_batch_before_it(documents):
    def make(seed=1):
        return Batches(documents, length=LENGTH, sequences=4, seed=seed)

    whole, last = make(), 17
    for step in range(last):
        whole[step]
    for a, b in zip(vars(whole[last]).values(), vars(make()[last]).values(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(whole[last].token, make(2)[last].token)


def test_processes_share_an_epoch(documents):
    parts = [Batches(documents, length=LENGTH, sequences=2, seed=1, rank=rank, world=2) for rank in range(2)]
    whole = Batches(documents, length=LENGTH, sequences=4, seed=1)
    for step in range(7):
        assert torch.equal(torch.cat([part[step].token for part in parts]), whole[step].token)


def test_refused():
    with pytest.raises(ValueError, match="no supervised token: none of 2 documents"):
        Batches(corpus([9, 30], [8, 20]), length=20, sequences=1, seed=0)
    with pytest.raises(ValueError, match="1 documents fill 1 sequences of 20 tokens; one step takes 2"):
        Batches(corpus([9], [3]), length=20, sequences=2, seed=0)
