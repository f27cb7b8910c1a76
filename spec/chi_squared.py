"""Pearson's test of counts against a law, with its power: how many draws it takes to catch a given error.

Plain statistics on the CPU, fp64; knows nothing of samplers.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

# Cells are pooled, the smallest first, until none should hold fewer draws: the test's law holds for large counts.
SMALLEST_CELL = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one test.

    Attributes:
        p_value: chance of counts at least as far off, if the law is right; 0 if something impossible was drawn.
        distance: total-variation distance of the observed frequencies, sampling noise included.
    """

    p_value: float
    distance: float


def p_value(statistic: float, freedom: int) -> float:
    """Chance of a greater statistic under the law."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_squared(counts: Tensor, law: Tensor) -> Outcome:
    """Test counts [C] against probabilities [C]."""
    counts, law = counts.double(), law.double()
    draws = float(counts.sum())
    expected = law * draws
    distance = float((counts / draws - law).abs().sum() / 2)
    if bool(counts[law == 0].any()):
        return Outcome(p_value=0.0, distance=distance)
    expected, order = expected[law > 0].sort()
    observed = counts[law > 0][order]
    pooled = max(int((expected < SMALLEST_CELL).sum()), 1 + int((expected.cumsum(0) < SMALLEST_CELL).sum()))
    expected, observed = (torch.cat([x[:pooled].sum()[None], x[pooled:]]) for x in (expected, observed))
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return Outcome(p_value=p_value(statistic, freedom) if freedom else 1.0, distance=distance)


def critical(freedom: int, level: float) -> float:
    """The statistic that is exceeded with probability `level` under the law."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > level else (low, middle)
    return high


def power(draws: float, distance: float, freedom: int, level: float) -> float:
    """Least chance of rejecting a law that is `distance` off in total variation.

    The statistic is non-central chi-squared with parameter draws * sum(d^2 / p), which is at least draws * (2 *
    distance)^2 by Cauchy and Schwarz; its tail is a Poisson mixture of central ones.
    """
    rate = draws * (2 * distance) ** 2 / 2
    j = torch.arange(int(rate + 12 * rate**0.5 + 30), dtype=torch.float64)
    weight = (j * math.log(rate) - rate - torch.lgamma(j + 1)).exp()
    edge = torch.tensor(critical(freedom, level) / 2, dtype=torch.float64)
    return float((weight * torch.special.gammaincc(freedom / 2 + j, edge)).sum())


def draws_needed(distance: float, freedom: int, level: float, wanted: float) -> int:
    """Draws that catch an error of `distance` with probability `wanted`."""
    low = high = 1.0
    while power(high, distance, freedom, level) < wanted:
        low, high = high, 4 * high
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if power(middle, distance, freedom, level) < wanted else (low, middle)
    return int(high) + 1
