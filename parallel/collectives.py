"""Collectives over a group of processes: functional operators that compiled steps can hold.

Chosen by device and size: on GPUs of one machine small sums go through symmetric memory, everything else through NCCL;
on CPUs through gloo.

Each takes a tensor and gives a new one; nothing is waited for on the host. Knows neither placements nor models.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from . import symmetric


class Group:
    """Processes that exchange tensors of equal shapes.

    Args:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.name: str = group.group_name
        self.has_reduce_scatter = "nccl" in dist.get_backend_config(group)
        self.symmetric = self.has_reduce_scatter and symmetric.prepare(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.symmetric and symmetric.fits(x):
            total: Tensor = symmetric.symmetric_all_reduce(x.contiguous(), self.name)
            return total
        return self.reduce_by_backend(x)

    def reduce_by_backend(self, x: Tensor) -> Tensor:
        """The same through NCCL or gloo, whatever the size."""
        return _done(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.name))

    def all_gather(self, x: Tensor) -> Tensor:
        """Everybody's tensor, [size, *x.shape]."""
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous()[None], self.size, self.name)
        return _done(gathered)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Our part x[rank] of the sum of [size, ...] over all processes."""
        if not self.has_reduce_scatter:
            return self.all_reduce(x)[self.rank]
        part = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name)
        return _done(part)[0]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The tensor of the process with that number in the group."""
        return _done(torch.ops._c10d_functional.broadcast(x.contiguous(), source, self.name))


class Sum:
    """All-reduce as a border of modules; see `modelkit.borders.FusedSum`."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.width: int | None = None  # of the rows that `add_norm` takes

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.group.all_reduce(x)

    def prepare(self, width: int) -> None:
        """Make what `add_norm` needs for rows of that width; all processes of the group call at the same time."""
        if self.group.symmetric and symmetric.prepare_rows(self.group.group, width):
            self.width = width

    def fuses(self, x: Tensor) -> bool:
        """Whether `add_norm` takes a residual stream [R, H] such as x."""
        return x.shape[1] == self.width and x.shape[0] <= symmetric.MOST_ROWS and x.dtype in symmetric.DTYPES

    def add_norm(self, addend: Tensor, x: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
        """x + the sum of everybody's addend, and its norm."""
        both: list[Tensor] = symmetric.sum_add_norm(addend, x, weight, eps, self.group.name)
        return both


def _done(x: Tensor) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return result
