"""What a profile says about rounds: were they launched ahead, where the device idled, which kernels ran.

A pure function of a list of events. Knows Chrome traces as PyTorch's profiler writes them, nothing of engines.
"""

from __future__ import annotations

import bisect
import dataclasses
import gzip
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One bar of a trace.

    Attributes:
        name: of a kernel, a call or a mark.
        category: "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "user_annotation", ...
        start: microseconds, on a clock that host and device share.
        duration: microseconds.
        correlation: the same number in a call and in all that it started on the device.
    """

    name: str
    category: str
    start: float
    duration: float
    correlation: int | None = None

    @property
    def end(self) -> float:
        """Microseconds."""
        return self.start + self.duration


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse:
    """One kernel, over all rounds: launches a round, microseconds a round, share of all kernel time."""

    name: str
    count: float
    time: float
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What a profile of consecutive rounds says.

    Attributes:
        rounds: rounds that have a successor in the profile.
        ahead: how many of them were still running when their successor's launch was called.
        late: the numbers of the others, from 1.
        launches: graph launches of each round, the last one's too.
        kernels: kernels of each round.
        round_time: microseconds from a round's first kernel to its successor's, median.
        idle_between: share of the whole time between the last kernel of a round and the first of the next one.
        copies_between: the part of it (a share of the whole time too) in which the device copies tokens out.
        idle_inside: share of the whole time in gaps between the kernels of a round.
        top: kernels by time.
    """

    rounds: int
    ahead: int
    late: list[int]
    launches: list[int]
    kernels: list[int]
    round_time: float
    idle_between: float
    copies_between: float
    idle_inside: float
    top: list[KernelUse]


def read_trace(path: Path) -> list[Event]:
    """Events of a Chrome trace, .json or .json.gz."""
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    records: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return [
        Event(
            name=r["name"], category=r["cat"], start=float(r["ts"]), duration=float(r["dur"]),
            correlation=r.get("args", {}).get("correlation"),
        )
        for r in records
        if r.get("ph") == "X" and "cat" in r
    ]  # fmt: skip


def analyse(events: Sequence[Event], mark: str, skip: int = 0) -> Timeline:
    """Assign calls to rounds by time and kernels to calls by correlation, and measure.

    Args:
        events: a profile; order does not matter.
        mark: name of the host-side annotation around each round's launch.
        skip: first rounds that are left out.

    Raises:
        ValueError: fewer than two rounds, or a round without kernels: the profile does not show what is asked.
    """
    marks = [e for e in events if e.category == "user_annotation" and e.name == mark]
    marks = sorted(marks, key=lambda e: e.start)[skip:]
    if len(marks) < 2:
        raise ValueError(f"the profile holds {len(marks)} rounds; two are needed")
    calls = _calls_by_round(events, marks)
    started: dict[int, list[Event]] = defaultdict(list)
    on_device = [e for e in events if e.category in DEVICE]
    for event in on_device:
        if event.correlation is not None:
            started[event.correlation].append(event)
    work = [[e for call in own if call.correlation is not None for e in started[call.correlation]] for own in calls]
    for number, own in enumerate(work):
        if not any(e.category == "kernel" for e in own):
            raise ValueError(f"the profile shows no kernel of round {number + 1}")
    graphs = [[call for call in own if "GraphLaunch" in call.name] for own in calls]
    launched = [g[0].start if g else m.start for g, m in zip(graphs, marks, strict=True)]
    begin, end = ([edge(own) for own in work] for edge in (_begin, _end))
    between = [(a, b) for a, b in zip(end, begin[1:], strict=False) if b > a]
    whole = end[-1] - begin[0]
    inside = sum(e - b - covered(own, b, e) for own, b, e in zip(work, begin, end, strict=True))
    kernels = [[e for e in own if e.category == "kernel"] for own in work]
    late = [number for number, (launch, done) in enumerate(zip(launched[1:], end, strict=False), 1) if launch >= done]
    return Timeline(
        rounds=len(marks) - 1,
        ahead=len(marks) - 1 - len(late),
        late=late,
        launches=[len(g) for g in graphs],
        kernels=[len(own) for own in kernels],
        round_time=statistics.median(b - a for a, b in itertools.pairwise(begin)),
        idle_between=sum(b - a for a, b in between) / whole,
        copies_between=sum(covered(on_device, a, b) for a, b in between) / whole,
        idle_inside=inside / whole,
        top=_by_time([e for own in kernels for e in own], len(marks)),
    )


def covered(events: Iterable[Event], begin: float, end: float) -> float:
    """Microseconds of begin..end in which at least one of the events runs."""
    total, reached = 0.0, begin
    for event in sorted(events, key=lambda e: e.start):
        total += max(min(event.end, end) - max(event.start, reached), 0.0)
        reached = max(reached, event.end)
    return total


def _begin(events: Iterable[Event]) -> float:
    return min(e.start for e in events)


def _end(events: Iterable[Event]) -> float:
    return max(e.end for e in events)


def _calls_by_round(events: Sequence[Event], marks: Sequence[Event]) -> list[list[Event]]:
    starts = [m.start for m in marks]
    found: list[list[Event]] = [[] for _ in marks]
    for call in sorted((e for e in events if e.category in CALLS), key=lambda e: e.start):
        index = bisect.bisect_right(starts, call.start) - 1
        if index >= 0 and call.start < marks[index].end:
            found[index].append(call)
    return found


def _by_time(kernels: Sequence[Event], rounds: int) -> list[KernelUse]:
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.duration)
    whole = sum(e.duration for e in kernels)
    found = [
        KernelUse(name=name, count=len(each) / rounds, time=sum(each) / rounds, share=sum(each) / whole)
        for name, each in times.items()
    ]
    return sorted(found, key=lambda use: -use.time)
