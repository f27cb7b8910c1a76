"""Values made by a thread while those before them are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def made_ahead(make: Callable[[A], B], items: Iterable[A], count: int) -> Iterator[B]:
    """make(item) of each item in turn, at most `count` ahead of the one that is asked for.

    One thread makes them all, so `make` may keep state of its own. What it raises is raised where its value is due.
    """
    with ThreadPoolExecutor(1) as thread:
        waiting: deque[Future[B]] = deque()
        try:
            for item in items:
                waiting.append(thread.submit(make, item))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
