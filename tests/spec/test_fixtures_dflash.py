"""The public DFlash fixtures: the reference implementations' own logits, caches, drafts, trees and accepted lengths."""

import functools
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from dflash_helpers import make_engine, paths  # noqa: E402

from modelkit.loading import load_model  # noqa: E402
from spec.draft import DRAFTERS  # noqa: E402

FIXTURES = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures" / "dflash"
pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"no public fixtures at {FIXTURES}")
APRIL, SWA, FITTED = "drafter_april_random", "drafter_pkg010_swa_random", "drafter_fitted_taps012"
ATOL = 1e-4  # suggested by the fixtures; seen: 1e-5
GAP = 1e-4  # below it another arithmetic may pick another tree (cases.json)


@functools.cache
def load(name):
    """(config.json, cases.json, cases.safetensors)"""
    folder = FIXTURES / name
    config, cases = (json.loads((folder / f"{stem}.json").read_text()) for stem in ("config", "cases"))
    return config, cases, safetensors_torch.load_file(folder / "cases.safetensors")


def close(found, stored):
    assert found.shape == stored.shape
    assert float((found - stored).abs().max()) < ATOL


@torch.no_grad()
@pytest.mark.parametrize("target_config", ["config.json", "config.v5.json"])
@pytest.mark.parametrize("name", [APRIL, SWA])
def test_rounds_of_a_random_drafter(name, target_config, tmp_path):
    """Features in, round by round: logits of every block row, and context K/V of every layer."""
    config, cases, tensors = load(name)
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").symlink_to(FIXTURES / "target" / target_config)
    (folder / "model.safetensors").symlink_to(FIXTURES / "target" / "model.safetensors")
    target = load_model(folder, dtype="float32")
    table = {"name": "dflash", "path": str(FIXTURES / name)}
    drafter = DRAFTERS.build(table, target=target, slots=1, capacity=32, candidates=4)
    assert (drafter.taps, drafter.depth, drafter.features) == ((0, 2, 3), 7, 3 * 64)
    for r, stored in enumerate(cases["cases"]["rounds"]):
        features, start = tensors[f"r{r}.target_hidden"], stored["anchor_position"]
        assert features.shape[1] == stored["context_rows"]
        drafter.ingest(features, torch.tensor([features.shape[1]]))
        assert drafter.cache.length[0] == start
        anchor = tensors[f"r{r}.block_ids"][:, 0]
        close(drafter.block_logits(anchor, torch.tensor([start]), start), tensors[f"r{r}.logits"])
        for layer in range(config["num_hidden_layers"]):
            pages = drafter.cache.view(layer)
            for letter, found in zip("kv", pages.context(start), strict=True):
                kept = tensors[f"r{r}.cache_{letter}.{layer}"]  # the package's sliding layers keep window - 1 rows
                close(found[:, :, start - kept.shape[2] :], kept)


@functools.cache
def run(tree, budget):
    """The engine on the six prompts: (completions, rounds by prompt), a round as (its tree, its draft logits)."""
    settings = {"name": tree} | ({"budget": budget, "candidates": budget} if budget else {})
    engine = make_engine(FIXTURES / "target", FIXTURES / FITTED, settings, max_model_len=128)
    logits, rounds, done = [], [], []
    build, block_logits = engine.tree.build, engine.drafter.block_logits

    def watched_logits(*args):
        logits.append(block_logits(*args)[0, 1:])
        return logits[-1][None, [0, *range(engine.drafter.depth)]]  # the anchor's own row must not matter

    def watched_build(*args):
        rounds[-1].append((build(*args), logits[-1]))
        return rounds[-1][-1][0]

    engine.drafter.block_logits, engine.tree.build = watched_logits, watched_build
    for prompt in load(FITTED)[2]["prompts"].tolist():
        rounds.append([])
        done += engine.generate([prompt], max_new_tokens=40)
    return done, rounds


def compare(tree, budget, key):
    """Yield (stored record of a round, the engine's tree, its draft logits, prompt, round) after the common checks."""
    done, rounds = run(tree, budget)
    prompts = load(FITTED)[1]["runs"][key]["prompts"]
    assert [c.token_ids for c in done] == load(FITTED)[2]["greedy.ids"].tolist() == [p["emitted"] for p in prompts]
    compared = 0
    for number, stored in enumerate(prompts):
        usable, gapped = stored["rounds_before_tail"], stored.get("rounds", [])
        assert min([GAP, *(r["boundary_gap"] for r in gapped[:usable])]) >= GAP
        lengths = [a + 1 for a in done[number].stats.per_step_accepted]
        assert lengths[:usable] == stored["accepted_lengths"][:usable], (key, number)
        for r, record in enumerate(stored.get("rounds") or stored["drafted"]):
            short = stored.get("rounds_with_short_block", [])
            if r < usable and r not in short:
                compared += 1
                yield record, *rounds[number][r], number, r
    assert compared > 40


@pytest.mark.parametrize("key", ["chain_april", "chain_ddtree_repo", "chain_pkg010"])
def test_fitted_drafter_in_a_chain(key):
    for drafted, tree, logits, prompt, r in compare("chain", None, key):
        assert tree.token[0, 1:].tolist() == drafted == logits.argmax(-1).tolist(), (prompt, r)
        if prompt == 0 and key != "chain_ddtree_repo":
            close(logits, load(FITTED)[2][f"{key}.prompt0.draft_logits"][r])


@pytest.mark.parametrize("budget", [4, 12, 30])
def test_fitted_drafter_in_a_tree(budget):
    for stored, tree, _, prompt, r in compare("best_first", budget, f"tree_budget_{budget}"):
        expected = [()]
        for parent, token in zip(stored["parents"][1:], stored["tokens"], strict=True):
            expected.append((*expected[parent], token))
        assert sorted(paths(tree, 0)) == sorted(expected[1:]), (prompt, r)
        found = dict(zip([(), *paths(tree, 0)], tree.depth[0].tolist(), strict=True))
        assert [found[path] for path in expected] == [0, *stored["depths"]]
