"""Counts of what drafts came to, by hand; which runs there are, and processes that share them."""

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from spec.config import CompileConfig, TargetConfig  # noqa: E402
from spec.training.config import EvaluateConfig  # noqa: E402
from spec.training.evaluate import DepthCounts, evaluate, report, runs  # noqa: E402


def test_depths_on_the_spine_and_off_it():
    best = torch.tensor([[1, 2, 3]] * 5)
    # The whole chain and its bonus; a bonus at once; a sibling at the first depth, then the best token, then another;
    # the best token and then a wrong one; an idle slot.
    token = torch.tensor([[1, 2, 3, 9], [7, -1, -1, -1], [5, 2, 6, -1], [1, 4, -1, -1], [-1, -1, -1, -1]])
    counts = DepthCounts.of(best, token, torch.tensor([4, 1, 3, 2, 0]))
    assert counts.on_reached.tolist() == [4, 2, 1] and counts.on_right.tolist() == [2, 1, 1]
    assert counts.off_reached.tolist() == [0, 1, 1] and counts.off_right.tolist() == [0, 1, 0]
    both = DepthCounts.total([counts, counts]).rates()
    assert both == {"on_spine": [0.5, 0.5, 1.0], "off_spine": [None, 1.0, 0.0]}
    record = {"drafter": "dflash", "tree": "chain", "budget": 3, "tokens": 9, "rounds": 4} | both
    record |= {"sampler": "gumbel", "temperature": 0.7}
    lengths = {"mean_acceptance_length": 2.5, "mean_acceptance_length_without_loops": 2.25, "looping": 1, "prompts": 2}
    rest = {"by_file": {"one": 2.0, "two": 3.0}, "acceptance_rate_per_position": [0.5, 0.4, 0.3]}
    text = report([record | lengths | rest])
    assert " ".join(text.splitlines()[2].split()) == "dflash chain 3 gumbel 0.7 9 4 2.50 2.25 1 of 2 2.00 3.00"
    assert "dflash chain 3 gumbel 0.7, on spine: 0.50 0.50 1.00" in text and "off spine:   -  1.00 0.00" in text


def test_what_stands_in_for_tokens_that_are_not_there_is_no_match():
    """A drafter whose best token is the padding's number must not look right there."""
    counts = DepthCounts.of(torch.tensor([[4, -1]]), torch.tensor([[4, -1, -1]]), torch.tensor([1]))
    assert counts.on_right.tolist() == [1, 0] and counts.on_reached.tolist() == [1, 0]


def planned(**changes):
    found, left_out = runs(
        Path("drafter"), TargetConfig(path="target"), CompileConfig(), EvaluateConfig(budgets=(15,), **changes)
    )
    lines = [(r.draft.name, r.tree.name, r.sampling.name, r.sampling.config.temperature) for r in found]
    return lines, left_out


def test_at_temperature_zero_there_is_one_sampler():
    lines, left_out = planned(samplers=("gumbel", "rejection"), temperatures=(0.0, 0.7), trees=("best_first",))
    pairs = [("dflash", "chain"), ("dflash", "best_first"), ("ngram", "best_first")]
    kinds = [("greedy", 0.0), ("gumbel", 0.7), ("rejection", 0.7)]
    assert lines == [(*pair, *kind) for kind in kinds for pair in pairs] and not left_out


def test_a_sampler_of_chains_is_measured_on_the_chain_only():
    lines, left_out = planned(samplers=("block_verification",), temperatures=(1.0,))
    assert lines == [("dflash", "chain", "block_verification", 1.0)]
    assert [re.search("on '(.*)' trees", line)[1] for line in left_out] == ["best_first", "spine_first"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samplers": ("greedy",), "temperatures": (0.5,)}, "temperature = 0.5: sampler 'greedy' decodes at 0 only"),
        ({"samplers": ("gumbl",)}, "did you mean 'gumbel'"),
        ({"samplers": ()}, "samplers = []"),
        ({"temperatures": ()}, "temperatures = []"),
        ({"temperatures": (float("inf"),)}, "temperatures = [inf]"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(**changes)


CONFIG = """
[target]
path = "{target}"
dtype = "float32"
[data]
folder = "{root}/data"
[drafter]
mask_token_id = 96
[train]
steps = 1
[output]
folder = "{drafter}"
[evaluate]
prompts = ["{root}/prompts.jsonl"]
max_new_tokens = 12
budgets = [6]
samplers = ["gumbel", "rejection"]
temperatures = [0.0, 0.8]
slots = 2
"""


@pytest.fixture
def options(tiny_targets, tiny_drafters, tmp_path):
    """`flashtree train` of a tiny drafter on two prompts, evaluation only."""
    (tmp_path / "prompts.jsonl").write_text('{"token_ids": [1, 2, 3, 1, 2]}\n{"token_ids": [5, 6]}\n')
    config = tmp_path / "train.toml"
    config.write_text(CONFIG.format(target=tiny_targets["qwen3"], root=tmp_path, drafter=tiny_drafters["qwen3"]))
    return ["train", "--config", str(config), "--only", "evaluate"]


def test_processes_share_the_runs(torchrun, options, tiny_targets, tiny_drafters, tmp_path):
    """Three processes find what one does, print it once and in its order."""
    done = torchrun(3, [*options, "--json", str(tmp_path / "found.json")])
    assert done.returncode == 0, done.stderr
    target = TargetConfig(path=str(tiny_targets["qwen3"]), dtype="float32")
    how = EvaluateConfig(
        prompts=(str(tmp_path / "prompts.jsonl"),), max_new_tokens=12, budgets=(6,), samplers=("gumbel", "rejection"),
        temperatures=(0.0, 0.8), slots=2,
    )  # fmt: skip
    alone = evaluate(tiny_drafters["qwen3"], target, CompileConfig(), how, lambda line: None)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 3 * 4 and alone is not None
    assert [r | {"seconds": 0} for r in found] == [r | {"seconds": 0} for r in alone]
    turns = re.findall(r"^(\d+) of 12: (.*): acceptance length", done.stderr, re.M)
    assert sorted(int(turn) for turn, _ in turns) == list(range(1, 13)) and len({name for _, name in turns}) == 12
    lines = [line for line in done.stdout.splitlines() if " of 2" in line]
    assert [line.split()[:5] for line in lines] == [
        [str(r[name]) for name in ("drafter", "tree", "budget", "sampler", "temperature")] for r in alone
    ]


BROKEN = """
import os, time
from sampling.gumbel import Gumbel

class Broken(Gumbel):
    def sampled(self, logits, nodes):
        if os.environ["RANK"] == "1":
            raise ValueError("this sampler is broken")
        time.sleep(0.2)
        return super().sampled(logits, nodes)
"""


def test_a_failing_process_ends_the_others(torchrun, options, tmp_path):
    """Process 1 fails in its first run; process 0 has more to do, and would then wait for it."""
    (tmp_path / "broken.py").write_text(BROKEN)
    changes = ('evaluate.samplers=["broken:Broken"]', "evaluate.temperatures=[0.8]")
    done = torchrun(2, [*options, *(part for change in changes for part in ("--set", change))], str(tmp_path))
    assert done.returncode != 0 and "ValueError: this sampler is broken" in done.stderr
    assert "acceptance length" not in done.stdout
