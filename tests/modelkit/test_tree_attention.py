"""The Triton tree attention against an fp64 definition: in Triton's interpreter on a CPU, and on a GPU.

Everything that must not be read holds NaN: cache places behind the committed length, pages of nobody, padding rows, and
what the kernel's own buffers hold before it writes them. The interpreter runs in a process of its own (this file as a
script), because Triton reads TRITON_INTERPRET when it is imported; it is wrong for bf16, so fp32 stands in for that.
"""

import contextlib
import dataclasses
import json
import random
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import interpreter

from modelkit.attention import DensePlan
from modelkit.cache import LayerView
from modelkit.rows import Rows, pack_bits

NAN = float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rows and context of each slot; `page` None: one page a slot; `gpu_tiles`: bf16's tiles in the interpreter."""

    rows: tuple[int, ...]
    context: tuple[int, ...]
    padding: int = 0
    Hkv: int = 1
    G: int = 1
    D: int = 64
    page: int | None = None
    window: int = 0
    splits: int = 1
    sinks: bool = False
    bits: str = "tree"  # tree | chain | any
    spare: int = 7  # capacity behind the longest context
    width: int = 0  # at least
    gpu_tiles: bool = False

    @property
    def capacity(self) -> int:
        return max(self.context) + self.spare


def random_case(seed: int, *, rows: int, slots: int, dims: tuple[int, ...], groups: int, context: int) -> Case:
    pick = random.Random(seed)
    S = pick.randint(1, slots)
    total = pick.randint(1, rows)
    cuts = sorted(pick.randint(0, total) for _ in range(S - 1))
    counts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    return Case(
        rows=counts, context=tuple(pick.choice([0, pick.randint(0, context)]) if s else pick.randint(0, context)
                                   for s in range(S)),
        padding=pick.choice([0, 0, 5]), Hkv=pick.randint(1, 3), G=pick.randint(1, groups), D=pick.choice(dims),
        page=pick.choice([None, None, 16, 24, 64, 256]), window=pick.choice([0, 0, 1, 5, 40, context // 2 + 1]),
        splits=pick.choice([1, 2, 3, 7, 16]), sinks=pick.random() < 0.4, bits=pick.choice(["tree", "chain", "any"]),
        gpu_tiles=pick.random() < 0.5,
    )  # fmt: skip


def visibility(count: int, kind: str, pick: random.Random) -> tuple[Tensor, Tensor]:
    """Visible rows [count, count] and depths [count] of one slot."""
    seen, depth = torch.eye(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
    for i in range(1, count):
        parent = i - 1 if kind == "chain" else pick.randrange(max(0, i - 12), i)
        seen[i] |= seen[parent]
        depth[i] = depth[parent] + 1
    if kind == "any":
        seen = torch.rand(count, count, generator=torch.Generator().manual_seed(count)) < 0.5
        seen[:1] = False  # not even itself: it sees itself all the same
    return seen, depth


def arguments(case: Case, seed: int, dtype: torch.dtype, device: str = "cpu", poison: float = NAN) -> dict[str, Any]:
    """Arguments of `tree_attention`."""
    pick, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    S, used = len(case.rows), sum(case.rows)
    R, Hq, width = used + case.padding, case.Hkv * case.G, max(1, case.width, *case.rows)
    seen = torch.zeros(R, width, dtype=torch.bool)
    position = torch.zeros(R, dtype=torch.int64)
    first = 0
    for count, context in zip(case.rows, case.context, strict=True):
        square, depth = visibility(count, case.bits, pick)
        seen[first : first + count, :count] = square
        position[first : first + count] = context + depth
        first += count
    page = case.page or case.capacity
    per_slot = -(-case.capacity // page)
    order = list(range((S + 1) * per_slot + 2))
    if case.page:
        pick.shuffle(order)
    table = torch.tensor(order[: (S + 1) * per_slot], device=device).view(S + 1, per_slot)
    pages = {
        name: torch.full((len(order), case.Hkv, page, case.D), poison, dtype=dtype, device=device) for name in "kv"
    }
    for s, context in enumerate(case.context):
        for i in range(-(-context // page)):
            inside = min(page, context - i * page)
            for stored in pages.values():
                stored[table[s, i], :, :inside] = normal(case.Hkv, inside, case.D)
    fresh = {name: normal(R, heads, case.D) for name, heads in (("q", Hq), ("k", case.Hkv), ("v", case.Hkv))}
    for x in fresh.values():
        x[used:] = poison
    return fresh | {
        "k_pages": pages["k"], "v_pages": pages["v"], "table": table,
        "length": torch.tensor([*case.context, 0], device=device), "position": position.to(device),
        "ancestors": pack_bits(seen).to(device),
        "row_offset": torch.tensor([0, *case.rows], device=device).cumsum(0), "width": width,
        "scale": 1.7 * case.D**-0.5, "window": case.window, "splits": case.splits,
        "sinks": torch.randn(Hq, generator=generator, device=device) if case.sinks else None,
    }  # fmt: skip


def expected(a: dict[str, Any]) -> Tensor:
    """The definition, slot by slot in fp64 [R, Hq, D]; zeros in padding rows."""
    R, Hq, D = a["q"].shape
    Hkv, page = a["k_pages"].shape[1:3]
    out = torch.zeros(R, Hq, D, dtype=torch.float64, device=a["q"].device)
    offset, length = a["row_offset"].tolist(), a["length"].tolist()
    for s in range(len(offset) - 1):
        first, last, context = offset[s], offset[s + 1], length[s]
        count = last - first
        if not count:
            continue
        key = torch.arange(context, device=out.device)
        at = a["table"][s][key // page]
        own, pos = slice(first, last), a["position"][first:last]
        # Long division in Python keeps this free of the bit tricks under test.
        words = [[w % 2**32 for w in row] for row in a["ancestors"][own].tolist()]
        bits = [[row[j // 32] // 2 ** (j % 32) % 2 == 1 or i == j for j in range(count)] for i, row in enumerate(words)]
        before = torch.ones(count, context, dtype=torch.bool, device=out.device)
        among = torch.tensor(bits, device=out.device)
        if a["window"]:
            before = pos[:, None] - key < a["window"]
            among = among & ((pos[:, None] - pos[None, :]).abs() < a["window"])
        hidden = ~torch.cat([before, among], 1)
        for h in range(Hkv):
            heads = slice(h * Hq // Hkv, (h + 1) * Hq // Hkv)
            keys = torch.cat([a["k_pages"][at, h, key % page], a["k"][own, h]]).double()
            values = torch.cat([a["v_pages"][at, h, key % page], a["v"][own, h]]).double()
            scores = torch.einsum("rgd,td->rgt", a["q"][own, heads].double(), keys) * a["scale"]
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
            if a["sinks"] is not None:
                sink = a["sinks"][heads].double()[None, :, None].expand(count, -1, 1)
                scores = torch.cat([scores, sink], -1)
            out[own, heads] = scores.softmax(-1)[..., : len(keys)] @ values
    return out


def error(found: Tensor, a: dict[str, Any]) -> tuple[float, float]:
    """Relative error of all rows together, and of the worst head of a row (at least against a tenth of the mean)."""
    reference = expected(a)
    assert found.shape == a["q"].shape and found.dtype == a["q"].dtype and found.is_contiguous()
    used = int(a["row_offset"][-1])
    assert (found[used:] == 0).all(), "padding rows must be zero"
    difference = (found.double() - reference)[:used].norm(dim=-1)
    size = reference[:used].norm(dim=-1)
    assert difference.isfinite().all()
    return float(difference.norm() / size.norm()), float((difference / size.clamp(min=0.1 * size.mean())).max())


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New tensors that nobody has written hold NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SMALL = {
    "one_row": Case(rows=(1,), context=(300,), Hkv=2, G=2, D=128, splits=4),
    "no_context": Case(rows=(5,), context=(0,), G=3, splits=3),
    "whole_blocks": Case(rows=(16,), context=(128,), G=4, D=128, splits=2, gpu_tiles=True),
    "more_splits_than_blocks": Case(rows=(3,), context=(40,), G=2, splits=16),
    "bit_31_and_second_word": Case(rows=(34,), context=(33,), G=1, splits=2, bits="chain"),
    "third_word": Case(rows=(70,), context=(70,), G=1, splits=3, gpu_tiles=True),
    "wide_words": Case(rows=(3, 2), width=70, context=(10, 20), splits=2),
    "first_chunk": Case(rows=(200,), context=(0,), gpu_tiles=True),
    "first_chunk_windowed": Case(rows=(170,), context=(0,), padding=9, window=50, G=2, gpu_tiles=True),
    "several_tiles": Case(rows=(20,), context=(150,), Hkv=1, G=8, splits=2, gpu_tiles=True),
    "idle_slots": Case(rows=(0, 9, 0), context=(50, 77, 10), padding=6, G=2, splits=3),
    "idle_slots_one_split": Case(rows=(0, 9, 0), context=(50, 77, 10), padding=6, G=3, splits=1, sinks=True),
    "nobody": Case(rows=(0, 0), context=(5, 9), padding=4, splits=2),
    "nobody_one_split": Case(rows=(0,), context=(5,), padding=4, splits=1),
    "ragged": Case(rows=(1, 33, 1), context=(290, 3, 64), Hkv=2, G=4, splits=3, gpu_tiles=True),
    "window_within_the_tree": Case(rows=(20,), context=(100,), window=3, splits=2, bits="chain"),
    "window_skips_blocks": Case(rows=(1, 7), context=(300, 200), window=40, splits=4, G=2, gpu_tiles=True),
    "window_of_one": Case(rows=(4, 4), context=(64, 65), window=1, splits=1, sinks=True),
    "pages_of_blocks": Case(rows=(6, 2), context=(200, 130), page=64, splits=3, gpu_tiles=True),
    "pages_below_blocks": Case(rows=(6, 2), context=(200, 130), page=16, splits=3, D=96),
    "odd_pages": Case(rows=(6, 2), context=(200, 130), page=24, splits=2, sinks=True),
    "sinks": Case(rows=(8,), context=(90,), Hkv=2, G=3, D=96, splits=3, sinks=True),
    "narrow_head": Case(rows=(8,), context=(90,), Hkv=2, G=2, D=24, splits=3),
    "wide_head": Case(rows=(8,), context=(90,), G=2, D=256, splits=2, gpu_tiles=True),
} | {
    f"random_{seed}": random_case(seed, rows=70, slots=3, dims=(64, 96, 128), groups=8, context=300)
    for seed in (1, 2, 4, 5, 6, 7, 8, 10, 11)  # those that take the interpreter less than 1 s
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n, c in SMALL.items() if not c.sinks])
def test_definition_is_the_dense_plan(name):
    """Without sinks the definition above and `DensePlan.attend` are the same function."""
    case = SMALL[name]
    a = arguments(case, seed=3, dtype=torch.float64, poison=0.0)
    used, S = int(a["row_offset"][-1]), len(case.rows)
    R, bound = a["q"].shape[0], case.capacity
    slot = torch.bucketize(torch.arange(R), a["row_offset"][1:], right=True)
    rows = Rows(
        token=torch.zeros(R, dtype=torch.int64), position=a["position"], slot=slot, parent=slot, valid=slot < S,
        ancestors=a["ancestors"], row_offset=a["row_offset"], width=a["width"], bound=bound,
    )  # fmt: skip
    view = LayerView(
        k=a["k_pages"], v=a["v_pages"], scratch_k=a["k"], scratch_v=a["v"], table=a["table"], length=a["length"],
        contiguous=False,
    )  # fmt: skip
    plan = DensePlan.prepare(rows, view, case.window or None, group=case.G, dtype=torch.float64)  # type: ignore[arg-type]
    out = plan.attend(a["q"], a["k"], a["v"], view, a["scale"])
    torch.testing.assert_close(out[:used], expected(a)[:used])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What `interpret` found for each small case: errors, or a traceback."""
    return interpreter.interpreted(__file__)


@pytest.mark.parametrize("name", SMALL)
def test_interpreted(interpreted, name):
    assert isinstance(interpreted[name], list), interpreted[name]
    together, worst = interpreted[name]
    assert together < 2e-6 and worst < 2e-5


def test_half_precision_interpreted(interpreted):
    assert isinstance(interpreted["float16"], list), interpreted["float16"]
    assert interpreted["float16"][0] < 2e-3


def test_splits_fill_one_wave():
    interpreter.needs_triton()
    from modelkit.kernels.tiles import KEYS_PER_SPLIT, choose_splits, choose_tile, tile_count

    for R, width, S, Hkv, G in [
        (1, 1, 1, 8, 4),
        (16, 16, 1, 8, 4),
        (64, 64, 1, 8, 4),
        (128, 16, 8, 8, 4),
        (95, 32, 64, 8, 4),
    ]:
        tile = choose_tile(R, width, S, G, 128)
        programs = tile_count(R, width, S, G, tile.block_m) * Hkv
        splits = choose_splits(R, width, S, Hkv, G, 33_000)
        if S < 64:
            least = -(-33_000 // KEYS_PER_SPLIT) if S > 1 else 1
            assert 132 * tile.per_sm * 0.75 < programs * splits <= max(132 * tile.per_sm, programs * least)
        else:  # more programs than fit already
            assert splits == -(-33_000 // KEYS_PER_SPLIT) > 1
    assert choose_splits(1, 1, 1, 8, 4, 100) == 3  # no more than there are blocks
    assert choose_splits(1, 1, 1, 8, 4, 33_000, window=100) == 3


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("block_m", [16, 64])
def test_tiles_are_enough(slots, block_m):
    interpreter.needs_triton()
    from modelkit.kernels.tree_attention import tile_count

    pick = random.Random(slots)
    for _ in range(200):
        G, width = pick.randint(1, 16), pick.randint(1, 40)
        counts = [pick.randint(0, width) for _ in range(slots)]
        R = max(1, sum(counts) + pick.randint(0, 3))
        needed = sum(-(-n * G // block_m) for n in counts)
        assert needed <= tile_count(R, width, slots, G, block_m)
    assert tile_count(13, 13, 1, 4, block_m) == -(-52 // block_m)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("k", lambda x: x[:-1], "k must be"),
        ("position", lambda x: x.int(), "position must be torch.int64"),
        ("sinks", lambda x: torch.zeros(2), "sinks must be"),
        ("v_pages", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "v_pages must be contiguous"),
        ("width", lambda x: 33, "width must be 1 to 32"),
        ("scale", lambda x: 0.0, "scale must be positive"),
        ("window", lambda x: -1, "window 0"),
        ("splits", lambda x: 129, "splits must be 1 to 128"),
    ],
)
def test_wrong_arguments_are_refused(field, change, message):
    interpreter.needs_triton()
    from modelkit.kernels.tree_attention import tree_attention

    a = arguments(Case(rows=(4,), context=(9,), Hkv=2, G=2), seed=0, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        tree_attention(**a | {field: change(a[field])})


LARGE = {
    "one_row_long": Case(rows=(1,), context=(33_000,), Hkv=8, G=4, D=128, splits=32),
    "verify_64_long": Case(rows=(64,), context=(33_000,), Hkv=8, G=4, D=128, splits=8),
    "verify_32": Case(rows=(32,), context=(1024,), Hkv=8, G=4, D=128, splits=16),
    "129_rows": Case(rows=(129,), context=(5000,), Hkv=2, G=4, D=128, splits=8, bits="chain"),
    "eight_slots": Case(
        rows=(16, 0, 1, 33, 16, 1, 7, 20), context=(1, 5, 33_000, 900, 64, 0, 8191, 4096), padding=34, Hkv=4, G=4,
        D=128, splits=5,
    ),
    "paged": Case(rows=(16, 5), context=(3000, 33), Hkv=4, G=4, D=128, page=64, splits=9),
    "small_pages": Case(rows=(16, 5), context=(3000, 33), Hkv=4, G=4, D=128, page=16, splits=9),
    "windowed": Case(rows=(32,), context=(20_000,), Hkv=8, G=4, D=128, window=4096, splits=8, sinks=True),
    "windowed_pages": Case(
        rows=(3, 9), context=(9000, 700), Hkv=2, G=8, D=64, page=256, window=128, splits=4, sinks=True
    ),
    "smollm2": Case(rows=(32,), context=(1500,), Hkv=3, G=3, D=64, splits=32),
    "group_16": Case(rows=(33,), context=(2000,), Hkv=1, G=16, D=64, splits=16, sinks=True),
    "head_96": Case(rows=(17,), context=(2500,), Hkv=4, G=1, D=96, splits=16),
    "head_256": Case(rows=(17,), context=(2500,), Hkv=2, G=4, D=256, splits=16, sinks=True),
    "head_256_one_row": Case(rows=(1,), context=(2500,), Hkv=2, G=8, D=256, splits=16),
    "one_split": Case(rows=(16, 3), context=(900, 4), padding=13, Hkv=8, G=4, D=128, splits=1, sinks=True),
} | {
    f"random_{seed}": random_case(seed, rows=129, slots=8, dims=(64, 96, 128, 256), groups=16, context=4000)
    for seed in range(100, 112)
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_gpu(name):
    from modelkit.kernels.tree_attention import tree_attention

    a = arguments(LARGE[name], seed=5, dtype=torch.bfloat16, device="cuda")
    with poisoned():
        found = tree_attention(**a)
    together, worst = error(found, a)
    assert together < 1e-2 and worst < 5e-2
    again = tree_attention(**a)
    assert torch.equal(found, again), "a row's result must not depend on timing"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ragged", "odd_pages", "window_skips_blocks", "wide_head", "several_tiles"])
def test_gpu_single_precision(name):
    from modelkit.kernels.tree_attention import tree_attention

    a = arguments(SMALL[name], seed=5, dtype=torch.float32, device="cuda")
    with poisoned():
        together, worst = error(tree_attention(**a), a)
    assert together < 5e-6 and worst < 5e-5


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["one_split", "eight_slots", "windowed_pages"])
def test_gpu_compiled_equals_eager(name, mode):
    from modelkit.kernels.tree_attention import tree_attention

    a = arguments(LARGE[name], seed=6, dtype=torch.bfloat16, device="cuda")
    tensors = {k: x for k, x in a.items() if isinstance(x, Tensor)}
    constants = {k: x for k, x in a.items() if not isinstance(x, Tensor)}

    def twice(given: dict[str, Tensor]) -> Tensor:
        first = tree_attention(**given, **constants)
        return tree_attention(**given | {"q": first.flip(0)}, **constants)

    torch.compiler.reset()
    compiled = torch.compile(twice, fullgraph=True, dynamic=False, mode=mode)  # noqa: TID251
    eager = twice(tensors)
    for _ in range(3):
        assert torch.equal(compiled(tensors), eager)
    torch.compiler.reset()


@pytest.mark.gpu
def test_gpu_operator_is_registered_rightly():
    from modelkit.kernels.tree_attention import tree_attention

    a = arguments(LARGE["verify_32"], seed=6, dtype=torch.bfloat16, device="cuda")
    tree_attention(**a)
    order = ("q", "k", "v", "k_pages", "v_pages", "table", "length", "position", "ancestors", "row_offset")
    flat = [a[k] for k in (*order, "width", "scale", "window", "splits", "sinks")]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flashtree.tree_attention.default, tuple(flat), test_utils=checks)


def interpret() -> dict[str, Any]:
    """Run the small cases in Triton's interpreter."""
    from modelkit.kernels import tree_attention

    interpreter.patch_interpreter()
    own = tree_attention.choose_tile

    def attempt(case: Case, dtype: torch.dtype) -> Any:
        tree_attention.choose_tile = (lambda *sizes: own(*sizes[:5])) if case.gpu_tiles else own
        try:
            a = arguments(case, seed=4, dtype=dtype)
            with poisoned():
                found = tree_attention.tree_attention(**a)
            return (0.0, 0.0) if not sum(case.rows) and (found == 0).all() else error(found, a)
        except Exception:
            return traceback.format_exc()[-3000:]

    results = {name: attempt(case, torch.float32) for name, case in SMALL.items()}
    results["float16"] = attempt(SMALL["idle_slots"], torch.float16)
    return results


if __name__ == "__main__":
    print(json.dumps(interpret()))
