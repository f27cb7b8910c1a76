"""Where compiled code is kept, and what compiled steps depend on (mostly traced only: no GPU needed)."""

import functools
import gc
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from modelkit.compile import Counters, compile_function, compile_step, operators

own_compile = torch.compile  # noqa: TID251

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture(autouse=True)
def no_folders(monkeypatch, tmp_path):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLASHTREE_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(torch, "compile", lambda step, **how: step)  # PyTorch's own default is none of our business


def folders():
    return tuple(os.environ.get(name) for name in NAMES)


def test_compiled_code_is_kept_beside_the_demo_model(tmp_path):
    compile_step(lambda: None, "none")
    assert folders() == (None, None) and not (tmp_path / "kept").exists()
    compile_step(lambda: None, "default")
    assert folders() == (str(tmp_path / "kept/compiled"), str(tmp_path / "kept/compiled/triton"))


def test_the_default_that_pytorch_sets_by_itself_is_replaced(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert cache_dir().startswith(str(tmp_path / "temporary")), "PyTorch has another default now"
    compile_step(lambda: None, "reduce-overhead")
    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept/compiled")


def test_the_users_folders_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    compile_step(lambda: None, "default")
    assert folders() == ("mine", None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("TRITON_CACHE_DIR", "triton's")
    compile_step(lambda: None, "default")
    assert folders() == (str(tmp_path / "kept/compiled"), "triton's")


def test_a_folder_that_cannot_be_made_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "kept").write_text("a file")
    compile_step(lambda: None, "default")
    assert folders() == (None, None)


@pytest.mark.usefixtures("cpp_compiler")
def test_kept_code_is_found_again_only_with_the_operators_it_was_made_with(monkeypatch):
    """An operator may return other sizes than it did, and PyTorch's caches know it by its name alone."""
    monkeypatch.setattr(torch, "compile", own_compile)
    state, found = torch.zeros(3), []
    with torch.compiler.config.patch(cache_key_tag="the user's"):
        for digest in ("one", "one", "another"):
            monkeypatch.setattr("modelkit.compile.operators", lambda digest=digest: digest)
            torch._dynamo.reset()
            before = counters["inductor"]["fxgraph_cache_hit"]
            compile_step(lambda: state.add_(1), "default")()
            found.append(counters["inductor"]["fxgraph_cache_hit"] > before)
            assert torch.compiler.config.cache_key_tag.startswith("the user's")
    assert found == [False, True, False]


def test_operators_are_known_by_their_files(monkeypatch, tmp_path):
    root = Path(compile_step.__code__.co_filename).parents[1]
    sources = [
        file for package in ("modelkit", "parallel", "sampling", "spec") for file in (root / package).rglob("*.py")
    ]
    defining = [file for file in sources if "custom_op(" in file.read_text()]
    names = {str(file.relative_to(root)) for file in defining} - {"modelkit/compile.py"}
    assert {"modelkit/kernels/few_rows.py", "parallel/symmetric.py", "spec/kernels/best_first.py"} <= names
    for name in [*names, "modelkit/kernels/tiles.py", "modelkit/rows.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    monkeypatch.setattr("modelkit.compile.__file__", str(tmp_path / "modelkit" / "compile.py"))

    def digest() -> str:
        operators.cache_clear()
        return operators()

    try:
        found = [digest()]
        for name in sorted({*names, "modelkit/kernels/tiles.py"}):
            with (tmp_path / name).open("a") as file:
                file.write("\n")
            found.append(digest())
        assert len(set(found)) == len(found)
        (tmp_path / "modelkit/rows.py").write_text("")
        assert digest() == found[-1], "compiled code knows by itself what is no operator"
    finally:
        operators.cache_clear()


@pytest.fixture
def traced(monkeypatch):
    """Compiled by a backend that runs what was traced, with the checks that were asked for."""
    torch._dynamo.reset()

    def trace(step, *, options, **how):
        return own_compile(step, backend="eager", options={"guard_filter_fn": options["guard_filter_fn"]}, **how)

    monkeypatch.setattr(torch, "compile", trace)
    yield
    torch._dynamo.reset()


def test_gradient_mode_of_the_caller_does_not_matter(traced):
    state = torch.zeros(3)
    step = compile_step(lambda: state.add_(1), "default")
    before = Counters.read().graphs
    step()
    with torch.no_grad():
        step()
    assert Counters.read().graphs == before + 1
    assert state.tolist() == [2, 2, 2]


def test_steps_of_one_function_are_told_apart_without_checks(traced):
    """Two owners, two arguments each, called in turn: each runs what it was traced with; nothing is traced again."""

    class Owner:
        def __init__(self, scale):
            self.scale, self.state = scale, torch.zeros(2)

        def step(self, rows):
            self.state[:rows] += rows * self.scale

    owners = [Owner(1), Owner(10)]
    before = Counters.read().graphs
    steps = [compile_step(functools.partial(owner.step, rows), "default") for owner in owners for rows in (1, 2)]
    for step in steps * 3:
        step()
    assert [owner.state.tolist() for owner in owners] == [[9, 6], [90, 60]]
    assert Counters.read().graphs == before + 4
    owners[0].scale = 5  # what a step was traced with does not change; if it did, nobody would notice
    steps[0]()
    assert owners[0].state.tolist() == [10, 6]


def test_a_step_nobody_holds_is_forgotten(traced):
    state = torch.zeros(1)
    watched = weakref.ref(state)
    step = compile_step(functools.partial(torch.Tensor.add_, state, 1), "default")
    step()
    del step, state
    gc.collect()
    assert watched() is None


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown compile mode 'fast'; known: none, default"):
        compile_step(lambda: None, "fast")


def test_functions_for_training_are_compiled_whole_with_their_gradients(monkeypatch):
    assert compile_function(torch.sin, False) is torch.sin
    asked = []
    trace = functools.partial(own_compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda f, **how: asked.append(how) or trace(f, **how))
    x = torch.ones(3, requires_grad=True)
    compile_function(lambda x: (x * x).sum())(x).backward()
    assert x.grad.tolist() == [2.0] * 3
    assert asked == [{"fullgraph": True, "dynamic": False}]
