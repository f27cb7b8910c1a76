"""House rules of the repository that no linter keeps."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("modelkit", "sampling", "parallel", "spec")
MAX_FILE_LINES = 400
MAX_README_LINES = 150

FENCE = re.compile(
    r"^(?P<indent> *)```python[^\n]*\n(?P<code> *# run\b.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
CONFIGS = sorted((ROOT / "spec" / "configs").glob("*.toml"))


def documentation_blocks():
    """Yield every ```python block of the README and docs/ whose first line is `# run`."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            name = f"{path.relative_to(ROOT)}:{line + 1}"
            # Leading newlines make a traceback point at the line of the Markdown file.
            yield pytest.param(path, "\n" * line + textwrap.dedent(match["code"]), id=name)


@pytest.mark.parametrize(("path", "code"), list(documentation_blocks()))
def test_documentation_block_runs(path, code, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("package", PACKAGES)
def test_import_needs_neither_triton_nor_transformers(package):
    # None in sys.modules makes `import triton` fail, also where it is installed and torch would load it.
    modules = [package, *([f"{package}.kernels"] if (ROOT / package / "kernels").is_dir() else [])]
    check = f"""
        import sys
        sys.modules["triton"] = None
        import {", ".join(modules)}
        sys.exit("{package} imports transformers" if "transformers" in sys.modules else 0)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(check)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_files_stay_readable():
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert lines, f"no Python files under {ROOT}"
    assert not {name: count for name, count in lines.items() if count > MAX_FILE_LINES}


def test_readme_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_no_init_files_under_tests():
    # tests/spec/__init__.py would shadow the package `spec`.
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads(path):
    from spec.config import TRAINING_PREFIX, GenerateConfig, load_config
    from spec.training.config import TrainingConfig, load_training_config

    if path.stem.startswith(TRAINING_PREFIX):
        assert isinstance(load_training_config(path.stem), TrainingConfig)
    else:
        assert isinstance(load_config(path.stem), GenerateConfig)
