"""The kernels of a layer compiled for compute capability 9.0 on a machine without a GPU: no launch, no result.

The interpreter takes more Python than the compiler does, and knows no shared memory.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the GPU tests compile these kernels", allow_module_level=True)

SHARED_BYTES = 227 * 1024
ROWS = (1, 2, 17, 33, 64)  # and a first chunk of 256
# hidden, heads, KV heads, head dim, inner: SmolLM2-135M, Llama-3.2-1B, Qwen3-8B, and a half and a quarter of that
SHAPES = {
    "smollm2": (576, 9, 3, 64, 1536),
    "llama-1b": (2048, 32, 8, 64, 8192),
    "qwen3-8b": (4096, 32, 8, 128, 12288),
    "half": (4096, 16, 4, 128, 6144),
    "quarter": (4096, 8, 2, 128, 3072),
}


@pytest.fixture
def compiled(monkeypatch) -> Iterator[list[tuple[str, Any]]]:
    """Launches compile; what was compiled, by kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from modelkit.kernels import add_norm, context, few_rows, freeze, linear, rotary, top_candidates, tree_attention

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found: list[tuple[str, Any]] = []

    def launch(kernel, grid, *arguments, **constants):
        made = kernel.warmup(*arguments, grid=grid, PDL=True, launch_pdl=True, **constants)
        found.append((kernel.fn.__name__, made))

    device = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda d: 0,
    )
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(driver, "_active", device, create=True))
        for module in (add_norm, context, few_rows, freeze, linear, rotary, top_candidates, tree_attention):
            patches.enter_context(mock.patch.object(module, "launch", launch))
        yield found


def run_layer(rows: int, hidden: int, heads: int, kv_heads: int, dim: int, inner: int, context: int = 8192) -> None:
    """Everything that a layer of so many rows launches, with and without what is optional."""
    from modelkit.kernels.add_norm import add_norm
    from modelkit.kernels.context import append_context
    from modelkit.kernels.few_rows import few_rows_linear
    from modelkit.kernels.freeze import freeze
    from modelkit.kernels.linear import one_row_linear
    from modelkit.kernels.rotary import rotary_store
    from modelkit.kernels.top_candidates import top_candidates
    from modelkit.kernels.tree_attention import choose_splits, tree_attention

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return torch.empty(*shape, dtype=dtype)

    def whole(*shape: int, dtype: torch.dtype = torch.int64) -> Any:
        return torch.zeros(*shape, dtype=dtype)

    norm, heads_norm = empty(hidden), empty(dim)
    widths = {"qkv": ((heads + 2 * kv_heads) * dim, hidden), "o": (hidden, heads * dim), "down": (hidden, inner)}
    for n_out, columns in widths.values():
        x, weight = empty(rows, columns), empty(n_out, columns)
        if rows == 1:
            one_row_linear(x, weight, empty(n_out), norm if columns == hidden else None, empty(1, n_out), 1e-5, False)
            continue
        partial = few_rows_linear(x, weight, empty(n_out), False)
        if n_out == hidden:
            add_norm(empty(rows, hidden), partial, norm, 1e-5)
            add_norm(None, partial, norm, 1e-5)
    x, weight = empty(rows, hidden), empty(2 * inner, hidden)
    if rows == 1:
        one_row_linear(x, weight, None, norm, None, 1e-5, True)
    else:
        few_rows_linear(x, weight, None, True)
    add_norm(empty(rows, hidden), None, norm, 1e-5)
    k, v = empty(256, kv_heads, dim), empty(256, kv_heads, dim)
    angles = empty(rows, dim // 2, dtype=torch.float32)
    for weights in ((None, None), (heads_norm, heads_norm)):
        qkv = empty(2, rows, (heads + 2 * kv_heads) * dim, dtype=torch.float32)
        rotary_store(qkv, angles, angles, *weights, 1e-5, k, v, heads)
    pages = empty(2, kv_heads, context, dim)
    for window in (0, 512):
        splits = choose_splits(
            rows, rows, 1, kv_heads, heads // kv_heads, context, head_dim=dim, window=window, itemsize=2
        )
        for ranges in {1, splits}:
            tree_attention(
                empty(rows, heads, dim), k, v, pages, pages, whole(2, 1), whole(2), whole(rows),
                whole(rows, 2, dtype=torch.int32), whole(2), rows, dim**-0.5, window, ranges, None,
            )  # fmt: skip
    for split, weights in ((1, None), (3, empty(2, dim))):
        projected = empty(split, rows, 4 * kv_heads * dim, dtype=torch.float32)
        append_context(
            projected, whole(1), whole(2), whole(2, 1), whole(4, 2), pages, weights, angles[0], 1e-5, 1.0, context
        )
    freeze([whole(rows), whole(rows, 2, dtype=torch.int32), whole(2)])
    top_candidates(empty(rows, 1000), 8)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_compiles(compiled, shape, rows):
    run_layer(rows, *SHAPES[shape])
    names = {name for name, _ in compiled}
    assert {
        "_append_kernel",
        "_attend_kernel",
        "combine_kernel",
        "_rotary_kernel",
        "_add_norm_kernel",
        "_copy_kernel",
    } <= names
    for name, made in compiled:
        assert made is not None and made.metadata.shared <= SHARED_BYTES, (name, made.metadata.shared)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_first_chunk_compiles(compiled, shape):
    from modelkit.kernels.context import append_context
    from modelkit.kernels.rotary import rotary_store
    from modelkit.kernels.tree_attention import tree_attention

    rows = 256
    _, heads, kv_heads, dim, _ = SHAPES[shape]
    half, whole = torch.bfloat16, torch.int64
    k, v = torch.empty(rows, kv_heads, dim, dtype=half), torch.empty(rows, kv_heads, dim, dtype=half)
    pages, numbers = torch.empty(2, kv_heads, 8192, dim, dtype=half), torch.zeros(rows, dtype=whole)
    angles, two = torch.empty(rows, dim // 2), torch.zeros(2, dtype=whole)
    rotary_store(
        torch.empty(1, rows, (heads + 2 * kv_heads) * dim, dtype=half), angles, angles, None, None, 0.1, k, v, heads
    )
    append_context(
        torch.empty(1, rows, 4 * kv_heads * dim, dtype=half), two[:1], two, two[:, None],
        torch.zeros(4, 2, dtype=whole), pages, None, angles[0], 1e-5, 1.0, 8192,
    )  # fmt: skip
    for window in (0, 512):
        tree_attention(
            torch.empty(rows, heads, dim, dtype=half), k, v, pages, pages, two[:, None], two, numbers,
            torch.zeros(rows, rows // 32, dtype=torch.int32), two, rows, dim**-0.5, window, 1, None,
        )  # fmt: skip
    assert {name for name, _ in compiled} == {"_append_kernel", "_attend_kernel", "_rotary_kernel"}
    for name, made in compiled:
        assert made.metadata.shared <= SHARED_BYTES, (name, made.metadata.shared)


@pytest.mark.parametrize("width", [16, 170])
def test_only_blocks_that_kernels_read_are_appended_unseen(compiled, width):
    """PyTorch's attention reads pages that nothing it is given ties to the lengths."""
    from modelkit.cache import KVCache
    from modelkit.config import ModelConfig
    from modelkit.context import ContextHeads
    from modelkit.kernels.backend import TritonBackend
    from modelkit.layers import Attention

    config = ModelConfig.from_dict(
        {
            "model_type": "qwen3", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rope_theta": 10.0,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        }
    )  # fmt: skip
    attention = Attention(config)
    attention.fuse()
    heads = ContextHeads([attention], torch.ones(8), 1.0, width)
    cache = KVCache(layers=1, heads=1, head_dim=16, slots=1, capacity=32, scratch=1, dtype=torch.float32)
    TritonBackend().append_context(torch.ones(1, 3, 32), heads, torch.tensor([2]), cache)
    assert [name for name, _ in compiled] == ["_append_kernel"] * (width == 16)
    assert bool(cache.layer(0).v.any()) == (width != 16)


def test_attention_is_given_copies_of_rows_and_lengths(compiled, monkeypatch):
    """It reads them before it waits for the launch before, which may be a kernel of the compiler that writes them."""
    from modelkit.cache import KVCache
    from modelkit.kernels import backend
    from modelkit.rows import chain

    cache = KVCache(layers=1, heads=1, head_dim=64, slots=1, capacity=32, scratch=4, dtype=torch.bfloat16)
    one = torch.ones(1, dtype=torch.int64)
    rows = chain(token=torch.zeros(1, 4, dtype=torch.int64), start=one, count=4 * one, rows=4, bound=8)
    plan = backend.TritonBackend().plan(rows, cache, None, group=1, dtype=torch.bfloat16)
    given: list[Any] = []
    monkeypatch.setattr(backend, "tree_attention", lambda *arguments: given.extend(arguments))
    fresh = torch.zeros(4, 1, 64, dtype=torch.bfloat16)
    plan.attend(fresh, fresh, fresh, cache.view(0), 1.0)
    live = (rows.position, rows.row_offset, rows.ancestors, cache.length)
    addresses = [value.data_ptr() for value in given if isinstance(value, torch.Tensor)]
    assert len(addresses) == 10 and not {value.data_ptr() for value in live} & set(addresses)
