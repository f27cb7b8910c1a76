"""The Triton kernels around attention against fp64: linear layers, norms, rotary embedding, context rows; on a GPU and
interpreted.

The interpreter runs in a process of its own (this file as a script), because Triton reads TRITON_INTERPRET when it is
imported; it is wrong for bf16, so fp32 stands in for that.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import interpreter

EPS = 1e-5


def draw(seed: int, dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    """normal(*shape): values of a seeded generator, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def distance(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found.double() - wanted).norm() / wanted.norm())


def linear_definition(x, weight, bias, swiglu):
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not swiglu:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def few_rows(dtype, device, rows, n, k, swiglu=False, bias=False):
    from modelkit.kernels.few_rows import few_rows_linear

    normal = draw(1, dtype, device)
    weights = 2 * n if swiglu else n
    x, weight = normal(rows, k), normal(weights, k) / k**0.5
    added = normal(weights) if bias else None
    found = few_rows_linear(x, weight, added, swiglu)
    return distance(found.double().sum(0), linear_definition(x, weight, added, swiglu))


def one_row(dtype, device, n, k, swiglu=False, bias=False, normed=False, residual=False):
    from modelkit.kernels.linear import one_row_linear

    normal = draw(2, dtype, device)
    weights = 2 * n if swiglu else n
    x, weight = normal(1, k), normal(weights, k) / k**0.5
    added, gain = (normal(weights) if bias else None), (1 + normal(k) / 4 if normed else None)
    rest = normal(1, n) if residual else None
    found = one_row_linear(x, weight, added, gain, rest, EPS, swiglu)
    wide = norm(x.double(), gain.double()) if gain is not None else x
    wanted = linear_definition(wide, weight, added, swiglu)
    return distance(found, wanted if rest is None else wanted + rest.double())


def add_norm(dtype, device, rows, hidden, splits):
    from modelkit.kernels.add_norm import add_norm as kernel

    normal = draw(3, dtype, device)
    x, weight = normal(rows, hidden), 1 + normal(hidden) / 4
    addend = draw(4, torch.float32, device)(splits, rows, hidden) if splits else None
    total, normed = kernel(x, addend, weight, EPS)
    wanted = x.double() + (0 if addend is None else addend.double().sum(0))
    apart = distance(normed, norm(wanted, weight.double()))
    return apart if addend is None else max(apart, distance(total, wanted))


def norm_of_sum(dtype, device, rows, hidden, splits):
    from modelkit.kernels.add_norm import add_norm as kernel

    weight = 1 + draw(3, dtype, device)(hidden) / 4
    addend = draw(4, torch.float32, device)(splits, rows, hidden)
    total, normed = kernel(None, addend, weight, EPS)
    assert not total.numel() and normed.dtype == dtype
    return distance(normed, norm(addend.double().sum(0), weight.double()))


def turn(heads: Tensor, angle: Tensor) -> Tensor:
    low, high = heads.chunk(2, -1)
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


def append(dtype, device, width, counts, lengths, dim=24, layers=2, kv_heads=2, page=8, splits=1, normed=True):
    from modelkit.cache import KVCache
    from modelkit.kernels.context import append_context

    slots, capacity = len(counts), 30
    with torch.device(device):
        cache = KVCache(
            layers=layers, heads=kv_heads, head_dim=dim, slots=slots, capacity=capacity, scratch=1, page_size=page,
            dtype=dtype,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(11)
    cache.set_table(torch.randperm(cache.table.numel(), generator=generator).view(cache.table.shape))
    cache.length[:-1] = torch.tensor(lengths)
    part = draw(12, torch.float32 if splits > 1 else dtype, device)
    projected = part(splits, slots * width, layers * 2 * kv_heads * dim)
    gain = 1 + draw(13, dtype, device)(layers, dim) / 4 if normed else None
    frequencies = torch.rand(dim // 2, generator=generator).to(device)
    for layer in cache.all_layers():
        layer.k.fill_(7.0)
        layer.v.fill_(7.0)
    count = torch.tensor(counts, device=device)
    kept = append_context(
        projected, count, cache.length, cache.table, cache.addresses, cache.layer(0).k, gain, frequencies, EPS, 0.9,
        capacity,
    )  # fmt: skip
    assert kept.tolist() == counts
    rows = projected.double().sum(0).view(slots, width, layers, 2, kv_heads, dim)
    wanted = torch.full((layers, 2, *cache.layer(0).k.shape), 7.0, dtype=torch.float64, device=device)
    for slot, (new, length) in enumerate(zip(counts, lengths, strict=True)):
        for step in range(min(new, capacity - length)):
            k, v = rows[slot, step].unbind(1)
            position = length + step
            k = norm(k, gain.double()[:, None]) if gain is not None else k
            place = (cache.table[slot, position // page], slice(None), position % page)
            wanted[:, 0][:, *place] = 0.9 * turn(k, position * frequencies.double())
            wanted[:, 1][:, *place] = v
    found = torch.stack([torch.stack([layer.k, layer.v]) for layer in cache.all_layers()])
    assert torch.equal(found == 7, wanted == 7), "rows of nobody were written, or some are missing"
    return distance(found[found != 7].double(), wanted[wanted != 7])


def rotary(dtype, device, rows, heads, kv_heads, dim, splits=1, qk_norm=True):
    from modelkit.kernels.rotary import rotary_store

    normal = draw(5, dtype, device)
    part = draw(6, torch.float32 if splits > 1 else dtype, device)
    qkv = part(splits, rows, (heads + 2 * kv_heads) * dim)
    angle = torch.rand(rows, dim // 2, generator=torch.Generator().manual_seed(7)).to(device) * 6
    weights = [1 + normal(dim) / 4 for _ in range(2)] if qk_norm else [None, None]
    k, v = (torch.full((rows + 3, kv_heads, dim), 7.0, dtype=dtype, device=device) for _ in range(2))
    q = rotary_store(qkv, angle.cos(), angle.sin(), *weights, EPS, k, v, heads)
    assert (k[rows:] == 7).all() and (v[rows:] == 7).all(), "rows of nobody were written"
    whole = qkv.double().sum(0).view(rows, -1, dim)
    both, value = whole[:, : heads + kv_heads], whole[:, heads + kv_heads :]
    if qk_norm:
        gain = torch.cat([w.double().expand(n, dim) for w, n in zip(weights, (heads, kv_heads), strict=True)])
        both = norm(both, gain)
    found = torch.cat([q, k[:rows], v[:rows]], 1)
    return distance(found, torch.cat([turn(both, angle.double()[:, None]), value], 1))


def freeze(dtype, device, sizes):
    from modelkit.kernels.freeze import freeze as kernel

    normal = draw(9, dtype, device)
    values = [normal(*shape) for shape in sizes[:-1]] + [normal(*sizes[-1]).mul(99).long().T]
    copies = kernel(values)
    assert all(copy.is_contiguous() for copy in copies)
    return max(distance(copy.double(), value.double()) for copy, value in zip(copies, values, strict=True))


Case = tuple[Callable[..., float], dict[str, Any]]
SMALL: dict[str, Case] = {
    "few_rows": (few_rows, {"rows": 5, "n": 72, "k": 4104}),
    "few_rows_bias": (few_rows, {"rows": 16, "n": 64, "k": 4160, "bias": True}),
    "few_rows_swiglu": (few_rows, {"rows": 33, "n": 72, "k": 648, "swiglu": True}),
    "few_rows_swiglu_bias": (few_rows, {"rows": 2, "n": 72, "k": 648, "swiglu": True, "bias": True}),
    "few_rows_small": (few_rows, {"rows": 5, "n": 200, "k": 328}),
    "few_rows_small_bias": (few_rows, {"rows": 16, "n": 64, "k": 1032, "bias": True}),
    "few_rows_small_swiglu": (few_rows, {"rows": 33, "n": 72, "k": 136, "swiglu": True}),
    "few_rows_small_swiglu_bias": (few_rows, {"rows": 2, "n": 72, "k": 520, "swiglu": True, "bias": True}),
    "few_rows_small_blocks": (few_rows, {"rows": 50, "n": 72, "k": 328}),
    "one_row": (one_row, {"n": 67, "k": 600}),
    "one_row_all": (one_row, {"n": 67, "k": 600, "bias": True, "normed": True, "residual": True}),
    "one_row_swiglu": (one_row, {"n": 67, "k": 512, "swiglu": True, "normed": True}),
    "one_row_swiglu_bias": (one_row, {"n": 67, "k": 512, "swiglu": True, "normed": True, "bias": True}),
    "norm": (add_norm, {"rows": 3, "hidden": 576, "splits": 0}),
    "add_norm": (add_norm, {"rows": 3, "hidden": 576, "splits": 1}),
    "add_norm_splits": (add_norm, {"rows": 5, "hidden": 40, "splits": 3}),
    "norm_of_sum": (norm_of_sum, {"rows": 3, "hidden": 40, "splits": 3}),
    "append": (append, {"width": 5, "counts": [3], "lengths": [6]}),
    "append_splits": (append, {"width": 4, "counts": [0, 4, 3], "lengths": [9, 28, 0], "splits": 3, "normed": False}),
    "append_many": (append, {"width": 70, "counts": [29], "lengths": [0], "page": 32}),
    "rotary": (rotary, {"rows": 3, "heads": 4, "kv_heads": 2, "dim": 24}),
    "rotary_splits": (rotary, {"rows": 3, "heads": 3, "kv_heads": 1, "dim": 64, "splits": 3, "qk_norm": False}),
    "rotary_many": (rotary, {"rows": 70, "heads": 2, "kv_heads": 1, "dim": 24, "splits": 2}),
    "freeze": (freeze, {"sizes": ((5, 3), (2,), (40, 60))}),
    "freeze_one": (freeze, {"sizes": ((3, 4),)}),
}
LARGE: dict[str, Case] = SMALL | {
    f"few_rows_{rows}_{n}_{k}": (few_rows, {"rows": rows, "n": n, "k": k, "bias": rows == 17})
    for rows in (2, 17, 32, 64)
    for n, k in ((6144, 4096), (960, 576), (576, 1536), (4096, 12288), (3072, 2048))
} | {
    f"few_rows_swiglu_{rows}_{n}": (few_rows, {"rows": rows, "n": n, "k": k, "swiglu": True})
    for rows in (16, 64)
    for n, k in ((12288, 4096), (3072, 4096), (1536, 576))
} | {
    "one_row_wide": (one_row, {"n": 4096, "k": 12288, "residual": True}),
    "one_row_gate": (one_row, {"n": 12288, "k": 4096, "swiglu": True, "normed": True}),
    "add_norm_wide": (add_norm, {"rows": 64, "hidden": 4096, "splits": 3}),
    "rotary_wide": (rotary, {"rows": 64, "heads": 32, "kv_heads": 8, "dim": 128, "splits": 2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What `check` said of each small case: nothing, or a traceback."""
    return interpreter.interpreted(__file__)


@pytest.mark.parametrize("name", SMALL)
def test_interpreted(interpreted, name):
    assert not interpreted[name], interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LARGE)
def test_gpu(name, dtype):
    function, sizes = LARGE[name]
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-3
    assert function(dtype, "cuda", **sizes) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in LARGE if not name.startswith("few_rows")])
def test_gpu_single_precision(name):
    function, sizes = LARGE[name]
    assert function(torch.float32, "cuda", **sizes) < 2e-6


@pytest.mark.gpu
def test_gpu_operators_are_registered_rightly():
    from modelkit.kernels.add_norm import add_norm as norm_kernel
    from modelkit.kernels.few_rows import few_rows_linear
    from modelkit.kernels.linear import one_row_linear

    normal = draw(1, torch.bfloat16, "cuda")
    x, weight, gain = normal(8, 512), normal(256, 512), normal(512)
    checks = ("test_schema", "test_faketensor")
    for operator, arguments in (
        (few_rows_linear, (x, weight, None, False)),
        (few_rows_linear, (x, weight, normal(256), True)),
        (one_row_linear, (x[:1], weight, None, gain, None, EPS, False)),
        (norm_kernel, (x, None, gain, EPS)),
        (norm_kernel, (x, normal(2, 8, 512), gain, EPS)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=checks)


def check(name: str) -> None:
    """A small case in fp32, for the interpreter."""
    function, sizes = SMALL[name]
    assert function(torch.float32, "cpu", **sizes) < 2e-6


if __name__ == "__main__":
    interpreter.run_all({name: functools.partial(check, name) for name in SMALL})
