"""The margin-aware comparison: what it must call explained, and what it must not."""

from __future__ import annotations

import pytest
import torch

from modelkit.demo import prepare_demo_model
from modelkit.loading import load_model
from sampling import SAMPLERS
from spec import Engine
from spec.compare import compare, filter_gap, scores, teacher_forced


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
    assert outcome.gap == pytest.approx(float(row.max() - row[second]), rel=1e-3)
    never = int(row.argmin())  # with top_p it is filtered out
    assert not compare(*how[:2], [*text[:9], never], *how[3:]).explained


LAW = torch.tensor([0.47, 0.306, 0.114, 0.06, 0.05], dtype=torch.float64)
HEAT, THIRD = 0.5, 2
# By how much the two best have to come down for the third to be kept: to the second's place, to a quarter of the best,
# to three quarters of the mass.
BORDERS = [
    ({"top_k": 2}, LAW[1] / LAW[2]),
    ({"min_p": 0.25}, LAW[0] / 4 / LAW[2]),
    ({"top_p": 0.75}, (LAW[0] + LAW[1]) / LAW[2:].sum() / 3),
]


def judge(settings, rows, own, favour=50.0):
    """`filter_gap` of two widths' logits; noise makes the third token the best by far wherever it is kept."""
    sampler = SAMPLERS.build({"name": "gumbel", "filters": ["top_k", "min_p", "top_p", "logit_bias"]})
    params = sampler.params(temperature=HEAT, seed=1, **settings)

    def chosen(logits):
        score = scores(sampler, params, [1, 2], [3], logits)
        score[THIRD] += favour
        return score

    kept = [bool(chosen(row)[THIRD] > -torch.inf) for row in rows]
    return kept, filter_gap(chosen, rows, [own, int(chosen(rows[1]).argmax())], 1 / HEAT)


@pytest.mark.parametrize(("settings", "ratio"), BORDERS, ids=["top_k", "min_p", "top_p"])
def test_a_removed_token_is_as_far_as_the_border_of_the_filter(settings, ratio):
    """The third token is chosen where it is kept; in the other width a filter removes it."""
    far = HEAT * float(ratio.log())
    narrow = (LAW.log() * HEAT).float()
    wide = narrow.clone()
    wide[:THIRD] -= far + 0.01
    kept, gap = judge(settings, [wide, narrow], THIRD)
    assert kept == [True, False] and gap == pytest.approx(far / HEAT, rel=0.02)
    # A token that would not be chosen even if it were kept is not explained by the filter.
    assert judge(settings, [wide, narrow], THIRD, favour=-50.0)[1] > 40


def test_a_banned_token_is_explained_by_nothing():
    row = (LAW.log() * HEAT).float()
    assert judge({"banned_token_ids": (THIRD,)}, [row, row], THIRD)[1] == float("inf")
