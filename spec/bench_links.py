"""What a layout's collectives cost: which ones a step makes, how long each takes, and how long it would elsewhere.

Measured apart from the step, so that their times can be taken out of it and those of another link put in their place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelkit.compile import Step
from parallel.collectives import Group
from parallel.mesh import everybody

from .engine import Engine
from .parts import Saved, Verify
from .timing import timed

CHAIN = 10  # collectives between two steps of the clock
SYMMETRIC, BROADCAST, GATHER = "symmetric_all_reduce", "broadcast", "all_gather_into_tensor"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Equal collectives of one step.

    Attributes:
        kind: the operator: `all_reduce` (NCCL or gloo), `symmetric_all_reduce`, `all_gather_into_tensor`, ...
        bytes: what each process puts in.
        count: how many a step makes.
    """

    kind: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What connects GPUs, as NCCL counts it when it chooses how to do a collective.

    Attributes:
        hop_us: what a hop takes longer than over NVLink: 1.0 us over PCIe less 0.47 (protocol LL, ring; hwLat in NCCL's
            src/graph/tuning.cc at 01afd20a77b5).
        gigabytes: 1e9 bytes a second and direction of one GPU, below one host bridge or switch: NCCL's topology logs
            (24.0 in NVIDIA/nccl-tests#100, 48.0 in NVIDIA/nccl#1189; across sockets 10.0 in NVIDIA/nccl-tests#307).
    """

    hop_us: float
    gigabytes: float


PCIE = {"PCIe 4.0 x16": Link(hop_us=0.53, gigabytes=24.0), "PCIe 5.0 x16": Link(hop_us=0.53, gigabytes=48.0)}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.name().partition("::")[2].partition(".")[0]
        if (func.namespace == "_c10d_functional" and kind != "wait_tensor") or kind == SYMMETRIC:
            self.found[kind, args[0].nbytes] += 1
        return func(*args, **(kwargs or {}))


def collectives_of(step: Step) -> list[Call]:
    """Run a step, which must not be compiled, and say which collectives it has made.

    Sums that also add and norm (FLASHTREE_FUSED_SUMS) are left out: no part of them could be replaced by a link's.
    """
    with torch.no_grad(), _Watch() as watch:
        step()
    return [Call(kind=kind, bytes=size, count=count) for (kind, size), count in watch.found.items()]


def links(engine: Engine, steps: Iterable[tuple[str, int | None]], repeat: int) -> dict[str, Any]:
    """What the collectives of some steps are and take, as a record.

    Args:
        engine: every slot holds a request, as a bench leaves it.
        steps: (part, rows) of the bench; those that are no whole forward are left out.
        repeat: see `time_collectives`.

    Returns:
        "collectives" by "part rows", and "collective_us" as `time_collectives` gives them.
    """
    saved, bound, made = Saved(engine), engine.capacity, {}
    for part, rows in steps:
        if part == "verify" and rows is not None:
            made[f"{part} {rows}"] = collectives_of(Verify(engine, rows // engine.state.slots, bound).step)
        elif part in ("plain step", "round") and rows is not None:
            made[f"{part} {rows}"] = collectives_of(functools.partial(engine.step, rows, bound, part == "plain step"))
        saved.restore()
    times = time_collectives([call for calls in made.values() for call in calls], engine.target.device, repeat)
    return {
        "collectives": {name: [dataclasses.asdict(call) for call in calls] for name, calls in made.items()},
        "collective_us": times,
    }


def time_collectives(calls: list[Call], device: torch.device, repeat: int) -> dict[str, float]:
    """Microseconds of each kind and size by "kind bytes", one behind the other with the host ahead.

    All processes must call this at the same time, with the same calls. A sum through symmetric memory is also timed
    as the backend's own.

    Args:
        calls: those of all steps.
        device: of the tensors.
        repeat: timings, of which the median counts.
    """
    group = Group(everybody())
    wanted = {(call.kind, call.bytes) for call in calls}
    wanted |= {("all_reduce", size) for kind, size in wanted if kind == SYMMETRIC}
    found = {}
    for kind, size in sorted(wanted):
        x = torch.zeros(max(size // 4, 1), dtype=torch.float32, device=device)
        ms = timed(_chain(group, kind, x), device, repeat, head_start=True)
        found[f"{kind} {size}"] = ms * 1e3 / CHAIN
    return found


def _chain(group: Group, kind: str, x: Tensor) -> Step:
    make: dict[str, Callable[[Tensor], Tensor]] = {
        SYMMETRIC: group.all_reduce,
        BROADCAST: lambda x: group.broadcast(x, 0),
        GATHER: lambda x: group.all_gather(x)[0],
        "all_reduce": group.reduce_by_backend,
        "reduce_scatter_tensor": lambda x: group.reduce_scatter(x.view(group.size, -1)).repeat(group.size),
    }

    def step() -> None:
        y = x
        for _ in range(CHAIN):
            y = make[kind](y)

    return step


def on_link(
    ms: float, calls: list[Call], times: dict[str, float], processes: int, link: Link, latency_us: dict[str, float]
) -> float:
    """Milliseconds of a step on another link: its collectives' measured times taken out, the link's put in.

        time of a collective there = latency here + hops * hop_us + bytes sent by one GPU / bandwidth

    The latency is that of the smallest collective of its kind by NCCL, measured here: symmetric memory over PCIe is not
    assumed. Hops and bytes are a ring's.

    Args:
        ms: of the step, here.
        calls: its collectives.
        times: microseconds here, as `time_collectives` gives them.
        processes: in a group.
        link: there.
        latency_us: by kind.
    """
    here = sum(call.count * times[f"{call.kind} {call.bytes}"] for call in calls)
    there = 0.0
    for call in calls:
        kind = "all_reduce" if call.kind == SYMMETRIC else call.kind
        rounds = 2 if kind == "all_reduce" else 1
        hops = rounds * (processes - 1)
        sent = call.bytes * {"all_reduce": 2 * (processes - 1) / processes, GATHER: processes - 1}.get(kind, 1)
        there += call.count * (latency_us[kind] + hops * link.hop_us + sent / link.gigabytes * 1e-3)
    return ms + (there - here) * 1e-3


def latencies(times: dict[str, float]) -> dict[str, float]:
    """Microseconds of the smallest collective of each kind."""
    smallest: dict[str, tuple[int, float]] = {}
    for name, us in times.items():
        kind, _, size = name.rpartition(" ")
        smallest[kind] = min(smallest.get(kind, (int(size), us)), (int(size), us))
    return {kind: us for kind, (_, us) in smallest.items()}
