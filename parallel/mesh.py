"""A named mesh of all processes, and the groups along its dimensions.

Dimensions: `pp` pipeline stages, then `kv` and `rep`, whose product is the tensor-parallel degree: KV heads are shared
out along `kv` and repeated along `rep`, so that there may be more processes than KV heads.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from .collectives import Group

# Placement by mesh dimension; what is not named is Replicate.
Placements = Mapping[str, Placement]


class Mesh:
    """All processes as a grid; the last dimension varies fastest with the rank. Make it with `make_mesh`.

    Args:
        device_type: "cpu" or "cuda".
        sizes: processes along each dimension, in order.
    """

    def __init__(self, device_type: str, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.devices: DeviceMesh = init_device_mesh(
            device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )  # fmt: skip
        self._groups: dict[tuple[str, ...], Group] = {}

    def size(self, dims: tuple[str, ...]) -> int:
        """Processes along some dimensions together."""
        return functools.reduce(lambda count, dim: count * self.sizes[dim], dims, 1)

    def coordinate(self, dim: str, rank: int | None = None) -> int:
        """Place of a process (None: ours) along a dimension."""
        rank = dist.get_rank() if rank is None else rank
        names = list(self.sizes)
        return rank // self.size(tuple(names[names.index(dim) + 1 :])) % self.sizes[dim]

    def group(self, dims: tuple[str, ...]) -> Group:
        """The processes that differ from ours in these dimensions only; every process must ask at the same time."""
        dims = tuple(dim for dim in self.sizes if dim in dims and self.sizes[dim] > 1)
        if dims not in self._groups:
            self._groups[dims] = Group(self._make(dims))
        return self._groups[dims]

    def _make(self, dims: tuple[str, ...]) -> dist.ProcessGroup:
        if self.size(dims) == dist.get_world_size():
            return everybody()
        if len(dims) == 1:
            return self.devices.get_group(dims[0])
        names = list(self.sizes)
        others = [dim for dim in names if dim not in dims]
        grid = torch.arange(dist.get_world_size()).view(*self.sizes.values())
        lines = grid.permute(*(names.index(dim) for dim in (*others, *dims))).reshape(-1, self.size(dims))
        group: dist.ProcessGroup | None
        group, _ = dist.new_subgroups_by_enumeration(lines.tolist())  # type: ignore[no-untyped-call]
        assert group is not None, "every process stands in one line"
        return group

    def listed(self, placements: Placements) -> list[Placement]:
        """Placements as DTensor wants them, one a dimension."""
        return [placements.get(dim, Replicate()) for dim in self.sizes]


def everybody() -> dist.ProcessGroup:
    """The group of all processes."""
    world = dist.group.WORLD
    assert world is not None, "Layout.connect comes first"
    return world


_meshes: dict[tuple[object, ...], Mesh] = {}


def make_mesh(device_type: str, sizes: Mapping[str, int]) -> Mesh:
    """The mesh of these sizes; the same one when it is asked for again, as process groups are never freed."""
    key = (everybody(), device_type, tuple(sizes.items()))
    if key not in _meshes:
        _meshes[key] = Mesh(device_type, sizes)
    return _meshes[key]
