"""The best-first kernel against `BestFirst` itself and its heap tests: in Triton's interpreter and on a GPU.

This file is also the script that runs in the interpreter.
"""

import dataclasses
import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import interpreter  # noqa: E402
import test_trees  # noqa: E402
from dflash_helpers import paths  # noqa: E402

from spec.tree.best_first import BestFirst  # noqa: E402
from spec.tree.spine_first import SpineFirst  # noqa: E402
from spec.types import Proposal, Tree  # noqa: E402

INF = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Random candidates; `missing`: how likely there is none; `off_spine`: of the spine-first policy."""

    S: int
    L: int
    k: int
    budget: int
    edge: bool = False
    missing: float = 0.0
    off_spine: float | None = None


def propose(case: Case) -> Proposal:
    S, L, k = case.S, case.L, case.k
    generator = torch.Generator().manual_seed(case.budget + 7 * L)

    def scores(*shape: int) -> torch.Tensor:
        x = (torch.randn(*shape, k + 2, generator=generator) * 2).log_softmax(-1)[..., :k]
        return torch.where(torch.rand(x.shape, generator=generator) < case.missing, -INF, x)

    ids = torch.rand(S, L, k + 9, generator=generator).argsort(-1)[..., :k].contiguous()
    if not case.edge:
        return Proposal(ids=ids, score=scores(S, L).sort(-1, descending=True).values)
    score = scores(S, L)
    score[:, 1:] = torch.nan  # not used, as edge[:, 0] is not
    edge = scores(S, L, k)
    edge[:, 0] = torch.nan
    return Proposal(ids=ids, score=score, edge=edge)


def scores_of(tree: Tree, proposal: Proposal, slot: int) -> list[float]:
    """fp32 path score of each valid node, in node order, the additions in the order of the path."""
    ids, total, rank = proposal.ids[slot].tolist(), {0: torch.tensor(0.0)}, {0: 0}
    parent, token, depth, valid = (x[slot].tolist() for x in (tree.parent, tree.token, tree.depth, tree.valid))
    for i in range(1, len(parent)):
        if valid[i]:
            d, rank[i] = depth[i] - 1, ids[depth[i] - 1].index(token[i])
            table = (
                proposal.score[slot, d] if proposal.edge is None or not d else proposal.edge[slot, d, rank[parent[i]]]
            )
            total[i] = total[parent[i]] + table[rank[i]].cpu()
    return [float(total[i]) for i in sorted(total) if i]


def check(case: Case, device: str = "cpu") -> None:
    proposal = propose(case)
    root = torch.arange(case.S) + 1000
    policy = BestFirst(BestFirst.Config(budget=case.budget, candidates=case.k))
    if case.off_spine is not None:
        policy = SpineFirst(SpineFirst.Config(budget=case.budget, candidates=case.k, off_spine=case.off_spine))
    want = policy.build(proposal, root)
    policy.use_kernels = True
    moved = [None if x is None else x.to(device) for x in (proposal.ids, proposal.score, proposal.edge)]
    tree = policy.build(Proposal(ids=moved[0], score=moved[1], edge=moved[2]), root.to(device))
    for field in dataclasses.fields(Tree):
        got, reference = getattr(tree, field.name), getattr(want, field.name)
        assert got.shape == reference.shape and got.dtype == reference.dtype and got.is_contiguous(), field.name
    tree = Tree(**{field.name: getattr(tree, field.name).cpu() for field in dataclasses.fields(Tree)})
    completed = Tree.make(token=tree.token, parent=tree.parent, depth=tree.depth, valid=tree.valid, max_depth=case.L)
    assert torch.equal(tree.ancestors, completed.ancestors)
    assert (tree.token[:, 0] == root).all() and (tree.parent[:, 0] == -1).all() and (tree.depth[:, 0] == 0).all()
    assert tree.valid[:, 0].all()
    padding = ~tree.valid
    assert not tree.token[padding].any() and not tree.parent[padding].any() and (tree.depth[padding] == 1).all()
    for s in range(case.S):
        assert set(paths(tree, s)) == set(paths(want, s)) and len(paths(tree, s)) == len(set(paths(tree, s)))
        found = scores_of(tree, proposal, s)
        assert case.off_spine is not None or found == sorted(found, reverse=True), "not the order of their scores"


def random_case(seed: int, spine: bool = False) -> Case:
    pick = random.Random(seed)
    edge = pick.random() < 0.5
    return Case(
        S=pick.randint(1, 3), L=pick.randint(1, 15), k=pick.randint(1, pick.choice([4, 16] if edge else [4, 16, 64])),
        budget=pick.randint(1, pick.choice([8, 40, 127])), edge=edge, missing=pick.choice([0.0, 0.2, 0.7]),
        off_spine=pick.choice([1.0, 0.3, 0.01]) if spine else None,
    )  # fmt: skip


CASES = {
    "one": Case(S=1, L=1, k=1, budget=1),
    "the_usual": Case(S=2, L=15, k=16, budget=31),
    "too_few": Case(S=2, L=2, k=3, budget=31),
    "a_chain": Case(S=2, L=15, k=1, budget=40),
    "none_at_all": Case(S=2, L=3, k=4, budget=9, missing=1.0),
    "none_at_all_with_edges": Case(S=2, L=3, k=4, budget=9, missing=1.0, edge=True),
    "edges": Case(S=2, L=7, k=10, budget=33, missing=0.3, edge=True),
    "edges_of_one_depth": Case(S=2, L=1, k=10, budget=5, missing=0.3, edge=True),
    "many": Case(S=1, L=15, k=16, budget=127),
    "very_many": Case(S=1, L=5, k=64, budget=255),
} | {f"random_{seed}": random_case(seed) for seed in range(24)}
CASES |= {
    "a_spine": Case(S=2, L=15, k=16, budget=31, off_spine=0.3),
    "a_spine_of_edges": Case(S=2, L=7, k=10, budget=33, missing=0.3, edge=True, off_spine=0.3),
    "a_spine_longer_than_the_budget": Case(S=1, L=15, k=4, budget=7, off_spine=0.3),
} | {f"random_spine_{seed}": random_case(seed, spine=True) for seed in range(100, 116)}


def traced(device: str = "cpu") -> None:
    """One graph, operators that tell their shapes; first, so that nothing is imported yet."""
    proposal, root = propose(CASES["edges"]), torch.arange(2)
    policy = BestFirst(BestFirst.Config(budget=33))
    policy.use_kernels = True

    def build(ids: torch.Tensor, score: torch.Tensor, edge: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        return policy.build(Proposal(ids=ids, score=score, edge=edge), root).ancestors

    inputs = [x.to(device) for x in (proposal.ids, proposal.score, proposal.edge, root)]
    torch.compiler.reset()
    backend = "eager" if device == "cpu" else "inductor"
    compiled = torch.compile(build, backend=backend, fullgraph=True, dynamic=False)  # noqa: TID251
    assert torch.equal(compiled(*inputs), build(*inputs))
    torch.compiler.reset()


def with_kernels(test: Callable[..., None], *arguments: object, device: str = "cpu") -> None:
    """One of test_trees' tests through the kernel."""
    BestFirst.use_kernels = True
    try:
        with torch.device(device):
            test(*arguments)
    finally:
        BestFirst.use_kernels = False


HEAP = [(3, 4, 16), (1, 5, 2), (15, 8, 5), (9, 1, 16), (2, 1, 1)]
CHECKS: dict[str, Callable[..., None]] = {"traced": traced}
CHECKS |= {name: functools.partial(check, case) for name, case in CASES.items()}
CHECKS |= {
    f"heap_{depths}_{k}_{budget}": functools.partial(
        with_kernels, test_trees.test_best_first_equals_the_heap, depths, k, budget
    )
    for depths, k, budget in HEAP
}
CHECKS["exact_ties"] = functools.partial(with_kernels, test_trees.test_best_first_at_exact_ties)
CHECKS |= {
    f"many_ties_{seed}": functools.partial(
        with_kernels, test_trees.test_best_first_with_many_ties_is_as_good_as_the_heap, seed
    )
    for seed in range(12)
}
CHECKS |= {
    f"promises_{kind}": functools.partial(
        with_kernels, test_trees.test_every_policy_keeps_the_promises_of_a_tree, "best_first", kind
    )
    for kind in ("marginals", "edges", "few candidates")
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return interpreter.interpreted(__file__)


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(interpreted, name):
    assert not interpreted[name], interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_gpu(name):
    CHECKS[name](device="cuda")


@pytest.mark.gpu
def test_gpu_the_greatest_budget():
    check(Case(S=2, L=15, k=64, budget=1023), "cuda")
    check(Case(S=2, L=15, k=64, budget=1000, edge=True, missing=0.3), "cuda")


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_the_engine_says_where_kernels_may_run(name, tiny_targets, monkeypatch):
    from spec import Engine, engine

    def load(*arguments, **settings):
        target = own(*arguments, **settings)
        target.backend.name = name
        return target

    own = engine.load_model
    monkeypatch.setattr(engine, "load_model", load)
    tables = {"target": {"path": str(tiny_targets["llama"])}, "draft": {"name": "ngram"}}
    assert Engine.from_config(tables).tree.use_kernels == (name == "triton")
    assert not hasattr(Engine.from_config(tables | {"tree": {"name": "chain"}}).tree, "use_kernels")
    assert not BestFirst.use_kernels


if __name__ == "__main__":
    interpreter.run_all(CHECKS)
