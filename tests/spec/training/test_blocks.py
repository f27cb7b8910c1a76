"""Blocks of packed texts: what they see, what they learn, and that training computes what inference computes."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dflash_helpers as tiny  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from modelkit import load_model  # noqa: E402
from modelkit.rows import chain  # noqa: E402
from spec.draft.dflash import DFlashDrafter  # noqa: E402
from spec.draft.dflash_config import DFlashConfig  # noqa: E402
from spec.draft.dflash_model import DFlashModel  # noqa: E402
from spec.training import trainer  # noqa: E402
from spec.training.attention import TextVisibility, dense_attention, flex_attention  # noqa: E402
from spec.training.blocks import (  # noqa: E402
    BlockVisibility,
    documents,
    draft_hidden,
    draw_anchors,
    make_blocks,
    next_anchors,
    teacher_rows,
)
from spec.training.config import OptimiserConfig  # noqa: E402
from spec.training.features import Features, target_features  # noqa: E402
from spec.training.loss import LOSSES  # noqa: E402
from spec.training.packing import Batch  # noqa: E402
from spec.training.trainer import DraftLoss  # noqa: E402

KINDS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "windowed": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5,
        "use_sliding_window": True,
    },
    "windowed, whole block": {
        "layer_types": ["sliding_attention"] * 3, "sliding_window": 4, "use_sliding_window": True, "is_causal": False,
    },
}  # fmt: skip
SIZES = [[11, 17], [23]]  # documents of each sequence
LENGTH, PROMPT = 30, 4
ANCHORS = [[5, 8, 16, 20], [4, 12, 13, 0]]  # two documents; the last of the second sequence is none
DRAWN = [[True] * 4, [True, True, True, False]]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tiny.save_folder(tmp_path_factory.mktemp("t") / "target", tiny.TARGET, tiny.random_weights(tiny.TARGET, 1))
    return load_model(folder, dtype="float32", device="cpu", kernels="reference")


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(5)
    token = torch.randint(tiny.MASK, (len(SIZES), LENGTH), generator=generator)
    document, position = torch.full_like(token, -1), torch.zeros_like(token)
    supervised = torch.zeros_like(token, dtype=torch.bool)
    for row, sizes in enumerate(SIZES):
        start = 0
        for number, size in enumerate(sizes):
            document[row, start : start + size] = number
            position[row, start : start + size] = torch.arange(size)
            supervised[row, start + PROMPT : start + size] = True
            start += size
    return Batch(token=token, document=document, position=position, supervised=supervised)


@pytest.fixture
def blocks(batch):
    return make_blocks(batch, torch.tensor(ANCHORS), torch.tensor(DRAWN), block=tiny.BLOCK, mask_token=tiny.MASK)


def drafter_folder(tmp_path, kind):
    config = tiny.changed(tiny.DRAFTER, KINDS[kind])
    return tiny.save_folder(tmp_path / "drafter", config, tiny.random_weights(config, 2))


def model_of(folder, target):
    from safetensors.torch import load_file

    published = DFlashConfig.from_file(folder / "config.json")
    model = DFlashModel(published, target.config.hidden_size)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.prepare()
    return model


def hidden_of(model, target, batch, blocks, features=None, embedded=None):
    features = target_features(target, model.config.target_layer_ids, batch).taps if features is None else features
    embedded = F.embedding(blocks.token, target.embed_tokens.weight) if embedded is None else embedded
    return draft_hidden(model, features, embedded, batch, blocks, dense_attention)


def spans(batch):
    """(sequence, start, end) of each document."""
    for row, sizes in enumerate(SIZES):
        start = 0
        for size in sizes:
            yield row, start, start + size
            start += size


@torch.no_grad()
def alone(target, taps, tokens):
    count = torch.tensor([len(tokens)])
    rows = chain(token=tokens[None], start=count * 0, count=count, rows=len(tokens), bound=0)
    return target(rows, None, taps).taps


def test_the_next_rounds_anchors(batch, blocks):
    # Behind the others: a place of another document, one that two blocks lead to, an answer's last token, no block.
    length = torch.tensor([2, 3, 5, 1, 1, 9, 10, 1])
    anchor, drawn = next_anchors(batch, blocks, length)
    assert anchor.tolist() == [[7, 21, 0, 0], [5, 21, 0, 0]]
    assert drawn.tolist() == [[True, True, False, False]] * 2


def test_packed_documents_are_blind_to_each_other_in_the_target(target, batch):
    with torch.no_grad():
        features = target_features(target, (3, 1), batch).taps
    for row, start, end in spans(batch):
        expected = alone(target, (3, 1), batch.token[row, start:end])
        torch.testing.assert_close(features[row, start:end], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_training_computes_what_inference_computes(kind, target, batch, blocks, tmp_path):
    folder = drafter_folder(tmp_path, kind)
    hidden = hidden_of(model_of(folder, target), target, batch, blocks)
    logits = F.linear(hidden, target.lm_head.weight)
    drafter = DFlashDrafter(DFlashDrafter.Config(path=str(folder)), target=target, slots=1, capacity=64, candidates=2)
    for row, start, end in spans(batch):
        for number, anchor in enumerate(ANCHORS[row]):
            if not DRAWN[row][number] or not start <= anchor < end:
                continue
            drafter.reset(0)
            before = batch.token[row, start:anchor]
            count = torch.tensor([len(before)])
            drafter.ingest(alone(target, drafter.taps, before)[None], count)
            served = drafter.block_logits(batch.token[row, anchor : anchor + 1], count, len(before))[0]
            torch.testing.assert_close(logits[row, number], served, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_learns_from_its_own_rows_and_the_text_before_its_anchor(kind, target, batch, blocks, tmp_path):
    model = model_of(drafter_folder(tmp_path, kind), target)
    features = target_features(target, model.config.target_layer_ids, batch).taps.detach().requires_grad_()
    embedded = F.embedding(blocks.token, target.embed_tokens.weight).detach().requires_grad_()
    hidden = hidden_of(model, target, batch, blocks, features, embedded)
    for row, number in ((0, 1), (0, 2), (1, 1)):
        got = torch.autograd.grad(hidden[row, number].square().sum(), (features, embedded), retain_graph=True)
        context, rows = (g.abs().sum(-1) > 0 for g in got)
        anchor = ANCHORS[row][number]
        own = batch.document[row] == batch.document[row, anchor]
        seen = torch.zeros_like(context)
        seen[row, :anchor] = own[:anchor]
        assert not (context & ~seen).any()  # neither the anchor's own features, nor later ones, nor other documents
        if "windowed" not in kind or kind == "windowed":  # a full layer reaches back to the beginning
            assert torch.equal(context, seen)
        assert context[row, anchor - 1]
        mine = torch.zeros_like(rows)
        mine[row, number] = True
        assert torch.equal(rows, mine)


def test_inside_a_block(batch):
    visible = {}
    for causal in (False, True):
        visibility = BlockVisibility(
            document=batch.document, anchor=torch.tensor(ANCHORS), block=tiny.BLOCK, causal=causal, window=None
        )
        mask = visibility.dense()[0, 0, :, LENGTH:]
        visible[causal] = mask[: tiny.BLOCK, : tiny.BLOCK]
        assert mask.sum() == visible[causal].sum() * len(ANCHORS[0])
    assert visible[False].all()
    assert torch.equal(visible[True], torch.ones_like(visible[True]).tril())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 5), (False, 3)])
@torch.no_grad()
def test_flex_attention_sees_what_the_mask_shows(batch, causal, window):
    blocks = BlockVisibility(
        document=batch.document, anchor=torch.tensor(ANCHORS), block=tiny.BLOCK, causal=causal, window=window
    )
    text, generator = TextVisibility(document=batch.document, window=window), torch.Generator().manual_seed(1)
    for visibility in (blocks, text):
        q = torch.randn(2, 6, visibility.rows, 16, generator=generator)
        k, v = (torch.randn(2, 2, visibility.keys, 16, generator=generator) for _ in range(2))
        expected = dense_attention(visibility)(q, k, v, 0.3)
        torch.testing.assert_close(flex_attention(visibility)(q, k, v, 0.3), expected, rtol=1e-4, atol=1e-5)


def test_labels_are_the_tokens_at_the_same_positions(batch):
    anchors = [[5, 8, 10, 20], *ANCHORS[1:]]  # of the block at 10, a last token, the rows reach into the next answer
    blocks = make_blocks(batch, torch.tensor(anchors), torch.tensor(DRAWN), block=tiny.BLOCK, mask_token=tiny.MASK)
    for row, number in ((row, number) for row in range(2) for number in range(4)):
        anchor = anchors[row][number]
        assert blocks.token[row, number].tolist() == [int(batch.token[row, anchor])] + [tiny.MASK] * 5
        assert blocks.position[row, number, 0] == batch.position[row, anchor]
        end = next(end for r, start, end in spans(batch) if r == row and start <= anchor < end)
        for j in range(tiny.BLOCK):
            place = anchor + j
            real = DRAWN[row][number] and j > 0 and place < end and bool(batch.supervised[row, place])
            assert bool(blocks.real[row, number, j]) == real
            if real:
                assert blocks.label[row, number, j] == batch.token[row, place]


@torch.no_grad()
def test_soft_labels_are_what_the_target_says_of_the_tokens_behind_the_anchor(target, batch, blocks):
    hidden = target_features(target, (3, 1), batch, hidden=True).hidden
    logits = F.linear(teacher_rows(hidden, blocks), target.lm_head.weight).view(2, 4, tiny.BLOCK - 1, -1)
    for row, start, end in spans(batch):
        said = target.score(batch.token[row, start:end][None])[0]
        for number, anchor in enumerate(ANCHORS[row]):
            count = min(tiny.BLOCK - 1, end - 1 - anchor)
            if DRAWN[row][number] and start <= anchor < end:
                own = said[anchor - start : anchor - start + count]
                torch.testing.assert_close(logits[row, number, :count], own, rtol=1e-4, atol=1e-4)


def test_row_j_is_compared_with_the_token_at_anchor_plus_j(target, batch, blocks, monkeypatch):
    """A drafter whose row j says the token at its own position is right everywhere; shifted either way it is not."""
    model = DFlashModel(DFlashConfig.from_dict(tiny.DRAFTER, "x"), target.config.hidden_size)
    loss = LOSSES.build({"name": "decay"})
    config = OptimiserConfig(steps=1)
    module = DraftLoss(model, target, loss, config, compiled=False)
    monkeypatch.setattr(trainer, "block_loss", lambda hidden, label, real, *_, **__: (hidden.argmax(-1) == label)[real])
    for shift, right in ((0, True), (1, False), (-1, False)):
        said = F.one_hot(blocks.label.roll(shift, -1), tiny.VOCAB).float()
        monkeypatch.setattr(trainer, "draft_hidden", lambda *_, said=said: said)
        assert bool(module(batch, Features(taps=None, hidden=None), blocks).float().mean() > 0.5) == right


def test_blocks_of_a_document_share_a_number(batch, blocks):
    """[5, 8 | 16, 20] and [4, 12, 13], and what is no block stands apart: its number counts for nothing."""
    number = documents(batch, blocks)
    assert number.tolist()[:7] == [0, 0, 1, 1, 2, 2, 2] and int(number.max()) < number.numel()


def test_anchors_are_where_serving_puts_them(batch):
    """The first answer token and all behind it, but the last: it has no successor."""
    may = torch.zeros(len(SIZES), LENGTH, dtype=torch.bool)
    for row, start, end in spans(batch):
        may[row, start + PROMPT : end - 1] = True
    found = torch.zeros_like(may)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        anchor, drawn = draw_anchors(batch, 4, generator)
        assert drawn.all() and (anchor[:, 1:] > anchor[:, :-1]).all()
        found.scatter_(1, anchor, True)
    assert torch.equal(found, may)
    anchor, drawn = draw_anchors(batch, 40, generator)
    assert drawn.sum(1).tolist() == may.sum(1).tolist() and anchor.shape == (2, 40)
    assert (anchor[~drawn] == 0).all()
