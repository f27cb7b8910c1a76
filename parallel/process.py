"""The processes of a run: who we are, how they find each other, and which of them reports what went wrong.

`torchrun` starts one process a device, on one machine or several, and describes them in the environment; everything
here reads that description. Knows neither models nor placements.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
_ERROR = "flashtree/first error"
MEETING = datetime.timedelta(minutes=5)
_store: Any = None


def started() -> int:
    """Processes that this run was started with (1 without torchrun)."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Our number among them; 0 prints, and decides wherever one has to."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def met() -> bool:
    """Whether we are one of several processes that work together, not merely started beside others."""
    return (_store is not None or dist.is_initialized()) and started() > 1


def local_device(device: str, share: bool = False) -> str:
    """The device of this process: "cuda" becomes the one of our number on this machine.

    Args:
        device: as the config names it.
        share: processes that work beside each other may share a device where there are fewer.
    """
    if started() == 1 or torch.device(device) != torch.device("cuda"):
        return device
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return f"cuda:{number % max(torch.cuda.device_count(), 1) if share else number}"


def join(device: str) -> None:
    """Meet the other processes, unless we are alone or have met them before.

    Args:
        device: of the model; CUDA devices talk through NCCL, and host values through gloo.

    Raises:
        ValueError: torchrun's description of the processes is incomplete.
    """
    if started() == 1 or dist.is_initialized():
        return
    meet()
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(local_device(device))
        # NVLink multicast needs a fabric manager that many machines do not run, and hangs without it.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=_store, rank=rank(), world_size=started())


def meet() -> None:
    """Reach the store through which the processes find each other, as one that works together with the others.

    Raises:
        ValueError: torchrun's description of the processes is incomplete.
    """
    global _store
    if started() > 1:
        _store = shared_store()


@functools.cache
def shared_store() -> Any:
    """The store of all processes that torchrun started.

    Raises:
        ValueError: torchrun's description of the processes is incomplete.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"several processes, but {', '.join(missing)} not set: start them with torchrun")
    return next(iter(rendezvous("env://", timeout=MEETING)))[0]


def wait_for_all() -> None:
    """Until all processes have come so far, however long that takes."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # a barrier on the host; that of NCCL would need the device


def leave() -> None:
    """Part from the others, when all is done and no captured graph is left that holds a collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def after_first(make: Callable[[], T]) -> T:
    """Process 0 makes it, then the others do: for what is kept on disk."""
    made = make() if rank() == 0 else None
    of_first(None)
    return make() if made is None else made


def of_first(value: T) -> T:
    """Process 0's value of something on the host (picklable), in every process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    held: list[Any] = [value]
    dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
    result: T = held[0]
    return result


def is_first_error(message: str) -> bool:
    """Whether no process has failed before us; the others fail because of the first one, or in the same way."""
    if _store is None:
        return rank() == 0
    try:
        mine = f"{rank()}: {message}"
        return bool(_store.compare_set(_ERROR, "", mine).decode() == mine)
    except RuntimeError:
        return False  # the process that keeps the store is gone, and has said why


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another process does not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def failure_seen() -> Callable[[], bool]:
    """A check, for another thread, whether some process has failed (by a connection of its own to the store)."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch._C._distributed_c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=MEETING)

    def check() -> bool:
        try:
            return bool(store.check([_ERROR]))
        except RuntimeError:
            return True

    return check
