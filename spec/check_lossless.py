"""`flashtree check-lossless`: every drafter x tree against an oracle, prompt by prompt, token by token.

The oracle is transformers' greedy `generate` on the same weights (another implementation), this engine's own plain
decoding, or the oracle of an earlier run, whose file is given: another layout's or device's tokens. fp32 must be
identical; other precisions may differ at near-ties that the width noise explains.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from sampling import SAMPLERS
from sampling.gumbel import Gumbel

from .cli import add_config_arguments, check_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flashtree check-lossless`."""
    add_config_arguments(parser)
    parser.add_argument("--prompts", required=True, nargs="+", metavar="FILE", help="prompt files (.jsonl or text)")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="prompts, taken evenly from the files")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument(
        "--drafts", default="config,ngram,self", help="drafters, by comma; 'config' is the config's own"
    )
    parser.add_argument("--trees", default="chain,best_first,spine_first,static", help="tree policies, by comma")
    parser.add_argument(
        "--oracle", default="transformers", metavar="WHAT",
        help="transformers, plain, or the --json file of another run of this command, as of another layout",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write every comparison and the oracle's tokens to this file")


def run(arguments: argparse.Namespace) -> int:
    """Compare and print a table; exit code 1 if a difference is not explained."""
    from .config import load_config, parse_override
    from .engine import Engine
    from .prompts import encode_all, pick_prompts
    from .report import table

    overrides = dict(parse_override(text) for text in arguments.overrides)
    base = load_config(arguments.config, overrides)
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1")
    check_writable(arguments.json)
    _check_repeatable(base, arguments.oracle)
    prompts = pick_prompts(arguments.prompts, arguments.limit)
    variants = _variants(base, arguments.drafts, arguments.trees)
    oracle: list[list[int]] | None = None
    rows = [["drafter x tree", "prompts", "identical", "near-ties", "WRONG", "acceptance", "s"]]
    records, wrong = [], 0
    for name, config in variants:
        engine = Engine(config, progress=lambda line: print(line, file=sys.stderr))
        texts = encode_all(prompts, engine.tokenizer, engine.target.config.vocab_size)
        if oracle is None:
            print(f"oracle: {arguments.oracle}, {len(texts)} prompts x {arguments.max_new_tokens}", file=sys.stderr)
            oracle = _oracle(arguments.oracle, engine, texts, arguments.max_new_tokens)
        began = time.perf_counter()
        found = _check(engine, texts, oracle, arguments.max_new_tokens)
        bad = [c for c in found if not c["explained"]]
        if base.target.dtype == "float32":
            bad = [c for c in found if not c["identical"]]
        wrong += len(bad)
        same = sum(c["identical"] for c in found)
        lengths = sum(c["mean_acceptance_length"] for c in found) / len(found)
        seconds = f"{time.perf_counter() - began:.0f}"
        rows.append(
            [
                name,
                str(len(found)),
                str(same),
                str(len(found) - same - len(bad)),
                str(len(bad)),
                f"{lengths:.2f}",
                seconds,
            ]
        )
        records += [{"variant": name, **c} for c in found]
        print(table([rows[0], rows[-1]]), file=sys.stderr, flush=True)
    print(f"\n{base.target.path}, {base.target.dtype}, oracle {arguments.oracle}, {arguments.max_new_tokens} tokens")
    print(table(rows))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            record = {"prompts": texts, "max_new_tokens": arguments.max_new_tokens, "oracle": oracle}
            json.dump(record | {"comparisons": records}, out)
    return 1 if wrong else 0


def _check_repeatable(base: Any, oracle: str) -> None:
    """Tokens can be compared if they are the argmax, or drawn with a seed; transformers draws with noise of its own."""
    temperature = getattr(base.sampling.config, "temperature", 0.0)
    if temperature and not issubclass(SAMPLERS.get(base.sampling.name), Gumbel):
        raise ValueError(
            f"temperature = {temperature}: what sampler '{base.sampling.name}' draws depends on the drafts, so tokens "
            "cannot be compared one by one; `flashtree check-sampler` compares laws"
        )
    if temperature and getattr(base.sampling.config, "seed", None) is None:
        raise ValueError(f"temperature = {temperature} without a seed: add --set sampling.seed=1")
    if temperature and oracle == "transformers":
        raise ValueError(f"temperature = {temperature}: transformers draws other tokens; use --oracle plain")
    config = base.sampling.config
    reordered = hasattr(config, "params") and (bool(config.processors) or not config.params(temperature=0.0).is_argmax)
    if (reordered or getattr(config, "host_processors", None)) and oracle == "transformers":
        raise ValueError("[sampling] has penalties, biases or processors, which transformers lacks; use --oracle plain")


def _variants(base: Any, drafts: str, trees: str) -> list[tuple[str, Any]]:
    from .config import load_config

    found: list[tuple[str, Any]] = []
    for draft in drafts.split(","):
        for tree in trees.split(","):
            changes = {"tree.name": tree}
            if draft != "config":
                changes["draft.name"] = draft
            config = load_config(base, changes)
            name = f"{config.draft.name} x {tree}"
            if name not in [known for known, _ in found]:  # the config's own drafter may be named again
                found.append((name, config))
    return found


def _oracle(kind: str, engine: Any, texts: list[list[int]], most: int) -> list[list[int]]:
    if kind == "plain":
        return [c.token_ids for c in engine.generate_plain(texts, max_new_tokens=most)]
    if kind != "transformers":
        return _recorded(kind, texts, most)
    from .peers import transformers_greedy, transformers_model

    peer = transformers_model(engine)
    # The context limit ends our outputs; the oracle must stop there too.
    return [transformers_greedy(peer, ids, min(most, engine.capacity - len(ids))) for ids in texts]


def _recorded(file: str, texts: list[list[int]], most: int) -> list[list[int]]:
    """The oracle's tokens in the --json file of an earlier run, of the same prompts and settings."""
    try:
        record = json.loads(Path(file).read_text(encoding="utf-8"))
        prompts, tokens = record["prompts"], record["oracle"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--oracle {file}: neither 'transformers' nor 'plain' nor a file that --json has written ({error})"
        ) from None
    if (prompts, record["max_new_tokens"]) != (texts, most):
        raise ValueError(f"--oracle {file}: was written for other prompts, or another --max-new-tokens")
    found: list[list[int]] = tokens
    return found


def _check(engine: Any, texts: list[list[int]], oracle: list[list[int]], most: int) -> list[dict[str, Any]]:
    from .compare import compare

    found = []
    for index, done in engine.completions(texts, max_new_tokens=most, progress=True):
        params = engine.sampler.params()
        outcome = compare(
            engine.target, texts[index], done.token_ids, oracle[index], engine.nodes, engine.sampler, params
        )
        found.append(
            {
                "prompt": index,
                "identical": outcome.identical,
                "explained": outcome.explained,
                "detail": str(outcome),
                "mean_acceptance_length": done.stats.mean_acceptance_length,
            }
        )
    return found
