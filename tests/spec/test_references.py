"""The references of this folder against the public fixtures, and their properties on tiny cases."""

import functools
import itertools
import json
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import dflash_reference as ref  # noqa: E402
import heap_reference as heap  # noqa: E402

FIXTURES = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures" / "dflash"
needs_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"no public fixtures at {FIXTURES}")
APRIL, SWA, FITTED = "drafter_april_random", "drafter_pkg010_swa_random", "drafter_fitted_taps012"
CHAINS = [("chain_april", 125), ("chain_ddtree_repo", 125), ("chain_pkg010", 103)]  # rounds to compare
ATOL = 1e-5  # fp32 on both sides; seen: 4e-6. The fixtures' own runs with and without cache differ by 2e-6


@functools.cache
def load(name):
    """(config, weights, cases.json, cases.safetensors)"""
    folder, tensors = FIXTURES / name, safetensors_torch.load_file
    config, cases = (json.loads((folder / f"{stem}.json").read_text()) for stem in ("config", "cases"))
    return config, tensors(folder / "model.safetensors"), cases, tensors(folder / "cases.safetensors")


def embed_and_head():
    target = load("target")[1]
    return target["model.embed_tokens.weight"], target["lm_head.weight"]


def diff(a, b):
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.double() - b.double()).abs().max())


def rounds_of(name):
    tensors = load(name)[3]
    for r in range(3):
        features = torch.cat([tensors[f"r{i}.target_hidden"][0] for i in range(r + 1)])
        yield r, features, tensors[f"r{r}.block_ids"][0], len(features)


@needs_fixtures
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [APRIL, SWA])
def test_drafter_rounds_and_cache(name, dtype):
    config, weights, cases, tensors = load(name)
    worst = {"hidden": 0.0, "logits": 0.0, "cache": 0.0}
    for r, features, block, start in rounds_of(name):
        assert start == cases["cases"]["rounds"][r]["anchor_position"]
        assert len(block) == ref.block_size(config) == 8
        assert tensors[f"r{r}.position_ids"][0, -8:].tolist() == list(range(start, start + 8))
        assert torch.equal(embed_and_head()[0][block], tensors[f"r{r}.noise_embedding"][0])
        got = ref.dense_block_logits(weights, config, features.to(dtype), block, start, *embed_and_head())
        for key, value in zip(("hidden", "logits"), got, strict=True):
            assert value.dtype == dtype
            worst[key] = max(worst[key], diff(value, tensors[f"r{r}.{key}"][0]))
        for layer, kv in enumerate(ref.dense_context_kv(weights, config, features.to(dtype))):
            window = ref.layer_window(config, layer)
            kept = start if window is None else min(start, window - 1)  # sliding layers keep the last W - 1
            for letter, value in zip("kv", kv, strict=True):
                stored = tensors[f"r{r}.cache_{letter}.{layer}"][0].transpose(0, 1)
                worst["cache"] = max(worst["cache"], diff(value[-kept:], stored))
    print(name, dtype, worst)
    assert max(worst.values()) < ATOL


@needs_fixtures
def test_broken_on_purpose_moves_as_recorded():
    """The fixture records how far the logits move when a rule is broken: the masks' other branches."""
    config, weights, cases, _ = load(SWA)
    recorded = cases["sensitivity_max_abs_logit_change_rows_1_to_7_per_round"]
    changes = {
        "window - 1": {"sliding_window": 9},
        "window + 1": {"sliding_window": 11},
        "all layers full": {"layer_types": ["full_attention"] * 3},
        "causal flag flipped": {"is_causal": False},  # the window stays, now on both sides
    }
    worst = 0.0
    for r, features, block, start in rounds_of(SWA):
        args = features, block, start, *embed_and_head()
        right = ref.dense_block_logits(weights, config, *args)[1][1:]
        for what, change in changes.items():
            moved = diff(ref.dense_block_logits(weights, config | change, *args)[1][1:], right)
            worst = max(worst, abs(moved - recorded[what][r]))
    print("sensitivity, largest distance to the recorded number", worst)
    assert worst < ATOL


def test_config_spellings():
    assert ref.block_size({}) == 16
    assert ref.block_size({"block_size": 8, "dflash_config": {"block_size": 4}}) == 4
    old = {"head_dim": 8, "rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"head_dim": 8, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500}}
    assert torch.equal(*(ref.rope_frequencies(c, torch.float32)[0] for c in (old, new)))
    assert [k for k in range(20) if ref.is_visible(9, k, 8, False, 3)] == [7, 8, 9, 10, 11]
    types = {"layer_types": ["full_attention", "sliding_attention"]}
    assert ref.layer_is_causal(types, 1) and not ref.layer_is_causal(types, 0)
    assert ref.layer_is_causal(types | {"dflash_config": {"causal": True}}, 0)
    assert not ref.layer_is_causal(types | {"is_causal": False, "dflash_config": {"causal": True}}, 1)


@needs_fixtures
def test_scaling_of_embedding_and_logits():
    config, weights, _, _ = load(APRIL)
    embed, head = embed_and_head()
    _, features, *where = next(rounds_of(APRIL))
    args = features.double(), *where
    hidden, logits = ref.dense_block_logits(weights, config, *args, embed.double() * 3.0, head.double() * 0.5)
    scaled = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    for extra in (scaled, {"dflash_config": config["dflash_config"] | scaled}):
        got = ref.dense_block_logits(weights, config | extra, *args, embed, head)
        assert diff(got[0], hidden) < 1e-12 and diff(got[1], 2.0 * torch.tanh(logits / 2.0)) < 1e-12


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SCALINGS = [{"rope_type": "default"}, LINEAR, LLAMA3, YARN, YARN | {"truncate": False}]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rope_against_transformers(scaling):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    config = {"head_dim": 32, "max_position_embeddings": 2048}
    config["rope_parameters"] = {"rope_theta": 1e4, "original_max_position_embeddings": 256, **scaling}
    rotary = qwen3.Qwen3RotaryEmbedding(qwen3.Qwen3Config(**config))
    freqs, scale = ref.rope_frequencies(config, torch.float32)
    assert float((freqs / rotary.inv_freq - 1).abs().max()) < 1e-6
    assert scale == pytest.approx(rotary.attention_scaling, abs=1e-12)


@needs_fixtures
def test_target_forward():
    config, weights, _, tensors = load("target")
    for b, prompt in enumerate(tensors["prompts"]):
        outputs, logits = ref.dense_qwen3_target(weights, config, prompt)
        stored = [*tensors["prefill.hidden_states"][1:-1, b], tensors["prefill.last_layer_output"][b]]
        moved = diff(logits, tensors["prefill.logits"][b]), diff(torch.stack(outputs), torch.stack(stored))
        print("target", moved)
        assert max(moved) < 1e-4  # the fixture's suggested_atol


@functools.cache
def text_and_features(prompt):
    """20 prompt tokens, the 40 greedy ones, 8 more for rounds that overshoot; and the taps of all of them."""
    config, weights, _, _ = load("target")
    greedy = load(FITTED)[3]["greedy.ids"][prompt]
    ids = torch.cat([load(FITTED)[3]["prompts"][prompt], greedy])
    for _ in range(8):
        outputs, logits = ref.dense_qwen3_target(weights, config, ids)
        ids = torch.cat([ids, logits[-1:].argmax(-1)])
    assert torch.equal(logits[19:59].argmax(-1), greedy)
    taps = load(FITTED)[0]["dflash_config"]["target_layer_ids"]
    return ids.tolist(), torch.cat([outputs[i] for i in taps], dim=-1)


@functools.cache
def draft_logits(prompt, start):
    config, weights, _, _ = load(FITTED)
    ids, features = text_and_features(prompt)
    block = torch.tensor([ids[start]] + [config["dflash_config"]["mask_token_id"]] * 7)
    return ref.dense_block_logits(weights, config, features[:start], block, start, *embed_and_head())[1][1:]


def stored_rounds(run, key):
    """(prompt, round, anchor position, the text from there on, the round's record, its accepted length)"""
    for prompt, stored in enumerate(load(FITTED)[2]["runs"][run]["prompts"]):
        start, short = 20, stored.get("rounds_with_short_block", [])
        for r, (record, length) in enumerate(zip(stored[key], stored["accepted_lengths"], strict=True)):
            tail = r >= stored["rounds_before_tail"]
            if not (r in short or (tail and run == "chain_pkg010")):  # 0.1.0 shortens the last blocks
                yield prompt, r, start, text_and_features(prompt)[0][start:], record, length
            start += length


@needs_fixtures
@pytest.mark.parametrize("run,rounds", CHAINS)
def test_chain_rounds(run, rounds):
    compared, worst = 0, 0.0
    for prompt, r, start, text, drafted, length in stored_rounds(run, "drafted"):
        logits = draft_logits(prompt, start)
        assert logits.argmax(-1).tolist() == drafted, (prompt, r)
        stored = load(FITTED)[3].get(f"{run}.prompt{prompt}.draft_logits")
        worst = worst if stored is None else max(worst, diff(logits, stored[r]))
        rows = heap.walk_reference(range(-1, 7), [text[0], *drafted], text[1:9])
        assert rows == list(range(length)), (prompt, r)
        compared += 1
    print(run, compared, "rounds; draft logits", worst)
    assert compared == rounds and worst < 5e-5


@needs_fixtures
@pytest.mark.parametrize("budget,rounds", [(4, 113), (12, 91), (30, 79)])
def test_tree_rounds(budget, rounds):
    compared = 0
    for prompt, r, start, text, tree, length in stored_rounds(f"tree_budget_{budget}", "rounds"):
        values, ids = draft_logits(prompt, start).double().log_softmax(-1).topk(budget)
        paths = heap.heap_tree(values.tolist(), ids.tolist(), budget)
        parents, tokens = heap.paths_to_rows(paths, text[0])
        assert (parents, tokens[1:]) == (tree["parents"], tree["tokens"]), (prompt, r)
        assert heap.rows_to_paths(parents, tokens) == [(), *paths]
        on_text = [list(path) == text[1 : 1 + len(path)] for path in [(), *paths]]  # elsewhere: not known here
        target = [text[1 + d] if on else -1 for d, on in zip([0, *tree["depths"]], on_text, strict=True)]
        rows = heap.walk_reference(parents, tokens, target)
        assert rows == tree["accepted_rows"] and len(rows) == length, (prompt, r)
        compared += 1
    print("budget", budget, compared, "trees equal, in pop order")
    assert compared == rounds


@pytest.mark.parametrize("depths,k", [(3, 4), (1, 5), (4, 2), (2, 1), (5, 3)])
def test_heaps_are_brute_force(depths, k):
    for seed, budget in itertools.product(range(40), (1, 3, 7, 20, 1000)):
        rows, ids, rng = heap.random_case(seed, depths, k)
        sums = functools.partial(lambda rows, p: math.fsum(rows[d][r] for d, r in enumerate(p)), rows)
        paths = heap.heap_tree(rows, ids, budget)
        assert paths == heap.brute_force(sums, ids, budget)
        assert len(set(paths)) == len(paths) == min(budget, sum(k**d for d in range(1, depths + 1)))
        heap.paths_to_rows(paths, 0)  # raises unless prefix-closed, parents first
        edge = [[row] * k for row in rows]  # scores that do not depend on the parent: the same tree
        assert heap.heap_tree_edges(rows[0], edge, ids, budget) == paths
        edge = [[rng.sample(row, k) for _ in range(k)] for row in rows[1:]]  # and scores that do

        def score(p, first=rows[0], edge=edge):
            return math.fsum([first[p[0]], *(edge[d - 1][p[d - 1]][p[d]] for d in range(1, len(p)))])

        paths = heap.heap_tree_edges(rows[0], edge, ids, budget)
        assert paths == heap.brute_force(score, ids, budget)
        heap.paths_to_rows(paths, 0)


def test_ties_and_walk():
    flat, ids = [[math.log(0.25)] * 4] * 3, [[1, 2, 3, 4]] * 3
    assert heap.heap_tree(flat, ids, 6) == [(1,), (2,), (3,), (4,), (1, 1), (1, 2)]
    certain = [[0.0, -math.inf]] * 2  # the child ties with its parent, and comes behind it
    assert heap.heap_tree(certain, [[5, 6], [7, 8]], 2) == [(5,), (5, 7)]
    parents, tokens = [-1, 0, 1, 0, 3, 3], [9, 5, 6, 7, 5, 8]
    assert heap.walk_reference(parents, tokens, [7, 0, 0, 8, 0, 3]) == [0, 3, 5]
    assert heap.walk_reference(parents, tokens, [5, 8, 0, 0, 0, 0]) == [0, 1]  # 8 is under row 3 only
