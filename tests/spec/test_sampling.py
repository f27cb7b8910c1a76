"""Sampling through the engine: the tokens of an oracle by full forwards, whatever drafts; errors name the step."""

import itertools
import random
import sys

import pytest
import torch

from modelkit import load_model
from sampling import SAMPLERS, Drawn, SamplingParams
from sampling.noise import gumbel_noise
from sampling.reference import law
from spec import Engine
from spec.draft import DRAFTERS
from spec.requests import Settings
from spec.tree import TREES

# Strategies whose seeded output does not depend on what drafts, by the stream of their noise.
STREAMS = {"gumbel": 0, "token_match": 1}
# Settings under test; the penalties need an engine that is built with them.
FILTERS = {
    "hot": {"temperature": 1.5},
    "all thresholds": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "cold": {"temperature": 0.3, "min_p": 0.1},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5},
    "greedy with penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.8},
    "bias": {"temperature": 1.0, "logit_bias": {5: 2.5, 9: -3.0}, "banned_token_ids": [1, 2, 3], "top_p": 0.95},
}
SMALL = {"slots": 3, "page_size": 8, "prefill_chunk": 7, "max_model_len": 128}

pytestmark = pytest.mark.filterwarnings("ignore:not one token of drafter")


def prompt(length, seed=0):
    return random.Random(1000 * seed + length).choices(range(97), k=length)


PROMPTS = [prompt(4), prompt(23), prompt(1), prompt(40)]


def build(targets, drafters, draft="self", tree="chain", sampling=None, **engine):
    path = {"path": str(drafters["qwen3"])} if draft == "dflash" else {}
    tables = {
        "target": {"path": str(targets["qwen3"]), "dtype": "float32"},
        "draft": {"name": draft, **path},
        "tree": {"name": tree},
        "sampling": {"name": "gumbel"} | (sampling or {}),
        "engine": SMALL | engine,
    }
    return Engine.from_config(tables)


@pytest.fixture(scope="module")
def oracle(tiny_targets):
    """Token by token: one full forward, the law by the book, the noise of the position."""
    model, known = load_model(tiny_targets["qwen3"], dtype="float32"), {}

    def text(ids, count, settings, seed, stream=0):
        key = (*ids, str(settings), seed, stream)
        found = known.setdefault(key, [])
        params, low = SamplingParams(**settings), torch.tensor(2**32 - 1)
        while len(found) < count:
            logits = model.score(torch.tensor([[*ids, *found]]))[0, -1]
            position = torch.tensor([len(ids) + len(found)])
            noise = gumbel_noise(torch.tensor([seed]), position, 97, low, stream)[0]
            p = law(logits, params, ids, found)
            found.append(int((p.log() + (noise if params.temperature else 0)).argmax()))
        return found[:count]

    return text


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("tree", TREES.names())
def test_tokens_of_the_oracle(oracle, tree, name, tiny_targets, tiny_drafters):
    """Every drafter, and without one; in a ragged batch of more prompts than slots."""
    settings = FILTERS[name]
    filters = {"filters": ["top_k", "top_p", "min_p", "penalties", "logit_bias"]}
    for draft, sampling in itertools.product(DRAFTERS.names(), STREAMS):
        engine = build(tiny_targets, tiny_drafters, draft, tree, {"name": sampling} | filters)
        expected = [oracle(ids, 16, settings, 7, STREAMS[sampling]) for ids in PROMPTS]
        outs = engine.generate(PROMPTS, max_new_tokens=16, seed=7, **settings)
        assert [out.token_ids for out in outs] == expected, draft
    plain = engine.generate_plain(PROMPTS, max_new_tokens=16, seed=7, **settings)
    assert [out.token_ids for out in plain] == expected


@pytest.mark.parametrize("draft", DRAFTERS.names())
def test_requests_of_one_batch_differ(oracle, draft, tiny_targets, tiny_drafters):
    """Settings of every kind side by side, greedy ones among them, each with its own seed."""
    filters = {"filters": ["top_k", "top_p", "min_p", "penalties", "logit_bias"]}
    engine = build(tiny_targets, tiny_drafters, draft, "best_first", filters)
    kinds = [{}, *FILTERS.values(), {}, {"temperature": 1.0}]
    expected = [oracle(PROMPTS[n % 4], 14 + n % 3, kind, 50 + n) for n, kind in enumerate(kinds)]
    settings = [Settings(seed=50 + n, max_new_tokens=14 + n % 3, **kind) for n, kind in enumerate(kinds)]
    prompts = [PROMPTS[n % 4] for n in range(len(kinds))]
    assert [out.token_ids for out in engine.generate(prompts, settings)] == expected
    with pytest.raises(ValueError, match="9 settings: give as many as there are prompts"):
        engine.generate(prompts[:3], settings)
    with pytest.raises(ValueError, match="settings must be a Settings, got 3"):
        engine.generate(prompts[:1], [3])


def test_the_same_seed_whatever_else_runs(tiny_targets, tiny_drafters):
    """Alone, in a batch, in another slot, after other requests, in an engine of another shape. Buglog 18."""
    engine = build(tiny_targets, tiny_drafters, "dflash", "best_first", {"temperature": 1.0})
    alone = engine.generate([PROMPTS[1]], max_new_tokens=12, seed=3)[0].token_ids
    for place in range(4):
        several = [*PROMPTS[2:], *PROMPTS[2:]]
        several.insert(place, PROMPTS[1])
        assert engine.generate(several, max_new_tokens=12, seed=3)[place].token_ids == alone
    for _ in range(3):
        engine.generate(PROMPTS, max_new_tokens=5)
    assert engine.generate([PROMPTS[1]], max_new_tokens=12, seed=3)[0].token_ids == alone
    other = build(tiny_targets, tiny_drafters, "ngram", "static", {"temperature": 1.0}, slots=1, prefill_chunk=256)
    assert other.generate([PROMPTS[1]], max_new_tokens=12, seed=3)[0].token_ids == alone
    assert engine.generate([PROMPTS[1]], max_new_tokens=12, seed=4)[0].token_ids != alone
    # Without a seed all differ, prompts of one call too.
    outs = engine.generate([PROMPTS[1]] * 4, max_new_tokens=12)
    outs += [engine.generate([PROMPTS[1]], max_new_tokens=12)[0] for _ in range(4)]
    assert len({tuple(out.token_ids) for out in outs}) == 8


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_shared_noise_accepts_whole_blocks(temperature, tiny_targets, tiny_drafters):
    """The target as its drafter: with the noise of the right positions every draft is right; with independent not."""
    rates = {}
    for sampling in STREAMS:
        engine = build(tiny_targets, tiny_drafters, "self", "chain", {"name": sampling})
        (out,) = engine.generate([PROMPTS[1]], max_new_tokens=1 + 3 * 8, temperature=temperature, seed=1)
        rates[sampling] = out.stats.mean_acceptance_length
    assert rates["gumbel"] == 8
    assert rates["token_match"] < 8


def test_temperature_zero_is_greedy(tiny_targets, tiny_drafters, monkeypatch):
    """By the shortcut, and in rounds that sample for others."""
    greedy = build(tiny_targets, tiny_drafters, "dflash", "best_first", {"name": "greedy"})
    expected = greedy.generate(PROMPTS, max_new_tokens=12)
    engine = build(tiny_targets, tiny_drafters, "dflash", "best_first")
    modes, step = [], engine.step
    monkeypatch.setattr(engine, "step", lambda *args: modes.append(args[-1]) or step(*args))
    for always in (None, False):
        if always is not None:
            monkeypatch.setattr(engine.sampler, "always_argmax", lambda params: False)
        modes.clear()
        outs = engine.generate(PROMPTS, max_new_tokens=12, top_p=0.5, seed=1)
        for out, want in zip(outs, expected, strict=True):
            assert out.token_ids == want.token_ids
            assert out.stats.per_step_accepted == want.stats.per_step_accepted
        assert set(modes) == {always is None}


def nothing(logits, nodes):
    return torch.full_like(logits, -torch.inf)


def spoil(logits, nodes):
    return logits / 0 * 0


def never_seven(logits, nodes):
    """Follows the path: no 7 after a token below 50."""
    seven = torch.arange(logits.shape[-1], device=logits.device) == 7
    return torch.where(seven & (nodes.token < 50)[:, None], -torch.inf, logits)


@pytest.fixture
def user_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "user_processors", sys.modules[__name__])
    return "user_processors"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "after 0 tokens: step accept: every token is banned"),
        ("spoil", "after 0 tokens: step accept: a processor made logits that are NaN or infinite"),
    ],
)
def test_processors_that_leave_nothing(function, message, temperature, user_module, tiny_targets, tiny_drafters):
    engine = build(tiny_targets, tiny_drafters, sampling={"processors": [f"{user_module}:{function}"]})
    with pytest.raises(RuntimeError, match=f"prompt 0, {message}"):
        engine.generate(PROMPTS, temperature=temperature, seed=1)


def test_a_processor_on_every_row(user_module, tiny_targets, tiny_drafters):
    """It acts on drafts too: with speculation as without, greedy requests included."""
    changes = {"processors": [f"{user_module}:never_seven"], "filters": ["logit_bias"]}
    engine = build(tiny_targets, tiny_drafters, "self", "best_first", changes)
    for temperature in (0.0, 1.0):
        how = {"max_new_tokens": 24, "temperature": temperature, "logit_bias": {7: 30.0}, "seed": 1}
        outs = engine.generate(PROMPTS, **how)
        assert [o.token_ids for o in outs] == [o.token_ids for o in engine.generate_plain(PROMPTS, **how)]
        for ids, out in zip(PROMPTS, outs, strict=True):
            text = [ids[-1], *out.token_ids]
            assert all((b == 7) == (a >= 50) for a, b in itertools.pairwise(text))


@pytest.mark.parametrize("sampling", [{"name": "greedy"}, {"temperature": 1.0}, {"temperature": 0.0}])
@pytest.mark.parametrize("lag", [0, 1])
def test_nan_logits_are_an_error(sampling, lag, tiny_targets, tiny_drafters, monkeypatch, as_on_a_gpu):
    """In the middle of the text, of one request of three; the engine goes on afterwards."""
    engine = build(tiny_targets, tiny_drafters, "ngram", "best_first", sampling)
    as_on_a_gpu(engine, lag)
    expected = engine.generate(PROMPTS[:1], max_new_tokens=9, seed=1)[0].token_ids
    head = engine.target.head

    def broken(hidden):
        logits = head(hidden)
        if logits.shape[0] > 1 and (engine.state.total[1] > 27).any():
            logits[engine.nodes :] = float("nan")
        return logits

    monkeypatch.setattr(engine.target, "head", broken)
    with pytest.raises(RuntimeError, match=r"prompt [12], after \d+ tokens: step verify: the target's logits are NaN"):
        engine.generate(PROMPTS[:3], max_new_tokens=40, seed=1)
    monkeypatch.setattr(engine.target, "head", head)
    assert engine.generate(PROMPTS[:1], max_new_tokens=9, seed=1)[0].token_ids == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, r"top_p = 0.0: must be in \(0, 1\]"),
        ({"top_k": 2.5}, "top_k = 2.5 is not a"),
        ({"seed": -1}, r"seed = -1: must be in 0\.\."),
        ({"logit_bias": {1: 2.0}}, r"logit_bias: this engine is built without it; set \[sampling\] filters"),
        ({"banned_token_ids": [1]}, "logit_bias: this engine is built without it"),
        ({"frequency_penalty": 0.5}, "penalties: this engine is built without it"),
    ],
)
def test_settings_that_are_refused(settings, message, tiny_targets, tiny_drafters):
    engine = build(tiny_targets, tiny_drafters)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2]], temperature=1.0, **settings)
    assert int(engine.state.round) == 0


def test_ids_outside_the_vocabulary_are_refused(tiny_targets, tiny_drafters):
    engine = build(tiny_targets, tiny_drafters, sampling={"filters": ["logit_bias"]})
    for settings in ({"logit_bias": {97: 1.0}}, {"banned_token_ids": (97,)}):
        with pytest.raises(ValueError, match=r"token id 97 is not in 0\.\.96"):
            engine.generate([[1, 2]], **settings)


def test_every_registered_sampler_has_its_place_here():
    """A strategy is tested by tokens (STREAMS), by argmax, or, if it draws, by its law (`flashtree check-sampler`)."""
    exact = {name for name in SAMPLERS.names() if SAMPLERS.get(name).lossless} - {"greedy"}
    assert {name for name in exact if not issubclass(SAMPLERS.get(name), Drawn)} == set(STREAMS)
