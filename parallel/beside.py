"""Processes beside each other: each does whole pieces of work by itself, whichever is next when it asks.

No process group and no collectives, so that an engine in each is alone (see `process.met`); a store that counts the
pieces is enough. A process that fails is torchrun's to see, which ends the others.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from .process import rank, shared_store, started

T = TypeVar("T")
LOOK_SECONDS = 0.2


class Beside:
    """One job of all processes that torchrun started.

    Args:
        job: a name of its own for each job of a run.

    Raises:
        ValueError: torchrun's description of the processes is incomplete.
    """

    def __init__(self, job: str) -> None:
        self._store: Any = None
        if started() > 1:
            self._store = PrefixStore(f"flashtree/{job}", shared_store())

    def turns(self, count: int) -> Iterator[int]:
        """The numbers below `count`, each in one process only; the next one goes to the process that asks first."""
        if self._store is None:
            yield from range(count)
            return
        while (turn := self._store.add("turn", 1) - 1) < count:
            yield turn

    def gathered(self, value: T) -> list[T] | None:
        """What each process has found (picklable), by rank, in process 0; None in the others, which do not wait."""
        if self._store is None:
            return [value]
        if rank():
            self._store.set(f"found/{rank()}", pickle.dumps(value))
            return None
        return [value, *(pickle.loads(self._wait(f"found/{other}")) for other in range(1, started()))]

    def _wait(self, key: str) -> bytes:
        while not self._store.check([key]):  # not its own wait: that has a limit, and no ear for signals
            time.sleep(LOOK_SECONDS)
        return bytes(self._store.get(key))
