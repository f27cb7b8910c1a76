"""The margin-aware comparison: what it must call explained, and what it must not."""

from __future__ import annotations

import pytest
import torch

from modelkit.demo import prepare_demo_model
from modelkit.loading import load_model
from sampling import SAMPLERS
from spec import Engine
from spec.compare import compare, scores, shortfall, teacher_forced


@pytest.fixture(scope="module")
def bf16():
    return load_model(prepare_demo_model(), dtype="bfloat16")


def plain(model, prompt, n):
    """Greedy tokens by one-row forwards."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(teacher_forced(model, text, len(prompt), 1)[-1].argmax()))
    return text[len(prompt) :]


def test_identical(bf16):
    assert str(compare(bf16, [1, 2, 3], [4, 5], [4, 5], 16)) == "yes"


def test_noise_is_measured_even_when_the_difference_comes_early(bf16):
    """The wide run must really be wide at the first tokens after the prompt (padded), or its noise reads as 0."""
    prompt = [504, 3575, 282, 4649, 314] * 4
    text = prompt + plain(bf16, prompt, 4)
    narrow, wide = (teacher_forced(bf16, text, len(prompt), w) for w in (1, 16))
    assert float((narrow[1:] - wide[1:]).abs().max()) > 0


def test_a_wrong_token_is_not_explained(bf16):
    prompt = [504, 3575, 282, 4649, 314]
    right = plain(bf16, prompt, 4)
    logits = teacher_forced(bf16, prompt + right[:2], len(prompt), 1)[-1]
    wrong = [*right[:2], int(logits.argsort(descending=True)[50]), right[3]]
    outcome = compare(bf16, prompt, wrong, right, 16)
    assert not outcome.identical and outcome.first_difference == 2 and not outcome.explained


def test_a_missing_tail_is_not_explained(bf16):
    assert not compare(bf16, [1, 2, 3], [4, 5], [4, 5, 6], 16).explained


def test_fp32_widths_agree():
    model = load_model(prepare_demo_model(), dtype="float32")
    text = list(range(100, 140))
    narrow, wide = (teacher_forced(model, text, 10, w) for w in (1, 16))
    torch.testing.assert_close(narrow, wide, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.4},
    ],
)
def test_sampled_tokens_are_judged_by_what_chose_them(settings, tiny_targets):
    """The scores' argmax is each token of the engine; another token is a bug unless both widths have it near."""
    engine = Engine.from_config(
        {
            "target": {"path": str(tiny_targets["qwen3"]), "dtype": "float32"}, "draft": {"name": "ngram"},
            "sampling": {"filters": ["top_p", "penalties"]},
        }
    )  # fmt: skip
    prompt, params = [5, 8, 5, 9], engine.sampler.params(seed=3, **settings)
    text = engine.generate([prompt], max_new_tokens=10, seed=3, **settings)[0].token_ids
    logits = teacher_forced(engine.target, prompt + text, len(prompt), 1)
    for place, token in enumerate(text):
        row = scores(engine.sampler, params, prompt, text[:place], logits[place])
        assert int(row.argmax()) == token, place
    second = int(row.argsort(descending=True)[1])
    how = (engine.target, prompt, [*text[:9], second], text, 16, engine.sampler, params)
    outcome = compare(*how)
    assert outcome.first_difference == 9 and not outcome.explained
    apart = float(row.max() - row[second])
    if "top_p" in settings:  # the best one's removal may be nearer
        assert outcome.allowed < outcome.gap <= apart * 1.001
    else:
        assert outcome.gap == pytest.approx(apart, rel=1e-3)
    never = int(row.argmin())  # with top_p it is filtered out
    assert not compare(*how[:2], [*text[:9], never], *how[3:]).explained


LAW = torch.tensor([0.47, 0.306, 0.114, 0.06, 0.05], dtype=torch.float64)
HEAT, THIRD = 0.5, 2
LOGITS = (LAW.log() * HEAT).float()
# By how much the two best have to come down for the third to be kept: to the second's place, to a quarter of the best,
# to three quarters of the mass.
BORDERS = [
    ({"top_k": 2}, LAW[1] / LAW[2]),
    ({"min_p": 0.25}, LAW[0] / 4 / LAW[2]),
    ({"top_p": 0.75}, (LAW[0] + LAW[1]) / LAW[2:].sum() / 3),
]


def judge(settings, logits, token, favour=50.0):
    """(tokens kept, `shortfall`), where noise makes the third token the best by far if it is kept."""
    sampler = SAMPLERS.build({"name": "gumbel", "filters": ["top_k", "min_p", "top_p", "logit_bias"]})
    params = sampler.params(temperature=HEAT, seed=1, **settings)

    def chosen(logits):
        score = scores(sampler, params, [1, 2], [3], logits)
        score[THIRD] += favour
        return score

    return chosen(logits) > -torch.inf, shortfall(chosen, logits, token, 1 / HEAT)


@pytest.mark.parametrize(("settings", "ratio"), BORDERS, ids=["top_k", "min_p", "top_p"])
def test_how_far_a_token_is_from_the_border_of_a_filter(settings, ratio):
    far = float(ratio.log())  # of scores; logits are half as far
    kept, gap = judge(settings, LOGITS, THIRD)
    assert not kept[THIRD] and gap == pytest.approx(far, rel=0.02)
    # The other way round: it is kept and the choice; the best of the others is the choice where it is removed.
    near = LOGITS.clone()
    near[:THIRD] -= HEAT * (far + 0.05)
    kept, gap = judge(settings, near, THIRD)
    assert kept[THIRD] and gap == 0
    best = max(judge(settings, near, token)[1] for token in (0, 1) if kept[token])
    assert min(judge(settings, near, token)[1] for token in (0, 1)) == pytest.approx(0.05, rel=0.05) and best < 3


def test_to_be_kept_is_not_enough():
    """With bad noise for the third token the others have to be removed too; the best one goes when the second rises."""
    gap = judge({"min_p": 0.25}, LOGITS, THIRD, favour=-50.0)[1]
    assert gap == pytest.approx(float((4 * LAW[0] / LAW[1]).log()), rel=0.02)


def test_without_filters_it_is_the_difference_of_scores():
    kept, gap = judge({}, LOGITS, 4)
    assert kept.all() and gap > 40
    row = torch.tensor([2.0, 5.0, 4.5])
    assert [shortfall(lambda x: x, row, token, 1.0) for token in range(3)] == [3.0, 0.0, 0.5]


def test_a_wrong_token_takes_no_longer_than_a_near_one():
    """Of thousands of better tokens not each is looked at, once it is clear that the difference is too large."""
    sampler = SAMPLERS.build({"name": "gumbel", "filters": ["top_p"]})
    params, asked = sampler.params(temperature=1.5, seed=1, top_p=0.9), []
    logits = torch.randn(4000, generator=torch.Generator().manual_seed(1))

    def chosen(logits):
        asked.append(1)
        return scores(sampler, params, [1, 2], [3], logits)

    kept = chosen(logits)
    middle = int(kept.argsort(descending=True)[int((kept > -torch.inf).sum()) // 2])
    assert 0.2 < shortfall(chosen, logits, middle, 1 / 1.5, 0.2) <= float(kept.max() - kept[middle]) * 1.01
    assert len(asked) < 200


def test_a_banned_token_is_explained_by_nothing():
    assert judge({"banned_token_ids": (THIRD,)}, LOGITS, THIRD)[1] == float("inf")
