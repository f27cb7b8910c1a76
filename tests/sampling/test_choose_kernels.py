"""The Triton kernels that choose tokens against `Gumbel.noisy` and argmax: interpreted on a CPU, and on a GPU."""

import dataclasses
import functools
import random
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import interpreter
from rows_by_hand import roots, slot_params

from sampling.gumbel import Gumbel
from sampling.params import SamplingParams

INF, NAN = float("inf"), float("nan")
FILTERS = ("top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True)
class Case:
    """`spread`: of the logits; `grid`: they are multiples of it, so that there are ties; `passes`: over the device."""

    seed: int
    vocabulary: int
    spread: float = 3.0
    grid: float = 0.0
    features: tuple[str, ...] = FILTERS
    dtype: torch.dtype = torch.float32
    passes: int = 0


def requests(case, draw):
    """A request of each kind: filters off, alone, together, and at the edges of their ranges."""
    plain = [{}, {"temperature": 0.0}, {"temperature": 1e-8}, {"temperature": 100.0}]
    filters = {
        "top_k": [1, 2, 40, case.vocabulary, 10 * case.vocabulary],
        "top_p": [1e-6, 0.3, 0.9, 0.999999],
        "min_p": [1e-4, 0.1, 1.0],
    }
    alone = [{name: value} for name in case.features for value in filters[name]]
    together = [{name: draw.choice(filters[name]) for name in case.features} for _ in range(4)]
    return [{"temperature": draw.choice([0.3, 1.0, 1.5]), "seed": draw.randrange(2**63)} | one
            for one in (*plain, *alone, *together)]  # fmt: skip


def logits_of(case, rows):
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(rows, case.vocabulary, generator=generator) * case.spread
    if case.grid:
        x = (x / case.grid).round() * case.grid
    x[1::3, torch.randperm(case.vocabulary, generator=generator)[: case.vocabulary // 2]] = -INF
    return x.to(case.dtype)


def check(case, device="cpu"):
    """Every row's token is the reference's; a row that is not finite is told by its best logit."""
    from sampling.kernels import choose
    from sampling.kernels.choose import argmax_tokens

    draw = random.Random(case.seed)
    several = [SamplingParams(**one) for one in requests(case, draw)]
    nodes = roots(slot_params(several, vocab_size=case.vocabulary, features=case.features))
    x = logits_of(case, len(several))
    x[4], x[5, 1], x[6, 0] = -INF, NAN, INF
    good = [row for row in range(len(several)) if row not in (4, 5, 6)]
    sampler = Gumbel(Gumbel.Config(filters=case.features))
    rows = sampler.noisy(x, nodes)
    nodes.params.to(device)
    moved = {field.name: getattr(nodes, field.name) for field in dataclasses.fields(nodes)}
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in moved.items()}
    with mock.patch.object(choose, "PASSES", case.passes or choose.PASSES):
        token, fault = sampler._chosen(x.to(device), type(nodes)(**moved))
    assert fault.cpu().tolist() == rows.fault.tolist()
    for row in good:
        chosen, score = int(token[row]), rows.score[row]
        # Another device's logarithm may turn a near-tie of noisy scores, nothing else.
        assert score[chosen] >= score.max() - 1e-5 * max(1.0, float(score.max().abs())), (row, several[row])
    exact = [int(token[row]) == int(rows.score[row].argmax()) for row in good]
    assert sum(exact) >= len(exact) - (1 if device != "cpu" else 0)
    token, best = argmax_tokens(x.to(device))
    finite = [row for row in range(len(several)) if row not in (5, 6)]
    assert [int(token[row]) for row in finite if row != 4] == [int(x[row].argmax()) for row in finite if row != 4]
    assert torch.equal(best.cpu()[finite], x[finite].float().amax(-1))
    assert best[5].isnan() and best[6] == INF
    assert all(0 <= int(t) < case.vocabulary for t in token)


def check_perturbed(device="cpu"):
    """Three slots, one of them greedy, as a slice of wider logits."""
    several = [SamplingParams(temperature=t, seed=9 + i) for i, t in enumerate((0.7, 0.0, 1.3))]
    params = slot_params(several, vocab_size=4500, features=())
    wide = torch.randn(3, 6, 4500, generator=torch.Generator().manual_seed(3)) * 4
    position = torch.arange(15).view(3, 5) + 100
    sampler = Gumbel(Gumbel.Config())
    wanted = sampler.perturb(wide[:, 1:], position, params)
    sampler.use_kernels = True
    found = sampler.perturb(wide.to(device)[:, 1:], position.to(device), params.to(device))
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)


SMALL = {
    "two_chunks": Case(seed=1, vocabulary=4500),
    "ties": Case(seed=2, vocabulary=700, grid=1.0),
    "all_equal": Case(seed=3, vocabulary=300, spread=0.0),
    "one_filter": Case(seed=4, vocabulary=300, features=("top_p",)),
    "no_filter": Case(seed=5, vocabulary=300, features=()),
    "steep": Case(seed=6, vocabulary=300, spread=40.0),
    # Most rows are left to the one program that ends what is open.
    "one_pass": Case(seed=8, vocabulary=4500, passes=1),
    "two_passes": Case(seed=9, vocabulary=700, grid=1.0, passes=2),
}
LARGE = {
    f"{dtype}_{spread}".replace("torch.", ""): Case(seed=7, vocabulary=151936, spread=spread, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float32)
    for spread in (0.0, 1.0, 5.0)
}


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(__file__)


@pytest.mark.parametrize("name", [*SMALL, "perturbed"])
def test_interpreted(interpreted, name):
    assert not interpreted[name], interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_gpu(name):
    check((SMALL | LARGE)[name], "cuda")


@pytest.mark.gpu
def test_gpu_perturbed():
    check_perturbed("cuda")


@pytest.mark.gpu
def test_gpu_operators_are_registered_rightly():
    from sampling.kernels.choose import FARTHEST, argmax_tokens, choose_tokens

    x = torch.randn(3, 500, device="cuda")
    keys, limit = torch.ones(3, 2, dtype=torch.int64, device="cuda"), torch.full((3,), FARTHEST.value, device="cuda")
    one = torch.ones(3, device="cuda")
    arguments = (x, one, keys, limit.to(torch.int32), None, one.double() * 0.5)
    for operator, given in ((choose_tokens, arguments), (argmax_tokens, (x,))):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


if __name__ == "__main__":
    interpreter.run_all(
        {name: functools.partial(check, case) for name, case in SMALL.items()} | {"perturbed": check_perturbed}
    )
