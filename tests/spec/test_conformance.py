"""Every registered drafter x every registered tree: the tokens of stepwise argmax by full forwards, honest counts."""

import dataclasses
import functools
import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from modelkit import load_model
from sampling import SAMPLERS, SamplingParams
from sampling.params import FEATURES
from spec import Engine
from spec.draft import DRAFTERS
from spec.requests import Request
from spec.tree import TREES

# Settings under test by registered name, several by label; an entry that is not here runs by its defaults.
DRAFT_SETTINGS = {"self": {"": {}, ":wrong": {"wrong_every": 2, "block_size": 6}}}  # dflash gets its path below
TREE_SETTINGS, SAMPLING_SETTINGS = {}, {}
WITHOUT_SIBLINGS = {"chain"}

DRAFTS = [name + label for name in DRAFTERS.names() for label in DRAFT_SETTINGS.get(name, {"": {}})]
TARGETS = ("llama", "qwen3", "qwen2_windowed")
EVERY = list(itertools.product(DRAFTS, TREES.names(), TARGETS))
# Where the target matters less: one a pair, such that each drafter and each tree meets all of them.
SOME = [(d, t, m) for d, t, m in EVERY if TARGETS.index(m) == (DRAFTS.index(d) + TREES.names().index(t)) % len(TARGETS)]
SMALL = {"slots": 3, "page_size": 8, "prefill_chunk": 7, "max_model_len": 128}

pytestmark = pytest.mark.filterwarnings("ignore:not one token of drafter")


def prompt(length, seed=0):
    return random.Random(1000 * seed + length).choices(range(97), k=length)


SHORT, MIDDLE, LONG = prompt(4), prompt(23), prompt(80)


class Lab:
    """Engines by name, and the oracle: argmax of full forwards, a token at a time."""

    def __init__(self, request):
        self._folder, self._known = request.getfixturevalue, {}

    def path(self, target, drafter=False):
        if target == "fitted":
            return self._folder("fixtures_dir") / "dflash" / ("drafter_fitted_taps012" if drafter else "target")
        return self._folder("tiny_drafters" if drafter else "tiny_targets")[target]

    def greedy(self, target, ids, count):
        if target not in self._known:
            self._known[target] = load_model(self.path(target), dtype="float32")
        text = self._known.setdefault((target, *ids), [])
        while len(text) < count:
            best = self._known[target].score(torch.tensor([[*ids, *text]]))[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-4, "too close to a tie for a test; choose another prompt"
            text.append(int(best.indices[0]))
        return text[:count]

    def build(self, draft, tree, target, sampling="greedy", mode="none", **engine):
        name = draft.partition(":")[0]
        path = {"path": str(self.path(target, drafter=True))} if name == "dflash" else {}
        tables = {
            "target": {"path": str(self.path(target)), "dtype": "float32"},
            "draft": {"name": name, **DRAFT_SETTINGS.get(name, {"": {}})[draft.removeprefix(name)], **path},
            "tree": {"name": tree, **TREE_SETTINGS.get(tree, {})},
            "sampling": {"name": sampling, **SAMPLING_SETTINGS.get(sampling, {})},
            "engine": SMALL | engine,
            "compile": {"mode": mode},
        }
        try:
            return Engine.from_config(tables)
        except (ValueError, TypeError) as error:
            pytest.fail(f"{draft} x {tree} x {sampling} cannot be built ({error}): add test settings to {__file__}")


@pytest.fixture(scope="module")
def lab(request):
    return Lab(request)


@pytest.fixture(scope="module", params=SOME, ids="-".join)
def case(request, lab):
    """One drafter, tree and target: an engine, a maker of fresh ones, and the oracle."""
    fresh = functools.partial(lab.build, *request.param)
    _, tree, target = request.param
    return SimpleNamespace(tree=tree, engine=fresh(), fresh=fresh, greedy=functools.partial(lab.greedy, target))


all_targets = pytest.mark.parametrize("case", EVERY, ids="-".join, indirect=True)


def check(out, ids, expected, reason, engine):
    """Tokens, finish reason, and every count of the statistics against each other."""
    assert (out.token_ids, out.finish_reason) == (expected, reason)
    stats, steps, depth = out.stats, out.stats.per_step_accepted, engine.drafter.depth
    assert (stats.prompt_tokens, stats.completion_tokens) == (len(ids), len(expected))
    assert 1 + sum(accepted + 1 for accepted in steps) == len(expected)
    assert (stats.num_spec_steps, stats.num_accepted_draft_tokens) == (len(steps), sum(steps))
    assert stats.mean_acceptance_length == pytest.approx(1 + sum(steps) / max(len(steps), 1))
    rates, histogram = stats.acceptance_rate_per_position, stats.acceptance_histogram
    assert len(rates) == depth and all(1 >= high >= low >= 0 for high, low in itertools.pairwise([1, *rates]))
    assert sum(rates) * len(steps) == pytest.approx(sum(steps))
    assert stats.draft_tokens_per_step == engine.nodes - 1
    assert len(histogram) == depth + 1 and sum(histogram) == len(steps)
    json.dumps(stats.to_dict())


def cut(text, stops):
    """Text up to the first stop id, inclusive, and the reason it ends for."""
    end = next((i for i, token in enumerate(text) if token in stops), None)
    return (text, "length") if end is None else (text[: end + 1], "stop")


@all_targets
def test_tokens_are_the_targets_own(case):
    prompts = [SHORT, prompt(1), MIDDLE, prompt(40), prompt(8)]
    for ids, out in zip(prompts, case.engine.generate(prompts, max_new_tokens=24), strict=True):
        check(out, ids, case.greedy(ids, 24), "length", case.engine)
    for ids, out in zip(prompts, case.engine.generate_plain(prompts, max_new_tokens=24), strict=True):
        assert (out.token_ids, out.finish_reason, out.stats.num_spec_steps) == (case.greedy(ids, 24), "length", 0)


def nodes(tree):
    """Number of each valid node of the first slot by its parent's number and its token."""
    rows = zip(*(x[0].tolist() for x in (tree.parent, tree.token, tree.valid)), strict=True)
    return {(parent, token): number for number, (parent, token, valid) in enumerate(rows) if valid}


@all_targets
def test_every_round_accepts_all_that_its_tree_holds(case, monkeypatch):
    """Walking the oracle's text through the recorded trees gives each round's accepted length; the trees branch."""
    trees, build, count = [], case.engine.tree.build, 24
    monkeypatch.setattr(case.engine.tree, "build", lambda *args: trees.append(build(*args)) or trees[-1])
    (out,) = case.engine.generate([LONG], max_new_tokens=count)
    text, place, siblings = case.greedy(LONG, count + case.engine.drafter.depth), 0, 0
    check(out, LONG, text[:count], "length", case.engine)
    assert len(trees) == out.stats.num_spec_steps
    for tree, accepted in zip(trees, out.stats.per_step_accepted, strict=True):
        child = nodes(tree)
        assert child[-1, text[place]] == 0 and len(child) == tree.valid[0].sum(), "siblings with the same token"
        siblings += len(child) > len({parent for parent, _ in child})
        node, depth = 0, 0
        while (node := child.get((node, text[place + depth + 1]))) is not None:
            depth += 1
        assert accepted == min(depth, count - place - 2), (place, depth)
        last, place = place, place + accepted + 1
    assert (siblings > 0) == (case.tree not in WITHOUT_SIBLINGS)
    # What is drafted does not depend on how the text came about: as a prompt, whole or in chunks, or in rounds.
    case.engine.generate([LONG + text[:last]], max_new_tokens=2)
    assert nodes(trees[-1]) == nodes(trees[-2])
    monkeypatch.setattr("spec.engine.compile_step", lambda step, mode: step)  # one step for all lengths
    engine = case.fresh(page_size=None, prefill_chunk=256, slots=1, mode="default")
    (whole,) = engine.generate([LONG], max_new_tokens=count)
    assert (whole.token_ids, whole.stats.per_step_accepted) == (out.token_ids, out.stats.per_step_accepted)


@pytest.mark.parametrize("index", [0, 2, 5, 8])
def test_stop_ids_inside_a_block(case, index):
    text = case.greedy(SHORT, 14)
    stops = [text[index], next(i for i in range(97) if i not in text)]
    expected, _ = cut(text, stops)
    most = len(expected) if index == 5 else 14  # limit and stop id at the same token
    (out,) = case.engine.generate([SHORT], max_new_tokens=most, stop_token_ids=stops)
    check(out, SHORT, expected, "stop", case.engine)
    *pieces, last = case.engine.stream(SHORT, max_new_tokens=most, stop_token_ids=stops)
    assert [token for piece in (*pieces, last) for token in piece.token_ids] == expected
    assert not any(piece.completion for piece in pieces)
    check(last.completion, SHORT, expected, "stop", case.engine)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_max_new_tokens_is_exact(case, count):
    for ids, out in zip((MIDDLE, SHORT), case.engine.generate([MIDDLE, SHORT], max_new_tokens=count), strict=True):
        check(out, ids, case.greedy(ids, count), "length", case.engine)


@pytest.mark.parametrize("page_size", [None, 12])
def test_context_fills_to_its_limit(case, page_size):
    engine = case.fresh(max_model_len=32, page_size=page_size, slots=2)
    prompts = [prompt(28), prompt(31), prompt(25), prompt(28)]
    for ids, out in zip(prompts, engine.generate(prompts, max_new_tokens=100), strict=True):
        check(out, ids, case.greedy(ids, 32 - len(ids)), "length", engine)
    assert [len(o.token_ids) for o in engine.generate_plain(prompts, max_new_tokens=100)] == [4, 1, 7, 4]
    with pytest.raises(ValueError, match=r"prompt has 32 tokens; .*32 \(max_model_len\)"):
        engine.generate([prompt(32)])


def test_an_engine_remembers_nothing(case):
    """Short, long, short again in one slot, plain decoding between: as fresh engines, in tokens and acceptance."""
    fresh = {len(ids): case.fresh(slots=1).generate([ids], max_new_tokens=10)[0] for ids in (SHORT, LONG)}
    engine = case.fresh(slots=1)
    for ids in (SHORT, LONG, SHORT):
        (out,) = engine.generate([ids], max_new_tokens=10)
        check(out, ids, case.greedy(ids, 10), "length", engine)
        assert out.stats.per_step_accepted == fresh[len(ids)].stats.per_step_accepted
        assert engine.generate_plain([MIDDLE], max_new_tokens=3)[0].token_ids == case.greedy(MIDDLE, 3)


class Waits(TorchDispatchMode):
    """Finds what makes the host of a GPU wait: numbers copied there one by one, and numbers read."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        source = {"copy_": args[1:2], "index_put_": args[2:3]}.get(name, ())
        if name == "_foreach_copy_":
            source = args[1]
        if name == "_local_scalar_dense" or any(given.dim() == 0 for given in source):
            self.found.append(name)
        return operation(*args, **kwargs or {})


def test_a_request_is_admitted_without_waiting(case, lab, monkeypatch):
    """Neither buffers nor caches are set in a way that would wait for the rounds of other requests."""
    everything = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1.0, "seed": 1,
        "logit_bias": {3: 1.0}, "banned_token_ids": (4,),
    }  # fmt: skip
    monkeypatch.setitem(SAMPLING_SETTINGS, "gumbel", {"filters": list(FEATURES)})
    for engine, params in ((case.engine, {}), (case.fresh(sampling="gumbel"), everything)):
        for name in ("chunk_step", "first_step"):  # what the device does is another matter
            monkeypatch.setattr(engine.prefiller, name, lambda *_: lambda: None)
        request = Request(prompt_ids=LONG, max_new_tokens=3, stop_ids=[5, 6], sampling=SamplingParams(**params))
        with Waits() as waits:
            engine.prefill(1, request)
            engine.state.retire(1)
        assert not waits.found
        engine.state.total[1] = 0
    with Waits() as waits:
        case.engine.state.total[1] = 0
        case.engine.state.cache.layer(0).k[torch.tensor([1])] = 0
    assert waits.found == ["copy_", "index_put_"], "PyTorch assigns in another way now"


@pytest.mark.parametrize("lag", [0, 1])
def test_more_prompts_than_slots(case, lag, as_on_a_gpu):
    """Ragged prompts that end at different times; each comes out as it does alone, its acceptance too."""
    as_on_a_gpu(case.engine, lag)
    prompts = [LONG, *(prompt(n, seed=5) for n in (2, 35, 3, 17, 9, 1))]
    texts = [case.greedy(ids, 12) for ids in prompts]
    ends = {stop: {len(cut(text, [stop])[0]) for text in texts} for stop in range(97)}
    stop = max(ends, key=lambda token: len(ends[token]))
    assert len(ends[stop]) >= 3
    outs = case.engine.generate(prompts, max_new_tokens=12, stop_token_ids=[stop])
    for ids, text, out in zip(prompts, texts, outs, strict=True):
        check(out, ids, *cut(text, [stop]), case.engine)
        alone = case.engine.generate([ids], max_new_tokens=12, stop_token_ids=[stop])[0]
        assert alone.stats.per_step_accepted == out.stats.per_step_accepted


class Bytes:
    """A tokenizer whose tokens are letters and pieces of characters of two and four bytes."""

    parts = (*(bytes([c]) for c in range(33, 127)), b"\xc3", b"\xa9", b"\xf0\x9f")

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(self.parts[i] for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("lag", [0, 1])
def test_streamed_text(case, lag, monkeypatch, as_on_a_gpu):
    as_on_a_gpu(case.engine, lag)
    monkeypatch.setattr(case.engine, "tokenizer", Bytes())
    expected = case.greedy(MIDDLE, 20)
    text = Bytes().decode(expected)
    for stop, shown in ((None, text), (text[6:9], text[: text.index(text[6:9])])):
        pieces = list(case.engine.stream(MIDDLE, max_new_tokens=20, stop=stop))
        done = pieces[-1].completion
        assert "".join(piece.text for piece in pieces) == shown == done.text
        assert done.token_ids == expected[: len(done.token_ids)] == [t for piece in pieces for t in piece.token_ids]
        assert done.finish_reason == ("length" if stop is None else "stop")
        assert Bytes().decode(done.token_ids).startswith(shown + (stop or ""))
        if stop:  # ended by the host, beside others that go on
            outs = case.engine.generate([MIDDLE, SHORT, LONG], max_new_tokens=20, stop=stop)
            check(outs[0], MIDDLE, done.token_ids, "stop", case.engine)
            for ids, out in zip((SHORT, LONG), outs[1:], strict=True):
                check(out, ids, case.greedy(ids, 20), "length", case.engine)
    stream = case.engine.stream(MIDDLE, max_new_tokens=20)
    next(stream), next(stream)
    with pytest.raises(ValueError, match="busy"):
        case.engine.generate([SHORT])
    stream.close()
    assert case.engine.generate([SHORT], max_new_tokens=5)[0].token_ids == case.greedy(SHORT, 5)


@pytest.mark.parametrize("target", TARGETS)
def test_the_target_as_its_drafter_accepts_whole_blocks(lab, target):
    (out,) = lab.build("self", "chain", target).generate([MIDDLE], max_new_tokens=1 + 3 * 8)
    assert out.stats.per_step_accepted == [7, 7, 7] and out.stats.mean_acceptance_length == 8
    assert out.stats.draft_acceptance_rate == 1 and out.stats.acceptance_rate_per_position == [1.0] * 7


@pytest.mark.parametrize("tree", TREES.names())
def test_a_trained_drafter_in_a_ragged_batch(lab, tree):
    """Real acceptance, of several tokens and different in each slot, is the same alone; one text is known by heart."""
    stored = load_file(lab.path("fitted", drafter=True) / "cases.safetensors")["prompts"].tolist()
    prompts, engine = [stored[0], SHORT, stored[1], MIDDLE, *stored[2:]], lab.build("dflash", tree, "fitted")
    outs = engine.generate(prompts, max_new_tokens=20)
    for ids, out in zip(prompts, outs, strict=True):
        check(out, ids, lab.greedy("fitted", ids, 20), "length", engine)
        alone = engine.generate([ids], max_new_tokens=20)[0]
        assert alone.stats.per_step_accepted == out.stats.per_step_accepted
    assert outs[0].stats.mean_acceptance_length > 4


@pytest.mark.parametrize("sampling", [name for name in SAMPLERS.names() if SAMPLERS.get(name).lossless])
@pytest.mark.parametrize("tree", TREES.names())
def test_samplers_at_temperature_zero(lab, sampling, tree):
    if SAMPLERS.get(sampling).chains_only and tree not in WITHOUT_SIBLINGS:
        return  # refused, see test_strategies.py
    for draft in DRAFTS:
        engine = lab.build(draft, tree, "qwen3", sampling)
        outs = engine.generate([SHORT, LONG], max_new_tokens=12, temperature=0.0)
        for ids, out in zip([SHORT, LONG], outs, strict=True):
            check(out, ids, lab.greedy("qwen3", ids, 12), "length", engine)


def test_end_tokens_of_the_checkpoint(lab, tiny_targets, tmp_path):
    """Both ids of generation_config.json end an answer, unless they are to be ignored."""
    text = lab.greedy("llama", SHORT, 12)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_targets["llama"] / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [text[9], text[3]]}))
    engine = Engine.from_config({"target": {"path": str(tmp_path), "dtype": "float32"}, "draft": {"name": "self"}})
    assert engine.generate([SHORT], max_new_tokens=12)[0].token_ids == cut(text, [text[9], text[3]])[0]
    assert engine.generate([SHORT], max_new_tokens=12, ignore_eos=True)[0].token_ids == text


def test_a_drafter_of_which_nothing_is_accepted_is_reported(lab):
    propose = (engine := lab.build("self", "chain", "llama")).drafter.propose
    engine.drafter.propose = lambda *args: dataclasses.replace(draft := propose(*args), ids=(draft.ids + 1) % 97)
    with pytest.warns(UserWarning, match="not one token of drafter 'self'"):
        (out,) = engine.generate([SHORT], max_new_tokens=22)
    assert out.token_ids == lab.greedy("llama", SHORT, 22) and out.stats.mean_acceptance_length == 1
