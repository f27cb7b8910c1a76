"""Host processors by themselves: what they see, what becomes of their results, which errors name whom."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from rows_by_hand import slot_params, trees

from sampling import FAULTS, SAMPLERS, Acceptance, HostContext, SamplingParams
from sampling.base import ALL_BANNED, BAD_PROCESSOR, NOT_FINITE, with_fault
from sampling.host import HostProcessor, host_processors, processed

INF, NAN = float("inf"), float("nan")
PROMPTS, OUTPUTS = [[1, 2], [3], []], [[4], [5, 6, 7], []]
#      0 (the anchor)
#     / \
#    1   2
#    |   |
#    3   4
PARENTS = [-1, 0, 0, 1, 2]


def context(tokens=None, valid=None, rows=17):
    """Three slots of five rows, two rows of padding."""
    tokens = tokens or [[4, 8, 9, 1, 1], [7, 2, 3, 4, 5], [0, 0, 0, 0, 0]]
    nodes = trees(tokens, PARENTS, slot_params([SamplingParams()] * 3, vocab_size=6), start=[2, 3, 9], rows=rows)
    fields = {field.name: getattr(nodes, field.name) for field in dataclasses.fields(nodes)}
    mask = nodes.valid if valid is None else torch.tensor(valid)
    return HostContext(**(fields | {"params": None, "valid": mask}), prompts=PROMPTS, outputs=OUTPUTS)


def named(function, name="mod:fn"):
    return [HostProcessor(name=name, function=function)]


def test_each_row_has_its_own_text():
    valid = [True] * 6 + [False] + [True] * 3 + [False] * 7  # the second slot's first child holds nothing
    found = {row: (prompt, output) for row, prompt, output in context(valid=valid).texts()}
    first = {0: [4], 1: [4, 8], 2: [4, 9], 3: [4, 8, 1], 4: [4, 9, 1]}
    second = {5: [5, 6, 7], 7: [5, 6, 7, 3], 9: [5, 6, 7, 3, 5]}  # nor does row 8, which is below it, matter
    assert found == {row: ([1, 2], out) for row, out in first.items()} | {
        row: ([3], out) for row, out in second.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_they_get_and_what_is_kept(dtype):
    """A copy in fp32 that may be written into; results of any kind of float; one after another."""
    logits = torch.arange(17 * 6).view(17, 6).to(dtype)
    kept, seen = logits.clone(), []

    def first(x, nodes):
        seen.append((x.dtype, x.device.type, nodes.valid.sum()))
        x[:, 1] = -INF
        return x.double()

    def second(x, nodes):
        assert x.dtype == torch.float32 and (x[:, 1] == -INF).all()
        return (x + 1).T.contiguous().T

    scores = processed(logits, context(), named(first) + named(second))
    assert seen == [(torch.float32, "cpu", 15)] and torch.equal(logits, kept)
    expected = kept.float() + 1
    expected[:, 1] = -INF
    assert torch.equal(scores.logits, expected) and not scores.fault.any()
    assert scores.logits.is_contiguous() and scores.logits.dtype == torch.float32


def test_nothing_to_do():
    """Rounds of a warm-up have no rows that matter: the user's code is left alone."""
    idle = context(valid=[False] * 17)
    scores = processed(torch.ones(17, 6), idle, named(lambda x, nodes: 1 / 0))
    assert torch.equal(scores.logits, torch.ones(17, 6)) and not list(idle.texts())


def test_faults_are_told_apart():
    """Of the target, of the processor, nothing left; a processor cannot hide that the target's logits were NaN."""
    logits = torch.zeros(17, 6)
    logits[0, 2], logits[1, 0], logits[2] = NAN, INF, -INF

    def change(x, nodes):
        x[0] = 0
        x[3, 1], x[4, 1], x[5], x[6, :5] = NAN, INF, -INF, -INF
        return x

    fault = processed(logits, context(), named(change)).fault.tolist()
    assert fault[:7] == [NOT_FINITE, NOT_FINITE, ALL_BANNED, BAD_PROCESSOR, BAD_PROCESSOR, ALL_BANNED, 0]
    assert not any(fault[7:])


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda x, nodes: x[:1], r"Tensor \[1, 6\]"),
        (lambda x, nodes: x.argmax(-1), r"Tensor \[17\]"),
        (lambda x, nodes: x.fill_(0) and None, None),
        (lambda x, nodes: None, "NoneType"),
    ],
)
def test_what_is_no_logits_is_refused(wrong, what):
    kind, message = (ValueError, what) if what else (RuntimeError, "")
    expected = rf"processor 'mod:fn' must return logits \[17, 6\], it returned {message}" if what else "'mod:fn' failed"
    with pytest.raises(kind, match=expected):
        processed(torch.zeros(17, 6), context(), named(wrong))


def test_what_it_raises_has_its_name():
    def broken(x, nodes):
        return {}["state"]

    with pytest.raises(RuntimeError, match="host processor 'rules:json' failed: KeyError: 'state'") as caught:
        processed(torch.zeros(17, 6), context(), named(broken, "rules:json"))
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_first_fault_stays():
    path = torch.tensor([[0, 1], [2, -1], [3, -1]])
    token, count = path.clone(), torch.tensor([2, 1, 1])
    accepted = Acceptance(path=path, token=token, count=count, fault=torch.tensor([ALL_BANNED, ALL_BANNED, 0]))
    fault = torch.tensor([0, NOT_FINITE, 0, 0, BAD_PROCESSOR])  # of the last row, which is on nobody's path
    assert with_fault(accepted, fault).fault.tolist() == [NOT_FINITE, ALL_BANNED, 0]
    assert with_fault(accepted, None) is accepted
    assert len(FAULTS) == 4


class Grammar:
    def __call__(self, logits, nodes):
        return logits


@pytest.mark.filterwarnings("ignore:sampler 'typical' is lossy")
@pytest.mark.parametrize("name", SAMPLERS.names())
def test_every_strategy_takes_them(name, monkeypatch):
    """By name or as they are; they do not make a greedy request one that samples."""
    monkeypatch.setitem(sys.modules, "user_rules", sys.modules[__name__])
    grammar = Grammar()
    given = ["user_rules:test_nothing_to_do", grammar, test_nothing_to_do]
    sampler = SAMPLERS.build({"name": name, "host_processors": given})
    assert [one.name for one in sampler.host_processors] == [
        "user_rules:test_nothing_to_do", "Grammar", "test_nothing_to_do",
    ]  # fmt: skip
    assert sampler.host_processors[1].function is grammar
    assert sampler.always_argmax(SamplingParams())
    for wrong, message in {
        "no_such_module:f": r"host_processors: 'no_such_module:f' cannot be imported",
        "user_rules:nobody": "cannot be imported",
        "user_rules:INF": "'user_rules:INF' is not callable",
    }.items():
        with pytest.raises(ValueError, match=message):
            SAMPLERS.build({"name": name, "host_processors": [wrong]})
    with pytest.raises(ValueError, match=r"\[sampling\]: host_processors = \[3\] is not a"):
        SAMPLERS.build({"name": name, "host_processors": [3]})
    assert host_processors(()) == ()
