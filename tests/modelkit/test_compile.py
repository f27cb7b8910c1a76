"""Where compiled code is kept."""

import os

import pytest
import torch

from modelkit.compile import compile_step

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
