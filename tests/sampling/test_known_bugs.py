"""Mistakes that other projects have published, on the smallest input that shows them: the law of one round's token."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from rows_by_hand import slot_params, trees

from sampling import SAMPLERS, Drawn, Draws, SamplingParams

COUNT = 20_000  # frequencies are right to 0.0035; 0.015 is four times that
EXACT = ("gumbel", "token_match", "rejection", "block_verification")


def seeded(sampler, vocabulary, **settings):
    ones = [SamplingParams(temperature=1.0, seed=seed, **settings) for seed in range(COUNT)]
    return slot_params(ones, vocab_size=vocabulary, features=sampler.features)


def emitted(sampler, p, children, params, draws=None):
    """Frequencies of the first token after a root with these children [COUNT, k], and how often one is accepted."""
    tokens = torch.cat([torch.zeros_like(children[:, :1]), children], 1)
    nodes = trees(tokens.tolist(), [-1] + [0] * children.shape[1], params, start=[4] * COUNT)
    rows = torch.tensor(p).log().expand(len(nodes.token), len(p))
    accepted = sampler.accept(rows, dataclasses.replace(nodes, draws=draws))
    assert not accepted.fault.any()
    return torch.bincount(accepted.token[:, 0], minlength=len(p)) / COUNT, float((accepted.count > 1).float().mean())


@pytest.mark.parametrize("name", ["rejection", "block_verification"])
def test_the_law_of_the_drafts_is_the_one_they_were_drawn_from(name):
    """Buglog 11: the draft drawn from the filtered q, and judged by the raw one."""
    p, q, sampler = [0.3, 0.7, 0.0, 0.0], torch.tensor([0.4, 0.3, 0.2, 0.1]), SAMPLERS.build({"name": name})
    params = seeded(sampler, 4, top_k=2)
    logits, position = q.log().expand(COUNT, 1, 4), torch.full((COUNT, 1), 5)
    score, log_q = sampler.draw(logits, position, torch.tensor([1]), params)
    ids = score.topk(1).indices

    def found(law):
        return emitted(sampler, p, ids[:, 0], params, Draws(ids=ids, log_q=law))[0].tolist()

    assert found(log_q) == pytest.approx(p, abs=0.015)
    assert found(logits.contiguous()) == pytest.approx([0.429, 0.571, 0, 0], abs=0.015), (
        "the mistake has no effect here"
    )


@pytest.mark.parametrize("name", EXACT)
def test_the_drafters_best_tokens_are_no_draws(name):
    """Buglog 13 and 23: children that are the drafter's argmax, or its best two, and no draws from q.

    Tested by ratio with the real q they give [.6, 0, .4]; one after another with the original laws [0, .6, .4].
    """
    p, sampler = [0.5, 0.3, 0.2], SAMPLERS.build({"name": name})
    params = seeded(sampler, 3)
    for children, accepted in (([2], 0.2), ([2, 1], 0.5)):
        if sampler.chains_only and len(children) > 1:
            continue
        law, share = emitted(sampler, p, torch.tensor([children] * COUNT), params)
        assert law.tolist() == pytest.approx(p, abs=0.015)
        assert share == pytest.approx(accepted, abs=0.015), "no exact rule accepts more, none need accept less"


@pytest.mark.parametrize("name", EXACT)
def test_a_sure_drafter_at_temperature_one(name):
    """Buglog 13, with the sampler's own candidates: a law of one token is drawn from, and stored, as what it is."""
    p, q, sampler = [0.5, 0.3, 0.2], torch.tensor([0.0, 0.0, 1.0]), SAMPLERS.build({"name": name})
    params, position, draws = seeded(sampler, 3), torch.full((COUNT, 1), 5), None
    logits = q.log().expand(COUNT, 1, 3)
    if isinstance(sampler, Drawn):
        score, log_q = sampler.draw(logits, position, torch.tensor([1]), params)
        draws = Draws(ids=score.topk(1).indices, log_q=log_q)
    else:
        score = sampler.perturb(logits, position, params)
    ids = score.topk(1).indices[:, 0]
    assert (ids == 2).all()
    law, share = emitted(sampler, p, ids, params, draws)
    assert law.tolist() == pytest.approx(p, abs=0.015) and share == pytest.approx(0.2, abs=0.015)
