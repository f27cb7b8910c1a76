"""Values made ahead: in order, no further than told, errors where they are due."""

import threading

import pytest

from spec.training.ahead import made_ahead


def test_values_come_in_order_and_are_made_ahead_by_one_thread():
    made, threads, third = [], set(), threading.Event()

    def make(item):
        made.append(item)
        threads.add(threading.get_ident())
        if item == 3:
            third.set()
        return item * 10

    values = made_ahead(make, range(100), 3)
    assert next(values) == 0
    assert third.wait(10)  # nobody asked for it yet
    assert max(made) <= 4
    assert [*values] == [10 * n for n in range(1, 100)]
    assert made == [*range(100)] and len(threads) == 1 and threading.get_ident() not in threads


def test_an_error_is_raised_where_its_value_is_due():
    values = made_ahead(lambda item: 1 // item, [2, 1, 0, 1], 3)
    assert [next(values), next(values)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(values)


def test_fewer_than_are_made_ahead():
    assert [*made_ahead(str, [1, 2], 5)] == ["1", "2"]
