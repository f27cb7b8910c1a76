"""Loops at the end of a text: found from where they begin, and cut there."""

import random

import pytest

from spec.training.loops import LEAST_REPEATED, LONGEST_ROUND, cut_loop, find_loop


def unlike(n):
    """Tokens of which no two are the same."""
    return list(range(1000, 1000 + n))


@pytest.mark.parametrize("period", [1, 2, 5, 13, LONGEST_ROUND])
@pytest.mark.parametrize("part", [0, 1, 3])
def test_a_loop_is_found_from_its_first_round_on(period, part):
    turn = list(range(period))
    rounds = max(3, LEAST_REPEATED // period + 2)
    text = unlike(30) + turn * rounds + turn[: part % period]
    assert find_loop(text) == (30, period)
    assert cut_loop(text, 2) == unlike(30) + turn * 2


def test_what_is_no_loop():
    for text in ([], [1], unlike(200), unlike(50) + [7] * 5, unlike(50) + list(range(30)) * 2, [3, 4] * 40 + unlike(1)):
        assert find_loop(text) is None and cut_loop(text, 1) == text
    draw = random.Random(1)
    assert not any(find_loop(draw.choices(range(9), k=300)) for _ in range(50))


def test_a_round_longer_than_looked_for_is_none():
    assert find_loop(list(range(LONGEST_ROUND + 1)) * 4) is None
