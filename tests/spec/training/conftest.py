"""What tests of training share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def torchrun():
    """`flashtree` in several processes: (processes, options, folder to import from) -> what became of it."""

    def start(processes, options, path=""):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        root = Path(__file__).resolve().parents[3]
        environment = os.environ | {"PYTHONPATH": f"{root}:{path}", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, "-m", "spec.cli", *options], cwd=root, capture_output=True, text=True, env=environment,
            timeout=240,
        )  # fmt: skip

    return start
