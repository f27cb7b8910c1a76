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

from sampling import Acceptance, Draws

from ..config import CompileConfig, GenerateConfig, TargetConfig
from ..engine import Engine
from ..prompts import NamedPrompt, encode_all, in_turn, pick_prompts
from ..report import table
from ..stats import Stats
from ..types import Proposal, Verified
from .config import EvaluateConfig
from .loops import find_loop


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


def evaluate(
    drafter: Path, target: TargetConfig, compile_config: CompileConfig, config: EvaluateConfig,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Decode the prompts with a chain and with trees.

    Args:
        drafter: its folder.
        target: what it drafts for.
        compile_config: only the kernels are taken from it.
        config: prompts, budgets, lengths.
        say: called with lines of text.

    Returns:
        A record for each drafter and tree: names, budget, figures.

    Raises:
        ValueError: a prompt or the drafter is not usable.
    """
    stems = [Path(file).stem for file in config.prompts]
    names = [stem if stems.count(stem) == 1 else file for stem, file in zip(stems, config.prompts, strict=True)]
    files = zip(names, config.prompts, strict=True)
    prompts = in_turn([[(name, p) for p in pick_prompts([file], config.limit)] for name, file in files])[: config.limit]
    own = {"name": "dflash", "path": str(drafter)}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [(own, {"name": "chain"})]
    pairs += [(own, {"name": name, "budget": budget}) for name in config.trees for budget in config.budgets]
    if config.ngram and config.trees and config.budgets:
        pairs.append(({"name": "ngram"}, {"name": config.trees[0], "budget": config.budgets[0]}))
    return [_one_pair(draft, tree, target, compile_config, config, prompts, say) for draft, tree in pairs]


def _one_pair(
    draft: dict[str, Any], tree: dict[str, Any], target: TargetConfig, compile_config: CompileConfig,
    config: EvaluateConfig, prompts: list[tuple[str, NamedPrompt]], say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    engine = WatchedEngine(
        GenerateConfig.from_tables(
            {
                "target": dataclasses.asdict(target),
                "draft": draft,
                "tree": tree,
                "sampling": {"name": "gumbel", "temperature": config.temperature, "seed": 0},
                "compile": {"mode": "none", "kernels": compile_config.kernels},
                "engine": {"slots": min(config.slots, len(prompts))},
            }
        ),
        say,
    )
    encoded = encode_all([prompt for _, prompt in prompts], engine.tokenizer, engine.target.config.vocab_size)
    began = time.perf_counter()
    done = engine.generate(encoded, max_new_tokens=config.max_new_tokens, progress=True)
    stats = Stats.total(completion.stats for completion in done)
    by_file = {
        name: Stats.total(c.stats for (n, _), c in zip(prompts, done, strict=True) if n == name)
        for name in dict.fromkeys(name for name, _ in prompts)
    }
    straight = [completion.stats for completion in done if find_loop(completion.token_ids) is None]
    record = {
        "drafter": draft["name"],
        "tree": tree["name"],
        "budget": engine.nodes - 1,
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
    rows = [["drafter", "tree", "budget", "tokens", "rounds", "acceptance length", "without loops", "looping"]]
    for r in records:
        without = r["mean_acceptance_length_without_loops"]
        lengths = f"{r['mean_acceptance_length']:.2f}", "-" if without is None else f"{without:.2f}"
        loops = f"{r['looping']} of {r['prompts']}"
        rows.append([r["drafter"], r["tree"], str(r["budget"]), str(r["tokens"]), str(r["rounds"]), *lengths, loops])
    files = list(records[0]["by_file"]) if records else []
    if len(files) > 1:
        rows = [[*row, *(files if r is None else (f"{r['by_file'][f]:.2f}" for f in files))]
                for row, r in zip(rows, [None, *records], strict=True)]  # fmt: skip
    text = table(rows)

    def line(record: dict[str, Any], kind: str) -> str:
        shares = " ".join("  - " if share is None else f"{share:.2f}" for share in record[kind])
        return f"{record['drafter']} {record['tree']} {record['budget']}, {kind.replace('_', ' ')}: {shares}"

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
