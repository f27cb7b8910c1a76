"""The noise: the same integers everywhere, and Gumbel noise of independent keys."""

import math

import pytest
import torch

from sampling.noise import gumbel_noise, noise_bits

LOW = torch.tensor(2**32 - 1)


def by_the_book(seed, position, token, stream):
    """Python integers, no tensors."""

    def mix(x):
        x = ((x ^ x >> 16) * 0x21F0AAAD) % 2**32
        x = ((x ^ x >> 15) * 0x735A2D97) % 2**32
        return x ^ x >> 15

    lanes = []
    for lane in (0x243F6A88, 0x13198A2E):
        for word in (seed % 2**32, seed // 2**32, position % 2**32, stream):
            lane = mix(lane ^ word)
        lanes.append(lane)
    return mix(mix(token ^ lanes[0]) ^ lanes[1])


def rows(*keys):
    seed, position = (torch.tensor(x) for x in zip(*keys, strict=True))
    return seed, position


KEYS = [(0, 0), (0, 1), (1, 0), (7, 5), (2**31, 2**31), (2**32 - 1, 8191), (2**32, 131072), (2**63 - 1, 2**32 - 1)]


@pytest.mark.parametrize("stream", [0, 1])
def test_the_integers(stream):
    found = noise_bits(*rows(*KEYS), 300, LOW, stream)
    assert found.dtype == torch.int64
    assert found.tolist() == [[by_the_book(*key, v, stream) for v in range(300)] for key in KEYS]


def test_the_integers_are_these():
    """Written down: a change of the noise changes every seeded output in the world."""
    golden = [[3655780411, 2378591647, 2206653902], [2390983837, 1927439760, 2040099876]]
    assert noise_bits(*rows((0, 0), (2**40 + 7, 123)), 3, LOW).tolist() == golden


def test_a_key_is_all_that_matters():
    """Neither the other rows, nor their number, nor the size of the vocabulary."""
    alone = noise_bits(*rows((7, 5)), 50, LOW)[0]
    assert torch.equal(noise_bits(*rows((3, 1), (7, 5)), 900, LOW)[1, :50], alone)
    other = [noise_bits(*rows(key), 50, LOW, stream)[0] for key, stream in (((8, 5), 0), ((7, 6), 0), ((7, 5), 1))]
    assert not any((o == alone).any() for o in other)


def gumbel_cdf_distance(values):
    """Kolmogorov-Smirnov distance to the standard Gumbel law, times sqrt(n)."""
    x = values.double().flatten().sort().values
    cdf = torch.exp(-torch.exp(-x))
    steps = torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x)
    return float(torch.maximum((steps - cdf).abs().max(), (cdf - steps + 1 / len(x)).abs().max())) * math.sqrt(len(x))


@pytest.mark.parametrize("what", ["seeds", "positions", "tokens"])
def test_the_law(what):
    """Along each of the key's parts, counting up by one: what users do with seeds."""
    n = 200_000
    count, fixed = torch.arange(n), torch.full((n,), 12345)
    if what == "tokens":
        noise = gumbel_noise(fixed[:1], fixed[:1], n, LOW)[0]
    else:
        pair = (count, fixed) if what == "seeds" else (fixed, count)
        noise = gumbel_noise(*pair, 2, LOW)[:, 1]
    assert gumbel_cdf_distance(noise) < 2.0  # exceeded once in 1500 times by true noise
    assert noise.isfinite().all() and noise.max() > 10
    # No correlation with the neighbour, also in which is greater than the median.
    a, b = noise[:-1].double(), noise[1:].double()
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4.5 / math.sqrt(n)
    median = -math.log(math.log(2))
    assert abs(float(((a > median) == (b > median)).double().mean()) - 0.5) < 4.5 * 0.5 / math.sqrt(n)


def test_the_tail_at_a_large_vocabulary():
    """The largest of 152064 values: a Gumbel law moved by log V. A uniform of 24 bits would end it at 16.6."""
    seeds = torch.arange(200)
    best = gumbel_noise(seeds, seeds * 0, 152064, LOW).amax(-1)
    assert gumbel_cdf_distance(best - math.log(152064)) < 2.0
    assert best.max() > 16.7


def test_the_ends_of_the_uniform():
    """Integers 0 and 2^32 - 1, put in by hand: finite, and in order."""
    import sampling.noise as module

    original = module.noise_bits
    module.noise_bits = lambda *args: torch.tensor([[0, 1, 2**31, 2**32 - 2, 2**32 - 1]])
    try:
        noise = gumbel_noise(torch.zeros(1), torch.zeros(1), 5, LOW)[0]
    finally:
        module.noise_bits = original
    assert noise.isfinite().all() and (noise.diff() <= 0).all() and noise[0] > noise[1]
    assert math.isclose(float(noise[0]), 33 * math.log(2), rel_tol=1e-6)
