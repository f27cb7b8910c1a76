"""What the processes of a test group run; see `processes.py`. Arguments and results are plain values."""

import functools

import torch
import torch.distributed as dist
from eager import WRONG, Sequence, eager_logits
from torch.distributed.tensor import Partial, Replicate, Shard

from modelkit import load_model
from parallel import LAYOUTS, process
from parallel.lowering import lower
from parallel.mesh import everybody, make_mesh
from spec import Engine

LAYOUTS.register("sequence")(Sequence)
for name, layout in WRONG.items():
    LAYOUTS.register(name)(layout)


@functools.lru_cache(maxsize=4)
def _engine(text):
    return Engine.from_config(eval(text))


def _built(tables, fresh=False):
    return Engine.from_config(tables) if fresh else _engine(repr(tables))


def odd_ones(logits, nodes):
    """A user's processor: wants the whole vocabulary, and bans the even ids after an odd token."""
    even = torch.arange(logits.shape[-1]) % 2 == 0
    assert logits.shape[-1] == 97
    return logits.masked_fill(even & (nodes.token % 2 == 1)[:, None], -torch.inf)


def _layout(table):
    layout = LAYOUTS.build(table)
    layout.connect("cpu")
    return layout


def generate(tables, prompts, plain=False, **settings):
    """Tokens, accepted lengths, and the lengths of the caches afterwards."""
    engine = _built(tables)
    outs = engine.generate(prompts, plain=plain, **settings)
    return (
        [out.token_ids for out in outs],
        [out.stats.per_step_accepted for out in outs],
        engine.state.cache.length.tolist(),
    )


def traced(tables, prompts, **settings):
    """`generate` with steps traced whole, without the time that inductor takes; and the number of graphs."""
    from unittest import mock

    from torch._dynamo.utils import counters

    compile_whole = functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)  # noqa: TID251
    before = counters["stats"]["unique_graphs"]
    with mock.patch("torch.compile", lambda step, **options: compile_whole(step)):
        outs = _built(tables, fresh=True).generate(prompts, **settings)
        accepted = [out.stats.per_step_accepted for out in outs]
    return [out.token_ids for out in outs], accepted, counters["stats"]["unique_graphs"] - before


def with_kernels(tables, prompts, **settings):
    """`generate` by the Triton backend, whose kernels are replaced by their meaning; with speculation and plainly."""
    from unittest import mock

    from stand_ins import triton_backend

    with mock.patch("modelkit.loading.make_backend", lambda name, device: triton_backend()()):
        engine = _built(tables, fresh=True)
    return [[out.token_ids for out in engine.generate(prompts, plain=plain, **settings)] for plain in (False, True)]


def with_fused_sums(tables, prompts, **settings):
    """The same with sums of few rows taken by the kernel that adds and norms, or what it means; and how many were."""
    from unittest import mock

    from stand_ins import add_norm

    from parallel.collectives import Sum

    taken = []

    def meaning(border, addend, x, weight, eps):
        assert addend.shape[1:] == x.shape and addend.is_contiguous() and x.is_contiguous()
        taken.append(len(x))
        return add_norm(x, border(addend.sum(0))[None], weight, eps)

    with mock.patch.object(Sum, "fuses", lambda border, x: len(x) <= 40), mock.patch.object(Sum, "add_norm", meaning):
        return with_kernels(tables, prompts, **settings), len(taken), max(taken, default=0)


def on_gpus(tables, prompts, fused=False, **settings):
    """Tokens with speculation and plainly, twice each, and what the compiler and its graphs have counted."""
    import dataclasses
    import os
    from unittest import mock

    from modelkit.compile import Counters

    with mock.patch.dict(os.environ, {"FLASHTREE_FUSED_SUMS": "1" if fused else "0"}):
        engine = _built(tables, fresh=True)
    outs, counted = [], []
    for plain in (False, True) * 2:
        outs.append([out.token_ids for out in engine.generate(prompts, plain=plain, **settings)])
        counted.append(dataclasses.asdict(Counters.read()))
    if fused:
        from parallel import symmetric

        assert symmetric._mailboxes and all(boxes.epochs[0] > 0 for boxes in symmetric._mailboxes.values())
    return outs, counted


def sums(sizes, repeat):
    """Sums by symmetric memory and by NCCL, again and again in one graph's buffers: what is used, what differs."""
    from parallel.collectives import Group
    from parallel.symmetric import fits

    process.join("cuda")
    group, wrong = Group(everybody()), []
    for dtype in (torch.bfloat16, torch.float32):
        for size in sizes:
            for number in range(repeat):
                generator = torch.Generator("cuda").manual_seed(1000 * number + process.rank())
                x = torch.randn(size, device="cuda", generator=generator).to(dtype)
                found, expected = group.all_reduce(x), x.double()
                dist.all_reduce(expected)
                if not torch.allclose(
                    found.double(), expected, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=1e-2
                ):
                    wrong.append((str(dtype), size, number))
    return group.symmetric and all(fits(torch.empty(size)) for size in sizes), wrong


def fused_sums(width, repeat):
    """Sums that also add and norm: the most rows, what differs, whether all processes have the same bits."""
    import os
    from unittest import mock

    from parallel.collectives import Group, Sum
    from parallel.symmetric import MOST_ROWS

    process.join("cuda")
    border, wrong, seen = Sum(Group(everybody())), [], []
    with mock.patch.dict(os.environ, {"FLASHTREE_FUSED_SUMS": "1"}):
        border.prepare(width)
    assert border.fuses(torch.empty(MOST_ROWS, width, dtype=torch.bfloat16))
    weight = torch.linspace(0.5, 2.0, width, device="cuda").bfloat16()

    def numbers(seed, *shape):
        return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))

    def check(where, share, x, found):
        total = share.sum(0).bfloat16().float()
        dist.all_reduce(total)
        expected = x + total.bfloat16()
        wide = expected.double()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
        close = torch.allclose(found[0].double(), wide, atol=0.1, rtol=1e-2)
        if not close or not torch.allclose(found[1].double(), normed, atol=0.1, rtol=2e-2):
            wrong.append(where)
        seen.append(found[0].double().sum())

    for number in range(repeat):
        rows, splits = 1 + number * 7 % MOST_ROWS, 1 + number % 3
        share, x = (
            numbers(2 * number + 10_000 * process.rank(), splits, rows, width),
            numbers(number, rows, width).bfloat16(),
        )
        check(number, share, x, border.add_norm(share, x, weight, 1e-5))
    sums = torch.stack(seen)
    theirs = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, sums)
    return MOST_ROWS, wrong, all(torch.equal(theirs[0], other) for other in theirs)


def order_in_compiled_code():
    """Collectives of a function as inductor orders them, with a stand-in for symmetric memory; and its results."""
    from unittest import mock

    from torch._inductor import comms, config

    from parallel import symmetric
    from parallel.collectives import Group
    from parallel.symmetric import keep_in_order, sum_add_norm, symmetric_all_reduce

    process.join("cpu")
    group, found = Group(everybody()), []
    symmetric_all_reduce.register_kernel("cpu")(lambda x, name: group.reduce_by_backend(x))
    boxes = mock.Mock()
    boxes.sum_add_norm = lambda addend, x, weight, eps: [x + group.reduce_by_backend(addend.sum(0)), x * weight]
    symmetric._mailboxes[group.name, 4] = boxes
    keep_in_order()

    def step(x):
        first = symmetric_all_reduce(x, group.name)
        gathered = group.all_gather(x)
        total, normed = sum_add_norm(x.view(1, 1, 4), first.view(1, 4), x, 0.5, group.name)
        return symmetric_all_reduce(first, group.name), gathered, group.broadcast(x, 1), total, normed

    def seen(nodes, *rest):
        found.extend(node.node.op_overload._opname for node in nodes if comms.contains_collective(node))
        return decide(nodes, *rest)

    decide = comms.decide_global_ordering_of_comms
    with mock.patch.object(comms, "decide_global_ordering_of_comms", seen), config.patch(force_disable_caches=True):
        results = torch.compile(step, fullgraph=True)(torch.ones(4) * (1 + process.rank()))  # noqa: TID251
    return found, [result.flatten().tolist() for result in results]


def compared(tables, prompt, a, b, width):
    """`compare` of two outputs in every process."""
    from spec.compare import compare

    found = compare(_built(tables).target, prompt, a, b, width)
    return found.first_difference, found.gap, found.noise


def beside(count):
    """The pieces of work that came to this process, and what it was told of the others."""
    from parallel.beside import Beside

    job = Beside("pieces")
    mine = list(job.turns(count))
    return mine, job.gathered(mine)


def connect(layout, device):
    """Nothing but errors."""
    LAYOUTS.build(layout).connect(device)


def build(tables):
    """Nothing but errors."""
    _built(tables, fresh=True)


def random_weights(tables, names):
    """Parameters of a target that is a shape, whole again."""
    engine = Engine(_config(tables), random_weights=True)
    return [engine.target.get_parameter(name).tolist() for name in names]


def _config(tables):
    from spec.config import load_config

    return load_config(tables)


def held(tables):
    """Elements of target and drafter in this process, layers, and vocabulary."""
    engine = _built(tables)
    count = {name: p.numel() for name, p in engine.target.named_parameters()}
    draft = {name: p.numel() for name, p in getattr(engine.drafter, "model", torch.nn.Module()).named_parameters()}
    caches = sum(buffer.numel() for layer in engine.state.cache.layers for buffer in layer.buffers())
    return count, draft, caches, list(engine.target.own)


def disagreeing(tables, prompts, where, **settings):
    """Generate while process 1 sees other numbers: +1 ULP at ties of logits ("logits"), or other drafts ("drafts")."""
    engine = _built(tables, fresh=True)
    if process.rank() == 1 and where == "logits":
        accept = engine.sampler.accept

        def nudged(logits, nodes):
            half = logits.shape[-1] // 2
            more = torch.nextafter(logits[:, half:], torch.full_like(logits[:, half:], torch.inf))
            return accept(torch.cat([logits[:, :half], more], -1), nodes)

        engine.sampler.accept = nudged
    if process.rank() == 1 and where == "drafts":
        build = engine.tree.build
        engine.tree.build = lambda proposal, anchor: _moved(build(proposal, anchor))
    outs = engine.generate(prompts, **settings)
    return [out.token_ids for out in outs]


def _moved(tree):
    import dataclasses

    return dataclasses.replace(tree, token=torch.cat([tree.token[:, :1], (tree.token[:, 1:] + 1) % 90], 1))


def own_prompts(tables, prompts, **settings):
    """Each process asks for its own prompt: what comes out is process 0's."""
    engine = _built(tables)
    return [out.token_ids for out in engine.generate([prompts[process.rank()]], **settings)]


def scores(path, layout, ids):
    """Logits of a full forward, lowered."""
    model = load_model(path, dtype="float32", layout=_layout(layout))
    return model.score(torch.tensor(ids)).tolist()


def eager(path, layout, ids):
    """The same as DTensor does it."""
    return eager_logits(path, _layout(layout), torch.tensor(ids)).tolist()


def crossings(sizes):
    """Every change of placement, applied to parts of known wholes; the errors against the definition."""
    process.join("cpu")
    mesh = make_mesh("cpu", sizes)
    dims = tuple(sizes)
    coordinates = {dim: mesh.coordinate(dim) for dim in dims}
    whole = torch.arange(7 * 8, dtype=torch.float32).view(7, 8)
    kinds = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "S-1": Shard(-1), "P": Partial()}
    size, number = mesh.size(dims), 0
    for dim in dims:
        number = number * sizes[dim] + coordinates[dim]
    wrong = []
    for a, source in kinds.items():
        for b, wanted in kinds.items():
            if "S" in a and b == "P":
                continue  # nobody needs it: refused
            step = lower(dict.fromkeys(dims, source), dict.fromkeys(dims, wanted), mesh)
            x = _part(whole, source, size, number)
            got = x if step is None else step(x)
            if b == "P":
                dist.all_reduce(got := got.clone())
                expected = whole
            else:
                expected = _part(whole, wanted, size, number)
            if "S0" in a and b != a:
                got = got[: expected.shape[0]]  # whoever gathers gets the padding behind the rest
            if got.shape != expected.shape or not torch.equal(got, expected):
                wrong.append((a, b, got.tolist(), expected.tolist()))
    return wrong


def _part(whole, placement, size, number):
    if isinstance(placement, Replicate):
        return whole
    if isinstance(placement, Partial):
        return whole * ((1.0 - (size - 1) * 2) if number == 0 else 2.0)
    dim = placement.dim % 2
    each = -(-whole.shape[dim] // size)
    padded = torch.nn.functional.pad(whole, (0, 0) * (1 - dim) + (0, each * size - whole.shape[dim]))
    return padded.narrow(dim, number * each, each)


def refused_crossing(sizes, source, wanted):
    """`lower` between placements given as {dimension: code}."""
    process.join("cpu")
    codes = {"R": Replicate(), "S": Shard(0), "P": Partial()}
    lower({d: codes[c] for d, c in source.items()}, {d: codes[c] for d, c in wanted.items()}, make_mesh("cpu", sizes))


def vocabulary(sizes, k):
    """Reductions of a row-wise logit table against the plain ones; the names of those that differ."""
    from parallel.collectives import Group
    from parallel.vocabulary import VocabularyShard

    process.join("cpu")
    shard = VocabularyShard(Group(everybody()), [sum(sizes[:i]) for i in range(len(sizes) + 1)])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, sum(sizes), generator=generator)
    x[1, 3] = x[1, -1] = 9.0  # a tie over two parts: the lowest id
    x[2, -2] = torch.nan
    x[3] = -torch.inf
    x[3, 5] = 0.0
    own = x[:, shard.first : shard.first + shard.size]
    ids, values = shard.best(own)
    found = {
        "gather": (shard.gather(own), x),
        "amax": (shard.amax(own), x.amax(-1, keepdim=True)),
        "argmax": (shard.argmax(own), x.argmax(-1)),
        "best ids": (ids, x.argmax(-1)),
        "best values": (values, x.gather(-1, x.argmax(-1, keepdim=True))[:, 0]),
        "add": (shard.add(own.nan_to_num(0, 0, 0).long().sum(-1)), x.nan_to_num(0, 0, 0).long().sum(-1)),
    }

    def local(logits, k):
        best, ids = logits.topk(k, -1)
        return ids, best - logits.logsumexp(-1, keepdim=True)

    rows = [0, 4]
    ids, score = shard.top_candidates(own[rows][None], k, local)
    expected_ids, expected = local(x[rows][None], k)
    found["candidates"] = (ids, expected_ids)
    wrong = [name for name, (a, b) in found.items() if not torch.equal(a.nan_to_num(77.0), b.nan_to_num(77.0))]
    close = torch.allclose(score, expected, atol=1e-5)
    embedded = shard.embed(torch.arange(sum(sizes)), torch.arange(float(shard.size))[:, None] + shard.first)
    table = torch.equal(embedded[:, 0], torch.arange(float(sum(sizes))))
    return wrong + [name for name, right in (("candidates' scores", close), ("embed", table)) if not right]
