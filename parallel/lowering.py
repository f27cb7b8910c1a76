"""From placements on two sides of a border to the collective between them. The only place that derives collectives.

    Partial -> Replicate   all-reduce          Replicate -> Shard     our slice
    Partial -> Shard       reduce-scatter      Replicate -> Partial   the first process keeps it, the others have zeros
    Shard   -> Replicate   all-gather          Shard -> another Shard through Replicate

Activations are split into equal parts: what does not divide is padded with zeros, and whoever gathers gets the padding
behind the rest (see `modelkit.borders`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .collectives import Group, Sum
from .mesh import Mesh, Placements

Step = Callable[[Tensor], Tensor]


def lower(source: Placements, wanted: Placements, mesh: Mesh) -> Step | None:
    """What turns a process's part under `source` into its part under `wanted`; None where nothing is to be done.

    Dimensions of the mesh that change in the same way share one collective.

    Raises:
        ValueError: a dimension that the mesh does not have, or a change that no collective makes.
    """
    for name in (*source, *wanted):
        if name not in mesh.sizes:
            raise ValueError(f"placement on mesh dimension '{name}'; the mesh has {', '.join(mesh.sizes)}")
    changes: dict[tuple[Placement, Placement], list[str]] = {}
    for dim, size in mesh.sizes.items():
        change = source.get(dim, Replicate()), wanted.get(dim, Replicate())
        if size > 1 and change[0] != change[1]:
            changes.setdefault(change, []).append(dim)
    steps = [step for change, dims in changes.items() for step in _steps(*change, mesh.group(tuple(dims)))]
    if not steps:
        return None
    if len(steps) == 1:
        return steps[0]

    def all_steps(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return all_steps


def _steps(source: Placement, wanted: Placement, group: Group) -> list[Step]:
    if isinstance(source, Partial) and isinstance(wanted, Replicate):
        return [Sum(group)]
    if isinstance(source, Partial) and isinstance(wanted, Shard):
        return [lambda x: group.reduce_scatter(_split(x, wanted.dim, group.size))]
    if isinstance(source, Shard) and isinstance(wanted, Replicate):
        return [lambda x: _joined(group.all_gather(x), source.dim)]
    if isinstance(source, Replicate) and isinstance(wanted, Shard):
        return [lambda x: _split(x, wanted.dim, group.size)[group.rank].contiguous()]
    if isinstance(source, Replicate) and isinstance(wanted, Partial):
        return [(lambda x: x) if group.rank == 0 else torch.zeros_like]
    if isinstance(source, Shard) and isinstance(wanted, Shard):
        return [*_steps(source, Replicate(), group), *_steps(Replicate(), wanted, group)]
    raise ValueError(f"no collective makes {wanted} of {source}")


def _split(x: Tensor, dim: int, parts: int) -> Tensor:
    """[parts, ...]: equal pieces along a dimension, the last ones padded with zeros."""
    dim %= x.dim()
    size = -(-x.shape[dim] // parts)
    if missing := size * parts - x.shape[dim]:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))
    return x.reshape(*x.shape[:dim], parts, size, *x.shape[dim + 1 :]).movedim(dim, 0)


def _joined(x: Tensor, dim: int) -> Tensor:
    """Pieces [parts, ...] side by side along a dimension."""
    dim %= x.dim() - 1
    return x.movedim(0, dim).flatten(dim, dim + 1)
