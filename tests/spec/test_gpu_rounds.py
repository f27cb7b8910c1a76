"""Compiled rounds on a GPU: the tokens of eager rounds, in one captured graph a bucket, no host in between."""

from __future__ import annotations

import json
import random

import pytest
import torch

from modelkit.compile import Counters
from spec import Engine
from spec.cli import main
from spec.requests import Request
from spec.trace import trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:not one token of drafter")]

PAIRS = [("ngram", "best_first"), ("self", "chain"), ("dflash", "best_first"), ("dflash", "static")]


def prompts():
    """Lengths that cross pages of 16 and chunks of 32; one repeats itself, so that n-grams are found."""
    draw = random.Random(5)
    return [draw.choices(range(97), k=n) for n in (3, 31)] + [[7, 8, 9, 10, 11] * 9]


def engine(targets, drafters, draft, tree, mode, kernels, sampling=None, **sizes):
    path = {"path": str(drafters["qwen3"])} if draft == "dflash" else {}
    return Engine.from_config(
        {
            "target": {"path": str(targets["qwen3"]), "dtype": "float32", "device": "cuda"},
            "draft": {"name": draft, **path},
            "tree": {"name": tree},
            "sampling": sampling or {},
            "engine": {"max_model_len": 128, "prefill_chunk": 32, **sizes},
            "compile": {"mode": mode, "kernels": kernels},
        }
    )


@pytest.mark.parametrize(("draft", "tree"), PAIRS)
def test_compiled_rounds_equal_eager_ones(tiny_targets, tiny_drafters, draft, tree):
    build = lambda *how, **sizes: engine(tiny_targets, tiny_drafters, draft, tree, *how, **sizes)  # noqa: E731
    want = build("none", "reference").generate_plain(prompts(), max_new_tokens=40)
    before = Counters.read()
    fast = build("reduce-overhead", "triton")
    graphs = []
    for _ in range(2):
        got = fast.generate(prompts(), max_new_tokens=40)
        graphs.append(Counters.read().graphs)
        assert [c.token_ids for c in got] == [c.token_ids for c in want]
        assert [sum(n + 1 for n in c.stats.per_step_accepted) + 1 for c in got] == [40] * len(want)
    assert graphs[0] == graphs[1], "the second time nothing is compiled any more"
    after = Counters.read()
    assert after.skipped == before.skipped
    assert after.partitions == before.partitions
    assert after.non_static_inputs == before.non_static_inputs
    eager = build("none", "triton", page_size=16).generate(prompts(), max_new_tokens=40)
    assert [c.token_ids for c in eager] == [c.token_ids for c in want]


def test_two_slots_in_one_graph(tiny_targets, tiny_drafters):
    want = engine(tiny_targets, tiny_drafters, "ngram", "best_first", "none", "reference").generate_plain(
        prompts(), max_new_tokens=24
    )
    both = engine(tiny_targets, tiny_drafters, "ngram", "best_first", "reduce-overhead", "triton", slots=2)
    got = both.generate(prompts(), max_new_tokens=24)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]


def ban_by_text(logits, nodes):
    """A host processor: one token of three is left, which one depends on the whole output."""
    for row, _, output in nodes.texts():
        logits[row, torch.arange(97) % 3 != sum(output) % 3] = -torch.inf
    return logits


@pytest.mark.filterwarnings("ignore:host_processors")
@pytest.mark.parametrize(("draft", "tree"), PAIRS)
def test_host_processors_between_two_graphs(tiny_targets, tiny_drafters, draft, tree):
    table = {"host_processors": [ban_by_text]}
    build = lambda *how: engine(tiny_targets, tiny_drafters, draft, tree, *how, sampling=table, slots=2)  # noqa: E731
    slow, fast = build("none", "reference"), build("reduce-overhead", "triton")
    before, graphs = Counters.read(), []
    for _ in range(2):
        for temperature in (0.0, 0.8):
            how = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
            want, got = slow.generate_plain(prompts(), **how), fast.generate(prompts(), **how)
            assert [c.token_ids for c in got] == [c.token_ids for c in want]
        graphs.append(Counters.read().graphs)
    assert graphs[0] == graphs[1], "the second time nothing is compiled any more"
    after = Counters.read()
    for name in ("skipped", "partitions", "non_static_inputs"):
        assert getattr(after, name) == getattr(before, name), name


def test_no_synchronisation_in_a_round(tiny_targets, tiny_drafters):
    fast = engine(tiny_targets, tiny_drafters, "ngram", "best_first", "reduce-overhead", "triton")
    fast.generate(prompts()[:1], max_new_tokens=24)  # compiles and captures
    step = fast.compiled_step(fast.nodes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_no_synchronisation_in_a_prefill(tiny_targets, tiny_drafters):
    """A request is admitted without waiting for the rounds of the others."""
    fast = engine(tiny_targets, tiny_drafters, "ngram", "best_first", "reduce-overhead", "triton")
    fast.generate(prompts()[:1], max_new_tokens=4, stop_token_ids=[5])  # compiles and captures
    request = Request(prompt_ids=prompts()[0], max_new_tokens=4, stop_ids=[5, 6])
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast.prefill(0, request)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_bench_of_compiled_parts(tiny_targets, tiny_drafters, tmp_path, capsys):
    """Real weights; the parts compile by themselves, nothing compiles again, no host in the rounds."""
    out, before = tmp_path / "steps.json", Counters.read()
    settings = {
        "target.path": tiny_targets["qwen3"], "target.dtype": "float32", "target.device": "cuda", "tree.budget": 7,
        "draft.name": "dflash", "draft.path": tiny_drafters["qwen3"], "engine.prefill_chunk": 32,
    }  # fmt: skip
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    arguments = ["--steps", *sets, "--rows", "1", "--context", "8,24", "--repeat", "2", "--json", str(out)]
    assert main(["bench", *arguments]) == 0
    record = json.loads(out.read_text())
    assert record["mode"] == "reduce-overhead" and record["bandwidth"] > 1e11
    after = record["compiler"]
    assert (after["skipped"], after["partitions"]) == (before.skipped, before.partitions)
    assert after["non_static_inputs"] == before.non_static_inputs
    for run in record["runs"]:
        assert run["recompiles_while_timing"] == run["host_syncs_in_10_rounds"] == 0
        assert all(part["device_ms"] > 0 and part["ms"] > 0 for part in run["parts"])


def test_the_host_stays_ahead(tiny_targets, tiny_drafters, tmp_path):
    """By the profiler: one graph a round, launched before the last kernel of the round before has ended."""
    # The target run once a depth makes the device's part of a tiny model's round longer than the host's.
    sizes = {"max_model_len": 256}
    fast = engine(tiny_targets, tiny_drafters, "self", "chain", "reduce-overhead", "triton", **sizes)
    found = trace(fast, prompts()[0], 20, tmp_path / "trace.json.gz", warm_rounds=3)
    assert found.timeline is not None
    assert set(found.timeline.launches) == {1}
    assert found.timeline.ahead == found.timeline.rounds == 20
    assert min(found.timeline.kernels) == max(found.timeline.kernels) > 0


@pytest.mark.parametrize("draft", ["ngram", "dflash"])
def test_after_a_warm_up_nothing_is_compiled(tiny_targets, tiny_drafters, draft):
    """Chunks of two sizes, 64 rows and 200 (in fp32 by PyTorch's attention), in rounds of two slots."""
    texts = [*prompts(), *(random.Random(n).choices(range(97), k=n) for n in (64, 199, 213))]
    sizes = {"slots": 2, "max_model_len": 256, "prefill_chunk": 200}
    build = lambda *how: engine(tiny_targets, tiny_drafters, draft, "best_first", *how, **sizes)  # noqa: E731
    want = build("none", "reference").generate_plain(texts, max_new_tokens=30)
    start = Counters.read()
    fast = build("reduce-overhead", "triton")
    fast.warm_up()
    before = Counters.read()
    for plain in (False, True):
        got = fast.generate(texts, max_new_tokens=30, plain=plain)
        assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert Counters.read() == before
    for name in ("skipped", "partitions", "non_static_inputs"):
        assert getattr(before, name) == getattr(start, name), name
