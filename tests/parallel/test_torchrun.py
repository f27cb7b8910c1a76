"""The command line under torchrun: who prints, how it fails, how it is interrupted, and two machines played by one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_layouts import BOTH, HOT, TENSOR, tables

from spec import Engine

HERE = Path(__file__).resolve().parent
PROMPTS = [[1, 2, 3, 4], [9, 2, 3, 4]]
LINES = "".join(json.dumps({"token_ids": ids}) + "\n" for ids in PROMPTS)


@pytest.fixture
def options(targets, drafter, tmp_path):
    """`options(parallel, draft)`: --config and what follows it."""

    def make(parallel, draft="dflash"):
        file = tmp_path / "run.toml"
        config = tables(targets(2), parallel, draft, sampling=HOT, drafter=drafter)
        text = ""
        for table, values in config.items():
            text += f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        file.write_text(text)
        return config, ["--config", str(file), "--max-new-tokens", "12"]

    return make


def torchrun(*command, nodes=("--nproc-per-node", "2"), **environment):
    """A running torchrun in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *nodes, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])} | environment,
    )  # fmt: skip


def expected(config):
    outs = Engine.from_config(config | {"parallel": {"name": "single"}}).generate(PROMPTS, max_new_tokens=12)
    return [out.token_ids for out in outs]


def check(config, out):
    """Each prompt's JSON once, with the tokens of one process."""
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["token_ids"] for record in sorted(records, key=lambda record: record["id"])] == expected(config)


def test_generate_prints_once(options):
    config, arguments = options(TENSOR)
    run = torchrun("-m", "spec.generate", *arguments, "--json")
    out, err = run.communicate(LINES, timeout=180)  # the prompts come through process 0's standard input
    assert run.returncode == 0, err
    check(config, out)


def test_a_failing_process_ends_all_with_its_own_error(options):
    _, arguments = options(TENSOR, "ngram")
    run = torchrun(str(HERE / "troubled.py"), *arguments, TROUBLE="error", PROCESS="1")
    _, err = run.communicate(LINES, timeout=180)
    failed = float(re.search(r"fails at ([\d.]+)", err)[1])
    assert run.returncode != 0 and time.time() - failed < 20, err
    assert "(process 1 of 2) flashtree: error: this drafter is broken\n" in err
    assert err.count("flashtree: error") + err.count("Traceback (most recent call last)") == 2, "one is torchrun's"


def test_an_interrupt_leaves_no_process(options):
    """Process 1 sleeps, process 0 waits for it in a collective; torchrun alone gets the signal."""
    _, arguments = options(TENSOR, "ngram")
    run = torchrun(str(HERE / "troubled.py"), *arguments, TROUBLE="sleep", PROCESS="1")
    run.stdin.write(LINES)
    run.stdin.close()
    while "asleep" not in run.stderr.readline():
        assert run.poll() is None
    children = descendants(run.pid)
    assert len(children) >= 2
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=20) != 0
    end = time.monotonic() + 5
    while alive := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"still there: {alive}"
        time.sleep(0.1)


def descendants(pid):
    """Processes below a process, whatever their group."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [further for child in children for further in descendants(child)]


@pytest.mark.slow
def test_bench_prints_once(options, tmp_path):
    _, arguments = options(TENSOR)
    figures = tmp_path / "figures.json"
    steps = ["--steps", "--rows", "1,7", "--context", "32", "--repeat", "1", "--json", str(figures)]
    run = torchrun("-m", "spec.cli", "bench", *arguments[:2], "--set", "engine.max_model_len=200", *steps)
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    assert "layout tensor of 2 processes" in out and out.count("\nplain step") == 1
    first, second = (json.loads(path.read_text()) for path in (figures, figures.with_stem("figures-1")))
    assert first["config"] == second["config"]
    # Rows of 64 in fp32: the embedding, two sums a layer.
    assert {"kind": "all_reduce", "bytes": 256, "count": 9} in first["collectives"]["plain step 1"]
    assert first["collectives"] == second["collectives"]
    called = {f"{call['kind']} {call['bytes']}" for calls in first["collectives"].values() for call in calls}
    assert called == set(first["collective_us"]) and min(first["collective_us"].values()) > 0


@pytest.mark.slow
def test_two_machines_of_two_processes(options):
    config, arguments = options(BOTH)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = ("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    runs = [
        torchrun("-m", "spec.generate", *arguments, "--json", nodes=(*address, "--node-rank", rank)) for rank in "01"
    ]
    (out, err), (silent, _) = (run.communicate(LINES, timeout=240) for run in runs)
    assert [run.returncode for run in runs] == [0, 0], err
    check(config, out)
    assert not silent


LATE = """
import argparse, sys, time
from parallel import process
from spec import together

together.LEAVE_SECONDS = 1.0

def main(arguments):
    process.join("cpu")
    time.sleep(4 * (process.rank() == 0))
    return 0

sys.exit(together.run_together(main, argparse.Namespace()))
"""


def test_who_is_done_waits_for_the_others(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    run = torchrun(str(tmp_path / "late.py"), nodes=("--standalone", "--nproc-per-node", "2"))
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
