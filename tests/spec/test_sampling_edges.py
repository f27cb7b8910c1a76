"""The edges of the parameters, of every strategy: laws where something could divide by zero, overflow or be left empty.

By the rounds of `flashtree check-sampler`, with a drafter that is wrong; and through the engine.
"""

import pytest
import torch

from sampling import SAMPLERS
from spec import Engine
from spec.check_sampler import Case, V, build, check, joint_law, policy, targets
from spec.requests import Settings
from spec.strategies import serves
from spec.tree import TREES

EXACT = [name for name in SAMPLERS.names() if SAMPLERS.get(name).lossless and name != "greedy"]
TARGETS = {name: target for name, (target, _) in targets().items()} | {"all equal": torch.zeros(V, V, V)}
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# (target, settings): what is drawn.
EDGES = {
    "T = 0": ("opposite", {"temperature": 0.0}),
    "T = 1e-8": ("opposite", {"temperature": 1e-8}),
    "T = 100": ("opposite", {"temperature": 100.0}),
    "T = 0, all equal": ("all equal", {"temperature": 0.0}),
    "T = 1e-8, all equal": ("all equal", {"temperature": 1e-8}),
    "T = 100, all equal": ("all equal", {"temperature": 100.0}),
    "all equal, all filters": ("all equal", {"temperature": 1.0, "top_k": 1, "top_p": 1e-9, "min_p": 1.0}),
    "T = 1e-8, all filters": ("opposite", {"temperature": 1e-8, "top_k": 2, "top_p": 0.9, "min_p": 0.1}),
    "-inf": ("disjoint", {"temperature": 1.0}),
    "-inf, T = 100": ("disjoint", {"temperature": 100.0}),
    "-inf, T = 1e-8": ("disjoint", {"temperature": 1e-8}),
    "filters off": ("opposite", {"temperature": 1.0} | OFF),
    "top_k = V": ("opposite", {"temperature": 1.0, "top_k": V}),
    "top_k > V": ("opposite", {"temperature": 1.0, "top_k": 2**40}),
}
DRAFT = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0], [1.0, 1.0, 1.0]])

pytestmark = pytest.mark.filterwarnings("ignore:not one token of drafter")


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", EXACT)
def test_the_law_at_the_edge(name, edge):
    target, settings = EDGES[edge]
    sampler = build(name, {})
    for tree in TREES.names():
        if serves(sampler, policy(tree)):
            params = sampler.params(seed=0, **settings)
            case = Case(name=edge, tree=tree, target=TARGETS[target], draft=DRAFT, params=params)
            outcome, _ = check(case, sampler, 4096)
            assert outcome.p_value > 1e-4, (tree, outcome)


def test_the_edges_are_what_they_are_called():
    """The book itself: one text, all texts alike, as without filters, nothing that is impossible."""
    laws = {}
    for edge, (target, settings) in EDGES.items():
        params = build("gumbel", {}).params(seed=0, **settings)
        laws[edge] = joint_law(Case(name=edge, tree="chain", target=TARGETS[target], draft=DRAFT, params=params))
    for edge in ("T = 0", "T = 1e-8", "T = 0, all equal", "T = 1e-8, all filters", "-inf, T = 1e-8"):
        assert float(laws[edge].max()) == 1.0, edge
    assert torch.equal(laws["T = 0"], laws["T = 1e-8"])
    for edge in ("T = 1e-8, all equal", "T = 100, all equal", "all equal, all filters"):
        torch.testing.assert_close(laws[edge], torch.full_like(laws[edge], V**-3.0))
    assert float((laws["T = 100"] - V**-3.0).abs().max()) < 0.01
    for edge in ("top_k = V", "top_k > V"):
        assert torch.equal(laws[edge], laws["filters off"])
    assert ((laws["-inf"] == 0) == (laws["-inf, T = 100"] == 0)).all() and (laws["-inf"] == 0).any()


@pytest.fixture(scope="module")
def engine(tiny_targets):
    def make(name):
        return Engine.from_config(
            {
                "target": {"path": str(tiny_targets["qwen3"]), "dtype": "float32"},
                "draft": {"name": "self", "wrong_every": 3, "block_size": 5},
                "tree": {"name": "chain" if SAMPLERS.get(name).chains_only else "best_first"},
                "sampling": {"name": name},
                "engine": {"slots": 16, "max_model_len": 64},
            }
        )

    return make


@pytest.mark.filterwarnings("ignore:sampler 'typical' is lossy")
@pytest.mark.parametrize("name", [*EXACT, "typical"])
def test_edges_through_the_engine(name, engine):
    """A temperature of 1e-8 is greedy decoding, 100 is nearly uniform, filters that are off change nothing."""
    made, ids = engine(name), [5, 8, 5, 9]
    greedy = made.generate([ids], max_new_tokens=12)[0].token_ids
    assert made.generate([ids], max_new_tokens=12, temperature=1e-8, seed=4)[0].token_ids == greedy
    plain = made.generate([ids], max_new_tokens=12, temperature=1.0, seed=4)[0].token_ids
    assert plain != greedy
    for off in ({"top_k": 0}, {"top_k": 97}, {"top_k": 10**9}, OFF):
        assert made.generate([ids], max_new_tokens=12, temperature=1.0, seed=4, **off)[0].token_ids == plain
    with pytest.raises(ValueError, match=r"top_p = 0.0: must be in \(0, 1\]"):
        made.generate([ids], temperature=1.0, top_p=0.0)
    settings = [Settings(seed=n, max_new_tokens=1, temperature=100.0) for n in range(96)]
    assert len({out.token_ids[0] for out in made.generate([ids] * 96, settings)}) > 40
