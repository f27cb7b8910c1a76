"""Layouts that spread a model over processes by a table: base of `tensor`, `pipeline` and their product.

`place` checks the table against the model, says which part of each parameter this process reads, and sets what the
table's borders lower to. It sees the model through names, shapes and the attributes that `modelkit.borders` documents.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from .collectives import Group, Sum
from .lowering import lower
from .mesh import Mesh, everybody, make_mesh
from .process import join, started
from .stages import PipelineStage, balanced
from .table import Part, Table, part_of, unmatched
from .vocabulary import VocabularyShard


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpreadConfig:
    """What all such layouts have.

    Attributes:
        draft: "target" spreads the drafter as the target is, "replicate" keeps all of it in every process.
    """

    draft: Literal["target", "replicate"] = "target"


class Spread:
    """Base of layouts by table; a subclass has the two tables and says how many processes do what.

    Attributes:
        target, drafter: the tables.
    """

    Config: ClassVar[type[Any]] = SpreadConfig
    target: ClassVar[Table]
    drafter: ClassVar[Table]

    def __init__(self, config: Any) -> None:
        self.config = config
        self.table, self.of = self.target, "target"
        self.from_first: Callable[[torch.Tensor], torch.Tensor] | None = None

    def split(self, processes: int) -> tuple[int, int]:
        """(pipeline stages, tensor-parallel degree) of so many processes.

        Raises:
            ValueError: the config asks for something else.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"layout {type(self).__name__} of the {self.of}"

    def of_drafter(self) -> Spread | None:
        """The same layout with the drafter's table."""
        if self.config.draft == "replicate":
            return None
        other = copy.copy(self)
        other.table, other.of = self.drafter, "drafter"
        return other

    def connect(self, device: str) -> None:
        """Meet the other processes."""
        self.split(started())
        if started() > 1 and torch.device(device).index is not None:
            raise ValueError(f"device '{device}' for each of {started()} processes; write '{device.partition(':')[0]}'")
        join(device)
        self._device = torch.device(device).type
        if started() > 1:
            self.from_first = functools.partial(Group(everybody()).broadcast, source=0)

    def place(self, module: nn.Module) -> Mapping[str, Part] | None:
        """See `modelkit.borders.Layout`."""
        try:
            return self._place(module)
        except ValueError as error:
            if self.of == "target":
                raise
            raise ValueError(f'{error}; [parallel] draft = "replicate" keeps all of it in every process') from None

    def _place(self, module: nn.Module) -> Mapping[str, Part] | None:
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
        placements = self.table.placements(shapes, self.name)
        if started() == 1:
            return None
        stages, degree = self.split(started())
        mesh = make_mesh(self._device, self.mesh_sizes(module, stages, degree))
        units = {
            f"{path}.{child}": attention.dim
            for path, attention in attentions(module).items()
            for child, _ in attention.named_children()
            if child.endswith("_proj")
        }
        parts = {
            name: part_of(
                name, shape, placements[name], mesh, self.name, unit=units.get(name.rpartition(".")[0], 1),
                uneven=name in VOCABULARY_ROWS,
            )
            for name, shape in shapes.items()
        }  # fmt: skip
        for attention in attentions(module).values():
            attention.heads //= degree
            attention.kv_heads //= mesh.sizes["kv"]
        self._set_borders(module, mesh, shapes.get("norm.weight", (0,))[0])
        if VOCABULARY_ROWS[0] in shapes:
            self._set_vocabulary(module, shapes, placements, mesh)
        gone = self._keep_own_layers(module, mesh)
        return {name: part for name, part in parts.items() if not name.startswith(gone)}

    def mesh_sizes(self, module: nn.Module, stages: int, degree: int) -> dict[str, int]:
        """Processes along `pp`, `kv` and `rep`.

        Raises:
            ValueError: heads cannot be shared out among so many.
        """
        path, attention = next(iter(attentions(module).items()))
        heads, kv_heads = attention.heads, attention.kv_heads
        if heads % degree:
            many = f"more than its {heads} heads can use" if degree > heads else f"which does not divide {heads} heads"
            raise ValueError(f"{self.name}: degree {degree}, {many} ({path}.q_proj.weight, {heads} x {attention.dim})")
        if kv_heads % degree and degree % kv_heads:
            raise ValueError(
                f"{self.name}: degree {degree} and {kv_heads} KV heads ({path}.k_proj.weight, {kv_heads} x "
                f"{attention.dim}): one must be a multiple of the other"
            )
        kv = min(degree, kv_heads)
        return {"pp": stages, "kv": kv, "rep": degree // kv}

    def _set_borders(self, module: nn.Module, mesh: Mesh, width: int) -> None:
        modules = dict(module.named_modules())
        for pattern, border in self.table.borders.items():
            matching = [name for name in modules if fnmatchcase(name, pattern)]
            if not matching:
                raise unmatched(self.name, "module", pattern, [name for name in modules if name])
            enter, leave = lower(*border.enter, mesh), lower(*border.leave, mesh)
            for name in matching:
                for side, step in (("enter", enter), ("leave", leave)):
                    if step is None:
                        continue
                    if not hasattr(modules[name], side):
                        kind = type(modules[name]).__name__
                        raise ValueError(f"{self.name}: module '{name}' ({kind}) has no border '{side}'")
                    setattr(modules[name], side, step)
                    if isinstance(step, Sum):
                        step.prepare(width)

    def _set_vocabulary(
        self, module: Any, shapes: Mapping[str, tuple[int, ...]], placements: Mapping[str, Any], mesh: Mesh
    ) -> None:
        table, head = VOCABULARY_ROWS
        if placements[table] != placements[head]:
            raise ValueError(f"{self.name}: {table} and {head} must have the same placement")
        dims = tuple(dim for dim, size in mesh.sizes.items() if size > 1 and dim in placements[table])
        if not dims:
            return
        group: Group = mesh.group(dims)
        # Everybody's part, told from the processes of our group: they differ from us along `dims` only.
        members = torch.distributed.get_process_group_ranks(group.group)
        rows = [
            part_of(table, shapes[table], placements[table], mesh, self.name, uneven=True, rank=member).slices[0]
            for member in members
        ]
        module.vocabulary = VocabularyShard(group, [*(part.start for part in rows), rows[-1].stop])

    def _keep_own_layers(self, module: Any, mesh: Mesh) -> tuple[str, ...]:
        """Drop the layers of other stages; the beginnings of their parameters' names."""
        dim, count = self.table.stages, len(module.layers)
        if dim is None or mesh.sizes[dim] == 1:
            return ()
        stages = mesh.sizes[dim]
        if stages > count:
            raise ValueError(f"{self.name}: {stages} pipeline stages, more than its {count} layers can use")
        weights = [sum(p.numel() for p in layer.parameters()) for layer in module.layers]
        module.own = balanced(weights, stages)[mesh.coordinate(dim)]
        module.stage = PipelineStage(mesh.group((dim,)))
        others = [index for index in range(count) if index not in module.own]
        for index in others:
            module.layers[index] = nn.Identity()
        return tuple(f"layers.{index}." for index in others)


# Parameters whose rows are the vocabulary's; only their parts may differ in size.
VOCABULARY_ROWS = ("embed_tokens.weight", "lm_head.weight")


def attentions(module: nn.Module) -> dict[str, Any]:
    """The attention modules by name: whatever has `heads`, `kv_heads` and `dim`."""
    return {name: child for name, child in module.named_modules() if hasattr(child, "kv_heads")}


def check_processes(what: str, wanted: int, processes: int) -> None:
    """Refuse another number of processes than a layout is made for."""
    if wanted != processes:
        raise ValueError(
            f"{what} makes {wanted} process(es), but {processes} were started; "
            f"run under torchrun --nproc-per-node {wanted}"
        )
