"""Filters and penalties against the law by the book, per request, per row, with each row's own ancestors."""

import math
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from rows_by_hand import roots, slot_params, trees

from sampling import SamplingParams
from sampling.base import ALL_BANNED, BAD_PROCESSOR, NOT_FINITE
from sampling.filters import changed, filtered
from sampling.reference import law

INF, NAN = float("inf"), float("nan")


def probabilities(score):
    return score.double().softmax(-1)


def check(logits, several, **how):
    """Each row's law, a slot a row, all in one batch."""
    params = slot_params(several, vocab_size=logits.shape[-1], **how)
    found = filtered(logits, roots(params))
    assert not found.fault.any()
    prompts = how.get("prompts") or [[0]] * len(several)
    for row, one, score, prompt in zip(logits, several, found.score, prompts, strict=True):
        if one.temperature == 0:
            assert int(score.argmax()) == int(law(row, one, prompt).argmax())
        else:
            expected = law(row, one, prompt)
            assert torch.equal(score > -INF, expected > 0)
            torch.testing.assert_close(probabilities(score), expected, rtol=2e-5, atol=1e-9)


def some(rng):
    """Parameters of every kind, mixed, some of them off."""
    pick = lambda off, *values: rng.choice([off, *values])  # noqa: E731
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.5, 100.0]), top_k=pick(0, 1, 2, 7, 50, 10**6),
        top_p=pick(1.0, 1e-9, 0.1, 0.5, 0.9, 0.999), min_p=pick(0.0, 0.01, 0.1, 0.5, 1.0),
        repetition_penalty=pick(1.0, 0.5, 1.3), presence_penalty=pick(0.0, 1.5, -1.0),
        frequency_penalty=pick(0.0, 0.7), banned_token_ids=pick((), (3, 4)), logit_bias=pick(None, {5: 3.0, 6: -2.5}),
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [8, 97, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_requests_in_one_batch(vocabulary, dtype):
    """bfloat16 has many exact ties, also at the thresholds."""
    rng, generator = random.Random(vocabulary), torch.Generator().manual_seed(vocabulary)
    for spread in (0.5, 3.0, 12.0):
        several = [some(rng) for _ in range(48)]
        logits = (torch.randn(48, vocabulary, generator=generator) * spread).to(dtype)
        check(logits, several, prompts=[[rng.randrange(vocabulary) for _ in range(5)] for _ in several])


@pytest.mark.parametrize(
    ("row", "params", "kept"),
    [
        # By probabilities: .5 .3 .2
        ([0.5, 0.3, 0.2], {"top_p": 0.499}, [0]),
        ([0.5, 0.3, 0.2], {"top_p": 0.51}, [0, 1]),
        ([0.5, 0.3, 0.2], {"top_p": 0.81}, [0, 1, 2]),
        ([0.5, 0.3, 0.2], {"top_p": 1e-300}, [0]),
        ([0.60, 0.37, 0.03], {"min_p": 0.1}, [0, 1]),  # buglog 19
        ([0.60, 0.37, 0.03], {"min_p": 1.0}, [0]),
        ([0.3, 0.4, 0.2, 0.1], {"top_k": 2}, [0, 1]),
        ([0.3, 0.4, 0.2, 0.1], {"top_k": 4}, [0, 1, 2, 3]),
        ([0.3, 0.4, 0.2, 0.1], {"top_k": 2**62}, [0, 1, 2, 3]),
        # Ties with the last one kept stay, whatever their ids.
        ([0.4, 0.2, 0.2, 0.2], {"top_k": 2}, [0, 1, 2, 3]),
        ([0.2, 0.4, 0.2, 0.2], {"top_p": 0.5}, [0, 1, 2, 3]),
        ([0.25, 0.25, 0.25, 0.25], {"top_k": 1, "top_p": 0.01, "min_p": 1.0}, [0, 1, 2, 3]),
        # Top-p looks at what top-k and min-p left: 4/7 of the mass is enough for 0.5, 3/7 more for 0.6.
        ([0.3, 0.4, 0.2, 0.1], {"top_k": 2, "top_p": 0.5}, [1]),
        ([0.3, 0.4, 0.2, 0.1], {"top_k": 2, "top_p": 0.6}, [0, 1]),
        ([0.3, 0.4, 0.2, 0.1], {"min_p": 0.6, "top_p": 0.5}, [1]),
        # At temperature 0.5 the odds are squared: .658 .237 .105
        ([0.5, 0.3, 0.2], {"top_p": 0.65, "temperature": 0.5}, [0]),
        ([0.5, 0.3, 0.2], {"min_p": 0.2, "temperature": 0.5}, [0, 1]),
        ([0.5, 0.0, 0.5], {"top_k": 3}, [0, 2]),
    ],
)
def test_by_hand(row, params, kept):
    one = SamplingParams(**({"temperature": 1.0} | params))
    score = filtered(torch.tensor([row]).log(), roots(slot_params([one], vocab_size=len(row)))).score[0]
    assert [i for i, s in enumerate(score.tolist()) if s > -INF] == kept
    check(torch.tensor([row]).log(), [one])


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-8, 100.0, 1e300])
def test_extreme_temperatures(temperature):
    row = torch.tensor([[-3.0, 2.0, 1.0, -INF, 1e30, -1e30]])
    score = filtered(row, roots(slot_params([SamplingParams(temperature=temperature)], vocab_size=6))).score
    assert not score.isnan().any() and float(score[0, 4]) == 0 and float(score[0, 3]) == -INF
    assert (score[0, [0, 1, 2]] < -1e8).all() or temperature >= 100


def test_penalties_see_the_path_of_their_row():
    """Two branches that say different things; the second slot has said much already. By the book for every row."""
    rng, vocabulary = random.Random(3), 12
    ones = [
        SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.8),
        SamplingParams(temperature=0.7, repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=0.3),
        SamplingParams(temperature=1.0),
    ]
    prompts, outputs = [[1, 2, 2], [4], [5, 6]], [[7], [3, 3, 9, 4], [1, 1]]
    params = slot_params(ones, vocab_size=vocabulary, prompts=prompts, features=("penalties",))
    width = max(map(len, outputs))
    emitted = torch.tensor([out + [11] * (width - len(out)) for out in outputs])
    params.record(emitted, torch.tensor(list(map(len, outputs))))
    parents = [-1, 0, 0, 1, 2, 3, 3]  # paths: 0 1 3 5, 0 1 3 6, 0 2 4
    tokens = [[out[-1]] + [rng.choice([2, 3, 8, 8]) for _ in parents[1:]] for out in outputs]
    logits = torch.randn(3 * len(parents) + 2, vocabulary, generator=torch.Generator().manual_seed(4)) * 3
    nodes = trees(tokens, parents, params, start=[10, 20, 30], rows=len(logits))  # two rows of padding
    found = filtered(logits, nodes)
    for slot, one in enumerate(ones):
        for node in range(len(parents)):
            path, at = [], node
            while at > 0:
                path, at = [tokens[slot][at], *path], parents[at]
            row = slot * len(parents) + node
            expected = law(logits[row], one, prompts[slot], outputs[slot] + path)
            torch.testing.assert_close(probabilities(found.score[row]), expected, rtol=2e-5, atol=1e-7)
    # A new request in the slot remembers nothing.
    params.admit(1, ones[1], torch.tensor([6]))
    one = filtered(logits[:3], trees([[0]] * 3, [-1], params, start=[1, 1, 1])).score[1]
    torch.testing.assert_close(probabilities(one), law(logits[1], ones[1], [6]), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("nodes", [31, 33, 70])
def test_long_paths_cross_bit_words(nodes):
    one = SamplingParams(temperature=1.0, frequency_penalty=0.1)
    params = slot_params([one], vocab_size=5, prompts=[[0]], features=("penalties",))
    tokens = [random.Random(nodes).choices(range(5), k=nodes)]
    score = filtered(torch.zeros(nodes, 5), trees(tokens, range(-1, nodes - 1), params, start=[3])).score
    for node in range(nodes):
        expected = law(torch.zeros(5), one, [0], tokens[0][1 : node + 1])
        torch.testing.assert_close(probabilities(score[node]), expected, rtol=2e-5, atol=1e-7)


def test_a_processor_sees_logits_and_rows():
    """It runs after the bias and before the temperature, and knows slot, position and token of each row."""

    def only_the_next_id(logits, nodes):
        assert logits.dtype == torch.float32
        ids = torch.arange(logits.shape[-1])
        return torch.where(ids == nodes.token[:, None] + nodes.slot[:, None] + 1, logits, -torch.inf)

    params = slot_params([SamplingParams(temperature=0.1)] * 2, vocab_size=6)
    nodes = trees([[1, 2], [1, 2]], [-1, 0], params, start=[4, 9])
    score = filtered(torch.zeros(4, 6), nodes, (only_the_next_id,)).score
    assert (score > -INF).nonzero().tolist() == [[0, 2], [1, 3], [2, 3], [3, 4]]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda x, nodes: x[:1], r"Tensor \[1, 6\]"),
        (lambda x, nodes: x[:, :-1], r"Tensor \[2, 5\]"),
        (lambda x, nodes: x[:, 0], r"Tensor \[2\]"),
        (lambda x, nodes: None, "NoneType"),
    ],
)
def test_a_processor_that_returns_something_else_is_refused(wrong, what):
    nodes = roots(slot_params([SamplingParams(temperature=1.0)] * 2, vocab_size=6))
    with pytest.raises(ValueError, match=rf"must return logits \[2, 6\], it returned {what}"):
        filtered(torch.zeros(2, 6), nodes, (wrong,))


def test_a_processors_result_is_laid_out_for_kernels():
    nodes = roots(slot_params([SamplingParams(temperature=1.0)] * 2, vocab_size=6))
    found = changed(torch.zeros(2, 6), nodes, (lambda x, nodes: x.T.contiguous().T.half(),)).x
    assert found.is_contiguous() and found.dtype == torch.float32


@pytest.mark.parametrize(
    "wrong", [{"logit_bias": {1: 1e39}}, {"logit_bias": {1: float("nan")}}, {"repetition_penalty": 1e-42}]
)
def test_values_that_would_leave_fp32_are_refused(wrong):
    with pytest.raises(ValueError, match="must be in"):
        SamplingParams(**wrong)


def test_faults():
    """What makes a row useless, told apart."""
    ban = lambda logits, nodes: torch.where(nodes.slot[:, None] == 5, -torch.inf, logits)  # noqa: E731
    spoil = lambda logits, nodes: torch.where(nodes.slot[:, None] == 6, NAN, logits)  # noqa: E731
    fine, banned = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, banned_token_ids=(0, 1, 2))
    params = slot_params([fine] * 4 + [banned, fine, fine, SamplingParams()], vocab_size=3)
    logits = torch.tensor([[0.0, -INF, 1.0]] * 8)
    logits[1, 2], logits[2, 0], logits[3], logits[7, 1] = NAN, INF, -INF, NAN
    found = filtered(logits, roots(params)).fault.tolist()
    assert found == [0, NOT_FINITE, NOT_FINITE, ALL_BANNED, ALL_BANNED, 0, 0, NOT_FINITE]
    found = filtered(logits, roots(params), (ban, spoil)).fault.tolist()
    assert found == [
        0, NOT_FINITE, NOT_FINITE, ALL_BANNED, ALL_BANNED, ALL_BANNED, BAD_PROCESSOR, NOT_FINITE,
    ]  # fmt: skip


@pytest.mark.parametrize("vocabulary", [33, 20000])
def test_a_row_does_not_depend_on_its_batch(vocabulary):
    """Bit for bit what it is alone, so that a tree and plain decoding keep the same tokens."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    several = [some(rng) for _ in range(17)]
    logits = torch.randn(17, vocabulary, generator=generator) * 4
    together = filtered(logits, roots(slot_params(several, vocab_size=vocabulary))).score
    for row in range(17):
        alone = filtered(logits[row : row + 1], roots(slot_params(several[row : row + 1], vocab_size=vocabulary))).score
        assert torch.equal(alone[0] > -INF, together[row] > -INF)
        torch.testing.assert_close(alone[0], together[row], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_p": 0.0}, r"top_p = 0.0: must be in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p = 1.1: must be in \(0, 1\]"),
        ({"top_k": -1}, r"top_k = -1: must be 0 \(off\) or more"),
        ({"min_p": -0.1}, r"min_p = -0.1: must be in \[0, 1\]"),
        ({"temperature": -1.0}, r"temperature = -1.0: must be 0 \(greedy\) or a positive number"),
        ({"temperature": NAN}, "temperature = nan"),
        ({"temperature": INF}, "temperature = inf"),
        ({"top_p": NAN}, "top_p = nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty = 0.0: must be in \[0.01, 10\]"),
        ({"presence_penalty": 3.0}, r"presence_penalty = 3.0: must be in \[-2, 2\]"),
        ({"frequency_penalty": NAN}, r"frequency_penalty = nan: must be in \[-2, 2\]"),
        ({"logit_bias": {1: INF}}, "logit_bias of token 1 is inf: must be in"),
        ({"seed": -1}, "seed = -1: must be in 0.."),
        ({"seed": 2**63}, "seed = .*: must be in 0..9223372036854775807"),
    ],
)
def test_values_out_of_range(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_ids_outside_the_vocabulary():
    SamplingParams(logit_bias={9: 1.0}, banned_token_ids=(0,)).check_ids(10)
    for given in ({"logit_bias": {10: 1.0}}, {"banned_token_ids": (10,)}, {"banned_token_ids": (-1,)}):
        with pytest.raises(ValueError, match=r"token id (10|-1) is not in 0\.\.9"):
            SamplingParams(**given).check_ids(10)


def test_what_values_need():
    assert SamplingParams(top_k=3, seed=1).features == ("top_k",)
    assert SamplingParams(top_p=0.9, min_p=0.1).features == ("top_p", "min_p")
    assert SamplingParams(frequency_penalty=0.1).features == SamplingParams(repetition_penalty=2).features
    assert SamplingParams(banned_token_ids=(1,)).features == ("logit_bias",)
    assert SamplingParams(top_k=3, top_p=0.5).is_argmax and not SamplingParams(presence_penalty=1).is_argmax
    assert not SamplingParams(temperature=math.ulp(0)).is_argmax
