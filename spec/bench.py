"""`flashtree bench`: plain and speculative decoding of the same prompts, and public peers, timed in one run.

End-to-end wall time on real prompts. Every system decodes the same token ids greedily with the same weights, dtype,
device and threads; systems take turns prompt by prompt, so that a machine's drift falls on all of them alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from .cli import add_config_arguments, check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flashtree bench`."""
    add_config_arguments(parser)
    parser.add_argument("--prompts", required=True, nargs="+", metavar="FILE", help="prompt files (.jsonl or text)")
    parser.add_argument("--limit", type=int, default=6, metavar="N", help="prompts, taken evenly from the files")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="times each prompt is run")
    parser.add_argument("--peers", action="store_true", help="also transformers: plain and with prompt lookup")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")


@dataclasses.dataclass(kw_only=True)
class Timing:
    """One system's runs.

    Attributes:
        tokens, seconds: of each run, prefill included.
        rate: tokens a second after the first token, where the system tells; else over the whole run.
    """

    name: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    acceptance: list[float] = dataclasses.field(default_factory=list)
    outputs: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second over all runs, prefill included."""
        return sum(self.tokens) / sum(self.seconds)


def run(arguments: argparse.Namespace) -> int:
    """Time and print a table; exit code 1 if outputs differ beyond near-ties."""
    from .config import load_config, parse_override
    from .engine import Engine
    from .prompts import encode_all, pick_prompts

    check_writable(arguments.json)
    overrides = dict(parse_override(text) for text in arguments.overrides)
    engine = Engine(load_config(arguments.config, overrides), progress=lambda line: print(line, file=sys.stderr))
    prompts = pick_prompts(arguments.prompts, arguments.limit)
    texts = encode_all(prompts, engine.tokenizer, engine.target.config.vocab_size)
    systems = _systems(engine, arguments.max_new_tokens, arguments.peers)
    timings = {name: Timing(name=name) for name in systems}
    for system in systems.values():  # warm-up: allocators, kernels chosen at first use
        system(texts[0][:64])
    from tqdm import tqdm

    for ids in tqdm(texts * arguments.repeat, disable=None, unit="prompt"):
        for name, system in systems.items():
            began = time.perf_counter()
            tokens, acceptance = system(ids)
            timing = timings[name]
            timing.seconds.append(time.perf_counter() - began)
            timing.tokens.append(len(tokens))
            timing.acceptance.append(acceptance)
            timing.outputs.append(tokens)
    return _print(engine, texts * arguments.repeat, timings, arguments)


System = Callable[[list[int]], tuple[list[int], float]]


def _systems(engine: Any, most: int, peers: bool) -> dict[str, System]:
    def ours(plain: bool) -> System:
        def complete(ids: list[int]) -> tuple[list[int], float]:
            done = engine.generate([ids], plain=plain, max_new_tokens=most)[0]
            return done.token_ids, done.stats.mean_acceptance_length

        return complete

    systems = {"plain": ours(True), f"{engine.config.draft.name} x {engine.config.tree.name}": ours(False)}
    if peers:
        from .peers import transformers_greedy, transformers_model

        peer = transformers_model(engine)
        systems["transformers generate"] = lambda ids: (transformers_greedy(peer, ids, most), 1.0)
        systems["transformers prompt lookup"] = lambda ids: (
            transformers_greedy(peer, ids, most, prompt_lookup_num_tokens=engine.drafter.depth),
            float("nan"),
        )
    return systems


def _print(engine: Any, texts: list[list[int]], timings: dict[str, Timing], arguments: argparse.Namespace) -> int:
    from .compare import compare
    from .generate import describe
    from .report import table

    plain = timings["plain"]
    rows = [["system", "tokens/s", "x plain", "median of prompts", "acceptance length", "same tokens", "near-ties"]]
    wrong = 0
    for timing in timings.values():
        found = [
            compare(engine.target, ids, a, b, engine.nodes)
            for ids, a, b in zip(texts, timing.outputs, plain.outputs, strict=True)
        ]
        same = sum(c.identical for c in found)
        close = sum(c.explained and not c.identical for c in found)
        ours = not timing.name.startswith("transformers")
        wrong += (len(found) - same - close) if ours else 0
        ratios = [
            (n / s) / (m / t)
            for n, s, m, t in zip(timing.tokens, timing.seconds, plain.tokens, plain.seconds, strict=True)
        ]
        length = statistics.fmean(timing.acceptance)
        rows.append(
            [
                timing.name,
                f"{timing.rate:.1f}",
                f"{timing.rate / plain.rate:.2f}",
                f"{statistics.median(ratios):.2f}",
                "-" if length != length else f"{length:.2f}",
                f"{same}/{len(found)}",
                str(close),
            ]
        )
    machine = machine_line(engine)
    print(f"{describe(engine)}\n{machine}\n{len(texts)} prompts x {arguments.max_new_tokens} tokens, prefill included")
    print(table(rows))
    if arguments.json:
        record = {"machine": machine, "systems": [dataclasses.asdict(t) | {"rate": t.rate} for t in timings.values()]}
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump(record, out)
    return 1 if wrong else 0


def machine_line(engine: Any) -> str:
    """What the figures were measured on."""
    import torch
    import transformers

    device = engine.target.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return (
        f"{where}, {torch.get_num_threads()} threads; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
