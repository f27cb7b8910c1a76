"""`flashtree bench`: what it measures and prints, what it refuses, and that the parts it times are a round."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from modelkit.rows import chain
from spec import Engine, load_config
from spec.cli import main
from spec.parts import AttentionAlone, Held, Parts, PrefillChunk, Saved, Verify, furnish, occupy, vacate
from spec.sources import drafter_shape, shapes, target_shapes
from spec.traffic import part_bytes

CAPACITY = 96
PARTS = {
    "first token",
    "plain step",
    "verify",
    "attention",
    "draft",
    "tree",
    "accept",
    "commit",
    "round",
    "prefill chunk",
}


@pytest.fixture
def target(tmp_path, tiny_targets) -> Path:
    """A target's config.json alone."""
    return Path(shutil.copy(tiny_targets["qwen3"] / "config.json", tmp_path / "target.json"))


@pytest.fixture
def drafter(tmp_path, tiny_drafters) -> Path:
    """The config.json alone of a drafter that fits."""
    return Path(shutil.copy(tiny_drafters["qwen3"] / "config.json", tmp_path / "drafter.json"))


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [1, 2, 3, 1, 2]}\n{"token_ids": [5, 6]}\n')
    return file


def bench(*arguments) -> int:
    return main(["bench", "--config", "smollm2-ngram", "--set", "target.dtype=float32", *map(str, arguments)])


def steps(target, *arguments) -> int:
    return bench("--shape", target, "--rows", "1,4", "--context", "8,24", "--repeat", "1", *arguments)


def dflash(path) -> tuple[str, ...]:
    return ("--set", "draft.name=dflash", "--set", f"draft.path={path}")


def engine_of(targets, drafters, draft, tree, slots=2, target="qwen2_windowed") -> Engine:
    path = {"path": str(drafters[target])} if draft == "dflash" else {}
    settings = {"widths": [2, 2, 1]} if tree == "static" else {}
    return Engine.from_config(
        {
            "target": {"path": str(targets[target]), "dtype": "float32"},
            "draft": {"name": draft, **path},
            "tree": {"name": tree, **settings},
            "engine": {"slots": slots, "max_model_len": CAPACITY, "prefill_chunk": 16},
        }
    )


def texts() -> list[list[int]]:
    """One that repeats itself, so that n-grams are found and acceptance changes."""
    return [[7, 8, 9, 10] * 5, [3, 1, 4, 1, 5, 9, 2, 6, 5]]


def observe(engine: Engine) -> dict[str, list]:
    found = {name: buffer.tolist() for name, buffer in engine.state.named_buffers(recurse=False)}
    return found | {"length": engine.state.length.tolist()}


@pytest.mark.parametrize(("draft", "tree"), [("ngram", "best_first"), ("self", "chain"), ("dflash", "static")])
def test_parts_in_order_are_a_round(draft, tree, tiny_targets, tiny_drafters):
    whole, cut = (engine_of(tiny_targets, tiny_drafters, draft, tree) for _ in range(2))
    for engine in (whole, cut):
        occupy(engine, texts())
        engine.step(2 * engine.nodes, CAPACITY)  # leaves features pending
    before = observe(cut)
    parts = Parts(cut, CAPACITY)
    assert observe(cut) == before, "making the parts must leave the state as it was"
    emitted = set()
    for number in range(6):
        at = whole.state.total.tolist()
        whole.step(2 * whole.nodes, CAPACITY)
        for part in parts.in_order().values():
            part()
        assert observe(cut) == observe(whole), number
        emitted |= {now - then for now, then in zip(whole.state.total.tolist(), at, strict=True)}
    assert emitted and 0 not in emitted and {"ngram": max(emitted) > 1, "self": emitted == {8}}.get(draft, True)


def test_a_part_can_run_again_from_the_same_place(tiny_targets, tiny_drafters):
    engine = engine_of(tiny_targets, tiny_drafters, "self", "chain")
    occupy(engine, texts())
    before, saved = observe(engine), Saved(engine)
    outcomes = []
    for _ in range(2):
        engine.step(2 * engine.nodes, CAPACITY)
        outcomes.append(observe(engine))
        saved.restore()
        assert observe(engine) == before
    assert outcomes[0] == outcomes[1] != before
    vacate(engine)
    assert not engine.state.active.any()


def test_a_restored_drafter_cache_takes_the_features_again(tiny_targets, tiny_drafters):
    engine = engine_of(tiny_targets, tiny_drafters, "dflash", "best_first")
    occupy(engine, texts())
    engine.step(2 * engine.nodes, CAPACITY)  # leaves features pending
    saved, lengths = Saved(engine), engine.drafter.cache.length.tolist()
    proposals = []
    for _ in range(2):
        proposals.append(engine.drafter.propose(engine.state, CAPACITY).score)
        assert engine.drafter.cache.length.tolist() != lengths
        saved.restore()
        assert engine.drafter.cache.length.tolist() == lengths
    torch.testing.assert_close(*proposals, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 5])
def test_verification_of_any_width_is_the_forward_over_a_chain(rows, tiny_targets, tiny_drafters):
    engine = engine_of(tiny_targets, tiny_drafters, "ngram", "best_first", target="llama")
    occupy(engine, texts())
    verify = Verify(engine, rows, CAPACITY)
    verify.step()
    got = verify.verified.get().logits.view(2, rows, -1)
    for slot, text in enumerate(texts()):
        want = engine.target.score(torch.tensor([text + list(range(rows))]))[0, len(text) :]
        torch.testing.assert_close(got[slot], want, rtol=1e-4, atol=1e-4)


def test_a_prefill_chunk_is_the_forward_over_its_rows(tiny_targets, tiny_drafters):
    engine = engine_of(tiny_targets, tiny_drafters, "ngram", "best_first", target="llama")
    occupy(engine, texts())
    before, chunk = observe(engine), PrefillChunk(engine, CAPACITY)
    chunk.forward()
    assert observe(engine) == before
    want = engine.target.score(torch.tensor([texts()[0] + list(range(16))]))[0, 20:]
    torch.testing.assert_close(engine.target.head(chunk.hidden), want, rtol=1e-4, atol=1e-4)


def test_parts_are_graphs_of_their_own(tiny_targets, tiny_drafters):
    torch._dynamo.reset()
    engine = engine_of(tiny_targets, tiny_drafters, "dflash", "best_first")
    occupy(engine, texts())
    saved, parts = Saved(engine), Parts(engine, CAPACITY)
    made = {**parts.in_order(), "wide": Verify(engine, 3, CAPACITY).step, "chunk": PrefillChunk(engine, CAPACITY)}
    made["attention"] = AttentionAlone(engine, 3, CAPACITY)
    for _ in range(2):
        for part in parts.in_order().values():
            part()
    want = observe(engine)
    saved.restore()
    trace = torch.compile  # noqa: TID251 (traced only: what compile_step relies on)
    traced = {name: trace(part, backend="eager", fullgraph=True, dynamic=False) for name, part in made.items()}
    for _ in range(2):
        for name in parts.in_order():
            traced[name]()
    assert observe(engine) == want
    traced["wide"]()
    traced["chunk"]()
    torch._dynamo.reset()


def test_held_values_keep_their_addresses(tiny_targets, tiny_drafters):
    engine = engine_of(tiny_targets, tiny_drafters, "ngram", "best_first")
    occupy(engine, texts())
    held = Held(engine.drafter.propose(engine.state, CAPACITY))
    at = held.get().score.data_ptr()
    engine.step(2 * engine.nodes, CAPACITY)
    fresh = engine.drafter.propose(engine.state, CAPACITY)
    held.put(fresh)
    assert held.get().score.data_ptr() == at and torch.equal(held.get().ids, fresh.ids)
    assert torch.equal(held.get().edge, fresh.edge)


def test_bytes_against_a_count_by_hand(target, drafter):
    config = load_config(
        {
            "target": {"path": str(target), "dtype": "bfloat16"},
            "draft": {"name": "dflash", "path": str(drafter)},
            "engine": {"slots": 2, "max_model_len": 64},
        }
    )
    found = part_bytes(Engine(config, random_weights=True), 40)
    # hidden 64, inner 96, 4 heads and 1 KV head of 24, 3 layers, vocabulary 97
    layer = 64 * (96 + 24 + 24) + 96 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 24
    head, norm = 97 * 64, 64
    kv = 3 * 2 * 1 * 24 * 40
    assert found["verify"] == found["plain step"] == 2 * (3 * layer + norm + head + 2 * kv)
    assert found["prefill chunk"] == 2 * (3 * layer + norm + kv)
    # drafter: 4 heads and 2 KV heads of 16, 2 layers, 2 taps
    own = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    assert found["draft"] == 2 * (2 * own + 128 * 64 + 2 * 64 + 2 * (2 * 2 * 2 * 16 * 40) + head)
    assert found["round"] == found["draft"] + found["verify"]
    assert found["accept"] == 2 * (2 * 32 * 97)
    assert found["tree"] is None and found["commit"] is None


def test_a_window_bounds_the_bytes_of_its_layers(tiny_targets, tiny_drafters):
    engine = engine_of(tiny_targets, tiny_drafters, "ngram", "best_first", slots=1)
    near, far = (part_bytes(engine, context) for context in (30, 40))
    # One of three layers sees all of the context, the others five positions; 2 KV heads of 16, fp32.
    assert far["verify"] - near["verify"] == 10 * 2 * 2 * 16 * 4
    assert near["draft"] is None and near["round"] == near["verify"]


@pytest.mark.parametrize("draft", ["ngram", "dflash"])
def test_steps_mode(draft, target, drafter, tmp_path, capsys):
    out = tmp_path / "steps.json"
    extra = dflash(drafter) if draft == "dflash" else ()
    assert steps(target, "--batch", "1,2", "--json", out, *extra) == 0
    text, record = capsys.readouterr().out, json.loads(out.read_text())
    assert "random weights" in text and "batch 2, context 24" in text and "GB/s" in text
    assert record["random_weights"] and record["mode"] == "none" and record["bandwidth"] > 1e8
    assert record["first_token"]["cold_s"] > 0 and record["first_token"]["warm_s"] > 0
    assert set(record["compiler"]) == {"graphs", "skipped", "partitions", "non_static_inputs"}
    assert [(run["batch"], run["context"]) for run in record["runs"]] == [(1, 8), (1, 24), (2, 8), (2, 24)]
    for run in record["runs"]:
        assert {part["part"] for part in run["parts"]} == PARTS - {"first token"}
        widths = [part["rows"] for part in run["parts"] if part["part"] == "verify"]
        assert sorted(widths) == [run["batch"] * n for n in (1, 4, 16)]
        assert all(part["ms"] > 0 and part["device_ms"] is None for part in run["parts"])
        assert run["host_syncs_in_10_rounds"] is None and run["peak_memory"] is None
        assert run["recompiles_while_timing"] == 0
        fractions = {part["part"]: part["fraction"] for part in run["parts"]}
        assert fractions["verify"] > 0 and (fractions["draft"] is None) == (draft == "ngram")


def test_only_some_parts(target, tmp_path):
    out = tmp_path / "steps.json"
    assert steps(target, "--parts", "verify, attention", "--json", out) == 0
    assert json.loads(out.read_text())["first_token"] is None
    for run in json.loads(out.read_text())["runs"]:
        assert {part["part"] for part in run["parts"]} == {"verify", "attention"}
        assert sorted(p["rows"] for p in run["parts"] if p["part"] == "attention") == [1, 4]
        assert all(part["bytes"] > 0 for part in run["parts"])


@pytest.mark.parametrize("draft", ["ngram", "dflash"])
def test_a_furnished_slot_is_as_a_prompt_leaves_it(tiny_targets, tiny_drafters, draft):
    engine = engine_of(tiny_targets, tiny_drafters, draft, "best_first", slots=2)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    found = []
    for fill in (occupy, furnish):
        vacate(engine)
        fill(engine, prompts)
        lengths = [engine.state.cache.length]
        lengths += [engine.drafter.cache.length] if draft == "dflash" else []
        state = engine.state
        now = [*lengths, state.total, state.limit, state.active, state.pending_count, state.reason, state.tokens[:, :5]]
        found.append([value.tolist() for value in now])
    assert found[0] == found[1]
    before = engine.state.total.tolist()
    engine.step(2 * engine.nodes, CAPACITY)
    assert all(b > a for a, b in zip(before, engine.state.total.tolist(), strict=True))


def test_sampling_mode(target, tmp_path, capsys):
    out = tmp_path / "sampling.json"
    assert steps(target, "--sampling", "--json", out) == 0
    record = json.loads(out.read_text())
    names = [found["name"] for found in record["rounds"]]
    assert names.count("greedy") == 4 and "top_p 0.9, min_p 0.05" in names and "penalties" in names
    assert {(found["batch"], found["context"]) for found in record["rounds"]} == {(1, 8), (1, 24)}
    for found in record["rounds"]:
        assert found["ms"] > 0 and (found["over_greedy"] == 1) >= (found["name"] == "greedy")
    assert "over greedy" in capsys.readouterr().out


def test_sampling_mode_needs_a_sampler_that_samples(target, capsys):
    assert steps(target, "--sampling", "--set", "sampling.name=greedy") == 2
    assert "sampler 'greedy' does not sample" in capsys.readouterr().err
    for wrong in (["--set", "sampling.top_p=0.5"], ["--steps"], ["--parts", "round"]):
        assert steps(target, "--sampling", *wrong) == 2
        assert "--sampling" in capsys.readouterr().err


def test_an_unknown_part_is_refused(target, capsys):
    assert steps(target, "--parts", "verfy") == 2
    assert "unknown part 'verfy'" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [1, 3])
def test_attention_alone_is_the_layers_attention(rows, tiny_targets, tiny_drafters):
    """A last layer's output against softmax by hand: the context, and the rows before in the scratch."""
    engine = engine_of(tiny_targets, tiny_drafters, "ngram", "best_first", slots=1)
    alone = AttentionAlone(engine, rows, CAPACITY)
    alone()
    config, cache = engine.target.config, engine.state.cache
    last, length = cache.layer(len(config.windows) - 1), int(cache.length[0])
    window, group = config.windows[-1], config.num_attention_heads // config.num_key_value_heads
    for row in range(rows):
        first = 0 if window is None else max(0, length + row - window + 1)
        for head in range(config.num_attention_heads):
            kv = head // group
            k, v = (
                torch.cat([pages[0, kv, :length], scratch[: row + 1, kv]])[first:]
                for pages, scratch in ((last.k, last.scratch_k), (last.v, last.scratch_v))
            )
            weight = (k @ alone.q[row, head] * config.head_dim**-0.5).softmax(0)
            torch.testing.assert_close(alone.out[row, head], weight @ v, rtol=1e-4, atol=1e-5)


def test_steps_mode_on_real_weights(tiny_targets, tmp_path, capsys):
    out = tmp_path / "steps.json"
    arguments = ("--set", f"target.path={tiny_targets['llama']}", "--rows", "1", "--context", "8", "--repeat", "1")
    assert bench("--steps", *arguments, "--json", out) == 0
    assert "random weights" not in capsys.readouterr().out
    assert json.loads(out.read_text())["random_weights"] is False


def test_peers_in_steps_mode(target, drafter, tmp_path, capsys):
    out = tmp_path / "steps.json"
    assert steps(target, "--peers", "--batch", "2", "--json", out, *dflash(drafter)) == 0
    text, peers = capsys.readouterr().out, json.loads(out.read_text())["peers"]
    eager = [peer for peer in peers if peer["system"] == "transformers generate, eager"]
    assert [peer["context"] for peer in eager] == [8, 24] and all(peer["ms"] > 0 for peer in eager)
    # transformers speculates for one prompt only: that is a line, not the end of the run.
    speculating = [peer for peer in peers if peer["system"] == "transformers dflash, eager"]
    assert len(speculating) == 2 and all(peer["failed"].startswith("failed: ") for peer in speculating)
    assert "transformers dflash, eager, context 8: failed: " in text


def test_peers_in_prompts_mode(tiny_targets, tiny_drafters, prompts, tmp_path, capsys):
    pytest.importorskip("transformers", minversion="5.17")
    out = tmp_path / "prompts.json"
    where = ("--set", f"target.path={tiny_targets['qwen3']}", *dflash(tiny_drafters["qwen3"]))
    assert bench(*where, "--prompts", prompts, "--max-new-tokens", "12", "--peers", "--json", out) == 0
    text, record = capsys.readouterr().out, json.loads(out.read_text())
    names = [system["name"] for system in record["systems"]]
    peers = ("generate, eager", "dflash, eager", "prompt lookup, eager")
    assert names == ["plain", "dflash x best_first", *(f"transformers {peer}" for peer in peers)]
    assert not any(system["failed"] for system in record["systems"])
    outputs = [system["outputs"] for system in record["systems"]]
    assert all(output == outputs[0] for output in outputs) and "2/2" in text


def test_times_are_written_before_outputs_are_compared(tiny_targets, prompts, tmp_path, monkeypatch):
    """Comparing takes longer than timing where texts differ: who gives up on it keeps the times."""
    warmed, out = [], tmp_path / "prompts.json"
    monkeypatch.setattr(Engine, "warm_up", lambda engine, texts, **settings: warmed.append(texts))

    def give_up(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("spec.compare.compare", give_up)
    where = ("--set", f"target.path={tiny_targets['qwen3']}")
    with contextlib.suppress(KeyboardInterrupt):
        bench(*where, "--prompts", prompts, "--max-new-tokens", "4", "--json", out)
    assert [system["name"] for system in json.loads(out.read_text())["systems"]] == ["plain", "ngram x best_first"]
    assert len(warmed[0]) == 2


def test_a_peer_that_fails_is_a_line(tiny_targets, prompts, monkeypatch, capsys):
    from spec import peers

    monkeypatch.setattr(peers, "transformers_model", lambda engine: 1 / 0)
    where = ("--set", f"target.path={tiny_targets['qwen3']}")
    assert bench(*where, "--prompts", prompts, "--max-new-tokens", "4", "--peers") == 0
    text = capsys.readouterr().out
    assert "transformers generate, eager: failed: ZeroDivisionError: division by zero" in text
    assert "plain" in text and "2/2" in text


def test_transformers_drafts_what_we_draft(tiny_targets, tiny_drafters):
    """Same drafter, other code: it is loaded under the right names, with the right positions, mask and rotation."""
    from spec.peers import transformers_drafter

    dflash_cache = pytest.importorskip("transformers.cache_utils").DFlashCache
    engine = engine_of(tiny_targets, tiny_drafters, "dflash", "chain", slots=1, target="qwen3")
    occupy(engine, texts()[:1])
    ours = engine.drafter.block_logits(engine.state.anchor, engine.state.length, CAPACITY)
    theirs, prompt, block = transformers_drafter(engine), torch.tensor(texts()[:1]), engine.drafter.block
    zero = torch.zeros(1, dtype=torch.int64)
    rows = chain(token=prompt, start=zero, count=zero + 20, rows=20, bound=0)
    anchor_and_masks = torch.full((1, block), engine.drafter.published.mask_token_id)
    anchor_and_masks[0, 0] = engine.state.anchor[0]
    cache = dflash_cache(config=theirs.config)
    cache.set_previous_accepted_tokens(20)
    with torch.no_grad():
        hidden = theirs(
            noise_embeds=engine.target.embed_tokens(anchor_and_masks),
            context_hidden_states=engine.target(rows, None, engine.drafter.taps).taps[None],
            position_ids=torch.arange(20 + block)[None], attention_mask=torch.ones(1, 20 + block, dtype=torch.int64),
            past_key_values=cache,
        ).last_hidden_state  # fmt: skip
    torch.testing.assert_close(engine.target.head(hidden), ours, rtol=1e-4, atol=1e-4)


def test_transformers_taps_the_last_layer_elsewhere(tiny_targets, tiny_drafters):
    from spec.peers import transformers_drafter

    engine = engine_of(tiny_targets, tiny_drafters, "dflash", "chain", slots=1, target="llama")  # taps 0 and 1 of 2
    with pytest.raises(ValueError, match="last layer behind the final norm"):
        transformers_drafter(engine)


REFUSALS = {
    "unknown shape": (("--shape", "qwen3-9b"), "did you mean 'qwen3-8b'?"),
    "unknown target": (("--set", "target.path=qwen3-9b"), "did you mean the shape 'qwen3-8b'?"),
    "rows": (("--rows", "1,many"), "--rows 1,many: not a list of whole numbers by comma"),
    "no rows": (("--rows", "0"), "--rows 0: numbers must be at least 1"),
    "context": (("--context", "1k"), "--context 1k: not a list"),
    "batch": (("--batch", ""), "--batch : not a list"),
    "context beyond the target": (("--context", "256"), "below the 256 positions"),
    "more rows than a forward has room for": (("--rows", "64", "--batch", "8"), "engine.prefill_chunk"),
    "repeat": (("--repeat", "0"), "--repeat 0"),
    "steps and prompts": (("--steps", "--prompts", "x.jsonl"), "takes no --prompts"),
    "drafter of another target": (dflash("qwen3-8b-dflash"), "hidden size is 4096"),
    "unknown drafter": (dflash("qwen3-9b-dflash"), "does not exist"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mistake_is_one_sentence(name, target, capsys):
    arguments, expected = REFUSALS[name]
    given = () if "--shape" in arguments or "target.path=qwen3-9b" in arguments else ("--shape", target)
    assert bench(*given, *arguments) == 2
    out, err = capsys.readouterr()
    assert expected in err and not out and err.startswith("flashtree: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "check-lossless"])
def test_nothing_is_generated_from_a_shape(command, target, drafter, prompts, tiny_targets, capsys):
    file = "--prompt-file" if command == "generate" else "--prompts"
    real = f"target.path={tiny_targets['qwen3']}"
    wrong = [
        ([f"target.path={target}"], f"target '{target}' is a shape without weights"),
        (["target.path=qwen3-8b"], "target 'qwen3-8b' is a shape without weights"),
        ([real, "draft.name=dflash", f"draft.path={drafter}"], f"drafter '{drafter}' is a shape without weights"),
    ]
    for overrides, expected in wrong:
        sets = [part for override in overrides for part in ("--set", override)]
        assert main([command, file, str(prompts), *sets]) == 2
        assert expected in capsys.readouterr().err


def test_shipped_shapes_fit_together():
    from modelkit import ModelConfig
    from modelkit.config import read_json
    from spec.draft.dflash_config import DFlashConfig

    assert {"qwen3-4b", "qwen3-8b", "llama-3.1-8b", "smollm2-135m"} == set(target_shapes())
    parameters = {}
    for name in target_shapes():
        target = ModelConfig.from_dict(read_json(shapes()[name]), name)
        if (own := drafter_shape(name)) is None:
            continue
        drafter = DFlashConfig.from_file(shapes()[own])
        layers, H = drafter.model, target.hidden_size
        assert (layers.hidden_size, layers.vocab_size) == (H, target.vocab_size)
        assert drafter.num_target_layers == target.num_hidden_layers > max(drafter.target_layer_ids)
        assert drafter.mask_token_id < target.vocab_size and not any(drafter.causal)
        heads = 2 * (layers.num_attention_heads + layers.num_key_value_heads) * layers.head_dim
        layer = H * heads + 3 * H * layers.intermediate_size + 2 * H + 2 * layers.head_dim
        parameters[name] = layers.num_hidden_layers * layer + len(drafter.target_layer_ids) * H * H + 2 * H
    # The published files' sizes: 1.00 GiB, 1.95 GiB and 1.95 GiB of bf16.
    sizes = {name: round(2 * count / 2**30, 2) for name, count in parameters.items()}
    assert sizes == {"qwen3-4b": 1.0, "qwen3-8b": 1.95, "llama-3.1-8b": 1.95}


def test_a_shape_brings_its_drafter():
    from spec.bench_plan import with_shape

    assert with_shape("smollm2-ngram", {}, "qwen3-8b").target.path == "qwen3-8b"
    drafted = with_shape("smollm2-ngram", {"draft.name": "dflash"}, "llama-3.1-8b")
    assert drafted.draft.config.path == "llama-3.1-8b-dflash"
    own = with_shape("smollm2-ngram", {"draft.name": "dflash", "draft.path": "x"}, "llama-3.1-8b")
    assert own.draft.config.path == "x"
    assert with_shape("smollm2-dflash", {}, "qwen3-8b").draft.config.path == "qwen3-8b-dflash"
    assert with_shape("smollm2-dflash", {}, "smollm2-135m").draft.name == "ngram"
    asked = with_shape("smollm2-dflash", {"draft.block_size": 8}, "smollm2-135m")
    assert asked.draft.config.path == "smollm2-135m-instruct-dflash"


def test_random_drafters_stay_finite(target, drafter):
    config = load_config({"target": {"path": str(target)}, "draft": {"name": "dflash", "path": str(drafter)}})
    engine = Engine(config, random_weights=True)
    (done,) = engine.generate([[1, 2, 3, 4]], max_new_tokens=12)
    assert len(done.token_ids) == 12
    logits = engine.drafter.block_logits(engine.state.anchor, engine.state.length, CAPACITY)
    assert torch.isfinite(logits).all() and float(logits.float().std()) < 10


def test_eager_steps_read_the_whole_context_and_little_more(tiny_targets, tiny_drafters, monkeypatch):
    from spec.bench_plan import PARTS as EVERY
    from spec.bench_plan import Plan
    from spec.bench_steps import Bench

    engine, seen = engine_of(tiny_targets, tiny_drafters, "dflash", "best_first", slots=1), []
    forward = engine.target.forward
    monkeypatch.setattr(engine.target, "forward", lambda rows, *rest: seen.append(rows.bound) or forward(rows, *rest))
    plan = Plan(rows=[1], contexts=[8], batches=[1], room=CAPACITY, parts=EVERY)
    bench = Bench(engine, plan, bandwidth=1e9, repeat=1)
    for context in (4, 8):
        seen.clear()
        bench.run(context)
        assert set(seen[1:]) == {context + 11 * engine.drafter.block}, "eleven rounds, one of them not timed"
