"""`flashtree bench-steps`: time of one forward over a given number of rows, at a model's shape with random weights.

A step is a chain of rows behind a context, through all layers, the head and argmax: one row is plain decoding, more are
what a tree's verification costs. Steps are timed back to back, as rounds run, on the device's own clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelkit.cache import KVCache
from modelkit.compile import Counters, compile_step
from modelkit.loading import load_model
from modelkit.model import Transformer
from modelkit.rows import chain

from .cli import check_writable
from .config import CompileConfig
from .report import table

BATCH = 10  # steps between two looks at the clock


def shapes() -> dict[str, Path]:
    """Published configs inside the package, by name."""
    folder = Path(str(resources.files("spec"))) / "shapes"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flashtree bench-steps`."""
    parser.add_argument("--shape", default="smollm2-135m", help=f"{', '.join(shapes())}, or a config.json")
    parser.add_argument("--rows", default="1,16,32", help="row counts, by comma")
    parser.add_argument("--context", default="1024", help="context lengths, by comma")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", default="auto", help="auto, none, default or reduce-overhead")
    parser.add_argument("--kernels", default="auto", help="auto, reference or triton")
    parser.add_argument("--repeat", type=int, default=7, metavar="N", help=f"timings of {BATCH} steps each")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")


class StepModule(nn.Module):
    """A step without arguments and results."""

    def __init__(self, model: Transformer, cache: KVCache, rows: int) -> None:
        super().__init__()
        self.model, self.cache, self.rows = model, cache, rows
        token = torch.arange(rows, device=model.device)[None] % model.config.vocab_size
        self.register_buffer("token", token, persistent=False)
        self.register_buffer("count", torch.full((1,), rows, device=model.device), persistent=False)
        self.register_buffer("chosen", torch.zeros(rows, dtype=torch.int64, device=model.device), persistent=False)

    token: Tensor
    count: Tensor
    chosen: Tensor

    def forward(self) -> None:
        """Embed, all layers, head, argmax."""
        start = self.cache.length[:-1]
        rows = chain(token=self.token, start=start, count=self.count, rows=self.rows, bound=self.cache.capacity)
        self.chosen.copy_(self.model.head(self.model(rows, self.cache).hidden).argmax(-1))


def run(arguments: argparse.Namespace) -> int:
    """Time and print a table."""
    check_writable(arguments.json)
    row_counts, contexts = (_numbers(text) for text in (arguments.rows, arguments.context))
    path = shapes().get(arguments.shape, Path(arguments.shape))
    if not path.is_file():
        raise ValueError(f"no shape '{arguments.shape}'; shipped: {', '.join(shapes())}, or a path to a config.json")
    model = load_model(path, dtype=arguments.dtype, device=arguments.device, kernels=arguments.kernels, random_seed=0)
    mode = CompileConfig(mode=arguments.mode).resolved_mode(arguments.device)
    cache = model.new_cache(slots=1, capacity=max(contexts) + 256, scratch=max(row_counts))
    for layer in cache.all_layers():
        layer.k.normal_()
        layer.v.normal_()
    lines = [["rows", *(f"context {n}, ms" for n in contexts), "first run, s"]]
    figures: list[dict[str, Any]] = []
    for rows in row_counts:
        began = time.perf_counter()
        step = compile_step(StepModule(model, cache, rows), mode)
        times = []
        for context in contexts:
            cache.length[0] = context
            times.append(timed(step, model.device, arguments.repeat))
            if len(times) == 1:
                first = time.perf_counter() - began
        lines.append([str(rows), *(f"{ms:.3f}" for ms in times), f"{first:.1f}"])
        figures.append({"rows": rows, "ms": dict(zip(contexts, times, strict=True)), "first_run_s": first})
    where = torch.cuda.get_device_name() if model.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{arguments.shape}, {arguments.dtype}, random weights; {where}; torch {torch.__version__}; mode {mode}, "
          f"kernels {model.backend.name}")  # fmt: skip
    print(table(lines))
    print(Counters.read())
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"'{text}' is not a list of whole numbers by comma") from None
    if min(found) < 1:
        raise ValueError(f"'{text}': numbers must be at least 1")
    return found


@torch.no_grad()
def timed(step: Any, device: torch.device, repeat: int) -> float:
    """Median milliseconds of a step, `BATCH` of them back to back at a time."""
    for _ in range(3):
        step()
    found = []
    for _ in range(repeat):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(BATCH):
                step()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / BATCH)
        else:
            began = time.perf_counter()
            for _ in range(BATCH):
                step()
            found.append((time.perf_counter() - began) * 1e3 / BATCH)
    return float(statistics.median(found))
