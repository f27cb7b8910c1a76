"""The generation script: parse, build, loop, print. Everything it does is possible in a few lines of `spec.Engine`."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from .cli import add_config_arguments
from .cli import run as run_command

# Options that are fields of `SamplingParams`; the config has the defaults.
SAMPLING = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
    "presence_penalty": float, "frequency_penalty": float, "seed": int,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flashtree generate`."""
    add_config_arguments(parser)
    source = parser.add_argument_group("prompts")
    source.add_argument("--prompt", action="append", default=[], help="a prompt; may be given again")
    source.add_argument("--prompt-file", metavar="FILE", help="text (one prompt), .jsonl (one a line), or - for stdin")
    source.add_argument("--raw", action="store_true", help="text as it is, without the chat template")
    source.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    how = parser.add_argument_group("decoding")
    how.add_argument("--max-new-tokens", type=int, metavar="N")
    for name, kind in SAMPLING.items():
        how.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X")
    how.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    how.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end tokens")
    how.add_argument("--plain", action="store_true", help="decode without speculation")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON object a prompt, as it is finished")
    out.add_argument(
        "--compare", action=argparse.BooleanOptionalAction, default=None,
        help="decode plainly too and compare (default: for a single prompt without --json)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """`flashtree generate`."""
    from parallel.process import of_first, rank

    from .config import load_config, parse_override
    from .prompts import as_chat, read_prompts

    overrides = dict(parse_override(text) for text in arguments.overrides)
    config = load_config(arguments.config, overrides)
    file = arguments.prompt_file
    if file is None and not arguments.prompt and not sys.stdin.isatty():
        file = "-"
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit}: must be at least 1")
    first = rank() == 0
    prompts = read_prompts(arguments.prompt, file, arguments.limit) if first else []

    from .engine import Engine

    engine = Engine(config, progress=lambda line: print(line, file=sys.stderr))
    prompts = of_first(prompts)
    if not arguments.raw and engine.tokenizer is not None and engine.tokenizer.chat_template:
        prompts = as_chat(prompts)
    settings: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        **{name: getattr(arguments, name) for name in SAMPLING},
        "stop": arguments.stop,
        "ignore_eos": True if arguments.ignore_eos else None,
    }
    compare = arguments.compare
    if compare is None:
        compare = len(prompts) == 1 and not arguments.json
    compare = compare and not arguments.plain
    if compare and arguments.seed is None and getattr(config.sampling.config, "seed", None) is None:
        settings["seed"] = of_first(secrets.randbelow(2**31))  # the two runs are to draw the same tokens
    kinds = [True] if arguments.plain else [False, True] if compare else [False]
    asked = [p.prompt for p in prompts]
    engine.warm_up(asked, plain=kinds, progress=lambda line: print(line, file=sys.stderr), **settings)
    if len(prompts) == 1 and not arguments.json:
        return _stream_one(engine, prompts[0].prompt, settings, arguments.plain, compare)
    return _batch(engine, prompts, settings, arguments, compare)


def _stream_one(engine: Any, prompt: Any, settings: dict[str, Any], plain: bool, compare: bool) -> int:
    from .report import summary

    completion = None
    for piece in engine.stream(prompt, plain=plain, **settings):
        if piece.text:
            print(piece.text, end="", flush=True)
        elif engine.tokenizer is None and piece.token_ids:
            print(*piece.token_ids, end=" ", flush=True)
        completion = piece.completion or completion
    assert completion is not None
    print(f"\n\n[{completion.finish_reason}] {describe(engine, plain)}")
    if not compare:
        print(summary(completion.stats, None))
        return 0
    baseline = engine.generate_plain([prompt], **settings)[0]
    print(summary(completion.stats, baseline.stats))
    print(f"tokens identical: {_compare(engine, prompt, completion, baseline, settings)}")
    return 0


def _batch(
    engine: Any, prompts: list[Any], settings: dict[str, Any], arguments: argparse.Namespace, compare: bool
) -> int:
    from .report import summary
    from .stats import Stats

    texts = [p.prompt for p in prompts]
    everything: list[Stats] = []
    baselines: dict[int, Any] = {}
    if compare:
        baselines = dict(engine.completions(texts, plain=True, progress=True, **settings))
    for index, done in engine.completions(texts, plain=arguments.plain, progress=True, **settings):
        everything.append(done.stats)
        verdict = _compare(engine, texts[index], done, baselines[index], settings) if compare else None
        if arguments.json:
            record: dict[str, Any] = {
                "id": prompts[index].id,
                "prompt": texts[index],
                "text": done.text,
                "token_ids": done.token_ids,
                "finish_reason": done.finish_reason,
                "stats": done.stats.to_dict(),
            }
            if compare:
                record["tokens_identical"] = verdict.identical if verdict else None
                record["plain_stats"] = baselines[index].stats.to_dict()
            print(json.dumps(record), flush=True)
        else:
            shown = done.text if done.text is not None else " ".join(map(str, done.token_ids))
            print(f"=== {prompts[index].id} [{done.finish_reason}]\n{shown}", flush=True)
            if compare:
                print(f"tokens identical: {verdict}")
    if not arguments.json:
        print(f"\n{describe(engine, arguments.plain)}")
        print(summary(Stats.total(everything), Stats.total(b.stats for b in baselines.values()) if compare else None))
    return 0


def _compare(engine: Any, prompt: Any, a: Any, b: Any, settings: dict[str, Any]) -> Any:
    from .compare import compare
    from .text import encode

    ids = encode(prompt, engine.tokenizer, engine.target.config.vocab_size)
    given = {name: settings[name] for name in SAMPLING if settings[name] is not None}
    params = engine.sampler.params(**given)
    return compare(engine.target, ids, a.token_ids, b.token_ids, engine.nodes, engine.sampler, params)


def describe(engine: Any, plain: bool = False) -> str:
    """One line that says what ran."""
    config = engine.config
    if plain:
        return f"{config.target.path}, {config.target.dtype}, plain decoding{_processes(config)}"
    return (
        f"{config.target.path}, {config.target.dtype}; drafter {config.draft.name} (block size "
        f"{engine.drafter.depth + 1}), tree {config.tree.name} (budget {engine.nodes - 1}, {engine.nodes} rows "
        f"verified), sampler {config.sampling.name}{_processes(config)}"
    )


def _processes(config: Any) -> str:
    from parallel.process import started

    return f", layout {config.parallel.name} of {started()} processes" if started() > 1 else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m spec.generate`."""
    parser = argparse.ArgumentParser(prog="python -m spec.generate", description=__doc__)
    add_arguments(parser)
    return run_command(run, parser.parse_args(argv))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
