"""Compiled prefill on the CPU: chunks padded to a few sizes and bounds leave what exact eager chunks leave.

`torch.compile` is replaced by what runs the same step eagerly, or traced: this tests padding and tracing, no compiler.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch._dynamo.utils import counters

from modelkit.cache import KVCache, Lane
from spec import Engine
from spec import prefill as prefill_module
from spec.draft import DRAFTERS
from spec.prefill import Bucket, context_bounds
from spec.requests import Settings
from spec.state import RING

pytestmark = pytest.mark.filterwarnings("ignore:not one token of drafter")

COMPILE = torch.compile  # noqa: TID251 (what modelkit/compile.py relies on)
CHUNK, CAPACITY = 70, 200
PAIRS = [(name, "static" if name == "dflash" else "best_first") for name in DRAFTERS.names()]
# One drafter with features and one without are enough where compiling takes its time.
CASES = [(*pair, plain, None) for pair in PAIRS for plain in (False, True)]
CASES += [("dflash", "static", False, "aot_eager"), ("ngram", "best_first", True, "eager")]


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    """Several bounds within a tiny model's positions."""
    monkeypatch.setattr(prefill_module, "FIRST_BOUND", 16)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def replace_compiler(monkeypatch, backend):
    """What `compile_step` gets for a step: the step itself, or its trace."""
    made = []

    def compile(step, **how):
        assert how["fullgraph"] and not how["dynamic"]
        made.append(step)
        return step if backend is None else COMPILE(step, backend=backend, fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", compile)
    return made


def build(targets, drafters, draft, tree, mode, **engine):
    path = {"path": str(drafters["qwen2_windowed"])} if draft == "dflash" else {}
    sizes = {"slots": 2, "max_model_len": CAPACITY, "prefill_chunk": CHUNK, "page_size": 16}
    return Engine.from_config(
        {
            "target": {"path": str(targets["qwen2_windowed"]), "dtype": "float32"},
            "draft": {"name": draft, **path},
            "tree": {"name": tree},
            "engine": sizes | engine,
            "compile": {"mode": mode},
        }
    )


def prompt(length):
    return random.Random(length).choices(range(97), k=length)


def context(cache, slot):
    length = int(cache.length[slot])
    views = [cache.view(layer) for layer in range(len(cache.layers))]
    return length, torch.stack([torch.stack(view.context(length))[:, slot] for view in views])


# A tail of each size, whole chunks alone, one token, and a prompt that only leaves room for one.
PROMPTS = [prompt(n) for n in (75, 139, 140, 1, 64, 65, 199)]


@pytest.mark.parametrize(("draft", "tree", "plain", "backend"), CASES)
def test_padded_chunks_equal_exact_ones(draft, tree, plain, backend, tiny_targets, tiny_drafters, monkeypatch):
    exact = build(tiny_targets, tiny_drafters, draft, tree, "none")
    want = exact.generate(PROMPTS, max_new_tokens=9, plain=plain)
    made = replace_compiler(monkeypatch, backend)
    for page_size in (16, None) if backend is None else (16,):
        padded = build(tiny_targets, tiny_drafters, draft, tree, "default", page_size=page_size)
        got = padded.generate(PROMPTS, max_new_tokens=9, plain=plain)
        assert [c.token_ids for c in got] == [c.token_ids for c in want]
        assert [c.stats.per_step_accepted for c in got] == [c.stats.per_step_accepted for c in want]
    if backend is not None:
        assert counters["stats"]["unique_graphs"] == len(made) and not counters["graph_break"]


@pytest.mark.parametrize("length", [75, 140])
def test_what_a_padded_prefill_leaves(length, tiny_targets, tiny_drafters, monkeypatch):
    """Caches of target and drafter, first token, and nothing in the other slot or behind the prompt."""
    replace_compiler(monkeypatch, None)
    engines = [build(tiny_targets, tiny_drafters, "dflash", "static", mode) for mode in ("none", "default")]
    for engine in engines:
        (request,) = engine._prepare([prompt(30)], None, {"max_new_tokens": 20})
        engine.prefill(0, request)
        engine.prefiller.token.fill_(96)  # what a padding row holds must not matter
        before = [context(cache, 0) for cache in (engine.state.cache, engine.drafter.cache)]
        (request,) = engine._prepare([prompt(length)], None, {"max_new_tokens": 20})
        engine.prefill(1, request)
        after = [context(cache, 0) for cache in (engine.state.cache, engine.drafter.cache)]
        assert [n for n, _ in after] == [30, 30]
        assert all(torch.equal(was[1], now[1]) for was, now in zip(before, after, strict=True))
    exact, padded = engines
    for find in (lambda e: e.state.cache, lambda e: e.drafter.cache):
        (n, want), (m, got) = context(find(exact), 1), context(find(padded), 1)
        assert n == m == length
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        pages = find(padded).table[1]
        behind = [layer.k[pages].transpose(1, 2).flatten(0, 1)[length:] for layer in find(padded).all_layers()]
        assert not any(part.any() for part in behind), "padding rows were kept"
    for name in ("tokens", "total", "anchor", "reason", "active", "ring", "round"):
        assert torch.equal(getattr(exact.state, name), getattr(padded.state, name)), name


def test_buckets_are_few_and_large_enough(tiny_targets, tiny_drafters, monkeypatch):
    replace_compiler(monkeypatch, None)
    prefill = build(tiny_targets, tiny_drafters, "ngram", "chain", "default").prefiller
    assert context_bounds(CAPACITY) == [0, 16, 64, CAPACITY] and context_bounds(16) == [0, 16]
    for bounds in (prefill.bounds, [0, CHUNK, 2 * CHUNK, CAPACITY]):
        prefill.bounds, used = bounds, set()
        for length in range(1, CAPACITY):
            for start in range(0, length, CHUNK):
                count = min(CHUNK, length - start)
                bucket = prefill.bucket(start, count)
                assert bucket in prefill.buckets(length)
                assert bucket.rows >= count and bucket.bound >= start
                used.add(bucket)
        assert used <= prefill.all_buckets() and len(used) <= len(prefill.sizes) * 4
    prefill.bounds = context_bounds(CAPACITY)
    assert prefill.bucket(0, 65) == Bucket(rows=CHUNK, bound=0)
    assert prefill.bucket(1, 65) == Bucket(rows=CHUNK, bound=16)
    monkeypatch.setattr(prefill.target.backend, "reads_bound", lambda rows: rows > 64)
    assert prefill.bucket(0, 64) == Bucket(rows=64, bound=CAPACITY)
    assert len(prefill.all_buckets()) == 1 + len({prefill.bucket(start, CHUNK) for start in (0, CHUNK, 2 * CHUNK)})


@pytest.mark.parametrize("page_size", [None, 4])
def test_a_lane_is_one_slot_of_the_cache(page_size):
    cache = KVCache(layers=2, heads=1, head_dim=4, slots=3, capacity=12, scratch=6, dtype=torch.float32,
                    page_size=page_size)  # fmt: skip
    lane, rows = Lane(cache), torch.randn(6, 1, 4)
    if page_size:
        cache.set_table(cache.table.flip(0).roll(1, 1))
    for layer in range(2):
        lane.write_scratch(layer, rows, -rows)
    lane.enter(2)
    for count in (4, 5):
        lane.commit(torch.arange(6)[None], torch.tensor([count]))
    assert cache.length.tolist() == [0, 0, 9, 0]
    for view, slot in ((cache.view(1), 2), (lane.view(1), 0)):
        k, v = (found[slot, 0] for found in view.context(9))
        assert torch.equal(k, torch.cat([rows[:4], rows[:5]])[:, 0]) and torch.equal(v, -k)
    lane.enter(0)
    lane.commit(torch.arange(6)[None], torch.tensor([0]))
    assert cache.length.tolist() == [0, 0, 9, 0] and lane.length.tolist() == [0, 0]


@pytest.mark.parametrize("lag", [0, 1])
def test_many_prompts_begin_at_once(tiny_targets, tiny_drafters, monkeypatch, lag):
    """More first tokens on their way than the ring holds; some requests end with theirs."""
    engine = build(tiny_targets, tiny_drafters, "ngram", "best_first", "none", slots=20)
    alone = build(tiny_targets, tiny_drafters, "ngram", "best_first", "none", slots=1)
    monkeypatch.setattr(engine.readback, "lag", lag)  # 1: as on a GPU
    pushed, most = engine.readback.push, []
    monkeypatch.setattr(
        engine.readback, "push", lambda *owners, **how: (pushed(*owners, **how), most.append(len(engine.readback)))
    )
    prompts = [random.Random(n).choices(range(97), k=1 + n % 7) for n in range(45)]
    sizes = [1 + n % 5 for n in range(45)]
    wanted = [alone.generate([ids], max_new_tokens=n)[0] for ids, n in zip(prompts, sizes, strict=True)]
    got = engine.generate(prompts, [Settings(max_new_tokens=n) for n in sizes])
    assert [out.token_ids for out in got] == [out.token_ids for out in wanted]
    assert [out.stats.per_step_accepted for out in got] == [out.stats.per_step_accepted for out in wanted]
    assert max(most) == (RING - 1 if lag else 1)


def test_the_device_has_its_next_round_before_anything_is_looked_at(
    tiny_targets, tiny_drafters, monkeypatch, as_on_a_gpu
):
    """As on a GPU: the first round goes out before the first token is read, and no call waits for its last round."""
    engine = build(tiny_targets, tiny_drafters, "ngram", "best_first", "none", slots=2)
    as_on_a_gpu(engine, 1)
    done = []
    for owner, name in ((engine.prefiller, "end"), (engine, "launch"), (engine.readback, "pop")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, call=call, name=name: (done.append(name), call(*a))[1])
    for ids in (prompt(5), prompt(9)):  # the second one begins behind a round that came to nothing
        want = build(tiny_targets, tiny_drafters, "ngram", "best_first", "none").generate([ids], max_new_tokens=8)
        done.clear()
        got = engine.generate([ids], max_new_tokens=8)
        assert got[0].token_ids == want[0].token_ids
        rounds = len(got[0].stats.per_step_accepted)
        assert done[:4] == ["end", "launch", "pop", "launch"]
        assert done.count("launch") == rounds + 1
        assert done.count("pop") == rounds + 1  # the first token; not the last round
    done.clear()
    engine.generate([prompt(5), prompt(9)], max_new_tokens=1)
    assert done == ["end", "end", "pop", "pop"]  # nothing to go on with


def test_a_step_that_is_not_compiled_does_not_keep_the_first_token(
    tiny_targets, tiny_drafters, monkeypatch, as_on_a_gpu
):
    replace_compiler(monkeypatch, None)
    engine = build(tiny_targets, tiny_drafters, "ngram", "best_first", "default")
    as_on_a_gpu(engine, 1)
    compiled, seen = engine.compiled_step, []
    monkeypatch.setattr(engine, "compiled_step", lambda *a: (seen.append("round"), compiled(*a))[1])
    for order in (["piece", "round"], ["round", "piece"]):  # the second time it is there
        seen.clear()
        for piece in engine.stream(prompt(5), max_new_tokens=6):
            seen += ["piece"] if piece.token_ids else []
        assert seen[:2] == order


def test_only_processes_of_a_layout_wait_for_the_last_round(tiny_targets, tiny_drafters, monkeypatch):
    engine, waited = build(tiny_targets, tiny_drafters, "ngram", "best_first", "none"), []
    end = engine.readback.end
    monkeypatch.setattr(engine.readback, "end", lambda wait: (waited.append(wait), end(wait))[1])
    engine.generate([prompt(5)], max_new_tokens=2)
    assert waited == [False]
