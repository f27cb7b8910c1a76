"""`flashtree check-lossless`: every drafter x tree against an oracle, prompt by prompt, token by token.

The oracle is transformers' greedy `generate` on the same weights (another implementation), this engine's own plain
decoding, or what another run of this command has written. fp32 must be identical; other precisions may differ at
near-ties that the width noise explains.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from sampling import SAMPLERS
from sampling.gumbel import Gumbel

from .cli import add_config_arguments, check_writable
from .requests import Completion, Settings, changed

ORACLES = ("transformers", "plain")
# What `--sampling` stands for: each temperature with each mix of filters.
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
MIXES: tuple[dict[str, Any], ...] = (
    {}, {"top_p": 0.9}, {"top_k": 50, "min_p": 0.02}, {"top_p": 0.95, "top_k": 40, "min_p": 0.05},
)  # fmt: skip
HEAD = [
    "drafter x tree", "sampling", "prompts", "identical", "near-ties", "WRONG", "gap / allowed", "acceptance", "s", "",
]  # fmt: skip


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
        "--sampling", nargs="*", metavar="SETTINGS",
        help="compare seeded sampling (--oracle plain): temperature=0.7,top_p=0.9 and so on, one engine for all; "
        "without SETTINGS a matrix of temperatures and filters",
    )  # fmt: skip
    parser.add_argument(
        "--oracle", default="transformers", metavar="WHAT",
        help="transformers, plain, or the --json file of another run of this command, as of another layout",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write every comparison and the oracles' tokens to this file")


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
    settings = {name: changed(one, {"max_new_tokens": arguments.max_new_tokens})
                for name, one in _settings(arguments.sampling).items()}  # fmt: skip
    record = None if arguments.oracle in ORACLES else _read_record(arguments.oracle)
    check_writable(arguments.json)
    for one in settings.values():
        _check_repeatable(base, arguments.oracle, one)
    prompts = pick_prompts(arguments.prompts, arguments.limit)
    variants = _variants(base, arguments.drafts, arguments.trees)
    oracles: dict[str, dict[str, Any]] = {}
    rows, records, wrong = [HEAD], [], 0
    for name, config in variants:
        engine = Engine(config, progress=_say)
        texts = encode_all(prompts, engine.tokenizer, engine.target.config.vocab_size)
        for sampling, one in settings.items():
            if sampling not in oracles:
                _say(f"oracle: {arguments.oracle}, {len(texts)} prompts x {arguments.max_new_tokens}{sampling and ', '}"
                     f"{sampling}")  # fmt: skip
                oracles[sampling] = _oracle(arguments.oracle, record, sampling, engine, texts, one)
            began = time.perf_counter()
            tokens = oracles[sampling]["tokens"]
            found = _check(engine, texts, tokens, one, arguments.oracle != "transformers")
            records += [{"variant": name, "sampling": sampling, **outcome} for outcome in found]
            row = _row(found, time.perf_counter() - began)
            rows.append([name, sampling, *row])
            wrong += sum(not outcome["passed"] for outcome in found)
            _say(table([HEAD, rows[-1]]))
    _say_differences(records)
    print(f"\n{base.target.path}, {base.target.dtype}, oracle {arguments.oracle}, {arguments.max_new_tokens} tokens")
    print(table(rows))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            written = {"prompts": texts, "max_new_tokens": arguments.max_new_tokens, "oracles": oracles}
            json.dump(written | {"comparisons": records}, out)
    return 1 if wrong else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _row(found: list[dict[str, Any]], seconds: float) -> list[str]:
    """A line of the table behind its names; "gap / allowed" is the worst one, of first differences."""
    same = sum(c["identical"] for c in found)
    bad = sum(not c["passed"] for c in found)
    shares = [c["gap"] / c["allowed"] if c["allowed"] else float("inf") for c in found if not c["identical"]]
    length = sum(c["mean_acceptance_length"] for c in found) / len(found)
    return [
        str(len(found)), str(same), str(len(found) - same - bad), str(bad), f"{max(shares):.2f}" if shares else "-",
        f"{length:.2f}", f"{seconds:.0f}", "FAIL" if bad else "pass",
    ]  # fmt: skip


def _say_differences(records: list[dict[str, Any]]) -> None:
    """A line for each output that is another one."""
    for record in records:
        if not record["identical"]:
            _say(f"{record['variant']} {record['sampling']} prompt {record['prompt']}: {record['detail']}")


def _settings(given: list[str] | None) -> dict[str, Settings]:
    """Settings by how they are written; one without changes if none are asked for."""
    from .config import parse_override

    if given is None:
        return {"": Settings()}
    if not given:
        found = [{"temperature": heat} | mix for heat, mix in itertools.product(TEMPERATURES, MIXES)]
    else:
        for text in given:
            if not all("=" in part for part in text.split(",")):
                raise ValueError(f"--sampling {text}: write it as name=value, for example temperature=0.7,top_p=0.9")
        found = [dict(parse_override(part) for part in text.split(",")) for text in given]
    if any("max_new_tokens" in one for one in found):
        raise ValueError("--sampling max_new_tokens: is the same for all; give --max-new-tokens")
    named = {",".join(f"{key}={value}" for key, value in one.items()): one for one in found}
    return {name: changed(None, {"seed": seed} | one) for seed, (name, one) in enumerate(named.items())}


def _check_repeatable(base: Any, oracle: str, settings: Settings | None = None) -> None:
    """Tokens can be compared if they are the argmax, or drawn with a seed; transformers draws with noise of its own."""
    config, asked = base.sampling.config, (settings or Settings()).sampling
    temperature = asked.get("temperature", getattr(config, "temperature", 0.0))
    if temperature and not issubclass(SAMPLERS.get(base.sampling.name), Gumbel):
        raise ValueError(
            f"temperature = {temperature}: what sampler '{base.sampling.name}' draws depends on the drafts, so tokens "
            "cannot be compared one by one; `flashtree check-sampler` compares laws"
        )
    if temperature and asked.get("seed", getattr(config, "seed", None)) is None:
        raise ValueError(f"temperature = {temperature} without a seed: add --set sampling.seed=1")
    if temperature and oracle == "transformers":
        raise ValueError(f"temperature = {temperature}: transformers draws other tokens; use --oracle plain")
    argmax = not hasattr(config, "params") or config.params(**asked | {"temperature": 0.0}).is_argmax
    if oracle == "transformers" and (
        not argmax or getattr(config, "processors", None) or getattr(config, "host_processors", None)
    ):
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


def _oracle(
    kind: str, record: dict[str, Any] | None, sampling: str, engine: Any, texts: list[list[int]], settings: Settings
) -> dict[str, Any]:
    """How tokens are chosen, seed and [sampling] included (as JSON has it), and the oracle's tokens by prompt."""
    params = json.loads(json.dumps(dataclasses.asdict(engine.sampler.params(**settings.sampling))))
    if not params["temperature"]:
        del params["seed"]  # made up if there is none, and not used
    if record is not None:
        return _recorded(kind, record, sampling, texts, settings, params)
    if kind == "plain":
        tokens = [c.token_ids for c in engine.generate_plain(texts, settings, progress=True)]
        return {"params": params, "tokens": tokens}
    from .peers import transformers_greedy, transformers_model

    peer, most = transformers_model(engine), settings.max_new_tokens or engine.capacity
    # The context limit ends our outputs; the oracle must stop there too.
    tokens = [transformers_greedy(peer, ids, min(most, engine.capacity - len(ids))) for ids in texts]
    return {"params": params, "tokens": tokens}


def _read_record(file: str) -> dict[str, Any]:
    """What an earlier run has written by --json, as far as it is an oracle."""
    try:
        record = json.loads(Path(file).read_text(encoding="utf-8"))
        return {name: record[name] for name in ("prompts", "max_new_tokens")} | {"oracles": dict(record["oracles"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--oracle {file}: neither 'transformers' nor 'plain' nor a file that --json has written ({error})"
        ) from None


def _recorded(
    file: str, record: dict[str, Any], sampling: str, texts: list[list[int]], settings: Settings,
    params: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The oracle of an earlier run, which must have had the same prompts and settings."""
    found: dict[str, Any] | None = record["oracles"].get(sampling)
    if found is None or (record["prompts"], record["max_new_tokens"]) != (texts, settings.max_new_tokens):
        raise ValueError(f"--oracle {file}: was written for other prompts, --sampling or another --max-new-tokens")
    if found["params"] != params:
        other = ", ".join(f"{name} = {found['params'].get(name)}" for name in params
                          if found["params"].get(name) != params[name])  # fmt: skip
        raise ValueError(
            f"--oracle {file}: was written with {other}: give the same [sampling], and --sampling in the same order, "
            "which decides the seeds"
        )
    return found


def _check(
    engine: Any, texts: list[list[int]], oracle: list[list[int]], settings: Settings, ours: bool
) -> list[dict[str, Any]]:
    """Outcomes by prompt. A forward of ours had a row for each slot (and node); the oracle's, if not ours, one."""
    from .compare import compare

    slots, exact = min(engine.state.slots, len(texts)), engine.config.target.dtype == "float32"
    params = engine.sampler.params(**settings.sampling)
    completions: dict[int, Completion] = dict(engine.completions(texts, settings, progress=True))
    found = []
    for index, done in sorted(completions.items()):
        outcome = compare(
            engine.target, texts[index], done.token_ids, oracle[index], slots * engine.nodes, engine.sampler, params,
            slots if ours else 1,
        )  # fmt: skip
        found.append(
            {
                "prompt": index,
                "identical": outcome.identical,
                "explained": outcome.explained,
                "passed": outcome.identical if exact else outcome.explained,
                "first_difference": outcome.first_difference,
                "gap": outcome.gap,
                "allowed": outcome.allowed,
                "detail": str(outcome),
                "mean_acceptance_length": done.stats.mean_acceptance_length,
            }
        )
    return found
