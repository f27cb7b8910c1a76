"""Gumbel and token matching: what requests may ask for, the choice of a row, and the drafter's share of the noise."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from rows_by_hand import roots, slot_params, trees

from sampling import SAMPLERS, SamplingParams
from sampling.base import ALL_BANNED, NOT_FINITE
from sampling.noise import gumbel_noise

LOW = torch.tensor(2**32 - 1)
NAMES = ("gumbel", "token_match")
EVERY = (*NAMES, "rejection", "block_verification", "typical")


def build(name, **config):
    return SAMPLERS.build({"name": name, **config})


def no_threes(logits, nodes):
    """A user's processor."""
    return logits.index_fill(1, torch.tensor([3]), -torch.inf)


def nothing(logits, nodes):
    """A processor that leaves nothing."""
    return torch.full_like(logits, -torch.inf)


@pytest.fixture
def here(monkeypatch):
    """This module's name, importable."""
    monkeypatch.setitem(sys.modules, "user_processors", sys.modules[__name__])
    return "user_processors"


@pytest.mark.parametrize("name", NAMES)
def test_each_row_takes_the_noisy_best(name):
    """Of the token after it: noise by the slot's seed and the row's position + 1, in the strategy's own stream."""
    sampler = build(name)
    ones = [SamplingParams(temperature=t, seed=s) for t, s in ((1.0, 3), (0.5, 4), (1.0, 3))]
    params = slot_params(ones, vocab_size=50, features=sampler.features)
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    nodes = trees([[7, 8, 9]] * 3, [-1, 0, 0], params, start=[10, 20, 11])
    seen = []
    for row in range(9):
        one, position = ones[row // 3], torch.tensor([[10, 20, 11][row // 3] + (row % 3 > 0) + 1])
        noise = gumbel_noise(torch.tensor([one.seed]), position, 50, LOW, NAMES.index(name))[0]
        seen.append(int((logits[row].log_softmax(-1) / one.temperature + noise).argmax()))
    accepted = sampler.accept(logits, nodes)
    assert accepted.token[:, 0].tolist() == seen[::3] and not accepted.fault.any()
    assert len(set(seen)) > 4, "the noise has no effect"


@pytest.mark.parametrize("name", EVERY)
def test_greedy_requests_in_a_batch_that_samples(name):
    """Exactly the argmax, the lowest id of equals; the same in the shortcut for batches without sampling."""
    sampler = build(name)
    ones = [SamplingParams(seed=1, top_k=2, top_p=0.3), SamplingParams(temperature=3.0, seed=1)]
    params = slot_params(ones, vocab_size=4, features=sampler.features)
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])  # buglog 21
    for seed in range(20):
        params.seed[:] = seed
        assert int(sampler.accept(logits, roots(params)).token[0, 0]) == 1
    logits = torch.randn(2, 4).bfloat16()
    assert int(sampler.accept(logits, roots(params)).token[0, 0]) == int(logits[0].argmax())


@pytest.mark.parametrize("name", EVERY[:-1])
def test_all_tokens_appear(name):
    """Buglog 16: 300 draws of .5 .3 .2; and 19: min_p at every row of a tree."""
    sampler = build(name)
    ones = [SamplingParams(temperature=1.0, min_p=0.1, seed=seed) for seed in range(3000)]
    params = slot_params(ones, vocab_size=3, features=sampler.features)
    logits = torch.tensor([[0.60, 0.37, 0.03], [0.5, 0.3, 0.2]]).log().repeat(3000, 1)
    tokens = sampler.accept(logits, trees([[0, 1]] * 3000, [-1, 0], params, start=[4] * 3000)).token
    first, second = (torch.bincount(column[column >= 0], minlength=3) for column in tokens.T)
    assert int(second.sum()) == int(first[1]), "the draft 1 is accepted where the target says 1"
    assert abs(first[0] / 3000 - 0.6186) < 0.04 and int(first[2]) == 0
    assert abs(second[0] / second.sum() - 0.5) < 0.07 and int(second.min()) > 100


def test_the_drafter_meets_the_noise_of_its_tokens():
    """A drafter whose law is the target's proposes, first of all, exactly what the target will choose."""
    sampler = build("gumbel")
    ones = [SamplingParams(temperature=t, seed=s) for t, s in ((0.7, 5), (1.3, 6), (0.0, 7))]
    params = slot_params(ones, vocab_size=40, features=sampler.features)
    logits = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(2))  # after a root and after its child
    start = torch.tensor([[8], [90], [3]])
    drafted = sampler.perturb(logits, start + torch.tensor([1, 2]), params)
    tokens = drafted.argmax(-1)
    nodes = trees([[0, int(t)] for t in tokens[:, 0]], [-1, 0], params, start=start[:, 0])
    accepted = sampler.accept(logits.flatten(0, 1), nodes)
    assert accepted.token.tolist() == tokens.tolist() and accepted.count.tolist() == [2, 2, 2]
    assert torch.equal(drafted[2], logits[2]), "a greedy request's scores are the drafter's own"
    token_match = build("token_match")
    assert token_match.perturb(logits, start, params) is logits


@pytest.mark.parametrize("name", EVERY)
def test_faults_of_the_path_only(name, here):
    sampler = build(name)
    params = slot_params([SamplingParams(temperature=1.0, seed=1)] * 3, vocab_size=4, features=sampler.features)
    logits = torch.full((6, 4), -50.0)
    logits[[0, 2, 4], 2] = 50.0  # every root chooses 2
    logits[1], logits[5] = float("nan"), float("nan")
    accepted = sampler.accept(logits, trees([[0, 2], [0, 2], [0, 1]], [-1, 0], params, start=[1, 1, 1]))
    assert accepted.fault.tolist() == [NOT_FINITE, 0, 0] and accepted.count.tolist() == [2, 2, 1]
    logits[0] = float("nan")  # row 0 is nobody else's
    accepted = sampler.accept(logits, trees([[0, 1], [0, 1], [0, 1]], [-1, 0], params, start=[1, 1, 1]))
    assert accepted.fault.tolist() == [NOT_FINITE, 0, 0] and accepted.count.tolist() == [1, 1, 1]
    nothing_left = build(name, processors=[f"{here}:nothing"])
    assert nothing_left.accept(logits[2:5], roots(params)).fault.tolist() == [ALL_BANNED] * 3


@pytest.mark.parametrize("name", EVERY)
def test_processors_from_the_config(name, here):
    sampler = build(name, temperature=1.0, processors=[f"{here}:no_threes"])
    params = slot_params([SamplingParams(temperature=1.0, seed=s) for s in range(200)], vocab_size=4, features=())
    tokens = sampler.accept(torch.zeros(200, 4), roots(params)).token[:, 0]
    assert sorted(set(tokens.tolist())) == [0, 1, 2]
    assert not sampler.always_argmax(SamplingParams()) and build(name).always_argmax(SamplingParams())
    for path, message in {
        "no_such_module:f": "processors: 'no_such_module:f' cannot be imported",
        f"{here}:none": "cannot be imported",
        f"{here}:NAMES": "is not callable",
    }.items():
        with pytest.raises(ValueError, match=message):
            build(name, processors=[path])


@pytest.mark.parametrize("name", EVERY)
def test_requests_change_the_config(name):
    sampler = build(name, temperature=0.7, top_p=0.9, seed=5)
    assert sampler.params() == SamplingParams(temperature=0.7, top_p=0.9, seed=5)
    assert sampler.params(temperature=0.0, top_k=3, seed=6) == SamplingParams(top_k=3, top_p=0.9, seed=6)
    with pytest.raises(ValueError, match=r"top_p = 0: must be in \(0, 1\]"):
        sampler.params(top_p=0)
    seeds = {build(name).params().seed for _ in range(20)}
    assert len(seeds) == 20, "unseeded requests are to differ"


def test_values_reach_the_device_exactly():
    one = SamplingParams(temperature=1e300, top_k=2**62, top_p=0.9, min_p=0.05, seed=2**63 - 1)
    params = slot_params([SamplingParams(), one], vocab_size=5, features=("top_k", "top_p", "min_p"))
    assert params.seed.tolist() == [0, 2**63 - 1, 0] and params.top_p.tolist() == [1.0, 0.9, 1.0]
    assert params.top_k.tolist() == [0, 2**62, 0] and bool(params.temperature.isfinite().all())
    params.admit(1, SamplingParams(), torch.tensor([1]))
    assert not params.top_k.any() and not params.min_p.any() and not params.temperature.any()


def test_what_is_built_in():
    assert set(build("gumbel").features) == {"top_k", "top_p", "min_p"}
    assert set(build("gumbel", repetition_penalty=1.1).features) == {"top_k", "top_p", "min_p", "penalties"}
    small = build("gumbel", filters=["top_p"])
    assert small.features == ("top_p",)
    params = slot_params([SamplingParams()], vocab_size=9, features=small.features)
    assert not hasattr(params, "output_count") and not hasattr(params, "top_k") and not hasattr(params, "logit_bias")
    for change, message in (
        ({"top_k": 3}, r'top_k: this engine is built without it; set \[sampling\] filters = \["top_p", "top_k"\]'),
        ({"logit_bias": {1: 1.0}}, "logit_bias: this engine is built without it"),
    ):
        with pytest.raises(ValueError, match=message):
            small.params(**change)
    with pytest.raises(ValueError, match=r"filters: unknown 'top_q'; known: top_k, top_p, .*logit_bias"):
        build("gumbel", filters=["top_q"])
    with pytest.raises(ValueError, match="top_k: this engine is built without it"):
        build("gumbel", filters=[], top_k=5)
