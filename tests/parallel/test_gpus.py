"""Layouts on two GPUs: sums through symmetric memory, collectives inside captured graphs, tokens of one GPU."""

import pytest
from processes import Group
from test_layouts import FILTERED, GREEDY, PIPELINE, PROMPTS, TENSOR, tables

from spec import Engine

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def gpus():
    made = Group(2)
    made.seconds = 200  # below the limit of .ci/gpu: who hangs must not be left behind
    yield made
    made.stop()


def test_sums_through_symmetric_memory(gpus):
    """From one unit of 16 bytes to the most that fits; each many times, as a buffer is used again at once."""
    for symmetric, wrong in gpus.sums([4 * 8, 4096, 256 * 1024, 1024 * 1024], 100):
        assert symmetric and not wrong


@pytest.mark.parametrize("sampling", [GREEDY, FILTERED], ids=["greedy", "filtered"])
@pytest.mark.parametrize(
    ("parallel", "fused"),
    [(TENSOR, False), (PIPELINE, False), (TENSOR, True)],
    ids=["tensor", "pipeline", "tensor, fused sums"],
)
def test_graphs_with_collectives(gpus, targets, drafter, parallel, fused, sampling):
    """The tokens of one GPU, again when graphs are replayed; nothing is compiled again, no graph is skipped."""
    # One slot, and prompts in one chunk: six graphs to compile.
    config = tables(targets(2), parallel, sampling=sampling, drafter=drafter, slots=1, prefill_chunk=32)
    config["target"] |= {"device": "cuda"}
    single = Engine.from_config(config | {"parallel": {"name": "single"}, "compile": {"mode": "none"}})
    expected = [out.token_ids for out in single.generate(PROMPTS, max_new_tokens=24)]
    for outs, counted in gpus.on_gpus(config, PROMPTS, max_new_tokens=24, fused=fused):
        assert outs == [expected] * 4
        assert counted[1]["graphs"] == counted[3]["graphs"]
        assert not any(counted[3][name] for name in ("skipped", "partitions", "non_static_inputs"))


def test_sums_that_also_add_and_norm(gpus):
    """Rows of all numbers in turn: as the sum, the addition and the norm one after the other."""
    for most, wrong, same in gpus.fused_sums(512, 200):
        assert most == 160 and not wrong and same
