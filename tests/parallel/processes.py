"""A group of processes that stays alive over many tests; each call runs one function of `cases.py` in all of them."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

SECONDS = 100  # nothing here takes long: a call that does has hung


class Group:
    """Several processes on this machine, connected as torchrun would connect them."""

    seconds = SECONDS

    def __init__(self, size):
        # Forked from a server that has imported everything and done nothing: a spawned process would take seconds.
        self.size, self._context = size, multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["cases"])
        self._members = []
        found = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        with mock.patch.dict(os.environ, {"PYTHONPATH": found}):
            forkserver.ensure_running()

    def _start(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, rank, self.size, port), daemon=True)
            process.start()
            self._members.append((process, ours))

    def call(self, name, *args, **kwargs):
        """Results of `cases.<name>`, one a process; an exception is returned as its class name and text."""
        if not self._members:
            self._start()
        for _, pipe in self._members:
            pipe.send((name, args, kwargs))
        results, end = [], time.monotonic() + self.seconds
        for rank, (_, pipe) in enumerate(self._members):
            if not pipe.poll(max(end - time.monotonic(), 0)):
                self.stop()
                raise TimeoutError(f"{name}: process {rank} of {self.size} did not answer within {self.seconds} s")
            try:
                results.append(pipe.recv())
            except EOFError:
                self.stop()
                raise RuntimeError(f"{name}: process {rank} of {self.size} died") from None
        if len({failed for failed, _ in results}) > 1:
            self.stop()  # some may wait for the others yet: the next call gets new ones
        return results

    def __getattr__(self, name):
        """`group.generate(...)`: the results, which must not be exceptions."""
        if name.startswith("_"):
            raise AttributeError(name)

        def checked(*args, **kwargs):
            results = self.call(name, *args, **kwargs)
            for rank, (failed, value) in enumerate(results):
                assert not failed, f"process {rank}: {value}"
            return [value for _, value in results]

        return checked

    def refused(self, name, *args, **kwargs):
        """The messages of the ValueErrors that every process raises, without duplicates."""
        results = self.call(name, *args, **kwargs)
        assert all(failed and value.startswith("ValueError: ") for failed, value in results), results
        return sorted({value.partition("\n")[0].removeprefix("ValueError: ") for _, value in results})

    def stop(self):
        """End all processes."""
        for process, _ in self._members:
            process.kill()
            process.join()
        self._members = []


def _serve(pipe, rank, size, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    sys.path.insert(0, str(Path(__file__).parent))
    import cases
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except EOFError:  # whoever asked is gone
            return
        try:
            pipe.send((False, getattr(cases, name)(*args, **kwargs)))
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            pipe.send((True, text))
