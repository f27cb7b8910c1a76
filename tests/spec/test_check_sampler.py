"""`flashtree check-sampler`: exact strategies pass, each kind of biased one fails, and the power is what it says."""

import dataclasses
import math
import sys

import pytest
import torch

from sampling import SAMPLERS, NodeContext, SlotParams, walk
from sampling.block_verification import BlockVerification
from sampling.draws import pick
from sampling.gumbel import Gumbel
from sampling.noise import noise_bits
from sampling.rejection import Rejection
from spec.check_sampler import FILTERS, LEVEL, build, cases, check, joint_law, targets
from spec.chi_squared import chi_squared, critical, draws_needed, p_value, power
from spec.cli import main
from spec.draft.perturbed import perturbed, with_draws
from spec.tree import TREES
from spec.types import Proposal

DRAWS = 20_000


class RatioRule(Gumbel):
    """The classic mistake: u < p/q with the real q, though the children are the drafter's best and not draws from q."""

    def perturb(self, logits, position, params):
        self.q = logits.float().softmax(-1)
        return logits

    def accept(self, logits, nodes):
        params, rows = nodes.params, torch.arange(len(nodes.token))
        p = logits.float().softmax(-1)
        q = self.q[nodes.slot, nodes.depth.clamp(max=self.q.shape[1] - 1)]
        is_child = (nodes.parent >= 0) & nodes.valid
        child = torch.full_like(nodes.token, -1).scatter(
            0, torch.where(is_child, nodes.parent, rows).flip(0), torch.where(is_child, nodes.token, -1).flip(0)
        )
        bits = [
            noise_bits(params.seed[nodes.slot], nodes.position, logits.shape[-1], params.low_bits, s) for s in (5, 6)
        ]
        u = bits[0][:, 0] / 2**32
        residual = (p - q).clamp(min=0) + 1e-9
        other = (residual.log() - (-((bits[1] + 0.5) / 2**32).log()).log()).argmax(-1)
        ratio = (p / q.clamp(min=1e-9)).gather(1, child.clamp(min=0)[:, None])[:, 0]
        return walk(torch.where((child >= 0) & (u < ratio), child, other), nodes)


class SameNoise(Gumbel):
    """Right token by token, wrong together: the noise does not know the position."""

    def accept(self, logits, nodes):
        return super().accept(logits, dataclasses.replace(nodes, position=nodes.position * 0))

    def perturb(self, logits, position, params):
        return super().perturb(logits, position * 0 + 1, params)


class RootsOnly(Gumbel):
    """Filters the bonus only (buglog 19): what follows a draft is taken from the raw law."""

    def accept(self, logits, nodes: NodeContext):
        bonus = super().accept(logits, nodes)
        raw_params = SlotParams(slots=nodes.slots, vocab_size=logits.shape[-1], device=logits.device)
        raw_params.seed, raw_params.temperature = nodes.params.seed, nodes.params.temperature
        raw = super().accept(logits, dataclasses.replace(nodes, params=raw_params))
        return raw if int(raw.count.max()) > 1 else bonus


class Nearly(Gumbel):
    """One token's odds are 6 % off: about 1.4 % in total variation."""

    def accept(self, logits, nodes):
        return super().accept(logits.float() + torch.tensor([0.06, 0.0, 0.0]), nodes)


class ForgottenMass(Rejection):
    """q is not normalised after a token is gone."""

    def mass_left(self, draws):
        return torch.ones_like(draws.ids, dtype=torch.float32)


class SortedOrder(Rejection):
    """Siblings are tested by probability, not as they were drawn."""

    def accept(self, logits, nodes):
        order = nodes.draws.log_q.gather(-1, nodes.draws.ids).sort(-1, descending=True).indices
        draws = dataclasses.replace(nodes.draws, ids=nodes.draws.ids.gather(-1, order))
        return super().accept(logits, dataclasses.replace(nodes, draws=draws))


class WholeLaw(Rejection):
    """After the last rejection draws from p, not from what is left of it."""

    def choose(self, p, nodes, draws):
        tokens, children = super().choose(p, nodes, draws), self.children(nodes, draws)
        taken = (children & (at_rows(draws.ids, nodes) == tokens[:, None])).any(-1)
        return torch.where(taken, tokens, pick(p, nodes))


class ShapeOfDraws(Rejection):
    """Candidates of little probability are not tested: a part of the draws that depends on what they are."""

    def children(self, nodes, draws):
        return super().children(nodes, draws) & (at_rows(draws.log_q.gather(-1, draws.ids), nodes) > -1.5)


class RawLaw(Rejection):
    """Buglog 11: the law handed on is not the one that was drawn from."""

    def draw(self, logits, position, depth, params):
        score, log_q = super().draw(logits, position, depth, params)
        return score, (log_q / 2).log_softmax(-1)


class SameNoiseAgain(BlockVerification):
    """The noise of a position is used again when the round after a rejection drafts it anew."""

    def draw(self, logits, position, depth, params):
        return super().draw(logits, position, depth * 0 + 1, params)


def at_rows(x, nodes):
    """[S, L, k] as [R, k]."""
    return x[nodes.slot, nodes.depth.clamp(max=x.shape[1] - 1)]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "user_samplers", sys.modules[__name__])


def worst(name, only=None, trees=None, draws=DRAWS):
    """The smallest p-value of each tree, over the cases whose name holds `only`."""
    sampler, found = build(name, {}), {}
    every = [case for case in cases(sampler, trees or TREES.names()) if only is None or only in case.name]
    for case in every:
        p = check(case, sampler, draws)[0].p_value
        found[case.tree] = min(p, found.get(case.tree, 1.0))
    return found, LEVEL / len(every)


@pytest.mark.parametrize("name", [name for name in SAMPLERS.names() if SAMPLERS.get(name).lossless])
def test_exact_strategies_pass(name):
    found, level = worst(name, draws=8192)
    assert min(found.values()) > level, found
    assert set(found) == ({"chain"} if SAMPLERS.get(name).chains_only else set(TREES.names()))


@pytest.mark.parametrize(
    ("mistake", "target", "trees"),
    [
        ("ForgottenMass", "opposite", ["best_first", "static"]), ("SortedOrder", "peaked", ["best_first", "static"]),
        ("WholeLaw", "opposite", ["chain", "best_first", "static"]),
        ("ShapeOfDraws", "equal", ["chain", "best_first", "static"]),
        ("RawLaw", "equal", ["chain", "best_first", "static"]), ("SameNoiseAgain", "equal", ["chain"]),
    ],
)  # fmt: skip
def test_mistakes_with_drawn_candidates_fail(mistake, target, trees):
    found, level = worst(f"user_samplers:{mistake}", only=f"{target}, none", trees=trees, draws=8192)
    assert max(found.values()) < level, found


@pytest.fixture
def stepwise(monkeypatch):
    """A drafter in place of each case's: one depth after another, its logits a function of the first draw before."""
    table = torch.tensor([[0.0, 2.0, -1.0], [2.5, 0.0, 0.0], [0.0, -1.0, 3.0]])

    def propose(perturb):
        ids, before = [], None
        for depth in range(3):
            logits = table[1].expand(propose.slots, 3) if before is None else table[before]
            ids.append(perturb(logits[:, None], depth)[:, 0].topk(propose.k, -1).indices)
            before = ids[-1][:, 0]
        return Proposal(ids=torch.stack(ids, 1), score=torch.zeros(propose.slots, 3, propose.k))

    def changed(given, sampler, length, params):
        propose.slots, propose.k = len(length), given(lambda logits, depth=0: logits).candidates
        return perturbed(propose, sampler, length, params)

    monkeypatch.setattr("spec.check_sampler.perturbed", changed)


@pytest.mark.parametrize("name", ["rejection", "block_verification"])
def test_a_drafter_that_builds_on_its_draws(name, stepwise):
    found, level = worst(name, only="equal, none")
    assert min(found.values()) > level, found


def test_a_tree_shaped_by_what_was_drawn_fails(monkeypatch):
    """Its own candidates' probabilities, made to fall along the ranks: every parent keeps a leading part of its draws.

    But an unlikely draw is left out where a likely one would have been tested.
    """

    def tempting(proposal, laws, sampled):
        whole = with_draws(proposal, laws, sampled)
        own = whole.draws.log_q.gather(-1, proposal.ids).cummin(-1).values
        return dataclasses.replace(whole, score=own)

    monkeypatch.setattr("spec.draft.perturbed.with_draws", tempting)
    found, level = worst("rejection", only="equal, none", trees=["best_first"], draws=8192)
    assert found["best_first"] < level, found


def test_the_ratio_rule_fails_on_every_tree():
    found, level = worst("user_samplers:RatioRule", only="none")
    assert max(found.values()) < level, found


def test_noise_that_repeats_fails():
    """Each token alone has the right law."""
    found, level = worst("user_samplers:SameNoise", only="none")
    assert max(found.values()) < level, found


@pytest.mark.parametrize("filters", ["top_k", "top_p", "min_p"])
def test_filters_on_the_bonus_only_fail(filters):
    found, level = worst("user_samplers:RootsOnly", only=filters)
    assert max(found.values()) < level, found


def test_a_small_error_is_found_with_enough_draws():
    found, level = worst("user_samplers:Nearly", only="near-ties, none", trees=["chain"], draws=120_000)
    assert found["chain"] < level


def test_the_command(capsys, monkeypatch):
    pairs = {name: pair for name, pair in targets().items() if name in ("equal", "opposite")}
    monkeypatch.setattr("spec.check_sampler.targets", lambda: pairs)
    few = ["--error", "0.06", "--trees", "chain"]
    assert main(["check-sampler", "token_match", *few]) == 0
    out, err = capsys.readouterr()
    assert "cases follow the target's law" in out and "token_match: 16 cases" in err
    assert main(["check-sampler", "user_samplers:RatioRule", *few]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert main(["check-sampler", "gumble"]) == 2
    assert "did you mean 'gumbel'" in capsys.readouterr().err
    assert main(["check-sampler", "gumbel", "--error", "2"]) == 2
    assert main(["check-sampler", "gumbel", "--trees", "chian"]) == 2


def test_the_law_of_a_case():
    """By hand: the first tokens of the first case, from the tables."""
    case = next(cases(build("gumbel", {}), ["chain"]))
    whole = joint_law(case).view(3, 3, 3)
    assert math.isclose(float(whole.sum()), 1.0)
    p = case.target.double().softmax(-1)
    assert math.isclose(float(whole[1, 2, 0]), float(p[2, 0, 1] * p[0, 1, 2] * p[1, 2, 0]), rel_tol=1e-9)


def test_every_filter_matters():
    """On its first target each filter moves the law by much more than the error that is to be caught."""
    every = {case.name: joint_law(case) for case in cases(build("gumbel", {}), ["chain"])}
    for filters in FILTERS:
        moved = (every[f"chain, opposite, {filters}"] - every["chain, opposite, none"]).abs().sum() / 2
        assert (moved > 0.05) == (filters != "none"), filters


def test_the_statistics():
    # Tables of the chi-squared law.
    assert math.isclose(p_value(3.841459, 1), 0.05, rel_tol=1e-5)
    assert math.isclose(critical(26, 0.01), 45.6417, rel_tol=1e-5)
    counts, law = torch.tensor([10, 20, 30]), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    outcome = chi_squared(counts, law)
    statistic = 4 / 12 + 4 / 18 + 0 / 30
    assert math.isclose(outcome.p_value, p_value(statistic, 2)) and math.isclose(outcome.distance, 2 / 60)
    assert chi_squared(torch.tensor([1000, 1]), torch.tensor([1.0, 0.0])).p_value == 0
    assert chi_squared(torch.tensor([1000, 0]), torch.tensor([1.0, 0.0])).p_value == 1
    # Rare cells are pooled: one draw where a hundredth was expected is no proof.
    rare = torch.tensor([1.0 - 1e-5, 5e-6, 5e-6], dtype=torch.float64)
    assert chi_squared(torch.tensor([1999, 1, 0]), rare).p_value > 1e-6


def test_the_power():
    """Tests of a law that is 0.02 off are rejected as often as promised, and of the law itself as often as allowed."""
    generator, level = torch.Generator().manual_seed(1), 0.01
    law = torch.full((27,), 1 / 27, dtype=torch.float64)
    off = law + torch.tensor([1, -1, 0] * 9) * 0.02 / 9
    for distance in (0.005, 0.15, 0.5):  # fewer for greater errors
        assert math.isclose(power(draws_needed(distance, 26, level, 0.99), distance, 26, level), 0.99, abs_tol=2e-2)
    assert draws_needed(0.5, 26, level, 0.99) < draws_needed(0.15, 26, level, 0.99) < 1000
    draws = draws_needed(0.02, 26, level, 0.99)
    assert math.isclose(power(draws, 0.02, 26, level), 0.99, abs_tol=1e-3)

    def rejected(truth):
        tests = [torch.multinomial(truth, draws, True, generator=generator).bincount(minlength=27) for _ in range(300)]
        return sum(chi_squared(counts, law).p_value < level for counts in tests) / 300

    assert rejected(off) > 0.97
    assert rejected(law) < 0.035
