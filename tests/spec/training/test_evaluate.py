"""Counts of what drafts came to, by hand."""

import pytest

torch = pytest.importorskip("torch")

from spec.training.evaluate import DepthCounts, report  # noqa: E402


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
    lengths = {"mean_acceptance_length": 2.5, "mean_acceptance_length_without_loops": 2.25, "looping": 1, "prompts": 2}
    rest = {"by_file": {"one": 2.0, "two": 3.0}, "acceptance_rate_per_position": [0.5, 0.4, 0.3]}
    text = report([record | lengths | rest])
    assert " ".join(text.splitlines()[2].split()) == "dflash chain 3 9 4 2.50 2.25 1 of 2 2.00 3.00"
    assert "chain 3, on spine: 0.50 0.50 1.00" in text and "off spine:   -  1.00 0.00" in text


def test_what_stands_in_for_tokens_that_are_not_there_is_no_match():
    """A drafter whose best token is the padding's number must not look right there."""
    counts = DepthCounts.of(torch.tensor([[4, -1]]), torch.tensor([[4, -1, -1]]), torch.tensor([1]))
    assert counts.on_right.tolist() == [1, 0] and counts.on_reached.tolist() == [1, 0]
