"""Host processors through the engine: exactly what plain decoding with them gives, eager and in compiled halves."""

import itertools
import random
import sys
import warnings

import pytest
import torch

from modelkit import load_model
from sampling import SAMPLERS, HostContext, SamplingParams
from sampling.noise import gumbel_noise
from sampling.reference import law
from spec import Engine
from spec.check_lossless import _check_repeatable
from spec.chi_squared import chi_squared
from spec.cli import main
from spec.compare import compare
from spec.config import load_config
from spec.draft import DRAFTERS
from spec.parts import Parts, occupy, vacate
from spec.requests import Settings
from spec.tree import TREES

V = 97
STREAMS = {"gumbel": 0, "token_match": 1}
SMALL = {"slots": 3, "page_size": 8, "prefill_chunk": 7, "max_model_len": 128}

pytestmark = [
    pytest.mark.filterwarnings("ignore:not one token of drafter"),
    pytest.mark.filterwarnings("ignore:host_processors"),
    pytest.mark.filterwarnings("ignore:sampler 'typical' is lossy"),
]


def prompt(length):
    return random.Random(length).choices(range(V), k=length)


PROMPTS = [prompt(4), prompt(23), prompt(1), prompt(40)]


def banned(given, output):
    """Two tokens of three, which ones depends on every token of the output and on the length of the prompt."""
    turn = sum((n + 1) * token for n, token in enumerate(output)) + len(given)
    return torch.arange(V) % 3 != turn % 3


def rule(logits, nodes):
    """The rule, as a host processor."""
    for row, given, output in nodes.texts():
        logits[row, banned(given, output)] = -torch.inf
    return logits


def strict(logits, nodes):
    """The rule by one who has nothing to say about texts that break it."""
    for row, given, output in nodes.texts():
        fine = not any(banned(given, output[:n])[token] for n, token in enumerate(output))
        logits[row, banned(given, output)] = -torch.inf
        if not fine:
            logits[row] = -torch.inf if row % 2 else torch.nan
    return logits


def follows(given, output):
    return not any(banned(given, output[:n])[token] for n, token in enumerate(output))


@pytest.fixture
def build(tiny_targets, tiny_drafters):
    def engine(draft="self", tree="chain", sampling=None, mode="none", **sizes):
        path = {"path": str(tiny_drafters["qwen3"])} if draft == "dflash" else {}
        return Engine.from_config(
            {
                "target": {"path": str(tiny_targets["qwen3"]), "dtype": "float32"},
                "draft": {"name": draft, **path} if isinstance(draft, str) else draft,
                "tree": {"name": tree},
                "sampling": {"name": "gumbel", "host_processors": [rule]} | (sampling or {}),
                "engine": SMALL | sizes,
                "compile": {"mode": mode},
            }
        )

    return engine


@pytest.fixture(scope="module")
def oracle(tiny_targets):
    """Token by token: a full forward, the rule, the law by the book, the noise of the position."""
    model, known = load_model(tiny_targets["qwen3"], dtype="float32"), {}

    def text(ids, count, settings, seed, stream=0):
        found = known.setdefault((*ids, str(settings), seed, stream), [])
        params, low = SamplingParams(**settings), torch.tensor(2**32 - 1)
        while len(found) < count:
            logits = model.score(torch.tensor([[*ids, *found]]))[0, -1].clone()
            logits[banned(ids, found)] = -torch.inf
            noise = gumbel_noise(torch.tensor([seed]), torch.tensor([len(ids) + len(found)]), V, low, stream)[0]
            p = law(logits, params, ids, found)
            found.append(int((p.log() + (noise if params.temperature else 0)).argmax()))
        assert follows(ids, found)
        return found[:count]

    return text


MIXED = {
    "temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "logit_bias": {5: 1.0},
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES.names())
@pytest.mark.parametrize("draft", DRAFTERS.names())
def test_tokens_of_the_oracle(oracle, draft, tree, build):
    """With and without speculation, sampled and greedy, in a ragged batch of more prompts than slots."""
    filters = {"filters": ["top_k", "top_p", "min_p", "penalties", "logit_bias"]}
    for sampling, settings in itertools.product(STREAMS, ({}, {"temperature": 1.0}, MIXED)):
        engine = build(draft, tree, {"name": sampling} | filters)
        expected = [oracle(ids, 14, settings, 7, STREAMS[sampling]) for ids in PROMPTS]
        for plain in (False, True):
            outs = engine.generate(PROMPTS, max_new_tokens=14, seed=7, plain=plain, **settings)
            assert [out.token_ids for out in outs] == expected
    engine = build(draft, tree, {"name": "greedy"})
    outs = engine.generate(PROMPTS, max_new_tokens=14)
    assert [out.token_ids for out in outs] == [oracle(ids, 14, {}, 7) for ids in PROMPTS]


@pytest.mark.parametrize("lag", [0, 1])
def test_drafts_that_break_the_rule_end_nothing(oracle, lag, build, as_on_a_gpu):
    """Rows that will not be accepted may be left without a token, or with nonsense."""
    engine = build("self", "best_first", {"host_processors": [strict]})
    as_on_a_gpu(engine, lag)
    outs = engine.generate(PROMPTS, max_new_tokens=14, seed=7, temperature=1.0)
    assert [out.token_ids for out in outs] == [oracle(ids, 14, {"temperature": 1.0}, 7) for ids in PROMPTS]


@pytest.mark.parametrize("sampling", ["rejection", "block_verification", "typical"])
def test_tokens_that_depend_on_drafts_follow_the_rule(sampling, build):
    for tree in ["chain"] if sampling == "block_verification" else TREES.names():
        for draft in DRAFTERS.names():
            engine = build(draft, tree, {"name": sampling, "host_processors": [strict]})
            settings = [Settings(seed=n, max_new_tokens=10, temperature=[1.5, 0.5, 0.0][n % 3]) for n in range(12)]
            outs = engine.generate(PROMPTS * 3, settings)
            assert all(follows(ids, out.token_ids) for ids, out in zip(PROMPTS * 3, outs, strict=True))
            greedy = outs[2::3]
            plain = engine.generate_plain([(PROMPTS * 3)[n] for n in (2, 5, 8, 11)], max_new_tokens=10)
            assert [out.token_ids for out in greedy] == [out.token_ids for out in plain]


@pytest.mark.parametrize(("tree", "sampling"), [("best_first", "rejection"), ("chain", "block_verification")])
def test_the_law_of_the_third_token(tree, sampling, build, tiny_targets):
    """As without a rule: where the drafter is wrong, and does not know the rule, the law is the target's under it."""
    count, ids = 1000, PROMPTS[2]
    engine = build({"name": "self", "wrong_every": 2, "block_size": 4}, tree, {"name": sampling}, slots=40)
    settings = [Settings(seed=seed, max_new_tokens=3, temperature=0.5) for seed in range(count)]
    outs = engine.generate([ids] * count, settings)
    model = load_model(tiny_targets["qwen3"], dtype="float32")
    texts, mass, whole = [[]], torch.ones(1, dtype=torch.float64), torch.zeros(V, dtype=torch.float64)
    for depth in range(3):
        logits = model.score(torch.tensor([[*ids, *text] for text in texts]))[:, -1].double()
        logits[torch.stack([banned(ids, text) for text in texts])] = -torch.inf
        joint = mass[:, None] * (logits / 0.5).softmax(-1)
        if depth == 2:
            whole = joint.sum(0)
        kept = (joint > 1e-7).nonzero().tolist()
        texts, mass = [[*texts[i], v] for i, v in kept], torch.stack([joint[i, v] for i, v in kept])
    seen = torch.bincount(torch.tensor([out.token_ids[2] for out in outs]), minlength=V)
    assert chi_squared(seen, whole / whole.sum()).p_value > 0.01


def traced(monkeypatch):
    """`torch.compile` that traces in full and runs what it traced; the steps it was given."""
    steps, real = [], torch.compile  # noqa: TID251 (a test of what modelkit/compile.py relies on)

    def compile(step, *, options, fullgraph, dynamic):
        assert fullgraph and not dynamic
        steps.append(step)
        return real(step, backend="eager", fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", compile)
    torch._dynamo.reset()
    return steps


@pytest.mark.parametrize(
    ("draft", "tree", "sampling"),
    [
        ({"name": "self", "block_size": 3}, "best_first", "gumbel"), ("ngram", "best_first", "greedy"),
        ("dflash", "static", "rejection"),
    ],
)  # fmt: skip
def test_compiled_halves(draft, tree, sampling, build, monkeypatch):
    """Each half is one graph, traced once; the user's code is in none of them and is left alone by the warm-up."""
    sizes = {"slots": 2, "prefill_chunk": 64}  # three requests: two at a time, and one
    want, calls = build(draft, tree, {"name": sampling}, **sizes), []

    def watched(logits, nodes):
        assert not torch.compiler.is_compiling() and isinstance(nodes, HostContext)
        calls.append(sum(1 for _ in nodes.texts()))
        return rule(logits, nodes)

    engine = build(draft, tree, {"name": sampling, "host_processors": [watched]}, "default", **sizes)
    steps = traced(monkeypatch)
    torch._dynamo.utils.counters.clear()
    engine.warm_up(plain=[False, True])
    assert not calls
    known, graphs = len(steps), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for plain, temperature in itertools.product((False, True), (0.0,) if sampling == "greedy" else (0.0, 1.0)):
        how = {"max_new_tokens": 10, "temperature": temperature, "seed": 3, "plain": plain}
        got, expected = engine.generate(PROMPTS[:3], **how), want.generate(PROMPTS[:3], **how)
        assert [out.token_ids for out in got] == [out.token_ids for out in expected]
        assert [out.stats.per_step_accepted for out in got] == [out.stats.per_step_accepted for out in expected]
    assert calls and all(calls)
    assert len(steps) == known and torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


def test_what_a_processor_sees(build):
    """Every row it was asked about: the prompt, the text so far, and drafts after it; nothing of an ended request."""
    seen = []

    def watched(logits, nodes):
        assert {name: getattr(nodes, name).device.type for name in ("token", "ancestors")} == {
            "token": "cpu", "ancestors": "cpu",
        }  # fmt: skip
        for row, given, output in nodes.texts():
            depth = int(nodes.depth[row])
            assert output[-1:] == [int(nodes.token[row])] if output else int(nodes.token[row]) == given[-1]
            assert len(given) + len(output) == int(nodes.position[row]) + 1
            seen.append((given, output[: len(output) - depth], output))
        return logits

    engine = build("self", "best_first", {"host_processors": [watched]})
    outs = engine.generate(PROMPTS, max_new_tokens=9, temperature=1.0, seed=2)
    for ids, out in zip(PROMPTS, outs, strict=True):
        own = [(text, whole) for given, text, whole in seen if given == ids]
        assert all(text == out.token_ids[: len(text)] for text, _ in own)
        asked = {tuple(whole) for _, whole in own}
        assert all(tuple(out.token_ids[:n]) in asked for n in range(len(out.token_ids)))
        assert tuple(out.token_ids) not in {tuple(text) for text, _ in own}
    assert {given == ids for given, *_ in seen for ids in PROMPTS} == {True, False}


def ban_all(logits, nodes):
    return torch.full_like(logits, -torch.inf)


def ban_later(logits, nodes):
    for row, _, output in nodes.texts():
        if len(output) >= 5:
            logits[row] = -torch.inf
    return logits


def spoil(logits, nodes):
    return logits * torch.nan


def hide(logits, nodes):
    return torch.zeros_like(logits)


@pytest.mark.parametrize(
    ("sampling", "temperature"), [("gumbel", 0.0), ("gumbel", 1.0), ("rejection", 1.0), ("greedy", 0.0)]
)
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (ban_all, r"prompt 0, after 0 tokens: step accept: every token is banned \(by banned_token_ids or a proc"),
        (ban_later, r"prompt \d, after [0-5] tokens: step accept: every token is banned"),
        (spoil, "prompt 0, after 0 tokens: step accept: a processor made logits that are NaN or infinite"),
    ],
)
def test_results_that_leave_nothing(function, message, sampling, temperature, build):
    engine = build("self", "best_first", {"name": sampling, "host_processors": [function]})
    with pytest.raises(RuntimeError, match=message):
        engine.generate(PROMPTS, max_new_tokens=20, temperature=temperature, seed=1)


def test_broken_logits_cannot_be_hidden(build, monkeypatch):
    engine = build("ngram", "best_first", {"host_processors": [hide]})
    head = engine.target.head
    monkeypatch.setattr(engine.target, "head", lambda hidden: head(hidden) * float("nan"))
    with pytest.raises(RuntimeError, match="prompt 0, after 0 tokens: step verify: the target's logits are NaN"):
        engine.generate(PROMPTS, temperature=1.0, seed=1)


@pytest.mark.parametrize("mode", ["none", "default"])
def test_errors_name_the_processor_and_leave_an_engine(mode, build, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda step, **how: step)
    broken = True

    def fragile(logits, nodes):
        if broken and any(len(output) > 4 for _, _, output in nodes.texts()):
            raise KeyError("state 7")
        return rule(logits, nodes)

    engine = build("self", "best_first", {"host_processors": [rule, fragile]}, mode)
    with pytest.raises(RuntimeError, match=r"host processor '.*fragile' failed: KeyError: 'state 7'") as caught:
        engine.generate(PROMPTS, max_new_tokens=9, temperature=1.0, seed=1)
    assert isinstance(caught.value.__cause__, KeyError)
    broken = False
    again = engine.generate(PROMPTS, max_new_tokens=9, temperature=1.0, seed=1)
    expected = build("self", "best_first").generate(PROMPTS, max_new_tokens=9, temperature=1.0, seed=1)
    assert [out.token_ids for out in again] == [out.token_ids for out in expected]
    narrow = build("self", "chain", {"host_processors": [lambda logits, nodes: logits[:, 1:]]}, mode)
    with pytest.raises(ValueError, match=r"processor '.*lambda.*' must return logits \[1, 97\], it returned Tensor"):
        narrow.generate(PROMPTS)


def test_one_warning_when_the_engine_is_built(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "user_rules", sys.modules[__name__])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = build("ngram", "chain", {"host_processors": ["user_rules:rule", strict]})
        engine.generate(PROMPTS[:1], max_new_tokens=3)
        build("ngram", "chain", {"host_processors": []})
    (eager,) = [str(w.message) for w in caught]
    assert eager.startswith(
        "host_processors (user_rules:rule, strict) run in Python between the target and the sampler"
    )
    with pytest.warns(UserWarning, match="host_processors .* a round is two compiled steps, not one") as compiled:
        build("ngram", "chain", mode="default")
    assert len(compiled) == 1 and "compiled" not in eager


def test_who_cannot_take_them_says_so(build, tiny_targets, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "user_rules", sys.modules[__name__])
    engine = build("ngram", "chain")
    occupy(engine, [PROMPTS[0]] * 3)
    with pytest.raises(ValueError, match="the parts of a round are timed without host processors"):
        Parts(engine, engine.capacity)
    vacate(engine)
    config = load_config("smollm2-ngram", {"sampling.host_processors": ["user_rules:rule"]})
    with pytest.raises(ValueError, match="processors, which transformers lacks; use --oracle plain"):
        _check_repeatable(config, "transformers")
    _check_repeatable(config, "plain")
    sets = [f"target.path={tiny_targets['qwen3']}", "draft.name=ngram", 'sampling.host_processors=["user_rules:rule"]']
    options = [part for one in sets for part in ("--set", one)]
    (tmp_path / "prompts.txt").write_text("a prompt")
    assert main(["bench", *options, "--prompts", str(tmp_path / "prompts.txt")]) == 2
    assert "set sampling.temperature=0, no penalties or processors" in capsys.readouterr().err
    assert main(["check-sampler", "gumbel", "--set", 'host_processors=["user_rules:rule"]']) == 2
    assert "host_processors are run by an engine" in capsys.readouterr().err


def test_a_config_keeps_the_callable_itself():
    class Grammar:
        def __deepcopy__(self, memo):
            raise TypeError("cannot be copied")

        def __call__(self, logits, nodes):
            return logits

    grammar = Grammar()
    first = load_config("smollm2-ngram", {"sampling.host_processors": [grammar], "sampling.name": "token_match"})
    again = load_config(first, {"tree.budget": 7})
    assert again.sampling.config.host_processors == (grammar,) and again.tree.config.budget == 7


@pytest.mark.parametrize("name", SAMPLERS.names())
def test_outputs_are_compared_behind_them(name, tiny_targets):
    """Two tokens that the processor has brought together are a near-tie, whatever the target says of them."""
    model, ids = load_model(tiny_targets["qwen3"], dtype="float32"), PROMPTS[1]
    best, other = model.score(torch.tensor([ids]))[0, -1].topk(2).indices.tolist()

    def even(logits, nodes):
        for row, given, output in nodes.texts():
            assert (given, output) == (ids, [])
            logits[row, other] = logits[row, best]
        return logits

    raw = SAMPLERS.build({"name": name})
    evened = SAMPLERS.build({"name": name, "host_processors": [even]})
    gaps = [compare(model, ids, [best], [other], 3, sampler, SamplingParams()).gap for sampler in (raw, evened)]
    assert gaps[0] > 1e-3 and gaps[1] == 0
