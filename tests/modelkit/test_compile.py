"""Where compiled code is kept, and what compiled steps depend on (traced only: no C++ compiler and no GPU needed)."""

import functools
import os

import pytest
import torch

from modelkit.compile import Counters, compile_function, compile_step

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


def test_gradient_mode_of_the_caller_does_not_matter(monkeypatch):
    trace = functools.partial(own_compile, backend="eager", fullgraph=True, dynamic=False)
    monkeypatch.setattr(torch, "compile", lambda step, **how: trace(step))
    torch._dynamo.reset()
    state = torch.zeros(3)
    step = compile_step(lambda: state.add_(1), "default")
    before = Counters.read().graphs
    step()
    with torch.no_grad():
        step()
    assert Counters.read().graphs == before + 1
    assert state.tolist() == [2, 2, 2]


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
