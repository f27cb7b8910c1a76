"""The whole round as one graph: `Engine.step` traces without a break, once, and computes what eager mode computes.

`backend="eager"` runs the traced graph as it is: this tests the tracing, not a compiler.
"""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from sampling import SamplingParams
from spec import Engine
from spec.draft import DRAFTERS
from spec.requests import Request
from spec.tree import TREES

# Settings under test by registered name; others run by their defaults.
DRAFT_SETTINGS = {"dflash": {"block_size": 4}, "self": {"wrong_every": 2, "block_size": 4}}
TREE_SETTINGS = {"static": {"widths": [2, 2, 1]}}
PAIRS = [*itertools.product(DRAFTERS.names(), TREES.names()), ("ngram", "plain")]
# (drafter, tree, active slots): all of them have rows, or only the first.
CASES = [(*pair, 2) for pair in PAIRS] + [("dflash", "best_first", 1), ("ngram", "plain", 1)]
SLOTS, CAPACITY, ROUNDS = 2, 64, 7


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Graphs(CompileCounter):
    """Counts graphs, and keeps the operations whose result has a size or a value that depends on data."""

    def __init__(self):
        super().__init__()
        self.dynamic = []

    def __call__(self, graph, inputs):
        for node in graph.graph.nodes:
            for value in tree_leaves(node.meta.get("example_value")):
                sizes = value.shape if isinstance(value, torch.Tensor) else [value]
                if any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes):
                    self.dynamic.append(node)
        return super().__call__(graph, inputs)


def prompt(length):
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def build(draft, tree, targets, drafters, target="qwen2_windowed", sampling=None):
    settings = DRAFT_SETTINGS.get(draft, {}) | ({"path": str(drafters[target])} if draft == "dflash" else {})
    tables = {
        "target": {"path": str(targets[target]), "dtype": "float32"},
        "draft": {"name": draft, **settings},
        "tree": {"name": tree, **TREE_SETTINGS.get(tree, {})},
        "sampling": sampling or {},
        "engine": {"slots": SLOTS, "max_model_len": CAPACITY, "page_size": 16},
    }
    return Engine.from_config(tables)


def observe(engine):
    state = engine.state
    names = ("tokens", "total", "anchor", "reason", "active", "pending_count", "ring", "round")
    return {name: getattr(state, name).tolist() for name in (*names, "length")}


@pytest.mark.parametrize(("draft", "tree", "active"), CASES)
def test_step_is_one_graph(draft, tree, active, tiny_targets, tiny_drafters):
    plain = tree == "plain"
    eager, traced = (build(draft, "chain" if plain else tree, tiny_targets, tiny_drafters) for _ in range(2))
    for engine in (eager, traced):
        for slot, ids in list(enumerate((prompt(9), prompt(20))))[:active]:
            # The second slot runs into its limit on the way: then it is idle, in the same graph.
            most = 30 if slot == 0 else 4
            engine.prefill(slot, Request(prompt_ids=ids, max_new_tokens=most, stop_ids=[]), plain)
    rows = active * (1 if plain else eager.nodes)
    counter = Graphs()
    trace = torch.compile  # noqa: TID251 (a test of what modelkit/compile.py relies on)
    step = trace(traced.step, backend=counter, fullgraph=True, dynamic=False)
    gained = set()
    for number in range(ROUNDS):
        before = eager.state.total.tolist()
        eager.step(rows, CAPACITY, plain)
        step(rows, CAPACITY, plain)
        gained |= {now - then for now, then in zip(eager.state.total.tolist(), before, strict=True)}
        assert observe(traced) == observe(eager), number
    assert counter.frame_count == 1, "recompiled"
    assert not counter.dynamic
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    assert not eager.state.active[1]
    assert len(gained - {0}) > 1 or draft == "dflash" or plain, "every round accepted the same"


SAMPLED = [("dflash", "best_first"), ("self", "static"), ("ngram", "plain")]


@pytest.mark.filterwarnings("ignore:sampler 'typical' is lossy")
@pytest.mark.parametrize(
    ("sampling", "draft", "tree"),
    [
        *[(name, *pair) for name in ("gumbel", "token_match", "rejection") for pair in SAMPLED],
        ("block_verification", "dflash", "chain"),
        ("block_verification", "self", "chain"),
        ("typical", "dflash", "best_first"),
    ],
)
def test_sampling_is_one_graph_whatever_the_requests(sampling, draft, tree, tiny_targets, tiny_drafters):
    """Every feature built in; requests come and go with other values, greedy ones too, and nothing is traced again."""
    plain = tree == "plain"
    table = {"name": sampling, "filters": ["top_k", "top_p", "min_p", "penalties", "logit_bias"]}
    eager, traced = (
        build(draft, "chain" if plain else tree, tiny_targets, tiny_drafters, sampling=table) for _ in range(2)
    )
    counter = Graphs()
    trace = torch.compile  # noqa: TID251 (a test of what modelkit/compile.py relies on)
    step = trace(traced.step, backend=counter, fullgraph=True, dynamic=False)
    several = [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.5, top_k=9, top_p=0.8, min_p=0.01, seed=2**40),
        SamplingParams(temperature=1.5, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={4: 1.0}, seed=9),
        SamplingParams(),
    ]
    for number, params in enumerate(several):
        for engine in (eager, traced):
            ids = prompt(9 + number)
            request = Request(prompt_ids=ids, max_new_tokens=40, stop_ids=[], sampling=params)
            engine.prefill(number % SLOTS, request, plain)
        for _ in range(3):
            eager.step(SLOTS * (1 if plain else eager.nodes), CAPACITY, plain, False)
            step(SLOTS * (1 if plain else eager.nodes), CAPACITY, plain, False)
            assert observe(traced) == observe(eager)
    assert counter.frame_count == 1, "recompiled"
    assert not counter.dynamic
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


def test_rounds_run_by_hand_do_not_disturb_generation(tiny_targets, tiny_drafters):
    """A warm-up, a trace or a measurement runs rounds of which nobody reads the tokens."""
    engine = build("dflash", "best_first", tiny_targets, tiny_drafters)
    (expected,) = engine.generate([prompt(9)], max_new_tokens=8)
    for rounds in range(1, 4):
        for _ in range(rounds):
            engine.step(engine.nodes, CAPACITY)
        assert engine.generate([prompt(9)], max_new_tokens=8)[0].token_ids == expected.token_ids
