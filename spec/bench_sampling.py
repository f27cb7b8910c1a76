"""`flashtree bench --sampling`: what sampling adds to a round, against the greedy round of the same engine.

The sampled round is compiled once; only the slots' parameters change between its timings, as they do when requests
differ. Penalties and biases keep tables of the vocabulary's size, so they are timed on an engine built with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from modelkit.compile import Counters, forget
from sampling import SAMPLERS, SamplingParams

from .bench_plan import Plan, random_prompts, tell, uses_random_weights
from .config import GenerateConfig, load_config
from .engine import Engine
from .generate import describe
from .parts import Saved, furnish, vacate
from .report import machine_line, table
from .timing import timed
from .warm_up import greedy_kinds

PLAIN_FILTERS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.9, min_p 0.05": {"top_p": 0.9, "min_p": 0.05},
    "top_k 50, top_p 0.9, min_p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
WITH_TABLES: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES,
    "logit bias": {"logit_bias": {5: 1.0}, "banned_token_ids": (7,)},
    "penalties, bias, top_p 0.9, min_p 0.05": PENALTIES | {"logit_bias": {5: 1.0}, "top_p": 0.9, "min_p": 0.05},
}
BUILT_WITH = ("top_k", "top_p", "min_p", "penalties", "logit_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledRound:
    """A round under one set of parameters.

    Attributes:
        name: of the set; "greedy" is the round that the others are compared with.
        built_with: filters of the engine.
        ms: a round, back to back as rounds run.
        device_ms: the same with the host ahead; None on a CPU.
        over_greedy: the same time over that of the greedy round of the same engine (device time where there is one).
        compiled: graphs compiled while this set was timed; the first sampled one compiles the round for all.
    """

    name: str
    built_with: tuple[str, ...]
    ms: float
    device_ms: float | None
    over_greedy: float
    compiled: int


def run_sampling(arguments: argparse.Namespace, config: GenerateConfig) -> int:
    """Time, print, write the record."""
    if False not in greedy_kinds(SAMPLERS.get(config.sampling.name)(config.sampling.config)):  # type: ignore[call-arg]
        raise ValueError(f"--sampling: sampler '{config.sampling.name}' does not sample")
    if arguments.peers or arguments.parts or arguments.steps:
        raise ValueError("--sampling times rounds only and takes neither --steps nor --parts nor --peers")
    defaults = config.sampling.config.params()
    if dataclasses.replace(defaults, temperature=0.0, seed=None) != SamplingParams() or config.sampling.config.filters:
        raise ValueError("--sampling chooses filters, penalties and biases itself: leave them out of [sampling]")
    arguments.rows = "1"  # of verifications, which are not timed here
    plan = Plan.read(arguments, config)
    record: dict[str, Any] = {"config": config.to_tables(), "random_weights": uses_random_weights(config), "rounds": []}
    kinds = ((BUILT_WITH[:3], PLAIN_FILTERS), (BUILT_WITH, WITH_TABLES))
    for batch, (built_with, sets) in itertools.product(plan.batches, kinds):
        sized = load_config(config, {"sampling.filters": list(built_with)})
        engine = plan.engine(sized, batch)
        if not record["rounds"]:
            record |= {"machine": machine_line(engine), "mode": config.compile.resolved_mode(config.target.device)}
            record |= {"kernels": engine.target.backend.name}
            print(f"{describe(engine)}, mode {record['mode']}, kernels {record['kernels']}\n{record['machine']}")
            if uses_random_weights(config):
                print("random weights: times are those of the shape, acceptance means nothing")
        for context in plan.contexts:
            vacate(engine)
            furnish(engine, random_prompts(engine, context))
            rounds = list(_rounds(engine, built_with, sets, context, arguments.repeat or 15))
            record["rounds"] += [{"batch": batch, "context": context} | dataclasses.asdict(one) for one in rounds]
            print(f"\nbatch {batch}, context {context}, built with {', '.join(built_with)}\n{_table(rounds)}")
        del engine
        forget()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 0


def _table(rounds: list[SampledRound]) -> str:
    rows = [["parameters", "ms", "device ms", "over greedy", "graphs compiled"]]
    for found in rounds:
        device = "-" if found.device_ms is None else f"{found.device_ms:.3f}"
        rows.append([found.name, f"{found.ms:.3f}", device, f"{found.over_greedy:.3f}", f"{found.compiled}"])
    return table(rows)


def _rounds(
    engine: Engine, built_with: tuple[str, ...], sets: dict[str, dict[str, Any]], context: int, repeat: int
) -> Iterator[SampledRound]:
    rows, device = engine.state.slots * engine.nodes, engine.target.device
    prompt = torch.zeros(0, dtype=torch.int64, device=device)
    greedy: float | None = None
    # The greedy round needs no parameters but goes through the same loop.
    for name, changes in {"greedy": {"temperature": 0.0}, **sets}.items():
        tell(f"batch {engine.state.slots}, context {context}: {name}")
        params = engine.sampler.params(**{"temperature": 0.7, "seed": 1} | changes)
        for slot in range(engine.state.slots):
            engine.state.sampling.admit(slot, params, prompt)
        before, saved = Counters.read().graphs, Saved(engine)
        step = engine.compiled_step(rows, greedy=engine.sampler.always_argmax(params))
        ms = timed(step, device, repeat, before=saved.restore)
        cuda = device.type == "cuda"
        device_ms = timed(step, device, repeat, before=saved.restore, head_start=True) if cuda else None
        measure = ms if device_ms is None else device_ms
        greedy = measure if greedy is None else greedy
        yield SampledRound(
            name=name, built_with=built_with, ms=ms, device_ms=device_ms, over_greedy=measure / greedy,
            compiled=Counters.read().graphs - before,
        )  # fmt: skip
