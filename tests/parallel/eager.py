"""A layout as DTensor runs it, eagerly: the oracle of what `parallel.lowering` derives. And a layout by table alone.

Parameters are DTensors, linear layers and norms are DTensor's own, and a border is `redistribute`; DTensor must find
the placement there that the table says. Rotation and attention have no sharding rule and run on local heads.
"""

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from modelkit import load_model
from modelkit.backend import Reference, Stream
from modelkit.functional import linear
from modelkit.rope import rotate
from modelkit.rows import chain
from parallel.mesh import make_mesh
from parallel.table import COLUMNS, FEATURES, SUMMANDS, VOCABULARY, WHOLE, Border, Table
from parallel.tensor import DRAFTER, LAYERS, OPTIONAL, Tensor

ROWS_SPLIT = {"kv": Shard(0), "rep": Shard(0)}
SEQUENCE = {
    "": Border(enter=(WHOLE, ROWS_SPLIT), leave=(ROWS_SPLIT, WHOLE)),
    "layers.*.self_attn": Border(enter=(ROWS_SPLIT, WHOLE), leave=(SUMMANDS, ROWS_SPLIT)),
    "layers.*.mlp": Border(enter=(ROWS_SPLIT, WHOLE), leave=(SUMMANDS, ROWS_SPLIT)),
}


class Sequence(Tensor):
    """Sequence-parallel: between blocks each process has some of the rows."""

    target = Table(
        parameters={"embed_tokens.weight": VOCABULARY, "lm_head.weight": VOCABULARY, **LAYERS},
        borders=SEQUENCE,
        optional=OPTIONAL,
    )
    drafter = Table(
        parameters={"fc.weight": COLUMNS, **LAYERS},
        borders={"fc": Border(leave=(FEATURES, WHOLE)), **SEQUENCE},
        optional=DRAFTER.optional,
    )


class OnDTensors(Reference):
    """The reference operations; what goes into attention and what comes out is local."""

    def __init__(self, mesh, attention):
        self.mesh = mesh
        self.group = attention.heads // mesh.size(("kv", "rep")) // (attention.kv_heads // mesh.sizes["kv"])

    def plan(self, rows, cache, window, *, group, dtype, ancestors=None):
        return super().plan(rows, cache, window, group=self.group, dtype=dtype, ancestors=ancestors)

    def attention_input(self, attention, stream, norm, angles, cache, layer):
        x = self.normed(stream, norm)
        x = x if attention.enter is None else attention.enter(x)
        q, k, v = (part.to_local() for part in attention.project(x))
        return rotate(q, *angles), rotate(k, *angles), v

    def attention_output(self, attention, mixed, stream):
        placed = self.mesh.listed({"kv": Shard(1), "rep": Shard(1)})
        out = linear(DTensor.from_local(mixed, self.mesh.devices, placed), attention.o_proj)
        return Stream(x=stream.x + attention.leave(out))


def eager_logits(path, layout, ids):
    """Logits [B, T, V] of ids [B, T]."""
    model = load_model(path, dtype="float32", fuse=False)
    table, (stages, degree) = layout.target, layout.split(torch.distributed.get_world_size())
    mesh = make_mesh("cpu", layout.mesh_sizes(model, stages, degree))
    placements = table.placements([name for name, _ in model.named_parameters(remove_duplicate=False)], "oracle")
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        placed = distribute_tensor(parameter.detach(), mesh.devices, mesh.listed(placements[name]))
        setattr(model.get_submodule(owner), leaf, Parameter(placed, requires_grad=False))
    if model.config.tie_word_embeddings:
        model.tie()
    model.backend = OnDTensors(mesh, model.attention)
    for pattern, border in table.borders.items():
        kind = pattern.rpartition(".")[2]
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == kind and (name == pattern or kind in ("self_attn", "mlp")):
                module.enter = crossing(border.enter, mesh)
                module.leave = crossing(border.leave, mesh)
    with torch.no_grad():
        return _forward(model, mesh, ids)


def crossing(sides, mesh):
    source, wanted = map(mesh.listed, sides)

    def border(x):
        assert list(x.placements) == [Shard(p.dim % x.dim()) if isinstance(p, Shard) else p for p in source]
        return x.redistribute(mesh.devices, wanted)

    return border


def _forward(model, mesh, ids):
    batch, length = ids.shape
    start = torch.zeros(batch, dtype=torch.int64)
    rows = chain(token=ids, start=start, count=start + length, rows=batch * length, bound=0)
    whole = mesh.listed({})
    # DTensor's own embedding masks along one dimension of the mesh only.
    table = model.embed_tokens.weight.full_tensor()
    embedded = DTensor.from_local(table[rows.token], mesh.devices, whole)
    stream = Stream(x=embedded if model.enter is None else model.enter(embedded))
    rope = model.config.rope
    angles = model.backend.angles(model.inverse_frequencies, rope.attention_factor, rows.position, torch.float32)
    plans = model.plans(rows, None)
    for block, window in zip(model.layers, model.config.windows, strict=True):
        stream = block(stream, angles, plans[window], model.backend, None, 0)
    hidden = model.backend.normed(stream, model.norm)
    hidden = hidden if model.leave is None else model.leave(hidden)
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
    return logits.full_tensor().view(batch, length, -1)


def changed(parameters=None, borders=None, drop=()):
    """A tensor layout with a mistake in its target's table."""
    table = Tensor.target
    kept = {name: placed for name, placed in table.parameters.items() if name not in drop}
    wrong = Table(
        parameters={**(parameters or {}), **kept}, borders={**table.borders, **(borders or {})}, optional=OPTIONAL
    )
    return type("Wrong", (Tensor,), {"target": wrong})


WRONG = {
    "misspelt": changed({"layers.*.self_attn.qq_proj.*": COLUMNS}),
    "incomplete": changed(drop=["embed_tokens.weight"]),
    "borderless": changed(borders={"layers.*.ffn": Border()}),
    "wrong_border": changed(borders={"norm": Border(leave=(SUMMANDS, WHOLE))}),
    "other_mesh": changed(borders={"layers.*.mlp": Border(leave=({"ep": Shard(0)}, WHOLE))}),
    "two_vocabularies": changed({"lm_head.weight": WHOLE}, drop=["lm_head.weight"]),
}
