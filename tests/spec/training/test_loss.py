"""Losses: what positions weigh, that chunks change nothing, and the figures that training shows."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from spec.training.loss import (  # noqa: E402
    LOSSES,
    Head,
    Outcome,
    acceptance,
    balanced,
    block_loss,
    make_chunk_loss,
    spine_counts,
)

N, L, H, V = 7, 4, 8, 11
DOCUMENT = torch.tensor([0, 0, 1, 2, 2, 2, 3])


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, L, H, generator=generator)
    label = torch.randint(V, (N, L), generator=generator)
    real = torch.arange(L) < torch.tensor([4, 4, 2, 0, 4, 3, 4])[:, None]
    return hidden, label, real, Head(weight=torch.randn(V, H, generator=generator), multiplier=1.0, cap=None)


def test_decay_is_the_weighted_mean(case):
    hidden, label, real, head = case
    loss = LOSSES.build({"name": "decay", "gamma": 2.0})
    found = block_loss(
        hidden, label, real, DOCUMENT, loss=loss, chunk_loss=make_chunk_loss(loss, head), chunk_blocks=3
    ).loss
    total = weight = 0.0
    for n in range(N):
        for k in range(L):
            if real[n, k]:
                w = 2.718281828459045 ** (-k / 2.0)
                total += w * -float(F.linear(hidden[n, k], head.weight).log_softmax(-1)[label[n, k]])
                weight += w
    assert float(found) == pytest.approx(total / weight, rel=1e-4)


def test_dpace_weighs_positions_by_what_they_add_to_the_acceptance_length():
    log_q = torch.tensor([[-0.1, -0.7, -0.2, -1.5]], requires_grad=True)
    real = torch.ones(1, 4, dtype=torch.bool)
    expected = torch.autograd.grad(log_q.cumsum(1).exp().sum(), log_q)[0]
    weights = LOSSES.build({"name": "dpace", "alpha": 0.0}).weights(-log_q.detach(), real)
    torch.testing.assert_close(weights, expected)
    smoothed = LOSSES.build({"name": "dpace", "alpha": 1.0}).weights(-log_q.detach(), real)
    assert smoothed.tolist() == [[4.0, 3.0, 2.0, 1.0]]
    real[0, 2:] = False
    cut = LOSSES.build({"name": "dpace", "alpha": 1.0}).weights(-log_q.detach(), real)
    assert cut.tolist() == [[2.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", LOSSES.names())
def test_chunks_change_neither_loss_nor_gradient(name, case):
    hidden, label, real, head = case
    loss = LOSSES.build({"name": name})
    got = []
    for chunk in (1, 3, N):
        at = hidden.clone().requires_grad_()
        out = block_loss(
            at, label, real, DOCUMENT, loss=loss, chunk_loss=make_chunk_loss(loss, head), chunk_blocks=chunk
        )
        out.loss.backward()
        got.append((out.loss.detach(), at.grad, out.right))
    for other in got[1:]:
        torch.testing.assert_close(other, got[0])
    assert not got[0][1][~real].any()  # what has no label teaches nothing
    assert got[0][1][real].any(-1).all()


def test_no_gradient_through_the_weights(case):
    """Confidence decides how much a position counts; it is not itself to be raised by that."""
    hidden, label, real, head = case
    loss = LOSSES.build({"name": "dpace", "alpha": 0.0})
    at = hidden.clone().requires_grad_()
    block_loss(
        at, label, real, DOCUMENT, loss=loss, chunk_loss=make_chunk_loss(loss, head), chunk_blocks=N
    ).loss.backward()
    nll = F.cross_entropy(head.logits(hidden).flatten(0, 1), label.flatten(), reduction="none").view(N, L)
    other = hidden.clone().requires_grad_()
    again = F.cross_entropy(head.logits(other).flatten(0, 1), label.flatten(), reduction="none").view(N, L)
    ((again * loss.weights(nll, real)).sum() / loss.normaliser(real)).backward()
    torch.testing.assert_close(at.grad, other.grad)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_soft_labels_share_the_cross_entropy_with_the_targets_distribution(cap, case):
    hidden, label, real, head = case
    head, loss = Head(weight=head.weight, multiplier=0.7, cap=cap), LOSSES.build({"name": "decay"})
    teacher = torch.randn(N, L, H, generator=torch.Generator().manual_seed(7))
    at = hidden.clone().requires_grad_()
    chunk_loss = make_chunk_loss(loss, head, 0.25)
    found = block_loss(at, label, real, DOCUMENT, loss=loss, chunk_loss=chunk_loss, chunk_blocks=3, teacher=teacher)
    found.loss.backward()
    other = hidden.clone().requires_grad_()
    wanted = 0.75 * F.one_hot(label, V) + 0.25 * head.logits(teacher).softmax(-1)
    entropy = F.cross_entropy(head.logits(other).flatten(0, 1), wanted.flatten(0, 1), reduction="none").view(N, L)
    weights = loss.weights(entropy.detach(), real)
    expected = (entropy * weights).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(at.grad, other.grad)


def test_logits_of_one_chunk_are_in_memory_at_once(case):
    hidden, label, real, head = case
    loss = LOSSES.build({"name": "decay"})
    shapes = []

    def watched(*args):
        shapes.append(args[0].shape[0])
        return make_chunk_loss(loss, head)(*args)

    at = hidden.clone().requires_grad_()
    block_loss(at, label, real, DOCUMENT, loss=loss, chunk_loss=watched, chunk_blocks=3).loss.backward()
    assert shapes == [3, 3, 1]  # and never again: the gradient is made with them


def test_figures_count_whole_blocks_only():
    right = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 0]]).bool()
    real = torch.ones(4, 4, dtype=torch.bool)
    real[3, 2:] = False
    accuracy, length = acceptance(Outcome(loss=torch.zeros(()), right=right & real, real=real, document=DOCUMENT))
    assert accuracy.tolist() == pytest.approx([2 / 3, 1, 2 / 3, 1])
    assert float(length) == pytest.approx(1 + (2 + 4 + 0) / 3)


def test_scaled_and_capped_logits():
    head = Head(weight=torch.eye(3), multiplier=2.0, cap=1.5)
    assert head.logits(torch.tensor([1.0, 0.0, -1.0])).tolist() == pytest.approx([1.3053, 0.0, -1.3053], abs=1e-3)


@pytest.mark.parametrize(("table", "message"), [
    ({"name": "dpase"}, "did you mean 'dpace'"), ({"name": "decay", "gamma": 0.0}, "gamma = 0.0: must be positive"),
    ({"name": "dpace", "alpha": 2.0}, "alpha = 2.0: must be in"),
])  # fmt: skip
def test_refused(table, message):
    with pytest.raises(ValueError, match=message):
        LOSSES.build(table)


def test_rows_behind_right_ones_and_behind_the_first_wrong_one():
    right = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.bool)
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    counts = spine_counts(Outcome(loss=torch.zeros(()), right=right, real=real, document=torch.arange(4)))
    # Behind right ones: 1 and 0 of the first block, 0 of the third, 1 of the last. Behind the first wrong one: the
    # first block's last, the second's second, the third's third; what is further on does not count.
    assert counts.tolist() == [[4, 2], [3, 2]]


def test_blocks_weigh_by_the_rounds_that_their_document_takes():
    right = torch.tensor(
        [[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]], dtype=torch.bool
    )
    real = torch.ones(7, 3, dtype=torch.bool)
    real[3] = False  # no block at all
    real[4, 2] = False  # cut short: it counts where its document has no whole one
    real[6, 2] = False
    document = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    means = torch.tensor([(4 + 1) / 2, (4 + 1) / 2, 2.0, torch.inf, 3.0, 4.0, 4.0])
    expected = means**-2
    torch.testing.assert_close(balanced(right, real, document, 2.0), expected * 6 / expected.sum())
    assert balanced(right, real, document, 0.0).tolist() == [1, 1, 1, 0, 1, 1, 1]


def test_balance_scales_what_blocks_teach(case):
    hidden, label, real, head = case
    label[:3] = head.logits(hidden[:3]).argmax(-1)  # these are right
    loss, got = LOSSES.build({"name": "dpace"}), []
    for balance in (0.0, 2.0):
        at = hidden.clone().requires_grad_()
        out = block_loss(
            at, label, real, DOCUMENT, loss=loss, chunk_loss=make_chunk_loss(loss, head), chunk_blocks=3,
            balance=balance,
        )  # fmt: skip
        out.loss.backward()
        got.append(at.grad)
    weight = balanced(out.right, real, DOCUMENT, 2.0)
    torch.testing.assert_close(got[1], got[0] * weight[:, None, None])
    assert weight.max() > 1.05
