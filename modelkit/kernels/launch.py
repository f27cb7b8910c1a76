"""Launching kernels with programmatic dependent launch: the next kernel is set up while this one still runs.

A kernel calls `wait` before it touches its predecessor's results and `release`, never before that, when its successor
may be scheduled. So parameters, and what an operator further back has written, can be read before `wait`, where it
costs no time. Not what the compiler's own kernels write: it moves them to just before their first reader. All writing
comes behind `wait`, since the predecessor may still read what was there.
Neither the compiler's own templates nor `triton_op` can ask for such launches, so operators that use it are opaque
custom ops. The interpreter (tests without a GPU) knows none of it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@functools.cache
def dependent_launch() -> bool:
    """Whether kernels are launched that way: on compute capability 9 and newer, unless FLASHTREE_PDL=0."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    return os.environ.get("FLASHTREE_PDL", "1") == "1" and torch.cuda.get_device_capability()[0] >= 9


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the predecessor's results; every program does, also one with nothing to do."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the successor be scheduled; late where its programs would take up the room of ours."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](...), with PDL told to the kernel and to the launcher."""
    if dependent_launch():
        kernel[grid](*arguments, PDL=True, launch_pdl=True, **constants)
    else:
        kernel[grid](*arguments, PDL=False, **constants)
