"""`flashtree check-sampler`: is a sampling strategy exact? The joint law of three emitted tokens, case by case.

No model: a vocabulary of three tokens, a target whose logits depend on the last two of them, a drafter that is right,
wrong, certain or flat, every tree policy, filters and penalties. Rounds run as in the engine, thousands of slots at a
time; what they emit is counted and compared with the law by the book (`sampling/reference.py`) by chi-squared. The
level is shared among the cases, and there are so many draws that an error of the given size is found with 99 %
probability in whatever case it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from modelkit.registry import parse_config
from modelkit.rows import flatten
from sampling import FAULTS, SAMPLERS, NodeContext, Sampler, SamplingParams, SlotParams
from sampling.params import FEATURES
from sampling.reference import law

from .chi_squared import Outcome, chi_squared, draws_needed
from .draft import Perturb
from .draft.perturbed import perturbed
from .strategies import serves
from .tree import TREES, TreePolicy
from .types import Proposal

V, DEPTH, TOKENS = 3, 3, 3
START = [2, 0]  # the prompt: the token before the anchor, and the anchor
LEVEL, POWER = 0.01, 0.99
BATCH = 1 << 13

# Small ones of each policy; a policy that is not here runs by its defaults.
TREE_SETTINGS: dict[str, dict[str, Any]] = {
    "best_first": {"budget": 5}, "spine_first": {"budget": 5}, "static": {"widths": [2, 1, 1]},
}  # fmt: skip
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "min_p": {"min_p": 0.3},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {0: 1.5}, "banned_token_ids": (1,)},
    "all": {
        "temperature": 1.2, "top_k": 2, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2,
        "frequency_penalty": -0.6, "logit_bias": {2: 0.4},
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One law to be tested.

    Attributes:
        target: logits [V, V, V] after each pair of tokens.
        draft: the drafter's logits [L, V].
    """

    name: str
    tree: str
    target: Tensor
    draft: Tensor
    params: SamplingParams


def targets() -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of a target and a drafter that are likely to bring errors to light, by name."""
    draw = torch.Generator().manual_seed(11)
    smooth = torch.randn(V, V, V, generator=draw) * 1.2
    ties = torch.tensor([0.0, 0.0, 1e-3]).expand(V, V, V).contiguous()
    peaked = torch.eye(V)[torch.arange(V).roll(1)].expand(V, V, V) * 4.0
    holes = smooth.clone()
    holes[:, 1, 2] = holes[0, :, 1] = -torch.inf
    right = smooth[START[0], START[1]].expand(DEPTH, V)
    certain = torch.tensor([-torch.inf, 0.0, -torch.inf]).expand(DEPTH, V)
    return {
        "equal": (smooth, right),
        "opposite": (smooth, -3 * right),
        "one-hot draft": (smooth, certain),
        "near-ties": (ties, torch.zeros(DEPTH, V)),
        "peaked": (peaked.contiguous(), torch.tensor([1.0, 0.0, 2.0]).expand(DEPTH, V)),
        "disjoint": (holes, torch.tensor([-1.0, 2.0, 2.5]).expand(DEPTH, V)),
    }


def cases(sampler: Sampler, trees: list[str]) -> Iterator[Case]:
    """Every tree x target without filters, and every tree x filter that the sampler has on two of the targets.

    One is always "opposite", where every filter matters; the others take turns.
    """
    default = {"temperature": 1.0}
    try:
        sampler.params(temperature=1.0)
    except ValueError:
        default = {"temperature": 0.0}  # it decodes greedily: the law is one text
    pairs = targets()
    trees = [tree for tree in trees if serves(sampler, policy(tree))]
    if not trees:
        raise ValueError("the sampler verifies chains only, and none of --trees is one")
    for number, ((filters, changes), tree) in enumerate(itertools.product(FILTERS.items(), trees)):
        given = default | (changes if default["temperature"] else {})
        if (changes and given == default) or not set(SamplingParams(**given).features) <= set(sampler.features):
            continue
        params = sampler.params(seed=0, **given)
        turn = list(pairs)[(number + number // len(trees)) % len(pairs)]
        for kind in dict.fromkeys(("opposite", turn)) if changes else pairs:
            target, draft = pairs[kind]
            yield Case(name=f"{tree}, {kind}, {filters}", tree=tree, target=target, draft=draft, params=params)


def joint_law(case: Case) -> Tensor:
    """Probabilities fp64 [V ** TOKENS] of the first tokens."""
    whole = torch.zeros((V,) * TOKENS, dtype=torch.float64)

    def add(output: tuple[int, ...], p: float) -> None:
        if len(output) == TOKENS:
            whole[output] = p
        elif p > 0:
            before, last = (*START, *output)[-2:]
            for token, q in enumerate(law(case.target[before, last], case.params, START, output).tolist()):
                add((*output, token), p * q)

    add((), 1.0)
    return whole.flatten()


@torch.no_grad()
def draw(case: Case, sampler: Sampler, tree: TreePolicy, first_seed: int, slots: int) -> tuple[Tensor, float]:
    """Emit in so many slots, each with the next seed, until every one has enough tokens.

    Returns:
        The first tokens int64 [S, TOKENS], and tokens a round.

    Raises:
        ValueError: the sampler reports a fault.
    """
    params = many(case.params, first_seed, slots)
    width = len(START) + TOKENS * (DEPTH + 1)
    text = torch.zeros(slots, width, dtype=torch.int64)
    text[:, : len(START)] = torch.tensor(START)
    total, rounds, step = torch.full((slots,), len(START)), 0, torch.arange(DEPTH + 1)
    while int(total.min()) < len(START) + TOKENS:
        nodes = grow(case, sampler, tree, text, total, params)
        before = text.gather(1, total[:, None] - 2)[nodes.slot, 0]
        before = torch.where(nodes.parent < 0, before, nodes.token[nodes.parent.clamp(min=0)])
        accepted = sampler.accept(case.target[before, nodes.token], nodes)
        if accepted.fault is not None and bool(accepted.fault.any()):
            raise ValueError(f"{case.name}: {FAULTS[int(accepted.fault.max())]}")
        room = torch.minimum(accepted.count, width - total)
        place = torch.where(step < room[:, None], total[:, None] + step, width)
        text = torch.nn.functional.pad(text, (0, 1)).scatter(1, place, accepted.token.clamp(min=0))[:, :width]
        total, rounds = total + room, rounds + 1
        params.record(accepted.token, room)
    return text[:, len(START) : len(START) + TOKENS], float((total - len(START)).double().mean()) / rounds


def many(params: SamplingParams, first_seed: int, slots: int) -> SlotParams:
    """The same request in every slot, but for the seed; built with what it needs."""
    whole = SlotParams(slots=slots, vocab_size=V, device=torch.device("cpu"), features=params.features)
    whole.admit(0, params, torch.tensor(START))
    for buffer in whole.buffers():
        if buffer.dim():
            buffer.copy_(buffer[:1].expand_as(buffer))
    whole.seed[:] = first_seed + torch.arange(slots + 1)
    return whole


def grow(
    case: Case, sampler: Sampler, tree: TreePolicy, text: Tensor, total: Tensor, params: SlotParams
) -> NodeContext:
    """Propose and build, as a drafter and the engine do."""
    slots = len(total)

    def propose(perturb: Perturb) -> Proposal:
        logits = perturb(case.draft.expand(slots, DEPTH, V)).float()
        score, ids = logits.log_softmax(-1).topk(min(tree.candidates, V), -1)
        return Proposal(ids=ids, score=score)

    proposal = perturbed(propose, sampler, total - 1, params)
    built = tree.build(proposal, text.gather(1, total[:, None] - 1)[:, 0])
    width = built.token.shape[1]
    rows = flatten(
        token=built.token, parent=built.parent, valid=built.valid, ancestors=built.ancestors,
        position=total[:, None] - 1 + built.depth, count=torch.full_like(total, width), rows=slots * width, bound=0,
    )  # fmt: skip
    return NodeContext(
        token=rows.token, parent=rows.parent, depth=rows.position - (total - 1)[rows.slot], position=rows.position,
        slot=rows.slot, local=rows.local(), valid=rows.valid, ancestors=rows.ancestors, slots=slots, max_depth=DEPTH,
        width=width, params=params, draws=proposal.draws,
    )  # fmt: skip


def policy(name: str) -> TreePolicy:
    """The tree policy under its name, a small one."""
    return TREES.build({"name": name, **TREE_SETTINGS.get(name, {})})


def check(case: Case, sampler: Sampler, draws: int) -> tuple[Outcome, float]:
    """Test one case; also tokens a round."""
    tree = policy(case.tree)
    powers = torch.tensor([V ** (TOKENS - 1 - i) for i in range(TOKENS)])
    counts, lengths = torch.zeros(V**TOKENS, dtype=torch.int64), []
    for start in range(0, draws, BATCH):
        tokens, length = draw(case, sampler, tree, start, min(BATCH, draws - start))
        counts += torch.bincount((tokens * powers).sum(-1), minlength=V**TOKENS)
        lengths.append(length)
    return chi_squared(counts, joint_law(case)), sum(lengths) / len(lengths)


def build(name: str, changes: dict[str, Any]) -> Sampler:
    """The sampler, with every feature that its Config lets one ask for."""
    kind = SAMPLERS.get(name)
    fields = {field.name for field in dataclasses.fields(kind.Config)}
    table = ({"filters": list(FEATURES)} if "filters" in fields else {}) | changes
    sampler = kind(parse_config(kind.Config, table, "[sampling]"))  # type: ignore[call-arg]
    if getattr(sampler, "host_processors", ()):
        raise ValueError("host_processors are run by an engine, and check-sampler has none; leave them out")
    return sampler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flashtree check-sampler`."""
    parser.add_argument("sampler", metavar="NAME", help='registered name, or "package.module:Class"')
    parser.add_argument("--trees", default=",".join(TREES.names()), help="tree policies, by comma (all)")
    parser.add_argument("--error", type=float, metavar="TV", help="what is to be caught (0.005)")
    parser.add_argument("--quick", action="store_true", help="catch 2 %% only: a sixteenth of the draws")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")


def run(arguments: argparse.Namespace) -> int:
    """Test every case and print the worst; exit code 1 if one is off."""
    from tqdm import tqdm

    from .config import parse_override
    from .report import table

    if arguments.quick and arguments.error is not None:
        raise ValueError("--quick and --error both say what is to be caught; give one of them")
    error = 0.02 if arguments.quick else 0.005 if arguments.error is None else arguments.error
    if not 0.0 < error < 1.0:
        raise ValueError(f"--error {error}: must be between 0 and 1")
    sampler = build(arguments.sampler, dict(parse_override(text) for text in arguments.overrides))
    every = list(cases(sampler, arguments.trees.split(",")))
    level = LEVEL / len(every)
    draws = draws_needed(error, V**TOKENS - 1, level, POWER)
    print(
        f"{arguments.sampler}: {len(every)} cases x {draws} draws of {TOKENS} tokens; an error of {error:.3g} in total "
        f"variation is caught with {POWER:.0%}, a false alarm comes in {LEVEL:.0%} of runs",
        file=sys.stderr,
    )
    found = [(case.name, *check(case, sampler, draws)) for case in tqdm(every, disable=None, unit="case")]
    found.sort(key=lambda entry: entry[1].p_value)
    rows = [["tree, target and draft, filter", "p-value", "TV seen", "tokens/round", ""]]
    for name, outcome, length in found[:10]:
        verdict = "WRONG" if outcome.p_value < level else ""
        rows.append([name, f"{outcome.p_value:.3g}", f"{outcome.distance:.4f}", f"{length:.2f}", verdict])
    wrong = sum(outcome.p_value < level for _, outcome, _ in found)
    print(table(rows))
    print(f"{wrong} of {len(found)} cases are off" if wrong else f"all {len(found)} cases follow the target's law")
    return 1 if wrong else 0
