"""Answers that end in a loop: small targets fall into one at low temperatures and repeat it up to the length limit.

A loop is trivial to draft, so it teaches little and flatters an acceptance length. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_ROUND = 64
LEAST_REPEATED = 24


def find_loop(tokens: Sequence[int]) -> tuple[int, int] | None:
    """Where the loop that a text ends in begins, and how many tokens a round of it has; None if it ends in none.

    A loop is a round of at most `LONGEST_ROUND` tokens that comes at least three times (the last time maybe in part
    beyond that), with at least `LEAST_REPEATED` tokens behind its first round. Of several, the one that begins first.
    """
    found: tuple[int, int] | None = None
    for period in range(1, min(LONGEST_ROUND, len(tokens) // 3) + 1):
        first = len(tokens)
        while first > period and tokens[first - 1] == tokens[first - 1 - period]:
            first -= 1
        start, repeated = first - period, len(tokens) - first
        if repeated >= max(2 * period, LEAST_REPEATED) and (found is None or start < found[0]):
            found = start, period
    return found


def cut_loop(tokens: list[int], rounds: int) -> list[int]:
    """The text with only so many rounds of the loop it ends in."""
    loop = find_loop(tokens)
    return tokens if loop is None else tokens[: loop[0] + rounds * loop[1]]
