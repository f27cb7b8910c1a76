"""Triton's interpreter for tests: kernels on a CPU, in a process of their own (Triton reads its switch on import)."""

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def needs_triton() -> None:
    """Skip the test where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")


def environment() -> dict[str, str]:
    """Of a process that runs kernels in the interpreter."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    quiet = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def interpreted(script: str) -> dict[str, Any]:
    """Run a test file as a script in the interpreter; what it printed last, as JSON."""
    needs_triton()
    run = subprocess.run(
        [sys.executable, script], env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def run_all(checks: Mapping[str, Callable[[], None]]) -> None:
    """In the script: run every check and print {name: "" or its traceback}."""
    patch_interpreter()
    found = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()[-3000:]
    print(json.dumps(found))


def patch_interpreter() -> None:
    """NumPy 2.4 refuses int() of the one-element arrays in which Triton 3.6 keeps its scalars."""
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched
