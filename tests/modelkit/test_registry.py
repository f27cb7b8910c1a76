"""Name -> class tables: loud about every mistake, open to classes from elsewhere."""

import dataclasses
import sys
import types
from typing import Any, Literal

import pytest

from modelkit.registry import Registry, parse_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    budget: int
    ratio: float = 0.5
    mode: Literal["fast", "exact"] = "fast"
    name_hint: str | None = None
    enabled: bool = True
    sizes: tuple[int, ...] = ()
    pair: tuple[int, float] = (1, 1.0)
    nested: tuple[tuple[int, ...], ...] = ()
    scale: float | None = None
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    order: list[int] = dataclasses.field(default_factory=list)
    anything: Any = None
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget {self.budget} is not positive")


class Tree:
    Config = Options

    def __init__(self, config: Options, **runtime: object) -> None:
        self.config, self.runtime = config, runtime


class Bare:
    """No Config."""


@pytest.fixture
def trees() -> Registry[Tree]:
    registry: Registry[Tree] = Registry("tree")
    for name in ("best_first", "spine_first", "chain"):
        assert registry.register(name)(type(name, (Tree,), {})).__name__ == name
    return registry


@pytest.fixture
def elsewhere(monkeypatch) -> types.ModuleType:
    """An importable module that is not ours."""
    module = types.ModuleType("elsewhere_trees")
    module.Mine, module.Bare, module.function = type("Mine", (Tree,), {}), Bare, lambda: None
    monkeypatch.setitem(sys.modules, "elsewhere_trees", module)
    return module


def parse(**table: Any) -> Options:
    return parse_config(Options, {"budget": 3} | table, "[tree]")


def test_build_gives_config_and_runtime(trees):
    tree = trees.build({"name": "best_first", "budget": 7, "ratio": 1}, device="cpu")
    assert type(tree).__name__ == "best_first" and tree.runtime == {"device": "cpu"}
    assert tree.config == Options(budget=7, ratio=1.0) and isinstance(tree.config.ratio, float)
    assert trees.names() == ["best_first", "chain", "spine_first"]


def test_the_table_is_not_changed(trees):
    table = {"name": "chain", "budget": 7}
    assert trees.config(table) == ("chain", Options(budget=7))
    assert table == {"name": "chain", "budget": 7}


@pytest.mark.parametrize("given", ["best_frist", "Best_First", "bestfirst"])
def test_unknown_name_with_a_suggestion(trees, given):
    message = f"unknown tree '{given}'; known: best_first, chain, spine_first; did you mean 'best_first'?"
    for call in (trees.get, lambda name: trees.build({"name": name, "budget": 1})):
        with pytest.raises(ValueError) as caught:
            call(given)
        assert str(caught.value) == message


def test_unknown_name_without_a_near_one(trees):
    with pytest.raises(ValueError, match=r"unknown tree 'zzz'; known: best_first, chain, spine_first$"):
        trees.get("zzz")
    with pytest.raises(ValueError, match="unknown draft 'x'; known: none"):
        Registry("draft").get("x")


def test_duplicates_are_refused_when_decorating(trees):
    decorator = trees.register("chain")
    with pytest.raises(ValueError, match="tree 'chain' is registered already, as chain"):
        decorator(type("Other", (Tree,), {}))
    assert trees.get("chain").__name__ == "chain"


def test_registries_do_not_share_names(trees):
    other: Registry[Tree] = Registry("layout")
    other.register("chain")(Tree)
    assert other.names() == ["chain"] and other.get("chain") is not trees.get("chain")


def test_a_class_without_config_is_refused(trees):
    with pytest.raises(ValueError, match="tree 'bare' needs a dataclass named Config"):
        trees.register("bare")(Bare)
    with pytest.raises(ValueError, match=r"'plain'.*Config"):
        trees.register("plain")(type("Plain", (), {"Config": dict}))
    assert "bare" not in trees.names()


@pytest.mark.parametrize("table", [{}, {"budget": 3}, {"name": None}, {"name": ""}])
def test_missing_name(trees, table):
    with pytest.raises(ValueError, match=r"tree.*known: best_first, chain, spine_first"):
        trees.build(table)


def test_a_name_of_another_type_is_not_called_missing(trees):
    with pytest.raises(ValueError, match=r"name.*3"):
        trees.build({"name": 3})


def test_path_to_a_class(trees, elsewhere):
    tree = trees.build({"name": "elsewhere_trees:Mine", "budget": 2}, slots=4)
    assert isinstance(tree, elsewhere.Mine) and tree.config.budget == 2 and tree.runtime == {"slots": 4}
    assert "elsewhere_trees:Mine" not in trees.names()
    with pytest.raises(ValueError, match=r"\[tree\].*'bugdet'.*did you mean 'budget'"):
        trees.build({"name": "elsewhere_trees:Mine", "bugdet": 2})


@pytest.mark.parametrize(
    "path",
    [
        "nowhere_at_all:Mine", "elsewhere_trees.sub:Mine", "elsewhere_trees:Missing", "elsewhere_trees:",
        ":Mine", ".rel:Mine", "elsewhere_trees:Bare", "elsewhere_trees:function",
    ],
)  # fmt: skip
def test_a_path_that_leads_to_no_class(trees, elsewhere, path):
    with pytest.raises(ValueError) as caught:
        trees.get(path)
    assert f"tree '{path}'" in str(caught.value)


def test_unknown_key_names_the_near_one():
    with pytest.raises(ValueError, match=r"\[tree\]: unknown key 'bugdet'; known: .*mean 'budget'"):
        parse(bugdet=3)
    with pytest.raises(ValueError, match="unknown key 'derived'"):
        parse(derived=3)


def test_missing_key_and_range():
    with pytest.raises(ValueError, match=r"\[tree\]: the key 'budget' is missing \(int\)"):
        parse_config(Options, {}, "[tree]")
    with pytest.raises(ValueError, match=r"\[tree\]: budget 0 is not positive"):
        parse(budget=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("budget", "3"), ("budget", 3.0), ("budget", True), ("budget", None), ("budget", [3]),
        ("ratio", "0.5"), ("ratio", True), ("ratio", None),
        ("mode", "slow"), ("mode", None), ("mode", ["fast"]), ("name_hint", 3),
        ("enabled", 1), ("enabled", "true"),
        ("sizes", 3), ("sizes", [1, "2"]), ("sizes", [1.5]), ("sizes", "12"), ("sizes", [True]),
        ("pair", [1]), ("pair", [1, 2.0, 3]), ("pair", [1.5, 2.0]), ("nested", [1]), ("nested", [["a"]]),
        ("weights", [1]), ("weights", None), ("order", 3), ("order", None), ("scale", "1"),
    ],
)  # fmt: skip
def test_wrong_types(key, value):
    with pytest.raises(ValueError) as caught:
        parse(**{key: value})
    assert f"[tree]: {key} = {value!r} is not a" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("ratio", 1, 1.0), ("mode", "exact", "exact"), ("name_hint", None, None), ("name_hint", "x", "x"),
        ("enabled", False, False), ("sizes", [8, 16], (8, 16)), ("sizes", [], ()),
        ("pair", [2, 2.5], (2, 2.5)),
        ("nested", [[1, 2], [3]], ((1, 2), (3,))), ("scale", None, None), ("anything", "x", "x"),
        ("weights", {"a": 1.5}, {"a": 1.5}),
    ],
)  # fmt: skip
def test_right_types(key, value, parsed):
    found = getattr(parse(**{key: value}), key)
    assert found == parsed and type(found) is type(parsed)


def test_a_list_field_takes_a_list():
    assert list(parse(order=[2, 1]).order) == [2, 1]
