"""The margin-aware comparison: what it must call explained, and what it must not."""

from __future__ import annotations

import pytest
import torch

from modelkit.demo import prepare_demo_model
from modelkit.loading import load_model
from spec.compare import compare, teacher_forced


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
