"""A run as data: shipped configs, overrides, refusals that name what is allowed, and the way back to tables."""

import dataclasses
import os
import sys
import types

import pytest

from spec.config import REGISTRIES, GenerateConfig, Strategy, load_config, parse_override, shipped_configs
from spec.tree.chain import Chain

MINIMAL = {"target": {"path": "somewhere"}, "draft": {"name": "ngram"}}


class Mine(Chain):
    """A strategy outside the registry, with a Config of its own."""

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        budget: int = 3
        taste: str = "sweet"
        widths: tuple[int, ...] = (1, 2)


@pytest.fixture
def mine(monkeypatch):
    """`Mine` as a config names it, importable for this test."""
    monkeypatch.setitem(sys.modules, "user_trees", types.SimpleNamespace(Mine=Mine))
    return "user_trees:Mine"


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs(name):
    config = load_config(name)
    assert config == load_config(shipped_configs()[name]) == load_config(str(shipped_configs()[name]))
    assert load_config(config) == config
    assert GenerateConfig.from_tables(config.to_tables()) == config
    assert config.target.path


def test_defaults():
    config = load_config(MINIMAL)
    assert [config.tree.name, config.sampling.name, config.parallel.name] == ["best_first", "gumbel", "single"]
    assert (config.engine.slots, config.compile.mode, config.generate.ignore_eos) == (1, "auto", False)
    modes = [config.compile.resolved_mode(device) for device in ("cpu", "cuda", "cuda:1")]
    assert modes == ["none", "reduce-overhead", "reduce-overhead"]
    assert load_config(MINIMAL, {"compile.mode": "none"}).compile.resolved_mode("cuda") == "none"
    assert isinstance(config.draft, Strategy) and set(REGISTRIES) == {"draft", "tree", "sampling", "parallel"}


def test_overrides():
    config = load_config("smollm2-self", {"tree.budget": 63, "target.path": "elsewhere", "generate.ignore_eos": True})
    assert (config.tree.config.budget, config.target.path, config.generate.ignore_eos) == (63, "elsewhere", True)
    assert config.draft.config.block_size == 8
    assert load_config("smollm2-self").tree.config.budget == 15
    assert load_config(config, {"engine.slots": 4}).engine.slots == 4
    tables = {"target": {"path": "somewhere"}, "draft": {"name": "ngram", "block_size": 5}}
    assert load_config(tables, {"draft.block_size": 6}).draft.config.block_size == 6
    assert tables["draft"] == {"name": "ngram", "block_size": 5}, "the caller's tables were changed"


@pytest.mark.parametrize("order", [1, -1])
def test_naming_another_strategy_drops_the_old_keys(order):
    overrides = {"draft.prompt_lookup_max": 3, "draft.name": "ngram", "tree.name": "chain"}
    config = load_config("smollm2-self", dict(list(overrides.items())[::order]))
    assert (config.draft.name, config.draft.config.prompt_lookup_max, config.draft.config.block_size) == (
        "ngram",
        3,
        None,
    )
    assert config.tree.config.budget is None
    # Naming the same one keeps them, also where the name stood there by default only.
    assert load_config("smollm2-self", {"draft.name": "self"}).draft.config.block_size == 8
    assert load_config(MINIMAL | {"tree": {"budget": 7}}, {"tree.name": "best_first"}).tree.config.budget == 7


REFUSED = {
    "trees.budget=3": r"unknown table \[trees\]; known: target, draft, tree,",
    "tree.budgte=3": r"\[tree\]: unknown key 'budgte'; known: budget, candidates; did you mean 'budget'\?",
    "target.pth=x": r"\[target\]: unknown key 'pth'; known: device, dtype, path; did you mean 'path'\?",
    "tree.name=best_frist": r"unknown tree 'best_frist'; known: .*did you mean 'best_first'\?",
    "draft.name=dflsh": "unknown draft 'dflsh'; known: dflash, ngram, self.*did you mean 'dflash'",
    "draft.name=dflash": r"\[draft\]: path is missing",
    "sampling.name=nucleus": "unknown sampling 'nucleus'; known: .*greedy",
    "parallel.name=tensors": "unknown parallel 'tensors'; known: .*single",
    "sampling.temperature=-1": r"\[sampling\]: temperature = -1.0: must be 0 \(greedy\) or a positive number",
    "compile.mode=fast": r"\[compile\]: mode = 'fast' is not a .*none",
    "compile.kernels=cuda": r"\[compile\]: kernels = 'cuda' is not a .*triton",
    "target.dtype=fp8": r"\[target\]: dtype = 'fp8'; known: float32, bfloat16, float16",
    "target.path=3": r"\[target\]: path = 3 is not a str",
    'tree.budget="7"': r"\[tree\]: budget = '7' is not a int",
    "tree.budget=7.0": r"\[tree\]: budget = 7.0 is not a int",
    "tree.budget=true": r"\[tree\]: budget = True is not a int",
    "tree.budget=0": r"\[tree\]: budget = 0: nodes besides the root must be in 1..1023",
    "tree.budget=-1": "budget = -1: ",
    "tree.budget=1024": "budget = 1024: nodes besides the root must be in 1..1023",
    "tree.candidates=0": "candidates = 0: at least 1",
    "engine.slots=0": r"\[engine\]: slots = 0: must be at least 1",
    "engine.max_model_len=0": "max_model_len = 0: must be at least 1",
    "engine.page_size=0": "page_size = 0",
    "engine.prefill_chunk=0": "prefill_chunk = 0",
    "engine.threads=0": "threads = 0",
    "generate.max_new_tokens=0": "max_new_tokens = 0: must be at least 1",
    "generate.ignore_eos=1": r"\[generate\]: ignore_eos = 1 is not a bool",
    "draft.block_size=1": "block_size = 1: .*must be in 2..257",
    "draft.block_size=258": "block_size = 258: .*must be in 2..257",
    "draft.num_speculative_tokens=0": "must be in 2..257",
    "draft.confidence=1": "confidence = 1.0: must be between 0 and 1",
    "draft.prompt_lookup_min=9": "must be 1 <= min <= max <= 32",
    "budget=3": "override 'budget': write it as table.key, for example tree.budget",
    "tree.widths.first=3": "override 'tree.widths.first': write it as table.key",
    "tree.=3": "override 'tree.': write it as table.key",
}


@pytest.mark.parametrize("text", REFUSED)
def test_overrides_that_are_refused(text):
    key, value = parse_override(text)
    with pytest.raises(ValueError, match=REFUSED[text]):
        load_config(MINIMAL, {key: value})


@pytest.mark.parametrize("widths", [[], [0], [2, -1], [2.0], 3, [8, 8, 8, 8]])
def test_static_widths_that_are_refused(widths):
    with pytest.raises(ValueError, match=r"\[tree\]: (widths|budget) = "):
        load_config(MINIMAL, {"tree.name": "static", "tree.widths": widths})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"draft": {"name": "ngram"}}, r"\[target\]: the key 'path' is missing"),
        ({"target": {"path": "x"}}, r"\[draft\]: the key 'name' is missing; known: dflash, ngram, self"),
        (MINIMAL | {"draft": {"name": 3}}, r"\[draft\]: name = 3 is not a str; known: dflash"),
        (MINIMAL | {"tree": 7}, r"\[tree\] must be a table, got 7"),
        (MINIMAL | {"tre": {}}, r"unknown table \[tre\]"),
    ],
)
@pytest.mark.parametrize("overrides", [{}, {"generate.ignore_eos": True}, {"tree.candidates": 3}])
def test_tables_that_are_refused(tables, message, overrides):
    with pytest.raises(ValueError, match=message):
        load_config(tables, overrides)


def test_block_size_in_both_spellings():
    assert load_config(MINIMAL, {"draft.num_speculative_tokens": 7}).draft.config.resolved_block_size(16) == 8
    assert load_config(MINIMAL, {"draft.block_size": 8}).draft.config.resolved_block_size(16) == 8
    assert load_config(MINIMAL).draft.config.resolved_block_size(16) == 16
    both = {"draft.block_size": 8, "draft.num_speculative_tokens": 7}
    assert load_config(MINIMAL, both).draft.config.resolved_block_size(16) == 8
    with pytest.raises(
        ValueError, match=r"\[draft\]: block_size = 8 \(anchor counted\) and num_speculative_tokens = 8"
    ):
        load_config(MINIMAL, both | {"draft.num_speculative_tokens": 8})


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tree.name": "static", "tree.widths": [3, 2], "engine.page_size": 16, "engine.max_model_len": 99},
        {"tree.name": "chain", "tree.budget": 5, "draft.num_speculative_tokens": 4, "draft.confidence": 0.5},
        {"draft.name": "dflash", "draft.path": "~/drafter", "generate.max_new_tokens": 3, "target.dtype": "float32"},
        {"draft.name": "self", "draft.wrong_every": 2, "sampling.temperature": 0, "target.device": "cuda"},
    ],
)
def test_round_trip_through_tables(overrides):
    config = load_config(MINIMAL, overrides)
    tables = config.to_tables()
    assert GenerateConfig.from_tables(tables) == config
    assert all(value is not None for table in tables.values() for value in table.values())


def test_strategies_outside_the_registry(mine):
    config = load_config(MINIMAL, {"tree.name": mine, "tree.taste": "sour", "tree.widths": [4]})
    assert config.tree == Strategy(name=mine, config=Mine.Config(taste="sour", widths=(4,)))
    assert GenerateConfig.from_tables(config.to_tables()) == config
    assert load_config(config, {"tree.budget": 9}).tree.config == Mine.Config(budget=9, taste="sour", widths=(4,))
    assert load_config(config, {"tree.name": "chain"}).tree.config == Chain.Config()
    with pytest.raises(ValueError, match="unknown key 'tast'; known: budget, taste, widths; did you mean 'taste'"):
        load_config(config, {"tree.tast": "x"})
    for name, message in {
        "user_trees:Yours": "cannot be imported",
        "no_such_module:Mine": "tree 'no_such_module:Mine' cannot be imported",
        "os:getcwd": "not a class with a dataclass named Config",
        "os:": "cannot be imported",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_config(MINIMAL, {"tree.name": name})


def test_files(tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text('target.path = "x"\n[draft]\nname = "ngram"\n[tree]\nname = "static"\nwidths = [2, 2]')
    config = load_config(path)
    assert config.tree.config.widths == (2, 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config("~/mine.toml") == config == load_config(os.fspath(path))
    with pytest.raises(ValueError, match=r"config file .*none\.toml does not exist"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ValueError, match=r"no config 'smollm2-ngrm'; shipped: .*did you mean 'smollm2-ngram'"):
        load_config("smollm2-ngrm")
    for bad in (b"[draft\n", b"\xff\xfe", b"a = 1\na = 2"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"mine\.toml is not valid TOML"):
            load_config(path)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("tree.budget=63", "tree.budget", 63),
        ("sampling.temperature=0.5", "sampling.temperature", 0.5),
        ("generate.ignore_eos=true", "generate.ignore_eos", True),
        ("tree.widths=[3, 2]", "tree.widths", [3, 2]),
        ("target.path=/a=b c", "target.path", "/a=b c"),
        (" tree.name = chain ", "tree.name", "chain"),
        ('target.path="7"', "target.path", "7"),
    ],
)
def test_parse_override(text, key, value):
    assert parse_override(text) == (key, value)


def test_an_override_needs_a_value():
    with pytest.raises(ValueError, match=r"--set tree.budget: write it as table.key=value"):
        parse_override("tree.budget")


def test_a_target_without_a_path_is_refused():
    with pytest.raises(ValueError, match="path is empty"):
        load_config("smollm2-ngram", {"target.path": ""})


def test_a_number_beyond_all_floats_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        load_config("smollm2-ngram", {"sampling.temperature": 10**400})
