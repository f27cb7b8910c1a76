"""Tokens of every layout are those of one process, whatever drafts, builds trees and samples."""

import functools
import itertools

import pytest
from safetensors.torch import load_file

from sampling import SAMPLERS
from spec import Engine
from spec.compare import compare
from spec.draft import DRAFTERS
from spec.tree import TREES

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3] * 2]
TENSOR, PIPELINE, BOTH = {"name": "tensor"}, {"name": "pipeline"}, {"name": "tensor_pipeline", "degree": 2}
GREEDY = {"name": "greedy"}
HOT = {"name": "gumbel", "temperature": 0.9, "seed": 3}
FILTERED = HOT | {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.1}
DRAFTS = {"dflash": {"block_size": 5}, "ngram": {"block_size": 5}, "self": {"block_size": 5, "wrong_every": 2}}
COUNT = 12


def tables(target, parallel, draft="dflash", tree="best_first", sampling=GREEDY, drafter=None, **engine):
    """A config; a drafter that is not in DRAFTS runs by its defaults."""
    settings = DRAFTS.get(draft, {}) | ({"path": drafter} if draft == "dflash" else {})
    return {
        "target": {"path": target, "dtype": "float32"},
        "draft": {"name": draft, **settings},
        "tree": {"name": tree, **({"budget": 7} if tree == "best_first" else {})},
        "sampling": sampling,
        "engine": {"slots": 2, "prefill_chunk": 7, "max_model_len": 64} | engine,
        "parallel": parallel,
    }


@pytest.fixture(scope="module")
def single():
    """Tokens and accepted lengths of one process."""

    @functools.cache
    def run(text, count):
        outs = Engine.from_config(eval(text)).generate(PROMPTS, max_new_tokens=count)
        return [out.token_ids for out in outs], [out.stats.per_step_accepted for out in outs]

    return lambda config, count=COUNT: run(repr(config | {"parallel": {"name": "single"}}), count)


def check(group, size, config, single, count=COUNT):
    """All processes emit what one does, and their caches are of one length."""
    results = group(size).generate(config, PROMPTS, max_new_tokens=count)
    assert results == results[:1] * size
    tokens, accepted, _ = results[0]
    expected = single(config, count)
    assert tokens == expected[0]
    if config["draft"]["name"] != "self":  # which spoils drafts differently where a vocabulary is in parts
        assert accepted == expected[1]
    return accepted


# Strategies rotate over layouts and targets, so that each meets each kind of layout.
ROTATED = list(itertools.product(DRAFTERS.names(), TREES.names()))
TARGETS = list(itertools.product((1, 2, 4), (False, True)))
CASES = [(2, TENSOR, *t) for t in TARGETS] + [(4, TENSOR, *t) for t in TARGETS]
CASES += [(2, PIPELINE, 2, True), (4, PIPELINE, 1, False), (4, BOTH, 2, False), (4, BOTH, 1, True), (4, BOTH, 4, False)]


@pytest.mark.parametrize(
    ("number", "case"),
    list(enumerate(CASES)),
    ids=[f"{c[1]['name']}{c[0]}-kv{c[2]}-{'tied' if c[3] else 'untied'}" for c in CASES],
)
def test_layouts_and_targets(group, targets, drafter, single, number, case):
    size, parallel, kv_heads, tied = case
    draft, tree = ROTATED[number % len(ROTATED)]
    sampling = (GREEDY, HOT, FILTERED)[number % 3]
    check(group, size, tables(targets(kv_heads, tied), parallel, draft, tree, sampling, drafter), single)


# Each layout meets each drafter with each tree, and each of them with each sampling.
SOME = [
    (
        parallel,
        draft,
        tree,
        (GREEDY, HOT, FILTERED)[(DRAFTERS.names().index(draft) + TREES.names().index(tree) + shift) % 3],
    )
    for shift, parallel in enumerate((TENSOR, PIPELINE))
    for draft, tree in ROTATED
]


@pytest.mark.parametrize("case", SOME, ids=lambda case: "-".join((case[0]["name"], *case[1:3], case[3]["name"])))
def test_every_drafter_with_every_tree(group, targets, drafter, single, case):
    parallel, draft, tree, sampling = case
    accepted = check(group, 2, tables(targets(2), parallel, draft, tree, sampling, drafter), single)
    if draft == "self" and tree == "chain":
        assert {0, 1} & set(accepted[0]), "no rejection"


@pytest.mark.parametrize(
    ("size", "parallel"), [(2, TENSOR), (4, TENSOR), (2, PIPELINE), (4, BOTH)], ids=["tp2", "tp4", "pp2", "tp2pp2"]
)
def test_a_trained_drafter(group, fixtures_dir, size, parallel):
    """Blocks that are accepted as a whole, and in part: the drafter sees the features that it was trained on."""
    folder = fixtures_dir / "dflash"
    config = tables(str(folder / "target"), parallel, drafter=str(folder / "drafter_fitted_taps012"))
    config["draft"]["block_size"] = 8
    prompts = load_file(folder / "drafter_fitted_taps012" / "cases.safetensors")["prompts"].tolist()[:2]
    outs = Engine.from_config(config | {"parallel": {"name": "single"}}).generate(prompts, max_new_tokens=24)
    expected = [out.token_ids for out in outs], [out.stats.per_step_accepted for out in outs]
    assert max(outs[0].stats.per_step_accepted) >= 4
    for tokens, accepted, _ in group(size).generate(config, prompts, max_new_tokens=24):
        assert (tokens, accepted) == expected


def test_the_drafter_in_every_process(group, targets, drafter, single):
    for size, parallel in ((2, TENSOR), (2, PIPELINE), (4, BOTH)):
        config = tables(targets(2), parallel | {"draft": "replicate"}, sampling=HOT, drafter=drafter)
        check(group, size, config, single)
        whole = sum(n for n in group(size).held(config)[1][1].values())
        spread = sum(n for n in group(size).held(config | {"parallel": parallel})[1][1].values())
        assert whole > spread * (1.8 if size == 2 else 3.5)


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE], ids=lambda table: table["name"])
def test_context_limit_stops_and_a_queue(group, targets, parallel):
    """More prompts than slots, some up to the context's end, some ended by a stop id: no process waits for another."""
    config = tables(targets(2), parallel, "ngram", max_model_len=32, page_size=8)
    prompts = [PROMPTS[1][:31], PROMPTS[0], PROMPTS[1][:20], PROMPTS[0][:1], PROMPTS[1][:28]]
    engine = Engine.from_config(config | {"parallel": {"name": "single"}})
    stop = engine.generate(prompts, max_new_tokens=40)[1].token_ids[5]
    expected = [out.token_ids for out in engine.generate(prompts, max_new_tokens=40, stop_token_ids=[stop])]
    assert {len(p) + len(ids) < 32 for p, ids in zip(prompts, expected, strict=True)} == {True, False}
    for tokens, _, _ in group(2).generate(config, prompts, max_new_tokens=40, stop_token_ids=[stop]):
        assert tokens == expected


@pytest.mark.parametrize("name", ["greedy", "gumbel"])
def test_biases_and_bans(group, targets, drafter, name):
    """Of ids in both halves of the vocabulary; a prompt's tokens are penalised wherever they stand."""
    sampling = {"name": "gumbel", "filters": ["logit_bias", "penalties", "top_p"], "seed": 5}
    config = tables(targets(2), TENSOR, sampling=sampling | {"temperature": 0.8 * (name == "gumbel")}, drafter=drafter)
    how = {
        "logit_bias": {5: 3.0, 60: 2.0, 96: 4.0}, "banned_token_ids": (7, 80), "repetition_penalty": 1.3,
        "presence_penalty": 0.5, "top_p": 0.8, "max_new_tokens": COUNT,
    }  # fmt: skip
    outs = Engine.from_config(config | {"parallel": {"name": "single"}}).generate(PROMPTS, **how)
    for tokens, _, _ in group(2).generate(config, PROMPTS, **how):
        assert tokens == [out.token_ids for out in outs]


def for_kernels(targets, drafter, parallel):
    """Configs whose rounds and prefills have one row, few and many; prompts, and the tokens of a single process."""
    long = [PROMPTS[0], PROMPTS[1] * 3]
    for size in ({"slots": 1, "prefill_chunk": 70}, {"slots": 2}):
        config = tables(targets(2), parallel, drafter=drafter, max_model_len=128, **size)
        outs = Engine.from_config(config | {"parallel": {"name": "single"}}).generate(long, max_new_tokens=COUNT)
        yield config, long, [out.token_ids for out in outs]


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE, {"name": "sequence"}], ids=lambda table: table["name"])
def test_the_triton_backend_at_borders(group, targets, drafter, single, parallel):
    """One row, few rows, many rows: sums are taken whole before they cross, and are added once."""
    for config, long, expected in for_kernels(targets, drafter, parallel):
        assert group(2).with_kernels(config, long, max_new_tokens=COUNT) == [[expected, expected]] * 2


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE], ids=lambda table: table["name"])
def test_sums_that_also_add_and_norm(group, targets, drafter, single, parallel):
    """One row and few rows through the fused kernel, many as before; a pipeline has no sums in its layers."""
    for config, long, expected in for_kernels(targets, drafter, parallel):
        for found, taken, most in group(2).with_fused_sums(config, long, max_new_tokens=COUNT):
            assert found == [expected, expected]
            assert (taken > 100 and 1 < most <= 40) if parallel == TENSOR else not taken


def test_processors_get_whole_logits(group, targets, drafter, single):
    config = tables(targets(2), TENSOR, sampling=HOT | {"processors": ["cases:odd_ones"]}, drafter=drafter)
    check(group, 2, config, single)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE], ids=lambda table: table["name"])
def test_collectives_inside_compiled_steps(group, targets, drafter, single, parallel):
    """Rounds and prefills are traced whole, and none is traced again."""
    config = tables(targets(2), parallel, sampling=FILTERED, drafter=drafter) | {"compile": {"mode": "default"}}
    tokens, _, graphs = group(2).traced(config, PROMPTS, max_new_tokens=COUNT)[0]
    assert tokens == single(config | {"compile": {"mode": "none"}})[0]
    assert graphs == 4  # a chunk of a prompt, the first token, rounds of one and of two slots


@pytest.mark.parametrize(
    "name", [n for n in SAMPLERS.names() if SAMPLERS.get(n).lossless and n not in ("greedy", "gumbel")]
)
def test_samplers_that_want_whole_logits(group, targets, drafter, single, name):
    config = tables(targets(2), TENSOR, tree="chain", sampling=HOT | {"name": name}, drafter=drafter)
    check(group, 2, config, single)


def test_outputs_are_compared_on_whole_logits(group, targets, drafter, single):
    """A difference is judged by the logits of both tokens, whoever holds them."""
    config = tables(targets(2), TENSOR, drafter=drafter)
    tokens = single(config)[0][0]
    other = [*tokens[:5], (tokens[5] + 48) % 97, *tokens[6:]]  # in the other process's part
    found = group(2).compared(config, PROMPTS[0], other, tokens, 8)
    model = Engine.from_config(config | {"parallel": {"name": "single"}}).target
    alone = compare(model, PROMPTS[0], other, tokens, 8)
    for first, gap, noise in found:
        assert first == alone.first_difference == 5
        assert gap == pytest.approx(alone.gap, abs=1e-4) and noise < 1e-4
