"""The steps mode of `flashtree bench`: the parts of a round, each timed by itself, at fixed shapes.

For each number of slots and each context length: a plain step, verifications of given widths, draft, tree, accept,
commit, the whole round, a prefill chunk; beside each the bytes it must move and how much of the measured bandwidth that
is. Needs no prompts: every slot holds random token ids, and noise for a context.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modelkit.compile import Counters, Step, compile_step, forget
from modelkit.loading import use_device
from parallel.process import local_device, started

from .bench_links import links
from .bench_plan import FIRST_TOKEN, Plan, random_prompts, tell, uses_random_weights
from .config import GenerateConfig
from .engine import Engine
from .generate import describe
from .parts import AttentionAlone, Parts, PrefillChunk, Saved, Verify, furnish, vacate
from .report import machine_line, table
from .timing import BATCH, copy_bandwidth, launching, synchronisations, timed
from .traffic import part_bytes

PROMPT, NEW = 128, 2  # the request whose first token is timed
PEER_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One part's figures.

    Attributes:
        part: its name.
        rows: of its forward, all slots together; None for parts without one.
        ms: a step, back to back as rounds run; the host's launches are in it where they are the slower ones.
        device_ms: the same with the host ahead; None on a CPU.
        bytes: that it must move; None where that says nothing.
        fraction: of the measured copy bandwidth that this is.
        floor_ms: the time that these bytes take at that bandwidth. A layout's processes move theirs at the same time,
            but pipeline stages work one after another.
        host_ms: the host's time for a launch while the device is busy; None on a CPU.
        first_run_s: the step's first run at this context, compiling included where it had not run before.
    """

    part: str
    rows: int | None
    ms: float
    device_ms: float | None
    bytes: int | None
    fraction: float | None
    floor_ms: float | None
    host_ms: float | None
    first_run_s: float


class Bench:
    """Times the parts of one engine's rounds.

    Args:
        engine: its slots are filled here.
        plan: rows and parts to time.
        bandwidth: bytes a second that fractions are of.
        repeat: timings of ten steps each.
    """

    def __init__(self, engine: Engine, plan: Plan, bandwidth: float, repeat: int) -> None:
        self.engine, self.plan, self.bandwidth, self.repeat = engine, plan, bandwidth, repeat
        self.mode = engine.config.compile.resolved_mode(engine.config.target.device)
        self.device = engine.target.device
        self._steps: dict[tuple[str, int | None], Step] = {}

    @property
    def timed_steps(self) -> list[tuple[str, int | None]]:
        """(part, rows) of what has been timed."""
        return list(self._steps)

    def run(self, context: int) -> dict[str, Any]:
        """All parts at one context length, as a record."""
        engine = self.engine
        vacate(engine)
        furnish(engine, random_prompts(engine, context))
        saved = Saved(engine)
        tell(f"{engine.state.slots} slot(s), context {context}")
        eager = self.mode == "none"
        if eager or not self._steps:  # an eager step reads as far as its bound; a compiled one must serve all contexts
            longest = context + (BATCH + 1) * (engine.drafter.depth + 1)
            self._steps = self._make(min(longest, engine.capacity) if eager else engine.capacity)
        first_runs = {key: self._first_run(key, saved) for key in self._steps}
        before = Counters.read()
        moved = part_bytes(engine, context)
        parts = [self._figure(key, moved[key[0]], first_runs[key], saved) for key in self._steps]
        recompiles = Counters.read().graphs - before.graphs
        whole = self._steps.get(("round", engine.state.slots * engine.nodes))
        syncs = None if whole is None else synchronisations(whole, self.device)
        saved.restore()
        return {
            "parts": [dataclasses.asdict(part) for part in parts],
            "host_syncs_in_10_rounds": syncs,
            "recompiles_while_timing": recompiles,
            "round_over_plain_step": _ratio(parts),
        }

    def _make(self, bound: int) -> dict[tuple[str, int | None], Step]:
        engine, slots = self.engine, self.engine.state.slots
        tree_rows = slots * engine.nodes
        compiling = self.mode != "none"
        made: dict[tuple[str, int | None], Step] = {}

        def add(part: str, rows: int | None, make: Callable[[], Step], compiled: bool = False) -> None:
            if part in self.plan.parts:
                made[part, rows] = make() if compiled else compile_step(make(), self.mode)

        def whole(
            rows: int, plain: bool
        ) -> Step:  # compiled, the engine's own: the first request has compiled it already
            return (
                engine.compiled_step(rows, plain) if compiling else functools.partial(engine.step, rows, bound, plain)
            )

        parts = functools.cache(lambda: Parts(engine, bound).in_order())  # making them runs them once
        add("plain step", slots, lambda: whole(slots, True), compiled=True)
        for n in self.plan.rows:
            add("verify", slots * n, functools.partial(_verify_step, engine, n, bound))
        for n in self.plan.rows:
            add("attention", slots * n, functools.partial(AttentionAlone, engine, n, bound))
        add("draft", None, lambda: parts()["draft"])
        add("tree", None, lambda: parts()["tree"])
        # In place of a chain as wide as the tree, if that was asked for.
        add("verify", tree_rows, lambda: parts()["verify"])
        add("accept", tree_rows, lambda: parts()["accept"])
        add("commit", None, lambda: parts()["commit"])
        add("round", tree_rows, lambda: whole(tree_rows, False), compiled=True)
        add("prefill chunk", engine.config.engine.prefill_chunk, lambda: PrefillChunk(engine, bound))
        return made

    def _first_run(self, key: tuple[str, int | None], saved: Saved) -> float:
        part, rows = key
        began = time.perf_counter()
        self._steps[key]()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        saved.restore()
        if self.mode != "none" and seconds > 1:
            tell(f"  {part}" + (f", {rows} rows" if rows else "") + f": compiled in {seconds:.0f} s")
        return seconds

    def _figure(self, key: tuple[str, int | None], moved: int | None, first_run: float, saved: Saved) -> Figure:
        clock = functools.partial(timed, self._steps[key], self.device, self.repeat, before=saved.restore)
        ms = clock()
        device_ms = clock(head_start=True) if self.device.type == "cuda" else None
        seconds = (ms if device_ms is None else device_ms) * 1e-3
        floor = None if moved is None else moved / self.bandwidth
        host_ms = launching(self._steps[key], self.device, before=saved.restore)
        return Figure(
            part=key[0], rows=key[1], ms=ms, device_ms=device_ms, bytes=moved,
            fraction=None if floor is None else floor / seconds,
            floor_ms=None if floor is None else floor * 1e3, host_ms=host_ms, first_run_s=first_run,
        )  # fmt: skip


def _ratio(parts: list[Figure]) -> float | None:
    times = {part.part: part.ms if part.device_ms is None else part.device_ms for part in parts}
    return times["round"] / times["plain step"] if {"round", "plain step"} <= times.keys() else None


def _verify_step(engine: Engine, rows: int, bound: int) -> Step:
    return Verify(engine, rows, bound).step


def first_tokens(engine: Engine) -> dict[str, float]:
    """Seconds to the first token and to the end of a short request: the process's first one, then the next."""
    length = min(PROMPT, engine.capacity - NEW - 1)
    prompt = random_prompts(engine, length)[0]
    found: dict[str, float] = {"prompt_tokens": length}
    for name in ("cold", "warm"):
        began = time.perf_counter()
        for piece in engine.stream(prompt, max_new_tokens=NEW, ignore_eos=True):
            if piece.token_ids:
                found.setdefault(f"{name}_s", time.perf_counter() - began)
        found[f"{name}_request_s"] = time.perf_counter() - began
    return found


def peer_steps(engine: Engine, contexts: list[int]) -> list[dict[str, Any]]:
    """Decoding steps of transformers' `generate` at the same shapes; one that fails says why."""
    from .peers import reason, transformers_model, transformers_step_ms, transformers_variants

    model, found = None, []
    for name, make in transformers_variants(engine).items():
        for context in contexts:
            tell(f"{engine.state.slots} slot(s), context {context}: {name}")
            entry: dict[str, Any] = {"system": name, "context": context}
            try:
                model = model or transformers_model(engine)
                prompts = torch.tensor(random_prompts(engine, context), device=engine.target.device)
                entry["ms"] = transformers_step_ms(model, prompts, PEER_TOKENS, **make())
            except Exception as error:  # whatever another package raises must not end the run
                entry["failed"] = reason(error)
            found.append(entry)
    return found


def run_steps(arguments: argparse.Namespace, config: GenerateConfig) -> int:
    """Time everything, print tables, write the record."""
    plan = Plan.read(arguments, config)
    device = torch.device(local_device(config.target.device))
    use_device(device)  # the clocks are those of the current device
    record: dict[str, Any] = {"config": config.to_tables(), "random_weights": uses_random_weights(config), "runs": []}
    record["processes"] = started()
    for batch in plan.batches:
        began = time.perf_counter()
        engine = plan.engine(config, batch)
        if not record["runs"]:
            record |= {"machine": machine_line(engine), "mode": config.compile.resolved_mode(config.target.device)}
            record |= {"kernels": engine.target.backend.name, "load_s": time.perf_counter() - began}
            record["first_token"] = first_tokens(engine) if FIRST_TOKEN in plan.parts else None
            record["bandwidth"] = copy_bandwidth(device)
            print(_head(record, engine), flush=True)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        bench = Bench(engine, plan, record["bandwidth"], arguments.repeat or 7)
        for context in plan.contexts:
            run = {"batch": batch, "context": context} | bench.run(context)
            run["peak_memory"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            record["runs"].append(run)
            print(_run_table(run), flush=True)
        if started() > 1 and "collectives" not in record:
            record |= links(engine, bench.timed_steps, arguments.repeat or 7)
            print("collectives, us: " + ", ".join(f"{name} B {us:.1f}" for name, us in record["collective_us"].items()))
        if arguments.peers:
            peers = peer_steps(engine, plan.contexts)
            record.setdefault("peers", []).extend({"batch": batch} | entry for entry in peers)
            print(_peer_table(batch, peers))
        del engine, bench
        forget()
        gc.collect()
    record["compiler"] = dataclasses.asdict(Counters.read())
    print("\ncompiler: " + ", ".join(f"{name} {count}" for name, count in record["compiler"].items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 0


def _head(record: dict[str, Any], engine: Engine) -> str:
    first = record["first_token"]
    lines = [
        f"{describe(engine)}, mode {record['mode']}, kernels {record['kernels']}",
        record["machine"],
        f"copy bandwidth {record['bandwidth'] / 1e9:.1f} GB/s, read and written",
        f"loading {record['load_s']:.1f} s",
    ]
    if first is not None:
        lines[-1] += (
            f"; first token of {first['prompt_tokens']} prompt tokens: cold {first['cold_s']:.2f} s, warm "
            f"{first['warm_s']:.3f} s; {NEW} tokens: cold {first['cold_request_s']:.2f} s, warm "
            f"{first['warm_request_s']:.3f} s"
        )
    if record["random_weights"]:
        lines.append("random weights: times are those of the shape, acceptance means nothing")
    return "\n".join(lines)


def _run_table(run: dict[str, Any]) -> str:
    rows = [["part", "rows", "ms", "device ms", "host ms", "MB", "floor ms", "of bandwidth", "first run, s"]]
    for part in run["parts"]:
        rows.append(
            [
                part["part"],
                _cell(part["rows"], "{}"),
                f"{part['ms']:.3f}",
                _cell(part["device_ms"], "{:.3f}"),
                _cell(part["host_ms"], "{:.3f}"),
                "-" if part["bytes"] is None else f"{part['bytes'] / 1e6:.1f}",
                _cell(part["floor_ms"], "{:.3f}"),
                _cell(part["fraction"], "{:.0%}"),
                f"{part['first_run_s']:.1f}",
            ]
        )
    memory = "-" if run["peak_memory"] is None else f"{run['peak_memory'] / 2**30:.1f} GiB"
    return (
        f"\nbatch {run['batch']}, context {run['context']}\n{table(rows)}\n"
        f"host synchronisations in 10 rounds: {_cell(run['host_syncs_in_10_rounds'], '{}')}; recompiles "
        f"while timing: {run['recompiles_while_timing']}; peak memory: {memory}; round over plain step: "
        f"{_cell(run['round_over_plain_step'], '{:.2f}')}"
    )


def _peer_table(batch: int, peers: list[dict[str, Any]]) -> str:
    rows = [["peer", "context", "ms a step"]]
    rows += [[p["system"], str(p["context"]), _cell(p.get("ms"), "{:.3f}")] for p in peers]
    failed = "".join(f"\n{p['system']}, context {p['context']}: {p['failed']}" for p in peers if "failed" in p)
    what = f"batch {batch}, {PEER_TOKENS} new tokens inside generate (a step is a token, or a round)"
    return f"\n{what}\n{table(rows)}{failed}"


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
