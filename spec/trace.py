"""`flashtree trace`: rounds under PyTorch's profiler, as a Chrome trace and as a verdict.

The engine serves a prompt as it always does; the profiler looks on. On a CUDA device the verdict says whether each
round was launched while the one before still ran, and where the device idled; elsewhere there is a table of operations.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .bench_plan import with_shape
from .cli import add_config_arguments, check_writable
from .config import parse_override
from .engine import ROUND, Engine
from .generate import describe
from .prompts import as_chat, encode_all, read_prompts
from .report import table
from .timeline import Timeline, analyse, read_trace

WARM_ROUNDS = 10
SETTLING = 3  # rounds that the profiler sees first: starting it stops the device, which has to be overtaken again
TOP = 15
# Copied with changes: stretches that an n-gram drafter finds, between stretches that it does not.
PROMPT = """Rewrite this list. Keep each line, but swap the first and the last name and add a made-up street:
1. Ada Lovelace, born in London in 1815, wrote the first program for the Analytical Engine.
2. Alan Turing, born in London in 1912, wrote about machines that imitate people.
3. Grace Hopper, born in New York in 1906, wrote the first compiler and coined the word debugging.
4. Edsger Dijkstra, born in Rotterdam in 1930, wrote about programs without jumps.
5. Barbara Liskov, born in Los Angeles in 1939, wrote about types that stand in for others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A profile of consecutive rounds.

    Attributes:
        accepted: draft tokens of each round looked at, its number on the host.
        timeline: None without a CUDA device.
        operations: the profiler's own table of operations on the host.
    """

    accepted: list[int]
    timeline: Timeline | None
    operations: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flashtree trace`."""
    add_config_arguments(parser)
    parser.add_argument("--shape", metavar="NAME", help="a shape (or a config.json) as target, random weights")
    parser.add_argument("--prompt", help="default: a list to be rewritten, which repeats itself in part")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="rounds to look at (default 100)")
    parser.add_argument("--plain", action="store_true", help="decode without speculation")
    parser.add_argument("--output", default="trace.json.gz", metavar="FILE", help="Chrome trace, .json or .json.gz")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")


def run(arguments: argparse.Namespace) -> int:
    """Profile, write, print."""
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds}: must be at least 1")
    if not arguments.output.endswith((".json", ".json.gz")):
        raise ValueError(f"--output {arguments.output}: the name must end in .json or .json.gz")
    for path in (arguments.output, arguments.json):
        check_writable(path)

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    overrides = dict(parse_override(text) for text in arguments.overrides)
    config = with_shape(arguments.config, overrides, arguments.shape)
    engine = Engine(config, progress=say, random_weights=arguments.shape is not None)
    if arguments.shape is not None:
        say("random weights: times are those of the shape, acceptance means nothing")
    prompts = as_chat(read_prompts([arguments.prompt or PROMPT], None)) if engine.tokenizer is not None else []
    vocabulary = engine.target.config.vocab_size
    # Without a tokenizer any ids will do, as long as they repeat in part.
    numbers = [(n * n if n % 8 else n) % vocabulary for n in range(1, 97)]
    (ids,) = encode_all(prompts, engine.tokenizer, vocabulary) or [numbers]
    found = trace(engine, ids, arguments.rounds, Path(arguments.output), plain=arguments.plain, progress=say)
    print(f"{describe(engine, arguments.plain)}\n{report(found)}\ntrace: {arguments.output}")
    if arguments.json:
        timeline = found.timeline and dataclasses.asdict(found.timeline)
        record = {"accepted": found.accepted, "timeline": timeline}
        Path(arguments.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 0


def trace(
    engine: Engine, ids: list[int], rounds: int, output: Path, *, plain: bool = False, progress: Any = None,
    warm_rounds: int = WARM_ROUNDS,
) -> Trace:  # fmt: skip
    """Profile rounds of one request behind its first few.

    Args:
        engine: not busy.
        ids: the prompt's token ids.
        rounds: how many, besides one more that the last of them is compared with.
        output: the Chrome trace, .json or .json.gz.
        plain: decode without speculation.
        progress: see `Engine.warm_up`.
        warm_rounds: rounds before the profile begins.

    Raises:
        ValueError: the request ends before so many rounds have run.
    """
    cuda = engine.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True):  # the watcher must be there before graphs are captured
        pass
    engine.warm_up([ids], plain=[plain], progress=progress)
    deepest = 1 if plain else engine.drafter.depth + 1
    settling = SETTLING if cuda else 0
    needed = warm_rounds + settling + rounds + 1
    most = min((needed + 2) * deepest, engine.capacity - len(ids))
    with contextlib.closing(engine.stream(ids, max_new_tokens=most, ignore_eos=True, plain=plain)) as stream:

        def take(count: int) -> list[int]:
            # A piece is what one round emitted, and for each piece taken one round is launched.
            pieces = [piece for _, piece in zip(range(count), stream, strict=False)]
            if len(pieces) < count or pieces[-1].completion is not None:
                raise ValueError(
                    f"{most} tokens were decoded in fewer than {needed} rounds; profile fewer rounds "
                    "or give engine.max_model_len more room"
                )
            return [len(piece.token_ids) - 1 for piece in pieces]

        take(1 + warm_rounds)
        with profile(activities=activities, acc_events=True) as profiler:
            accepted = take(settling + rounds + 1)[settling:]
            if cuda:
                torch.cuda.synchronize()
    profiler.export_chrome_trace(str(output))
    timeline = analyse(read_trace(output), ROUND, settling) if cuda else None
    averages = profiler.key_averages()
    return Trace(
        accepted=accepted, timeline=timeline, operations=averages.table(sort_by="self_cpu_time_total", row_limit=TOP)
    )


def report(found: Trace) -> str:
    """The verdict in words and tables."""
    accepted, timeline = found.accepted, found.timeline
    lines = [
        f"accepted tokens a round: {min(accepted)} to {max(accepted)}, {len(set(accepted))} different counts in "
        f"{len(accepted)} rounds"
    ]
    if timeline is None:
        lines.append("no CUDA device: no graphs, and nothing runs ahead; time on the host by operation:")
        return "\n".join([*lines, found.operations])
    if timeline.late:
        lines.append(f"launched late: behind round {', '.join(map(str, timeline.late))} of those looked at")
    launches, kernels = (_range(values) for values in (timeline.launches, timeline.kernels))
    verdict = [
        ["", "measured"],
        ["next round launched before this one ended (ahead)", f"{timeline.ahead} of {timeline.rounds}"],
        ["graph launches a round", launches],
        ["time a round, ms", f"{timeline.round_time / 1e3:.3f}"],
        ["idle between rounds", f"{timeline.idle_between:.2%}"],
        ["  of which copying tokens out", f"{timeline.copies_between:.2%}"],
        ["idle inside rounds", f"{timeline.idle_inside:.2%}"],
        ["kernels a round", kernels],
    ]
    top = [["kernel", "a round", "us a round", "share"]]
    top += [[k.name[:70], f"{k.count:g}", f"{k.time:.1f}", f"{k.share:.1%}"] for k in timeline.top[:TOP]]
    return "\n".join([*lines, table(verdict), "", table(top)])


def _range(values: list[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"
