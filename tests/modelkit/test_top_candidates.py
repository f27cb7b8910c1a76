"""The Triton top candidates against a stable sort: in Triton's interpreter on a CPU, and on a GPU.

This file is also the script that runs in the interpreter, which is wrong for bf16: fp16 and fp32 stand in for it.
"""

import dataclasses
import functools
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import interpreter

from modelkit.backend import Reference

INF = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Logits [*shape, V] of a kind; `sliced`: the rows after the first of each slot, as the drafter's are."""

    shape: tuple[int, ...]
    V: int
    k: int
    kind: str = "normal"  # normal | ties | zeros | few | last | none | nan
    dtype: torch.dtype = torch.float32
    sliced: bool = False


def logits_of(case: Case, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.V + case.k)
    *outer, rows = case.shape
    x = torch.randn((*outer, rows + case.sliced, case.V), generator=generator) * 3
    if case.kind == "ties":
        x = x.round()
    if case.kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)  # which are equal
    if case.kind in ("few", "last", "none"):
        x = torch.where((torch.rand(x.shape, generator=generator) < 3 / case.V) & (case.kind == "few"), x, -INF)
        x[..., case.V - 1] = 0.5
        if case.kind == "none":
            x[..., -1, :] = -INF
    if case.kind == "nan":
        x[..., 0, case.V // 2] = float("nan")
        x[..., 0, : case.V // 4] = float("nan")
    x = x.to(case.dtype).to(device)
    return x[..., 1:, :] if case.sliced else x


def check(case: Case, device: str = "cpu") -> None:
    from modelkit.kernels.backend import TritonBackend

    x = logits_of(case, device)
    ids, score = TritonBackend().top_candidates(x, case.k)
    assert ids.shape == score.shape == (*case.shape, case.k)
    assert ids.dtype == torch.int64 and score.dtype == torch.float32
    wide = x.float()
    best, order = wide.sort(dim=-1, descending=True, stable=True)
    ordinary = ~wide.isnan().any(-1)
    assert torch.equal(ids[ordinary], order[ordinary][..., : case.k])
    expected = best[..., : case.k] - wide.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(score, expected.where(ordinary[..., None], torch.nan), rtol=0, atol=2e-5, equal_nan=True)
    assert ((ids >= 0) & (ids < case.V)).all()
    assert (ids.sort(-1).values.diff() > 0).all(), "the same token twice"
    if case.kind == "normal" and case.dtype == torch.float32:  # the same function, where nothing ties
        torch.testing.assert_close((ids, score), Reference().top_candidates(x, case.k), rtol=0, atol=2e-5)


def random_case(seed: int, vocabulary: int, dtypes: tuple[torch.dtype, ...]) -> Case:
    pick = random.Random(seed)
    V = pick.randint(1, vocabulary)
    shape = tuple(pick.randint(1, 3) for _ in range(pick.randint(1, 3)))
    return Case(
        shape=shape, V=V, k=pick.randint(1, min(V, pick.choice([4, 16, 64]))), sliced=pick.random() < 0.5,
        kind=pick.choice(["normal", "ties", "few", "nan"]), dtype=pick.choice(dtypes),
    )  # fmt: skip


SMALL = {
    "one": Case(shape=(1,), V=1, k=1),
    "one_of_many": Case(shape=(2,), V=5000, k=1, kind="ties"),
    "as_many_as_there_are": Case(shape=(1, 2), V=37, k=37, kind="ties"),
    "more_than_groups": Case(shape=(1,), V=70, k=64),
    "whole_chunks": Case(shape=(2,), V=8192, k=8, kind="ties"),
    "a_chunk_and_one": Case(shape=(2, 1), V=4097, k=16, kind="few"),
    "zeros": Case(shape=(2,), V=700, k=16, kind="zeros"),
    "an_empty_chunk": Case(shape=(2,), V=4200, k=4, kind="last"),
    "no_candidates": Case(shape=(2, 2), V=4200, k=5, kind="none"),
    "nan": Case(shape=(1, 2), V=300, k=16, kind="nan"),
    "slots": Case(shape=(3, 2), V=650, k=10, kind="ties", sliced=True),
    "half": Case(shape=(2, 2), V=999, k=7, kind="ties", dtype=torch.float16, sliced=True),
    "four_dimensions": Case(shape=(2, 1, 2), V=333, k=3, sliced=True),
    "fallback": Case(shape=(2, 2), V=200, k=65),
} | {f"random_{seed}": random_case(seed, 1500, (torch.float32, torch.float16)) for seed in range(7)}

DRAFTER = functools.partial(Case, V=151_936, dtype=torch.bfloat16, sliced=True)
LARGE = {
    "drafter": DRAFTER(shape=(1, 15), k=16),
    "ties": DRAFTER(shape=(1, 15), k=64, kind="ties"),
    "few": DRAFTER(shape=(1, 15), k=16, kind="few"),
    "none": DRAFTER(shape=(1, 15), k=16, kind="none"),
    "nan_in_bf16": DRAFTER(shape=(1, 15), k=16, kind="nan"),
    "eight_slots": DRAFTER(shape=(8, 15), k=31, kind="ties"),
    "odd": Case(shape=(3, 7), V=151_665, k=16, kind="ties", dtype=torch.bfloat16),
    "single": Case(shape=(2, 7), V=49_152, k=16),
    "wide": Case(shape=(2,), V=262_144, k=5, kind="ties", dtype=torch.bfloat16),
} | {
    f"random_{seed}": random_case(seed, 60_000, (torch.float32, torch.bfloat16, torch.float16))
    for seed in range(100, 110)
}  # fmt: skip


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return interpreter.interpreted(__file__)


@pytest.mark.parametrize("name", SMALL)
def test_interpreted(interpreted, name):
    assert not interpreted[name], interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_gpu(name):
    check((SMALL | LARGE)[name], "cuda")


@pytest.mark.gpu
def test_gpu_compiled_reads_a_slice_where_it_lies():
    from modelkit.kernels.top_candidates import top_candidates

    x = logits_of(LARGE["eight_slots"], "cuda")._base
    torch.compiler.reset()
    compiled = torch.compile(lambda x: top_candidates(x[:, 1:], 16), fullgraph=True, dynamic=False)  # noqa: TID251
    compiled(x)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = compiled(x)
    assert torch.cuda.max_memory_allocated() - before < x.nbytes // 2, "copied"
    for got, want in zip(found, top_candidates(x[:, 1:], 16), strict=True):
        assert torch.equal(got, want)
    torch.compiler.reset()


def test_k_out_of_range_is_refused():
    interpreter.needs_triton()
    from modelkit.kernels.top_candidates import top_candidates

    for k, most in ((0, 9), (10, 9), (65, 64)):
        with pytest.raises(ValueError, match=f"1 to {most}, got {k}"):
            top_candidates(torch.zeros(2, max(most, 9)), k)


if __name__ == "__main__":
    interpreter.run_all({name: functools.partial(check, case) for name, case in SMALL.items()})
