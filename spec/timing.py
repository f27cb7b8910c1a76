"""Clocks for the bench: steps back to back on the device's own clock, copy bandwidth, host synchronisations."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch

from modelkit.compile import Step

BATCH = 10  # steps between two looks at the clock
HEAD_START = 40_000_000  # clock cycles, 20 ms or more: longer than the host takes to launch a batch


def _once(step: Step, device: torch.device, head_start: bool) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(BATCH):
            step()
        return (time.perf_counter() - began) * 1e3 / BATCH
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    if head_start:
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
    # Not timed: in the midst of a run the device is busy when a step is launched, and processes that exchange tensors
    # have met.
    step()
    start.record()
    for _ in range(BATCH):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / BATCH


@torch.no_grad()
def timed(
    step: Step, device: torch.device, repeat: int, *, before: Step = lambda: None, head_start: bool = False
) -> float:
    """Median milliseconds of a step, `BATCH` of them back to back at a time, after three to warm up.

    Args:
        step: what is timed.
        device: on CUDA its events tell the time, else the wall clock.
        repeat: batches.
        before: run before each batch, outside of the clock (puts lengths back).
        head_start: keep the GPU busy until the host has launched the whole batch, so that short steps show the time
            they take on the GPU and not the time the host takes to launch them; nothing on a CPU.
    """
    before()
    for _ in range(3):
        step()
    found = []
    for _ in range(repeat):
        before()
        found.append(_once(step, device, head_start))
    before()
    return statistics.median(found)


@torch.no_grad()
def launching(step: Step, device: torch.device, *, before: Step = lambda: None) -> float | None:
    """Milliseconds of the host's time that a launch of the step takes while the device is busy; None on a CPU."""
    if device.type != "cuda":
        return None
    before()
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    for _ in range(BATCH):
        step()
    ended = time.perf_counter()
    torch.cuda.synchronize()
    before()
    return (ended - began) * 1e3 / BATCH


def copy_bandwidth(device: torch.device, repeat: int = 5) -> float:
    """Bytes a second that a copy on the device reads and writes: 1 GiB on CUDA, 256 MiB on a CPU, best of `repeat`."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    if device.type == "cuda":
        return 2 * size / (timed(copy, device, repeat) * 1e-3)
    copy()
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        copy()
        found.append(time.perf_counter() - began)
    return 2 * size / min(found)


def synchronisations(step: Callable[[], None], device: torch.device, runs: int = 10) -> int | None:
    """Times that the host waited for the device in `runs` steps, as PyTorch's sync debug mode counts; None on a CPU."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(runs):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    # Switching the mode on warns too, in other words.
    return sum("called a synchronizing" in str(warning.message) for warning in caught)
