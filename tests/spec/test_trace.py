"""The verdict on a profile: from events made by hand, and from a real profile of eager rounds on the CPU."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from spec import Engine
from spec.cli import main
from spec.engine import ROUND
from spec.timeline import Event, analyse, covered, read_trace
from spec.trace import Trace, report, trace

pytestmark = pytest.mark.filterwarnings("ignore:not one token of drafter")


def event(name, category, start, end, correlation=None):
    return Event(name=name, category=category, start=start, duration=end - start, correlation=correlation)


def launch(start, correlation, end=None):
    """A mark around a graph launch of one microsecond."""
    return [
        event(ROUND, "user_annotation", start - 1, end or start + 2),
        event("cudaGraphLaunch", "cuda_runtime", start, start + 1, correlation),
    ]


# Round 1 runs 10..30 with a gap of 2; round 2, launched at 28, 31..40; round 3, launched too late at 45, 50..60, two
# kernels overlapping. Tokens are copied at 40..44, called outside the marks.
EVENTS = [
    *launch(5, 1), event("gemm", "kernel", 10, 20, 1), event("norm", "kernel", 22, 30, 1),
    *launch(28, 2), event("gemm", "kernel", 31, 40, 2),
    event("cudaMemcpyAsync", "cuda_runtime", 33, 34, 9), event("Memcpy DtoH", "gpu_memcpy", 40, 44, 9),
    *launch(45, 3), event("gemm", "kernel", 50, 57, 3), event("norm", "kernel", 55, 60, 3),
    event("cudaGraphLaunch", "cuda_runtime", 70, 71, 4), event("gemm", "kernel", 75, 99, 4),  # of no round
    event(ROUND, "gpu_user_annotation", 10, 30), event("aten::mm", "cpu_op", 5, 6),
]  # fmt: skip


def test_a_profile_made_by_hand():
    for events in (EVENTS, EVENTS[::-1]):
        found = analyse(events, ROUND)
        assert (found.rounds, found.ahead) == (2, 1)
        assert (found.launches, found.kernels) == ([1, 1, 1], [2, 1, 2])
        assert found.round_time == pytest.approx((21 + 19) / 2)
        assert found.idle_between == pytest.approx((1 + 10) / 50)
        assert found.copies_between == pytest.approx(4 / 50)
        assert found.idle_inside == pytest.approx(2 / 50)
        assert [use.name for use in found.top] == ["gemm", "norm"]
        assert found.top[0].count == 1 and found.top[1].count == pytest.approx(2 / 3)
        assert found.top[0].time == pytest.approx(26 / 3) and found.top[0].share == pytest.approx(26 / 39)


def test_eager_rounds_are_judged_by_their_beginning():
    """Without graphs a round's kernels come from many calls, and its mark's start counts as its launch."""
    events = []
    for start in (0, 10):
        events.append(event(ROUND, "user_annotation", start, start + 8))
        for step in (1, 4):
            call = start + step
            events.append(event("cudaLaunchKernel", "cuda_runtime", call, call + 1, call))
            events.append(event("add", "kernel", call + 2, call + 6, call))
    found = analyse(events, ROUND)
    assert (found.launches, found.kernels, found.ahead, found.idle_between) == (
        [0, 0],
        [2, 2],
        0,
        pytest.approx(3 / 17),
    )
    late = [dataclasses.replace(e, duration=9) if e.correlation == 4 and e.category == "kernel" else e for e in events]
    assert found.late == [1] and (analyse(late, ROUND).ahead, analyse(late, ROUND).late) == (1, [])


def test_the_first_rounds_can_be_left_out():
    whole, rest = analyse(EVENTS, ROUND), analyse(EVENTS, ROUND, 1)
    assert rest.rounds == whole.rounds - 1 and rest.kernels == whole.kernels[1:]


def test_two_graphs_in_a_round_are_seen():
    split = [event("cudaGraphLaunch", "cuda_runtime", 29.5, 30, 8), event("gemm", "kernel", 44, 45, 8)]
    assert analyse([*EVENTS, *split], ROUND).launches == [1, 2, 1]


def test_profiles_that_do_not_show_it():
    with pytest.raises(ValueError, match="holds 1 rounds"):
        analyse(EVENTS[:4], ROUND)
    with pytest.raises(ValueError, match="no kernel of round 2"):
        analyse([e for e in EVENTS if not (e.category == "kernel" and e.correlation == 2)], ROUND)


def test_overlapping_events_cover_once():
    both = [event("a", "kernel", 0, 4), event("b", "kernel", 1, 2), event("c", "kernel", 3, 6)]
    assert covered(both, 0, 8) == 6 and covered(both, 3.5, 5) == 1.5 and covered([], 0, 8) == 0


def test_report_of_a_device_profile():
    text = report(Trace(accepted=[0, 3, 3], timeline=analyse(EVENTS, ROUND), operations=""))
    assert "accepted tokens a round: 0 to 3, 2 different counts in 3 rounds" in text
    for line in ("1 of 2", "22.00%", "8.00%", "4.00%", "1 to 2"):
        assert line in text
    assert "gemm" in text.splitlines()[-2] and "66.7%" in text


@pytest.fixture
def settings(tiny_targets):
    return {"target.path": str(tiny_targets["qwen3"]), "target.dtype": "float32", "engine.max_model_len": 160}


@pytest.mark.parametrize("plain", [False, True])
def test_a_real_profile_on_the_cpu(settings, tmp_path, plain):
    engine = Engine.from_config("smollm2-ngram", settings)
    ids, file = [7, 8, 9, 10, 11] * 9, tmp_path / "trace.json.gz"
    found = trace(engine, ids, 5, file, plain=plain, warm_rounds=2)
    marks = [e for e in read_trace(file) if e.name == ROUND and e.category == "user_annotation"]
    assert len(marks) == 6 == len(found.accepted) and found.timeline is None
    (done,) = engine.generate([ids], max_new_tokens=80, plain=plain)  # and the engine is free again
    assert found.accepted == ([0] * 6 if plain else done.stats.per_step_accepted[2:8])
    assert "aten::" in found.operations
    with pytest.raises(ValueError, match="fewer than 123 rounds"):
        trace(engine, ids, 120, file, plain=plain, warm_rounds=2)


def test_the_command(settings, tmp_path, capsys):
    file, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    sets += ["--config", "smollm2-ngram"]
    asked = ["trace", *sets, "--rounds", "4", "--output", str(file), "--json", str(figures)]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "in 5 rounds" in shown and "no CUDA device" in shown and str(file) in shown
    assert len(json.loads(figures.read_text())["accepted"]) == 5
    assert json.loads(file.read_text())["traceEvents"]
    for wrong in (["--rounds", "0"], ["--output", "trace.txt"], ["--output", str(tmp_path / "no" / "trace.json")]):
        assert main([*asked, *wrong]) == 2


def test_traces_may_be_compressed(tmp_path):
    record = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 2, "args": {"correlation": 7}}
    text = json.dumps({"traceEvents": [record, {"ph": "M", "name": "process_name"}, {"ph": "i", "name": "mark"}]})
    (tmp_path / "trace.json").write_text(text)
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        file.write(text)
    want = [Event(name="gemm", category="kernel", start=1.5, duration=2.0, correlation=7)]
    assert read_trace(tmp_path / "trace.json") == read_trace(tmp_path / "trace.json.gz") == want
