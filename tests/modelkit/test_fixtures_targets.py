"""The target fixtures made with transformers: logits, taps of every layer, greedy decoding by the cache."""

import json
from pathlib import Path

import pytest
import torch

from modelkit import load_model
from modelkit.rows import chain

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
TARGETS = ("targets/llama3_rope", "targets/qwen2_swa", "targets/qwen3", "dflash/target")

pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"the shared fixtures are not at {FIXTURES}")


CASES = [(t, c) for t in TARGETS for c in ("config.json", "config.v5.json")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def target(request, tmp_path_factory):
    """Model, cases and tolerance of one fixture in one spelling."""
    from safetensors.torch import load_file

    name, config = request.param
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text((FIXTURES / name / config).read_text())
    (folder / "model.safetensors").symlink_to(FIXTURES / name / "model.safetensors")
    cases = load_file(FIXTURES / name / "cases.safetensors")
    tolerance = json.loads((FIXTURES / name / "cases.json").read_text())["checks"]["suggested_atol"]
    return load_model(folder, dtype="float32"), cases, tolerance


def close(found, expected, tolerance) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_prefill_logits(target):
    model, cases, tolerance = target
    close(model.score(cases["prompts"]), cases["prefill.logits"], tolerance)


def test_greedy_logits_by_one_full_forward(target):
    model, cases, tolerance = target
    text = torch.cat([cases["prompts"], cases["greedy.ids"]], 1)
    close(model.score(text)[:, 36:-1], cases["greedy.logits"], tolerance)


@torch.no_grad()
def test_taps_are_the_residual_stream_after_each_layer(target):
    model, cases, tolerance = target
    layers = model.config.num_hidden_layers
    prompts = cases["prompts"]
    zero = torch.zeros(2, dtype=torch.int64)
    rows = chain(token=prompts, start=zero, count=zero + 37, rows=74, bound=0)
    order = (2, 0, *range(3, layers), 1)
    output = model(rows, None, taps=order)
    states = cases["prefill.hidden_states"]
    hidden = model.config.hidden_size
    for number, layer in enumerate(order):
        found = output.taps[:, number * hidden : (number + 1) * hidden].view(2, 37, hidden)
        expected = cases["prefill.last_layer_output"] if layer == layers - 1 else states[layer + 1]
        scale = max(1.0, float(expected.abs().max()))
        close(found, expected, tolerance * scale)
    close(output.hidden.view(2, 37, hidden), states[-1], tolerance * 2)
    difference = (states[-1] - cases["prefill.last_layer_output"]).abs().max()
    assert difference > 0.1, "the last entry of hidden_states should be after the norm"
    assert model(rows, None).taps is None


@pytest.mark.parametrize("bound", ["exact", "capacity"])
@pytest.mark.parametrize("chunk", [1, 5, 37])
@torch.no_grad()
def test_greedy_ids_by_a_stepwise_loop(target, chunk, bound):
    """Prefill in chunks and then one token a step, both prompts in one batch, committed through the cache."""
    model, cases, tolerance = target
    prompts, ids = cases["prompts"], cases["greedy.ids"]
    cache = model.new_cache(slots=2, capacity=64, scratch=2 * chunk)

    def step(tokens, start):
        width = tokens.shape[1]
        position = torch.full((2,), start)
        limit = start if bound == "exact" else 64
        rows = chain(token=tokens, start=position, count=torch.full((2,), width), rows=2 * width, bound=limit)
        logits = model.head(model(rows, cache).hidden).view(2, width, -1)
        cache.commit(torch.arange(2 * width).view(2, width), torch.full((2,), width))
        return logits

    prefill = torch.cat([step(prompts[:, i : i + chunk], i) for i in range(0, 37, chunk)], 1)
    close(prefill, cases["prefill.logits"], tolerance)
    logits, found = prefill[:, -1], []
    for number in range(24):
        close(logits, cases["greedy.logits"][:, number], tolerance)
        found.append(logits.argmax(-1))
        logits = step(found[-1][:, None], 37 + number)[:, -1]
    assert torch.equal(torch.stack(found, 1), ids)
    assert cache.length[:-1].tolist() == [61, 61]


def test_every_target_fixture_is_covered():
    folders = {str(p.parent.relative_to(FIXTURES)) for p in FIXTURES.glob("*/*/config.v5.json")}
    assert folders == set(TARGETS)
