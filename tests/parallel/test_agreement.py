"""Processes that see different numbers act on process 0's decisions: no hang, the same tokens everywhere."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_layouts import BOTH, GREEDY, HOT, PIPELINE, PROMPTS, TENSOR, tables

from spec import Engine

HALF = 48
LAYOUTS = [(2, TENSOR), (2, PIPELINE), (4, BOTH)]
ids = [table["name"] for _, table in LAYOUTS]


@pytest.fixture(scope="module")
def twins(make_target):
    """A target for which tokens i and i + 48 are the same: every argmax is a tie."""
    folder = Path(make_target(5, head_dim=16, num_key_value_heads=2, num_hidden_layers=4))
    weights = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        weights[name][HALF : 2 * HALF] = weights[name][:HALF]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("sampling", [{"name": "rejection"}, HOT | {"name": "rejection"}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("size", "parallel"), LAYOUTS, ids=ids)
def test_an_ulp_at_a_tie(group, twins, drafter, size, parallel, sampling):
    """Process 1 sees all tokens of the upper half an ULP higher."""
    config = tables(twins, parallel, sampling=sampling, drafter=drafter)
    results = group(size).disagreeing(config, PROMPTS, "logits", max_new_tokens=12)
    assert results == results[:1] * size
    if sampling == {"name": "rejection"}:
        outs = Engine.from_config(config | {"parallel": {"name": "single"}}).generate(PROMPTS, max_new_tokens=12)
        assert [[t % HALF for t in ids] for ids in results[0]] == [[t % HALF for t in out.token_ids] for out in outs]


@pytest.mark.parametrize(("size", "parallel"), LAYOUTS, ids=ids)
def test_other_drafts(group, targets, drafter, size, parallel):
    """Process 1 builds trees of other tokens."""
    config = tables(targets(2), parallel, "ngram")
    results = group(size).disagreeing(config, PROMPTS, "drafts", max_new_tokens=12)
    outs = Engine.from_config(config | {"parallel": {"name": "single"}}).generate(PROMPTS, max_new_tokens=12)
    assert results == [[out.token_ids for out in outs]] * size


def test_seeds_and_prompts_of_the_first_process(group, targets):
    """Without a seed each process would draw one; with other prompts each would run its own rounds."""
    config = tables(targets(2), TENSOR, "ngram", sampling={"name": "gumbel", "temperature": 1.0})
    first, second = group(2).generate(config, PROMPTS, max_new_tokens=12)
    assert first == second
    assert group(2).generate(config, PROMPTS, max_new_tokens=12)[0] != first, "a fixed seed proves nothing"
    config = tables(targets(2), TENSOR, "ngram", sampling=GREEDY)
    (alone, _) = group(2).generate(config, PROMPTS[:1], max_new_tokens=20)
    assert group(2).own_prompts(config, [PROMPTS[0], PROMPTS[1][:20]], max_new_tokens=20) == [alone[0]] * 2
