"""Which strategies an engine puts together, and what rounds with drawn candidates give."""

import random

import pytest
import torch

from modelkit import load_model
from spec import Engine
from spec.check_lossless import _check_repeatable
from spec.chi_squared import chi_squared
from spec.config import load_config
from spec.draft import DRAFTERS
from spec.requests import Settings
from spec.tree import TREES

SMALL = {"slots": 3, "page_size": 8, "prefill_chunk": 7, "max_model_len": 128}
pytestmark = pytest.mark.filterwarnings("ignore:not one token of drafter")


def prompt(length):
    return random.Random(length).choices(range(97), k=length)


PROMPTS = [prompt(4), prompt(23), prompt(1), prompt(40)]


@pytest.fixture
def build(tiny_targets, tiny_drafters):
    def engine(draft="self", tree="chain", sampling=None, **sizes):
        path = {"path": str(tiny_drafters["qwen3"])} if draft == "dflash" else {}
        return Engine.from_config(
            {
                "target": {"path": str(tiny_targets["qwen3"]), "dtype": "float32"},
                "draft": {"name": draft, **path} if isinstance(draft, str) else draft,
                "tree": {"name": tree} if isinstance(tree, str) else tree,
                "sampling": {"name": "rejection"} | (sampling or {}),
                "engine": SMALL | sizes,
            }
        )

    return engine


def test_block_verification_wants_chains(build):
    name = {"name": "block_verification"}
    with pytest.raises(ValueError, match=r"'block_verification' verifies chains only, and tree 'static' takes 3 cand"):
        build(tree="static", sampling=name)
    assert build(tree={"name": "static", "widths": [1, 1]}, sampling=name).tree.candidates == 1


def test_lossy_sampling_warns(build):
    with pytest.warns(UserWarning, match="sampler 'typical' is lossy"):
        engine = build("dflash", "best_first", {"name": "typical"})
    greedy = build("dflash", "best_first", {"name": "greedy"}).generate(PROMPTS, max_new_tokens=8)
    assert [o.token_ids for o in engine.generate(PROMPTS, max_new_tokens=8)] == [o.token_ids for o in greedy]
    assert len(engine.generate(PROMPTS[:1], max_new_tokens=8, temperature=1.0)[0].token_ids) == 8


def test_tokens_that_depend_on_drafts_are_not_compared():
    config = load_config("smollm2-ngram", {"sampling.name": "rejection", "sampling.temperature": 1, "sampling.seed": 1})
    with pytest.raises(ValueError, match=r"'rejection' draws depends on the drafts.*check-sampler"):
        _check_repeatable(config, "plain")


@pytest.mark.parametrize("sampling", ["rejection", "block_verification"])
@pytest.mark.parametrize("draft", DRAFTERS.names())
def test_the_same_seed_whatever_else_runs(draft, sampling, build):
    """With one drafter and tree: alone, in a batch, in another slot, after other requests. Buglog 18."""
    for tree in TREES.names() if sampling == "rejection" else ["chain"]:
        engine = build(draft, tree, {"name": sampling, "temperature": 1.0})
        alone = engine.generate([PROMPTS[1]], max_new_tokens=12, seed=3)[0].token_ids
        for place in (0, 2, 4):
            several = [*PROMPTS[2:], *PROMPTS[2:]]
            several.insert(place, PROMPTS[1])
            assert engine.generate(several, max_new_tokens=12, seed=3)[place].token_ids == alone
        assert engine.generate([PROMPTS[1]], max_new_tokens=12, seed=4)[0].token_ids != alone


@pytest.mark.parametrize("sampling", ["rejection", "block_verification"])
def test_a_drafter_that_is_right_is_accepted(sampling, build):
    """p and q are equal up to rounding, with a temperature, filters and all."""
    engine = build("self", "chain", {"name": sampling})
    (out,) = engine.generate([PROMPTS[1]], max_new_tokens=1 + 3 * 8, temperature=1.3, top_p=0.9, top_k=30, seed=1)
    assert out.stats.mean_acceptance_length == 8


@pytest.mark.parametrize(("tree", "sampling"), [("best_first", "rejection"), ("chain", "block_verification")])
def test_the_law_of_the_third_token(tree, sampling, build, tiny_targets):
    """Of what the engine emits in its first round, where the drafter is wrong at the second depth."""
    temperature, count = 0.5, 1000
    engine = build({"name": "self", "wrong_every": 2, "block_size": 4}, tree, {"name": sampling}, slots=40)
    settings = [Settings(seed=seed, max_new_tokens=3, temperature=temperature) for seed in range(count)]
    outs = engine.generate([PROMPTS[2]] * count, settings)
    model, law = load_model(tiny_targets["qwen3"], dtype="float32"), torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([PROMPTS[2]])
    for _ in range(3):
        p = (model.score(texts)[:, -1].double() / temperature).softmax(-1)
        law = (law[:, None] * p).flatten()
        texts = torch.cat([texts.repeat_interleave(97, 0), torch.arange(97).repeat(len(texts))[:, None]], 1)
    expected = torch.zeros(97, dtype=torch.float64).index_add(0, texts[:, -1], law)
    seen = torch.bincount(torch.tensor([out.token_ids[2] for out in outs]), minlength=97)
    assert chi_squared(seen, expected).p_value > 0.01
