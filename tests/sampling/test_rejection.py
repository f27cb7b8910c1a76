"""Strategies with drawn candidates: rejection and block verification against plain loops, and what guards them."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from rows_by_hand import slot_params, trees

from sampling import SAMPLERS, Draws, SamplingParams
from sampling.draws import DRAFT, INSTEAD, TEST
from sampling.noise import gumbel_noise, uniform_noise

LOW = torch.tensor(2**32 - 1)
V = 7


def build(name):
    return SAMPLERS.build({"name": name})


def drawn(sampler, count, depths, k, seed=0, temperature=1.0):
    """Slots with laws of their own, their draws, and the context of a tree or chain made of them; roots at 5, 6, ..."""
    make = torch.Generator().manual_seed(seed)
    ones = [SamplingParams(temperature=temperature, seed=seed * 1000 + s) for s in range(count)]
    params = slot_params(ones, vocab_size=V, features=sampler.features)
    start = torch.arange(count) + 5
    depth = torch.arange(1, depths + 1)
    score, log_q = sampler.draw(
        2 * torch.randn(count, depths, V, generator=make), start[:, None] + depth, depth, params
    )
    draws = Draws(ids=score.topk(k, -1).indices, log_q=log_q)
    if k == 1:
        tokens, parents = [[0, *row] for row in draws.ids[..., 0].tolist()], list(range(-1, depths))
    else:  # a root, k children, and k - 1 of the first and k of the second child's
        tokens = [[0, *a, *b[: k - 1], *b] for a, b in draws.ids.tolist()]
        parents = [-1, *[0] * k, *[1] * (k - 1), *[2] * k]
    nodes = dataclasses.replace(trees(tokens, parents, params, start=start), draws=draws)
    logits = 2 * torch.randn(len(nodes.token), V, generator=make)
    return nodes, logits


def noise(kind, stream, nodes, row, size):
    """The numbers of a row: its token's position, and its depth, which keeps rounds apart."""
    seed, at = nodes.params.seed[nodes.slot[row]][None], nodes.position[row][None] + 1
    return kind(seed, at, size, LOW, stream + 256 * (int(nodes.depth[row]) + 1))[0].double()


def recursive_rejection(p, q, children, u, g):
    """By the book, normalised at every step: the next token."""
    p, q = p.clone(), q.clone()
    for x, uniform in zip(children, u.tolist(), strict=False):
        if uniform < p[x] / q[x]:
            return x
        p = (p - q).clamp(min=0)
        p, q[x] = p / p.sum(), 0.0
        q = q / q.sum()
    return int((p.log() + g).argmax())


@pytest.mark.parametrize("k", [1, 3])
def test_rejection_is_the_recursive_rule(k):
    sampler = build("rejection")
    nodes, logits = drawn(sampler, 300, 2, k)
    p, path, kinds = logits.double().softmax(-1), [], set()
    accepted = sampler.accept(logits, nodes)
    for slot in range(300):
        row, tokens = slot * (len(nodes.token) // 300), []
        while True:
            depth = len(tokens)
            below = {int(nodes.token[c]): c for c in range(len(nodes.token)) if nodes.parent[c] == row}
            order = [] if depth == 2 else [x for x in nodes.draws.ids[slot, depth].tolist() if x in below]
            q = nodes.draws.log_q[slot, min(depth, 1)].double().exp()
            u, g = noise(uniform_noise, TEST, nodes, row, k), noise(gumbel_noise, INSTEAD, nodes, row, V)
            tokens.append(recursive_rejection(p[row], q, order, u, g))
            kinds.add((len(order), order.index(tokens[-1]) if tokens[-1] in order else None))
            if tokens[-1] not in below:
                break
            row = below[tokens[-1]]
        path.append(tokens)
    assert [[t for t in row if t >= 0] for row in accepted.token.tolist()] == path
    assert accepted.count.tolist() == [len(tokens) for tokens in path]
    assert {(k, rank) for rank in (None, *range(k))} <= kinds and (k == 1 or (k - 1, None) in kinds)


def test_block_verification_is_algorithm_2():
    sampler, gamma = build("block_verification"), 4
    nodes, logits = drawn(sampler, 300, gamma, 1)
    accepted, taus = sampler.accept(logits, nodes), []
    for slot in range(300):
        row = range(slot * (gamma + 1), (slot + 1) * (gamma + 1))
        p, q = logits[row].double().softmax(-1), nodes.draws.log_q[slot].double().exp()
        x = nodes.token[row].tolist()[1:]
        reach, tau, left = 1.0, 0, (p[0] - q[0]).clamp(min=0)
        for i in range(1, gamma + 1):
            reach = min(reach * float(p[i - 1, x[i - 1]] / q[i - 1, x[i - 1]]), 1.0)
            residual = p[i] if i == gamma else (reach * p[i] - q[i]).clamp(min=0)
            h = reach if i == gamma else float(residual.sum() / (residual.sum() + 1 - reach))
            if float(noise(uniform_noise, TEST, nodes, row[i - 1], 1)[0]) <= h:
                tau, left = i, residual
        bonus = int((left.log() + noise(gumbel_noise, INSTEAD, nodes, row[tau], V)).argmax())
        assert accepted.token[slot].tolist() == [*x[:tau], bonus] + [-1] * (gamma - tau), slot
        assert accepted.path[slot].tolist() == [*row[: tau + 1]] + [-1] * (gamma - tau)
        taus.append(tau)
    assert accepted.count.tolist() == [tau + 1 for tau in taus] and set(taus) == set(range(gamma + 1))


def test_draws():
    """In the order of the noisy scores, of the law at the request's temperature and within its filters."""
    sampler = build("rejection")
    ones = [SamplingParams(temperature=t, seed=3, top_k=k) for t, k in ((0.5, 0), (0.0, 0), (2.0, 2))]
    params = slot_params(ones, vocab_size=V, features=sampler.features)
    logits = torch.randn(3, 2, V, generator=torch.Generator().manual_seed(4)).bfloat16()
    score, log_q = sampler.draw(logits, torch.tensor([[9, 10]] * 3), torch.tensor([1, 2]), params)
    torch.testing.assert_close(log_q[0], (logits[0].float() / 0.5).log_softmax(-1))
    for d in range(2):
        g = gumbel_noise(torch.tensor([3]), torch.tensor([9 + d]), V, LOW, DRAFT + 256 * (d + 1))[0]
        torch.testing.assert_close(score[0, d], log_q[0, d] + g)
    assert torch.equal(score[1].argsort(descending=True), logits[1].float().argsort(descending=True))
    assert (log_q[2] > -torch.inf).sum(-1).tolist() == [2, 2]
    assert torch.equal(score[2] > -torch.inf, log_q[2] > -torch.inf)


@pytest.mark.parametrize("name", ["rejection", "block_verification"])
def test_a_residual_of_nothing(name, monkeypatch):
    """Buglog 15: p equal to q bit by bit, and a rejection all the same: the token comes from p."""
    sampler = build(name)
    for module in ("rejection", "block_verification"):
        monkeypatch.setattr(f"sampling.{module}.uniforms", lambda nodes, size: torch.full((len(nodes.slot), size), 2.0))
    nodes, _ = drawn(sampler, 2000, 1, 1)
    p = torch.tensor([0.25, 0.25, 0.25, 0.25, 0, 0, 0])
    draws = dataclasses.replace(nodes.draws, log_q=p.log().expand_as(nodes.draws.log_q))
    nodes = dataclasses.replace(nodes, draws=draws, token=torch.where(nodes.parent < 0, nodes.token, 0))
    draws.ids[:] = 0
    accepted = sampler.accept(p.log().expand(len(nodes.token), V), nodes)
    share = torch.bincount(accepted.token[:, 0], minlength=V) / 2000
    assert not accepted.fault.any() and (share - p).abs().max() < 0.05


def test_a_sure_drafter_leaves_small_numbers():
    """What q has left without its sure token is far below fp32's rounding of 1, and still what it is."""
    sampler = build("rejection")
    log_q = torch.tensor([0.0, -25.0, -26.0, -torch.inf]).log_softmax(-1)[None, None]
    left = sampler.mass_left(Draws(ids=torch.tensor([[[0, 2, 1, 3]]]), log_q=log_q))[0, 0].double()
    expected = torch.tensor([1.0, 2.71828**-25 + 2.71828**-26, 2.71828**-25, 0.0], dtype=torch.float64)
    torch.testing.assert_close(left, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ["rejection", "block_verification"])
def test_greedy_requests_among_draws(name, k):
    """At temperature 0 the argmax, and the child that is it is accepted."""
    if name == "block_verification" and k > 1:
        return
    sampler = build(name)
    nodes, logits = drawn(sampler, 400, 2, k, temperature=0.0)
    accepted, best = sampler.accept(logits, nodes), SAMPLERS.build({"name": "greedy"}).accept(logits, nodes)
    assert torch.equal(accepted.token, best.token) and torch.equal(accepted.path, best.path)
    assert int(best.count.max()) == 3


def test_typical_acceptance_by_hand():
    """The most probable child above min(epsilon, delta * exp(-entropy)), else a draw."""
    sampler = build("typical")
    assert not sampler.lossless
    params = slot_params([SamplingParams(temperature=1.0, seed=s) for s in range(400)], vocab_size=V, features=())
    p = torch.tensor([0.6, 0.2, 0.05, 0.05, 0.05, 0.03, 0.02])  # entropy 1.28: 0.3 * exp(-1.28) = 0.083
    logits = p.log().expand(400 * 3, V)

    def first(children):
        nodes = trees([[0, *children]] * 400, [-1, 0, 0], params, start=[4] * 400)
        return torch.bincount(sampler.accept(logits, nodes).token[:, 0], minlength=V) / 400

    assert first([2, 1])[1] == 1.0 and first([1, 0])[0] == 1.0
    assert (first([2, 3]) - p).abs().max() < 0.08, "0.05 is not enough: draws"
    with pytest.raises(ValueError, match=r"epsilon = 0.0: must be in \(0, 1\]"):
        SAMPLERS.build({"name": "typical", "epsilon": 0})
