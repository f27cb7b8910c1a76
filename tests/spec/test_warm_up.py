"""Warm-up: all steps that serving will use and no others, nothing left behind, progress in words.

`torch.compile` is replaced by a recorder that runs the step as it is.
"""

from __future__ import annotations

import random

import pytest
import torch

from spec import Engine
from spec.cli import main
from spec.warm_up import RUNS, slot_buckets

pytestmark = pytest.mark.filterwarnings("ignore:not one token of drafter")

DRAFTS = ["dflash", "ngram", "self"]


@pytest.fixture
def compiled(monkeypatch):
    """How often each compiled step has run, in order of compilation."""
    runs = []

    def compile(step, **how):
        number = len(runs)
        runs.append(0)

        def counted():
            runs[number] += 1
            step()

        return counted

    monkeypatch.setattr(torch, "compile", compile)
    return runs


@pytest.fixture
def build(tiny_targets, tiny_drafters):
    def make(draft, mode="default", **engine):
        path = {"path": str(tiny_drafters["qwen3"])} if draft == "dflash" else {}
        sizes = {"slots": 3, "max_model_len": 128, "prefill_chunk": 100, "page_size": 16}
        return Engine.from_config(
            {
                "target": {"path": str(tiny_targets["qwen3"]), "dtype": "float32"},
                "draft": {"name": draft, **path},
                "tree": {"name": "best_first", "budget": 7},
                "engine": sizes | engine,
                "compile": {"mode": mode},
            }
        )

    return make


def prompt(length):
    return random.Random(length).choices(range(97), k=length)


PROMPTS = [prompt(n) for n in (5, 70, 105, 2, 40)]


def buffers(engine):
    """Every buffer of state, caches and lanes, but scratch and the pages of the dummy slot, which nobody reads."""
    found = dict(engine.state.named_buffers()) | {f"prefill {n}": b for n, b in engine.prefiller.lane.named_buffers()}
    caches = [engine.state.cache]
    if hasattr(engine.drafter, "cache"):
        found |= {f"drafter {n}": b for n, b in engine.drafter.cache.named_buffers()}
        found |= {f"drafter lane {n}": b for n, b in engine.drafter.lane.named_buffers()}
        caches.append(engine.drafter.cache)
    for cache in caches:
        pages = cache.table[:-1].flatten()
        own = {b.data_ptr() for layer in cache.all_layers() for b in (layer.k, layer.v)}
        found = {n: b[pages] if b.data_ptr() in own else b for n, b in found.items()}
    return {name: buffer.clone() for name, buffer in found.items() if "scratch" not in name}


@pytest.mark.parametrize("draft", DRAFTS)
def test_nothing_is_left_behind(draft, build, compiled):
    engine, other = build(draft), build(draft)
    fresh = buffers(engine)
    engine.warm_up()
    assert all(torch.equal(now, fresh[name]) for name, now in buffers(engine).items())
    for _ in range(2):  # before the first request, and between requests
        got, want = [e.generate(PROMPTS, max_new_tokens=12) for e in (engine, other)]
        assert [c.token_ids for c in got] == [c.token_ids for c in want]
        assert [c.stats.per_step_accepted for c in got] == [c.stats.per_step_accepted for c in want]
        used = buffers(engine)
        assert draft != "dflash" or int(used["pending_count"].sum()), "nothing pending that could get lost"
        engine.warm_up()
        assert not [name for name, now in buffers(engine).items() if not torch.equal(now, used[name])]


@pytest.mark.parametrize("slots", [3, 6])
@pytest.mark.parametrize("draft", DRAFTS)
def test_serving_compiles_nothing_more(draft, slots, build, compiled):
    engine = build(draft, slots=slots)
    engine.warm_up()
    assert set(compiled) == {RUNS}
    rounds = 4 * len(slot_buckets(slots))  # plain or not, sampled or not
    chunks = (2 if draft == "dflash" else 1) * len(engine.prefiller.all_buckets())
    known = len(compiled)
    assert known == rounds + chunks + 2
    eager = build(draft, mode="none", slots=slots)
    for plain in (False, True):
        # One after another ends, so that every number of slots is active in turn.
        for most in (1, 4, 12):
            got, want = (e.generate(PROMPTS, max_new_tokens=most, plain=plain) for e in (engine, eager))
            assert [c.token_ids for c in got] == [c.token_ids for c in want]
        (padded, exact) = (e.generate(PROMPTS[:3], max_new_tokens=5, plain=plain) for e in (engine, eager))
        assert [c.stats.per_step_accepted for c in padded] == [c.stats.per_step_accepted for c in exact]
    assert len(compiled) == known


def test_only_what_the_prompts_need(build, compiled):
    engine, lines = build("dflash", slots=6), []
    engine.warm_up([prompt(5), prompt(105), prompt(2)], plain=[False], progress=lines.append)
    assert lines == [
        "compiling prefill of 64 rows behind 0 (1 of 7)",
        "compiling prefill of 64 rows behind 128 (2 of 7)",
        "compiling prefill of 100 rows behind 0 (3 of 7)",
        "compiling the first token (4 of 7)",
        "compiling round of 8 rows (5 of 7)",
        "compiling round of 16 rows (6 of 7)",
        "compiling round of 32 rows (7 of 7)",
    ]
    known = len(compiled)
    engine.generate([prompt(5), prompt(105), prompt(2)], max_new_tokens=6)
    assert len(compiled) == known == 7
    engine.warm_up([prompt(5)], plain=[True], progress=lines.append)
    assert lines[-1] == "compiling plain round of 1 row (3 of 3)"


@pytest.mark.parametrize(("how", "rounds"), [([], [1, 0]), (["--no-compare"], [1]), (["--plain"], [0])])
def test_the_generation_script_warms_up_what_it_uses(how, rounds, tiny_targets, compiled, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [1, 2, 3, 1, 2]}')
    sets = [
        f"target.path={tiny_targets['qwen3']}",
        "target.dtype=float32",
        "engine.max_model_len=64",
        "engine.slots=2",
        "generate.max_new_tokens=4",
    ]
    options = [part for key in (*sets, "compile.mode=default") for part in ("--set", key)]
    assert main(["generate", "--config", "smollm2-ngram", *options, "--raw", "--prompt-file", str(file), *how]) == 0
    lines = capsys.readouterr().err.splitlines()
    names = ["plain round of 1 row", "round of 16 rows"]
    steps = ["prefill of 64 rows behind 0", "the first token", *(names[kind] for kind in rounds)]
    assert lines == [f"compiling {name} ({n} of {len(steps)})" for n, name in enumerate(steps, 1)]
    assert len(compiled) == len(steps)


def test_an_eager_engine_has_nothing_to_warm_up(build, compiled):
    lines = []
    eager = build("ngram", mode="none")
    eager.warm_up(progress=lines.append)
    assert not lines and not compiled
    with pytest.raises(ValueError, match="unknown setting 'bogus'"):  # checked all the same
        eager.warm_up(PROMPTS[:1], bogus=3)


def test_what_is_refused(build, compiled):
    engine = build("ngram")
    with pytest.raises(ValueError, match="prompt has 128 tokens"):
        engine.warm_up([prompt(128)])
    stream = engine.stream(PROMPTS[0], max_new_tokens=9)
    next(stream)
    with pytest.raises(ValueError, match="busy"):
        engine.warm_up()
    stream.close()
    engine.warm_up()


def test_buckets_of_active_slots():
    assert [slot_buckets(n) for n in (1, 3, 4)] == [[1], [1, 2, 3], [1, 2, 3, 4]]
    assert [slot_buckets(n) for n in (5, 8, 12)] == [[1, 2, 4, 5], [1, 2, 4, 8], [1, 2, 4, 8, 12]]
    assert len(slot_buckets(256)) == 9
