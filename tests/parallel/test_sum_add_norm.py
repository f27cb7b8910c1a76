"""The kernel that sums over processes, adds and norms: in Triton's interpreter, between processes that share memory.

This file is also the script that each of the processes runs.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import interpreter

WIDTH, SPLITS, EPS = 40, 2, 1e-5
CALLS = [3, 1, 1, 4, 2, 24, 1]  # rows of each
ROWS = max(CALLS)


def shares(rank: int, call: int, rows: int) -> torch.Tensor:
    """A process's addend [SPLITS, rows, WIDTH]; rank -1: the residual, the same everywhere."""
    generator = torch.Generator().manual_seed(1000 * call + rank + 1)
    return torch.randn(SPLITS, rows, WIDTH, generator=generator)


def run(folder: str, rank: int, processes: int, before: int, dtype: torch.dtype) -> None:
    """All calls of one process; `before`: what epochs begin with, to see them wrap around."""
    interpreter.patch_interpreter()
    from triton.runtime.interpreter import InterpreterBuilder

    # Of the two barriers one is between the flags and the reading: the last process is slow there, and what it has not
    # read yet must not be written again.
    InterpreterBuilder.create_barrier = lambda builder: time.sleep(0.03 * (rank == processes - 1))
    from parallel.kernels.sum_add_norm import Mailboxes

    size = Mailboxes.size(processes, WIDTH, ROWS)
    memory = [
        torch.from_file(f"{folder}/mailbox{peer}", shared=True, size=size, dtype=torch.uint8)
        for peer in range(processes)
    ]
    boxes = Mailboxes(
        addresses=torch.tensor([m.data_ptr() for m in memory]), width=WIDTH, rank=rank, memory=memory[rank],
        epochs=torch.full((ROWS,), before, dtype=torch.int32),
    )  # fmt: skip
    weight = torch.linspace(0.5, 2.0, WIDTH).to(dtype)
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    found = []
    for call, rows in enumerate(CALLS):
        x = shares(-1, call, rows)[0].to(dtype)
        total, normed = boxes.sum_add_norm(shares(rank, call, rows), x, weight, EPS)
        whole = sum(shares(peer, call, rows).sum(0).to(dtype).float() for peer in range(processes))
        expected = x + whole.to(dtype)
        torch.testing.assert_close(total, expected, **near)
        law = torch.nn.functional.rms_norm(total.float(), (WIDTH,), weight.float(), EPS)
        torch.testing.assert_close(normed.float(), law, **near)
        found.append(total.double().sum().item())
    print(json.dumps(found))


@pytest.mark.parametrize(
    ("processes", "before", "dtype"),
    [(2, 0, "float32"), (3, 0, "float32"), (2, 2**31 - 3, "float32"), (2, 0, "float16")],
    ids=["two", "three", "wrapping", "half"],
)
def test_sum_add_norm_between_processes(processes, before, dtype, tmp_path):
    interpreter.needs_triton()
    from parallel.kernels.sum_add_norm import Mailboxes

    data = Mailboxes.flags_at(processes, WIDTH, ROWS)
    flags = torch.full((ROWS * processes,), before, dtype=torch.int32).view(torch.uint8)
    poison = torch.full((data // 4,), float("nan")).view(torch.uint8)
    for rank in range(processes):
        (tmp_path / f"mailbox{rank}").write_bytes(torch.cat([poison, flags]).numpy().tobytes())
    command = [sys.executable, __file__, str(tmp_path)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(processes), str(before), dtype], env=interpreter.environment(),
            stdout=subprocess.PIPE, stderr=(tmp_path / f"err{rank}").open("w"),
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:  # where one fails the others wait for ever
        while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
    outs = {process.communicate()[0] for process in started}
    failed = [rank for rank, process in enumerate(started) if process.returncode > 0]
    assert not failed, (tmp_path / f"err{failed[0]}").read_text()[-2000:]
    assert len(outs) == 1, "not the same bits everywhere"


if __name__ == "__main__":
    run(sys.argv[1], *map(int, sys.argv[2:5]), getattr(torch, sys.argv[5]))
