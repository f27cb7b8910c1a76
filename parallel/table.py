"""A layout as data: which placement each parameter has, and what crosses the borders of modules.

Knows patterns and shapes; neither processes nor collectives.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch.distributed.tensor import Partial, Replicate, Shard

from .mesh import Mesh, Placements

WHOLE: Placements = {}
# Output features over all processes of a layer; those of KV heads along `kv` only; input features.
COLUMNS: Placements = {"kv": Shard(0), "rep": Shard(0)}
KV_COLUMNS: Placements = {"kv": Shard(0)}
ROWS: Placements = {"kv": Shard(1), "rep": Shard(1)}
VOCABULARY: Placements = {"pp": Shard(0), "kv": Shard(0), "rep": Shard(0)}
# Activations: each process has a summand; the last dimension, or the rows, are split.
SUMMANDS: Placements = {"kv": Partial(), "rep": Partial()}
FEATURES: Placements = {"kv": Shard(-1), "rep": Shard(-1)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """Placements on the two sides of a module's borders, as (source, wanted).

    Attributes:
        enter: of what comes in.
        leave: of what goes out.
    """

    enter: tuple[Placements, Placements] = (WHOLE, WHOLE)
    leave: tuple[Placements, Placements] = (WHOLE, WHOLE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A layout of one kind of model.

    Attributes:
        parameters: placement by pattern of the name (`*` is anything); the first pattern that matches counts.
        borders: by pattern of the module's name, "" is the model itself.
        optional: patterns of parameters that not every model has.
        stages: mesh dimension along which the layers are spread, whole ones; None: every process runs them all.
    """

    parameters: Mapping[str, Placements]
    borders: Mapping[str, Border]
    optional: frozenset[str] = frozenset()
    stages: str | None = "pp"

    def placements(self, names: Iterable[str], what: str) -> dict[str, Placements]:
        """Each parameter's placements.

        Args:
            names: of all parameters.
            what: the model and the layout, for messages.

        Raises:
            ValueError: a parameter without a pattern, or a pattern without a parameter.
        """
        found: dict[str, Placements] = {}
        used: set[str] = set()
        names = list(names)
        for name in names:
            matching = [pattern for pattern in self.parameters if fnmatchcase(name, pattern)]
            if not matching:
                raise ValueError(f"{what}: parameter {name} has no placement; patterns: {', '.join(self.parameters)}")
            found[name] = self.parameters[matching[0]]
            used.update(matching)
        for pattern in self.parameters:
            if pattern not in used and pattern not in self.optional:
                raise unmatched(what, "parameter", pattern, names)
        return found


def unmatched(what: str, kind: str, pattern: str, names: list[str]) -> ValueError:
    """A pattern that matches nothing."""
    close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
    hint = f"; the nearest is {close[0]}" if close else ""
    return ValueError(f"{what}: pattern '{pattern}' matches no {kind}{hint}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """See `modelkit.borders.Part`."""

    slices: tuple[slice, ...]
    zero: bool = False


def part_of(
    name: str, shape: tuple[int, ...], placements: Placements, mesh: Mesh, what: str, *, unit: int = 1,
    uneven: bool = False, rank: int | None = None,
) -> Part:  # fmt: skip
    """What a process holds of a parameter.

    Args:
        name: of the parameter, for messages.
        shape: of all of it.
        placements: its own.
        mesh: of all processes.
        what: the model and the layout, for messages.
        unit: rows (or columns) that must not be separated: those of a head.
        uneven: parts may differ by a row.
        rank: which process; None is ours.

    Raises:
        ValueError: it cannot be shared out; the message has the numbers.
    """
    slices, zero = [slice(0, size) for size in shape], False
    if not uneven:
        check_divides(name, shape, placements, mesh, what, unit)
    for dim, size in mesh.sizes.items():
        placement, place = placements.get(dim, Replicate()), mesh.coordinate(dim, rank)
        if isinstance(placement, Partial):
            zero = zero or place > 0
        if not isinstance(placement, Shard) or size == 1:
            continue
        start, stop = slices[placement.dim].start, slices[placement.dim].stop
        each = -(-(stop - start) // (size * unit)) * unit
        first, last = min(start + each * place, stop), min(start + each * (place + 1), stop)
        if first == last:
            raise ValueError(
                f"{what}: {name} {list(shape)}: {stop - start} along dimension {placement.dim} are too few for {size} "
                f"processes along '{dim}'"
            )
        slices[placement.dim] = slice(first, last)
    return Part(slices=tuple(slices), zero=zero)


def check_divides(name: str, shape: tuple[int, ...], placements: Placements, mesh: Mesh, what: str, unit: int) -> None:
    """Refuse parts of different sizes; arguments as in `part_of`."""
    for number, size in enumerate(shape):
        dims = tuple(dim for dim in mesh.sizes if placements.get(dim) == Shard(number))
        count, processes = size // unit, mesh.size(dims)
        if count % processes:
            heads = f" ({count} heads of {unit})" if unit > 1 else ""
            raise ValueError(
                f"{what}: {name} {list(shape)}: dimension {number} has {size}{heads}, which {processes} processes "
                f"({', '.join(dims)}) cannot share evenly"
            )
