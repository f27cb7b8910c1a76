"""`flashtree bench`: the parts of a round at fixed shapes, or prompts from end to end; public peers beside either.

This file parses the command line and has the prompts mode; the steps mode is `spec/bench_steps.py`. Prompts mode: wall
time on real prompts. Every system decodes the same token ids greedily with the same weights, dtype, device and threads;
systems take turns prompt by prompt, so that a machine's drift falls on all of them alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from .cli import add_config_arguments, check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flashtree bench`."""
    add_config_arguments(parser)
    parser.add_argument("--shape", metavar="NAME", help="a shape (or a config.json) as target, random weights")
    parser.add_argument("--peers", action="store_true", help="also transformers' generate: eager, compiled, dflash")
    parser.add_argument("--repeat", type=int, metavar="N", help="runs of each prompt (1), or timings of each step (7)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    steps = parser.add_argument_group("steps mode (the default without --prompts)")
    steps.add_argument("--steps", action="store_true", help="time the parts of a round at fixed shapes")
    steps.add_argument("--rows", default="1,16,32,64", metavar="N,..", help="rows a slot of verifications")
    steps.add_argument("--context", metavar="N,..", help="context lengths (default 1024,8192 as far as there is room)")
    steps.add_argument("--batch", default="1", metavar="N,..", help="slots")
    steps.add_argument("--parts", metavar="NAME,..", help="only these, as the table calls them: 'plain step,verify'")
    steps.add_argument("--sampling", action="store_true", help="in place of the parts: what sampling adds to a round")
    prompts = parser.add_argument_group("prompts mode")
    prompts.add_argument("--prompts", nargs="+", metavar="FILE", help="prompt files (.jsonl or text)")
    prompts.add_argument("--limit", type=int, default=6, metavar="N", help="prompts, taken evenly from the files")
    prompts.add_argument("--max-new-tokens", type=int, default=128, metavar="N")


@dataclasses.dataclass(kw_only=True)
class Timing:
    """One system's runs.

    Attributes:
        tokens, seconds: of each run, prefill included.
        acceptance: mean acceptance length of each run; empty for a system that does not tell.
        outputs: new tokens of each run.
        failed: why it could not run; "" if it did.
    """

    name: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    acceptance: list[float] = dataclasses.field(default_factory=list)
    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    failed: str = ""

    @property
    def is_peer(self) -> bool:
        """Whether another package does the work."""
        return self.name.startswith("transformers")

    @property
    def rate(self) -> float:
        """Tokens a second over all runs, prefill included; 0 if there are none."""
        return sum(self.tokens) / sum(self.seconds) if self.seconds else 0.0


def run(arguments: argparse.Namespace) -> int:
    """Time and print; exit code 1 if outputs of whole prompts differ beyond near-ties."""
    from .bench_plan import with_shape
    from .bench_sampling import run_sampling
    from .bench_steps import run_steps
    from .config import parse_override

    for name in ("steps", "sampling"):
        if getattr(arguments, name) and arguments.prompts:
            raise ValueError(f"--{name} times fixed shapes and takes no --prompts")
    if arguments.prompts and (arguments.parts or arguments.context):
        raise ValueError("--parts and --context belong to the steps mode, which takes no --prompts")
    if arguments.repeat is not None and arguments.repeat < 1:
        raise ValueError(f"--repeat {arguments.repeat}: must be at least 1")
    check_writable(arguments.json)
    config = with_shape(arguments.config, dict(parse_override(text) for text in arguments.overrides), arguments.shape)
    if arguments.sampling:
        return run_sampling(arguments, config)
    return run_prompts(arguments, config) if arguments.prompts else run_steps(arguments, config)


def run_prompts(arguments: argparse.Namespace, config: Any) -> int:
    """The prompts mode."""
    from tqdm import tqdm

    from sampling import SAMPLERS

    from .engine import Engine
    from .prompts import encode_all, pick_prompts

    prompts = pick_prompts(arguments.prompts, arguments.limit)
    sampler = SAMPLERS.get(config.sampling.name)(config.sampling.config)  # type: ignore[call-arg]
    if not sampler.always_argmax(sampler.params()) or getattr(sampler, "host_processors", None):
        raise ValueError(
            "bench --prompts decodes greedily, as its peers do; set sampling.temperature=0, no penalties or processors"
        )
    say = functools.partial(print, file=sys.stderr)
    engine = Engine(config, progress=say, random_weights=True)
    texts = encode_all(prompts, engine.tokenizer, engine.target.config.vocab_size) * (arguments.repeat or 1)
    systems = _systems(engine, arguments.max_new_tokens, arguments.peers)
    timings = {name: Timing(name=name) for name in systems}
    engine.warm_up(texts, progress=say, max_new_tokens=arguments.max_new_tokens)
    longest = max(texts, key=len)  # a compiled peer sizes its cache by it, once
    for name, system in systems.items():  # warm-up: allocators, compiling, kernels chosen at first use
        warm = Timing(name=name)
        _time(system, longest, warm)
        timings[name].failed = warm.failed
    for ids in tqdm(texts, disable=None, unit="prompt"):
        for name, system in systems.items():
            _time(system, ids, timings[name])
    return _print(engine, texts, timings, arguments)


System = Callable[[list[int]], tuple[list[int], float | None]]


def _time(system: System, ids: list[int], timing: Timing) -> None:
    """Run a system once; a peer that failed stays failed and does not end the run."""
    import torch

    if timing.failed:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # the system before may have left a round in flight
        torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        tokens, acceptance = system(ids)
    except Exception as error:
        from .peers import reason

        if not timing.is_peer:
            raise
        timing.failed = reason(error)
        return
    timing.seconds.append(time.perf_counter() - began)
    timing.tokens.append(len(tokens))
    if acceptance is not None:
        timing.acceptance.append(acceptance)
    timing.outputs.append(tokens)


def _systems(engine: Any, most: int, peers: bool) -> dict[str, System]:
    def ours(plain: bool) -> System:
        def complete(ids: list[int]) -> tuple[list[int], float | None]:
            done = engine.generate([ids], plain=plain, max_new_tokens=most)[0]
            return done.token_ids, done.stats.mean_acceptance_length

        return complete

    systems = {"plain": ours(True), f"{engine.config.draft.name} x {engine.config.tree.name}": ours(False)}
    if peers:
        from .peers import transformers_greedy, transformers_model, transformers_variants

        model = functools.cache(lambda: transformers_model(engine))

        def theirs(make: Callable[[], dict[str, Any]]) -> System:
            settings = functools.cache(make)
            return lambda ids: (transformers_greedy(model(), ids, most, **settings()), None)

        variants = transformers_variants(engine)
        variants["transformers prompt lookup, eager"] = lambda: {"prompt_lookup_num_tokens": engine.drafter.depth}
        systems |= {name: theirs(make) for name, make in variants.items()}
    return systems


def _row(engine: Any, texts: list[list[int]], timing: Timing, plain: Timing) -> tuple[list[str], int]:
    """A line of the table, and how many outputs differ from plain decoding's for no good reason."""
    from tqdm import tqdm

    from .compare import compare

    if timing.failed:
        return [timing.name, *["-"] * 6], 0
    # Where tokens differ both texts are computed anew, token by token: on a GPU that takes longer than the timing did.
    pairs = tqdm(list(zip(texts, timing.outputs, plain.outputs, strict=True)), f"comparing {timing.name}", disable=None)
    found = [compare(engine.target, ids, a, b, engine.nodes) for ids, a, b in pairs]
    same = sum(c.identical for c in found)
    close = sum(c.explained and not c.identical for c in found)
    runs = zip(timing.tokens, timing.seconds, plain.tokens, plain.seconds, strict=True)
    ratios = [(n / s) / (m / t) for n, s, m, t in runs]
    cells = [
        timing.name,
        f"{timing.rate:.1f}",
        f"{timing.rate / plain.rate:.2f}",
        f"{statistics.median(ratios):.2f}",
        f"{statistics.fmean(timing.acceptance):.2f}" if timing.acceptance else "-",
        f"{same}/{len(found)}",
        str(close),
    ]
    return cells, len(found) - same - close


def _print(engine: Any, texts: list[list[int]], timings: dict[str, Timing], arguments: argparse.Namespace) -> int:
    from .bench_plan import uses_random_weights
    from .generate import describe
    from .report import machine_line, table

    random_weights = uses_random_weights(engine.config)
    machine = machine_line(engine)
    if arguments.json:  # first: comparing takes long, and the times are there
        systems = [dataclasses.asdict(timing) | {"rate": timing.rate} for timing in timings.values()]
        record = {"machine": machine, "random_weights": random_weights, "systems": systems}
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump(record, out)
    rows = [["system", "tokens/s", "x plain", "median of prompts", "acceptance length", "same tokens", "near-ties"]]
    wrong = 0
    for timing in timings.values():
        cells, different = _row(engine, texts, timing, timings["plain"])
        rows.append(cells)
        wrong += 0 if timing.is_peer else different
    mode = engine.config.compile.resolved_mode(engine.config.target.device)
    print(f"{describe(engine)}, mode {mode}, kernels {engine.target.backend.name}\n{machine}")
    print(f"{len(texts)} prompts x {arguments.max_new_tokens} tokens, prefill included")
    print(table(rows))
    for timing in timings.values():
        if timing.failed:
            print(f"{timing.name}: {timing.failed}")
    if random_weights:
        print("random weights: acceptance means nothing, and transformers has other random weights than ours")
    return 1 if wrong else 0
