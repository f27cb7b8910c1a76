"""The model of other links, by hand."""

import pytest

from spec.bench_links import PCIE, Call, Link, latencies, on_link

TIMES = {
    "symmetric_all_reduce 8192": 7.0,
    "all_reduce 8192": 15.0,
    "all_reduce 524288": 25.0,
    "broadcast 200": 12.0,
    "all_gather_into_tensor 8": 11.0,
    "all_gather_into_tensor 1000000": 30.0,
}
LINK = Link(hop_us=0.5, gigabytes=10.0)


def test_latencies_are_those_of_the_smallest():
    assert latencies(TIMES) == {
        "symmetric_all_reduce": 7.0, "all_reduce": 15.0, "broadcast": 12.0, "all_gather_into_tensor": 11.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "there"),
    [
        # latency, hops of 0.5 us, bytes at 10 GB/s; of 4 processes
        (Call(kind="symmetric_all_reduce", bytes=8192, count=72), 15.0 + 6 * 0.5 + 8192 * 1.5 / 10e3),
        (Call(kind="all_reduce", bytes=524288, count=2), 15.0 + 6 * 0.5 + 524288 * 1.5 / 10e3),
        (Call(kind="broadcast", bytes=200, count=1), 12.0 + 3 * 0.5 + 200 / 10e3),
        (Call(kind="all_gather_into_tensor", bytes=1000000, count=1), 11.0 + 3 * 0.5 + 3000000 / 10e3),
    ],
    ids=lambda value: value.kind if isinstance(value, Call) else "",
)
def test_a_step_on_another_link(call, there):
    here = TIMES[f"{call.kind} {call.bytes}"]
    found = on_link(3.0, [call], TIMES, 4, LINK, latencies(TIMES))
    assert found == pytest.approx(3.0 + call.count * (there - here) * 1e-3)


def test_no_collectives_no_change():
    assert on_link(4.3, [], TIMES, 2, LINK, latencies(TIMES)) == 4.3


def test_a_slower_link_is_slower():
    call = Call(kind="all_reduce", bytes=524288, count=72)
    older, newer = (on_link(3.0, [call], TIMES, 2, link, latencies(TIMES)) for link in PCIE.values())
    assert older > newer > 3.0
