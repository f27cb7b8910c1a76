"""What a drafter is worth in the real engine: acceptance length of chain and trees, and where drafts go wrong.

The spine is the path of the drafter's best candidates. Its marginals are conditioned on nothing but the anchor, so they
hold only while the text follows the spine; the two kinds of depth are counted apart.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelkit import ModelConfig
from parallel.beside import Beside
from parallel.process import rank
from sampling import SAMPLERS, Acceptance, Draws

from ..config import CompileConfig, EngineConfig, GenerateConfig, TargetConfig
from ..engine import Engine
from ..prompts import NamedPrompt, encode_all, in_turn, pick_prompts
from ..report import table
from ..sources import target_source
from ..stats import Stats
from ..strategies import serves
from ..text import load_tokenizer
from ..tree import TREES
from ..types import Proposal, Verified
from .config import EvaluateConfig
from .loops import find_loop

NAMES = ("drafter", "tree", "budget", "sampler", "temperature")  # of a run, in its record


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthCounts:
    """Of rounds that got so deep, on the spine or off it: at how many there were, the drafter's best token was right.

    Attributes:
        on_reached, on_right, off_reached, off_right: int64 [L]. A round reaches depth d where the target's token there
            is known: one behind the last accepted one, the bonus.
    """

    on_reached: Tensor
    on_right: Tensor
    off_reached: Tensor
    off_right: Tensor

    @classmethod
    def of(cls, best: Tensor, token: Tensor, count: Tensor) -> DepthCounts:
        """Counts of a round.

        Args:
            best: int64 [S, L], the drafter's best token of each depth.
            token: int64 [S, L + 1], the target's tokens.
            count: int64 [S], how many of those are real.
        """
        depth = torch.arange(best.shape[1], device=best.device)
        reached = depth < count[:, None]
        right = (token[:, : best.shape[1]] == best) & reached
        spine = right.long().cumprod(1).bool().roll(1, 1)
        spine[:, 0] = True
        pairs = (reached & spine, right & spine, reached & ~spine, right & ~spine)
        return cls(**{field.name: part.sum(0) for field, part in zip(dataclasses.fields(cls), pairs, strict=True)})

    @classmethod
    def total(cls, parts: Sequence[DepthCounts]) -> DepthCounts:
        """Counts added up."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: torch.stack([getattr(part, name) for part in parts]).sum(0) for name in names})

    def rates(self) -> dict[str, list[float | None]]:
        """Share of right tokens at each depth, None where no round got there."""

        def share(right: Tensor, reached: Tensor) -> list[float | None]:
            return [r / n if n else None for r, n in zip(right.tolist(), reached.tolist(), strict=True)]

        return {"on_spine": share(self.on_right, self.on_reached), "off_spine": share(self.off_right, self.off_reached)}


class WatchedEngine(Engine):
    """An engine that counts what became of each round's drafts. It runs eagerly: the counting is not in its graphs."""

    def __init__(self, config: GenerateConfig, progress: Any = None) -> None:
        super().__init__(config, progress)
        self.counts: list[DepthCounts] = []
        self._best: Tensor | None = None

    def propose(self, bound: int, greedy: bool) -> Proposal:
        """See `Engine.propose`."""
        proposal = super().propose(bound, greedy)
        self._best = proposal.ids[..., 0]
        return proposal

    def accept(self, verified: Verified, greedy: bool, draws: Draws | None = None) -> Acceptance:
        """See `Engine.accept`."""
        accepted = super().accept(verified, greedy, draws)
        if self._best is not None:
            self.counts.append(DepthCounts.of(self._best, accepted.token, accepted.count))
        return accepted


def runs(
    drafter: Path, target: TargetConfig, compile_config: CompileConfig, config: EvaluateConfig
) -> tuple[list[GenerateConfig], list[str]]:
    """What is to be measured: each temperature and sampling strategy on the chain and on every tree.

    Args:
        drafter: its folder; nothing is read from it.
        target: what it drafts for.
        compile_config: only the kernels are taken from it.
        config: what is asked for.

    Returns:
        The runs, and what is left out because a strategy does not serve a tree, a line each.

    Raises:
        ValueError: an unknown strategy or tree, a budget out of range, or a temperature that a strategy refuses.
    """
    own: dict[str, Any] = {"name": "dflash", "path": str(drafter)}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [(own, {"name": "chain"})]
    pairs += [(own, {"name": name, "budget": budget}) for name in config.trees for budget in config.budgets]
    if config.ngram and len(pairs) > 1:
        pairs.append(({"name": "ngram"}, pairs[1][1]))
    found: list[GenerateConfig] = []
    left_out: dict[str, None] = {}
    for name in config.samplers:
        SAMPLERS.get(name)  # it is refused at temperature 0 too
    for temperature in config.temperatures:
        for name in config.samplers if temperature else ("greedy",):
            sampling = {"name": name, "temperature": temperature}
            for draft, tree in pairs:
                run = GenerateConfig.from_tables(
                    {
                        "target": dataclasses.asdict(target),
                        "draft": draft,
                        "tree": tree,
                        "sampling": sampling,
                        "compile": {"mode": "none", "kernels": compile_config.kernels},
                    }
                )
                if serves(SAMPLERS.build(sampling), TREES.build(tree)):
                    found.append(run)
                else:
                    left_out[f"sampler '{name}' verifies chains only: not measured on '{tree['name']}' trees"] = None
    return found, list(left_out)


def evaluate(
    drafter: Path, target: TargetConfig, compile_config: CompileConfig, config: EvaluateConfig,
    say: Callable[[str], None],
) -> list[dict[str, Any]] | None:  # fmt: skip
    """Decode the prompts with a chain and with trees; processes that torchrun started share the runs.

    Args:
        drafter: its folder.
        target: what it drafts for.
        compile_config: only the kernels are taken from it.
        config: prompts, budgets, lengths, samplers, temperatures.
        say: called with lines of text, one for each run that is done.

    Returns:
        A record for each run, in the order of `runs`: names, budget, temperature, figures. None in all processes but
        the first.

    Raises:
        ValueError: a prompt, a setting or the drafter is not usable.
    """
    stems = [Path(file).stem for file in config.prompts]
    names = [stem if stems.count(stem) == 1 else file for stem, file in zip(stems, config.prompts, strict=True)]
    files = zip(names, config.prompts, strict=True)
    prompts = in_turn([[(name, p) for p in pick_prompts([file], config.limit)] for name, file in files])[: config.limit]
    todo, left_out = runs(drafter, target, compile_config, config)
    for line in left_out if rank() == 0 else ():
        say(line)
    folder = target_source(target.path, say)
    shape = ModelConfig.from_folder(folder)
    encoded = encode_all([prompt for _, prompt in prompts], load_tokenizer(folder), shape.vocab_size)
    # No room for contexts that no prompt has: with many slots and processes it would be most of the memory.
    longest = max(map(len, encoded)) + config.max_new_tokens
    sizes = EngineConfig(
        slots=min(config.slots, len(prompts)), max_model_len=min(longest, shape.max_position_embeddings)
    )
    beside, found = Beside("evaluation"), {}
    order = sorted(range(len(todo)), key=lambda index: _length(todo[index]), reverse=True)
    for turn in beside.turns(len(order)):
        run = dataclasses.replace(todo[order[turn]], engine=sizes)
        record = found[order[turn]] = _record(run, prompts, encoded, config.max_new_tokens, say)
        say(f"{turn + 1} of {len(order)}: {_name(record)}: acceptance length {record['mean_acceptance_length']:.2f} in "
            f"{record['seconds']:.0f} s")  # fmt: skip
    everything = beside.gathered(found)
    if everything is None:
        return None
    records = {index: record for part in everything for index, record in part.items()}
    return [records[index] for index in sorted(records)]


def _name(record: dict[str, Any]) -> str:
    return " ".join(str(record[name]) for name in NAMES)


def _length(run: GenerateConfig) -> tuple[bool, float, int]:
    """What makes a run longer than another: few accepted tokens (n-grams, a high temperature), then many rows."""
    return run.draft.name == "ngram", run.sampling.config.temperature, getattr(run.tree.config, "budget", None) or 0


def _record(
    run: GenerateConfig, prompts: list[tuple[str, NamedPrompt]], encoded: list[list[int]], most: int,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    engine = WatchedEngine(run, say)
    began = time.perf_counter()
    done = engine.generate(encoded, max_new_tokens=most, seed=0, progress=True)
    stats = Stats.total(completion.stats for completion in done)
    by_file = {
        name: Stats.total(c.stats for (n, _), c in zip(prompts, done, strict=True) if n == name)
        for name in dict.fromkeys(name for name, _ in prompts)
    }
    straight = [completion.stats for completion in done if find_loop(completion.token_ids) is None]
    record = {
        "drafter": run.draft.name,
        "tree": run.tree.name,
        "budget": engine.nodes - 1,
        "sampler": run.sampling.name,
        "temperature": run.sampling.config.temperature,
        "prompts": len(prompts),
        "tokens": stats.completion_tokens,
        "rounds": stats.num_spec_steps,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "by_file": {name: part.mean_acceptance_length for name, part in by_file.items()},
        "looping": len(done) - len(straight),
        "mean_acceptance_length_without_loops": Stats.total(straight).mean_acceptance_length if straight else None,
        "acceptance_rate_per_position": stats.acceptance_rate_per_position,
        "seconds": time.perf_counter() - began,
    }
    return record | (DepthCounts.total(engine.counts).rates() if engine.counts else {})


def report(records: list[dict[str, Any]]) -> str:
    """Records as text: a line for each tree, then what the drafter got right at each depth."""
    rows = [[*NAMES, "tokens", "rounds", "acceptance length", "without loops", "looping"]]
    for r in records:
        without = r["mean_acceptance_length_without_loops"]
        lengths = f"{r['mean_acceptance_length']:.2f}", "-" if without is None else f"{without:.2f}"
        loops = f"{r['looping']} of {r['prompts']}"
        rows.append([*(str(r[name]) for name in NAMES), str(r["tokens"]), str(r["rounds"]), *lengths, loops])
    files = list(records[0]["by_file"]) if records else []
    if len(files) > 1:
        rows = [[*row, *(files if r is None else (f"{r['by_file'][f]:.2f}" for f in files))]
                for row, r in zip(rows, [None, *records], strict=True)]  # fmt: skip
    text = table(rows)

    def line(record: dict[str, Any], kind: str) -> str:
        shares = " ".join("  - " if share is None else f"{share:.2f}" for share in record[kind])
        return f"{_name(record)}, {kind.replace('_', ' ')}: {shares}"

    kinds = ("acceptance_rate_per_position", "on_spine", "off_spine")
    lines = [line(record, kind) for record in records for kind in kinds if kind in record]
    return (
        text
        + "\n\nby depth (share of rounds accepted; best token right, while on the spine and off it)\n"
        + "\n".join(lines)
    )


def write_json(path: str, records: list[dict[str, Any]]) -> None:
    """Write the records to a file."""
    Path(path).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
