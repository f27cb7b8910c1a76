"""Rows and the KV cache: any mix of chunks, steps and trees in one forward equals plain text."""

import dataclasses

import pytest
import torch
from torch import Tensor

from modelkit.cache import KVCache
from modelkit.rows import Rows, flatten, pack_bits, unpack_bits

WINDOWS = {"full": (None, None), "windowed": (4, 4), "mixed": (None, 3)}
CAPACITY = 64


@dataclasses.dataclass(frozen=True)
class Part:
    """What one slot takes part with: committed text, then nodes with parents (local indices, topological)."""

    context: list[int]
    tokens: list[int]
    parents: list[int]

    def path(self, node: int) -> list[int]:
        """Local indices from the root to a node."""
        return ([] if node < 0 else self.path(self.parents[node])) + ([node] if node >= 0 else [])

    def text(self, node: int) -> list[int]:
        return self.context + [self.tokens[i] for i in self.path(node)]


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def line(context: int, count: int, seed: int) -> Part:
    return Part(ids(context, seed), ids(count, seed + 100), [i - 1 for i in range(count)])


def tree(context: int, parents: list[int], seed: int) -> Part:
    return Part(ids(context, seed), ids(len(parents), seed + 100), parents)


# Siblings at depths 1, 2 and 3, of the first and of later children, in no depth order.
BUSHY = [-1, 0, 0, 1, 2, 1, 3, 0, 4, 6, 3]


def rows_of(parts: list[Part], *, padding: int, bound: int | None = None) -> Rows:
    """One forward's rows of all parts; `padding` rows behind them (-1: the uniform layout)."""
    width = max(1, *(len(p.tokens) for p in parts))
    shape = (len(parts), width)
    token, parent = torch.full(shape, 60), torch.full(shape, -1)
    position, visible = torch.zeros(shape, dtype=torch.int64), torch.zeros(*shape, width, dtype=torch.bool)
    valid = torch.zeros(shape, dtype=torch.bool)
    for s, part in enumerate(parts):
        for i in range(len(part.tokens)):
            path = part.path(i)
            token[s, i], parent[s, i], valid[s, i] = part.tokens[i], part.parents[i], True
            position[s, i] = len(part.context) + len(path) - 1
            visible[s, i, path] = True
    count = torch.tensor([len(p.tokens) for p in parts])
    rows = len(parts) * width if padding < 0 else int(count.sum()) + padding
    bound = max(len(p.context) for p in parts) if bound is None else bound
    nodes = {"token": token, "parent": parent, "valid": valid, "ancestors": pack_bits(visible), "position": position}
    return flatten(**nodes, count=count, rows=rows, bound=bound)


def commit(cache: KVCache, rows: Rows, paths: list[list[int]], junk: int = -1) -> None:
    """Commit local paths; entries past the count hold `junk`."""
    width = max(1, *(len(p) for p in paths))
    path = torch.full((len(paths), width), junk)
    for s, local in enumerate(paths):
        path[s, : len(local)] = torch.tensor(local, dtype=torch.int64) + rows.row_offset[s]
    cache.commit(path, torch.tensor([len(p) for p in paths]))


def new_cache(model, slots: int, layout: str = "static", scratch: int = 128) -> KVCache:
    size = {"static": None, "paged": 8, "permuted": 4, "ragged pages": 7}[layout]
    cache = model.new_cache(slots=slots, capacity=CAPACITY, scratch=scratch, page_size=size)
    if layout in ("permuted", "ragged pages"):
        order = torch.randperm(cache.table.numel(), generator=torch.Generator().manual_seed(5))
        cache.set_table(order.view(cache.table.shape))
    return cache


@torch.no_grad()
def fill(model, cache: KVCache, parts: list[Part]) -> None:
    """Commit each part's context, in one ragged prefill."""
    texts = [Part([], p.context, [i - 1 for i in range(len(p.context))]) for p in parts]
    rows = rows_of(texts, padding=1)
    model(rows, cache)
    commit(cache, rows, [list(range(len(p.context))) for p in parts])


@torch.no_grad()
def logits_of(model, rows: Rows, cache: KVCache) -> Tensor:
    return model.head(model(rows, cache).hidden)


def plain(model, text: list[int]) -> Tensor:
    """Logits of the last token, without cache or tree."""
    return model.score(torch.tensor([text]))[0, -1]


def expect_plain(model, rows: Rows, logits: Tensor, parts: list[Part]) -> None:
    for s, part in enumerate(parts):
        for i in range(len(part.tokens)):
            difference = logits[int(rows.row_offset[s]) + i] - plain(model, part.text(i))
            assert difference.abs().max() < 1e-4, f"slot {s}, node {i}"


@pytest.fixture(params=WINDOWS)
def model(request, tiny_model):
    return tiny_model(windows=WINDOWS[request.param])


@pytest.fixture
def mix() -> list[Part]:
    """A chunk behind a context, a plain step, a tree with siblings, an idle slot, a first chunk."""
    return [line(4, 7, 1), line(9, 1, 2), tree(6, BUSHY, 3), line(5, 0, 4), line(0, 3, 5)]


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 100])
def test_bits_round_trip(n):
    visible = torch.rand(3, 5, n, generator=torch.Generator().manual_seed(n)) < 0.5
    visible[0, 0] = True
    packed = pack_bits(visible)
    assert packed.dtype == torch.int32 and packed.shape == (3, 5, -(-n // 32))
    assert torch.equal(unpack_bits(packed, n), visible)
    number = sum(int(bit) << i for i, bit in enumerate(visible[1, 2].tolist()))
    assert sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(packed[1, 2].tolist())) == number


@pytest.mark.parametrize(("bit", "value"), [(0, 1), (31, -1 << 31), (32, 1), (63, -1 << 31)])
def test_single_bits(bit, value):
    packed, word = pack_bits(torch.arange(64) == bit), bit // 32
    assert packed[word] == value and packed[1 - word] == 0
    assert unpack_bits(packed, 64).nonzero().tolist() == [[bit]]


def test_flatten_ragged_holds_what_uniform_holds():
    parts = [tree(6, BUSHY, 3), line(2, 11, 6), tree(0, [-1] + [0] * 10, 7)]
    uniform, ragged = rows_of(parts, padding=-1), rows_of(parts, padding=3)
    assert uniform.uniform and not ragged.uniform and ragged.count == uniform.count + 3
    for name in ("token", "position", "slot", "parent", "valid", "ancestors"):
        assert torch.equal(getattr(ragged, name)[: uniform.count], getattr(uniform, name)), name
    assert torch.equal(ragged.row_offset, uniform.row_offset)
    assert ragged.slot[-3:].tolist() == [3] * 3 and not ragged.valid[-3:].any(), "padding rows"
    assert torch.equal(ragged.local()[: uniform.count], uniform.local())
    assert torch.equal(ragged.rectangle(), uniform.rectangle())


def test_flatten_leaves_idle_slots_out_and_pads(mix):
    rows = rows_of(mix, padding=4)
    assert rows.row_offset.tolist() == [0, 7, 8, 19, 19, 22]
    assert rows.slot.tolist() == [0] * 7 + [1] + [2] * 11 + [4] * 3 + [5] * 4
    assert rows.token.tolist() == mix[0].tokens + mix[1].tokens + mix[2].tokens + mix[4].tokens + [0] * 4
    assert rows.parent.tolist() == [-1, *range(6), -1, -1, *(p + 8 for p in BUSHY[1:]), -1, 19, 20] + [-1] * 4
    assert rows.position.tolist()[7:12] == [9, 6, 7, 7, 8] and rows.position.tolist()[-5:] == [2, 0, 0, 0, 0]
    assert rows.valid.tolist() == [True] * 22 + [False] * 4
    assert rows.local().tolist()[:22] == [*range(7), 0, *range(11), 0, 1, 2]


def test_padding_rows_have_local_index_zero(mix):
    rows = rows_of(mix, padding=4)
    assert rows.local()[rows.slot == rows.slots].tolist() == [0] * 4


@pytest.mark.parametrize("padding", [0, 3, -1])
def test_a_mix_equals_each_alone_and_plain_text(model, mix, padding):
    cache = new_cache(model, 5)
    fill(model, cache, mix)
    rows = rows_of(mix, padding=padding)
    logits = logits_of(model, rows, cache)
    expect_plain(model, rows, logits, mix)
    for part in (p for p in mix if p.tokens):
        alone = new_cache(model, 1)
        fill(model, alone, [part])
        single = rows_of([part], padding=-1)
        start = int(rows.row_offset[mix.index(part)])
        found, expected = logits[start : start + len(part.tokens)], logits_of(model, single, alone)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["paged", "permuted", "ragged pages"])
def test_block_tables_equal_the_static_cache(model, mix, layout):
    outputs = []
    for kind in ("static", layout):
        cache = new_cache(model, 5, kind)
        fill(model, cache, mix)
        rows = rows_of(mix, padding=2, bound=30)
        first = logits_of(model, rows, cache)[:22]
        commit(cache, rows, [[0, 1, 2, 3, 4, 5, 6], [0], [0, 1, 3, 6, 9], [], [0, 1]])
        then = [Part([0] * int(cache.length[s]), ids(2, 40 + s), [-1, 0]) for s in range(5)]
        outputs.append((first, logits_of(model, rows_of(then, padding=-1), cache)))
    for found, expected in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_trees_deeper_than_a_word_equal_their_paths(model, seed):
    """A spine of 36 rows with siblings hanging off it, then 20 rows hanging anywhere: two words of bits."""
    generator = torch.Generator().manual_seed(seed)
    pick = [int(torch.randint(0, 30 + i, (1,), generator=generator)) for i in range(20)]
    parents = [-1, 0, 0, 1, 1, *range(4, 35), *pick]
    part, other = tree(5, parents, 9), tree(3, BUSHY, 3)
    assert len(part.path(35)) == 34 and len(parents) == 56
    rows = rows_of([part, other], padding=2)
    assert rows.ancestors.shape[1] == 2 and (rows.ancestors[:, 0] < 0).any()
    cache = new_cache(model, 2)
    fill(model, cache, [part, other])
    expect_plain(model, rows, logits_of(model, rows, cache), [part, other])
    commit(cache, rows, [part.path(35), [0]])
    after = [Part(part.text(35), ids(2, 50), [-1, 0]), Part(other.text(0), ids(2, 51), [-1, 0])]
    rows = rows_of(after, padding=-1)
    expect_plain(model, rows, logits_of(model, rows, cache), after)


@torch.no_grad()
def test_positions_are_depths_not_row_numbers(model):
    part = Part(ids(6, 3), [7, 8, 9, 10], [-1, 0, 0, 1])
    cache = new_cache(model, 1)
    fill(model, cache, [part])
    rows = rows_of([part], padding=-1)
    assert rows.position.tolist() == [6, 7, 7, 8]
    right = logits_of(model, rows, cache)
    expect_plain(model, rows, right, [part])
    wrong = logits_of(model, dataclasses.replace(rows, position=torch.tensor([6, 7, 8, 9])), cache)
    assert (wrong[2:] - right[2:]).abs().amax(1).min() > 0.01
    swapped = Part(part.context, [7, 9, 8, 10], [-1, 0, 0, 2])
    other = logits_of(model, rows_of([swapped], padding=-1), cache)
    torch.testing.assert_close(other[[0, 2, 1, 3]], right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["static", "permuted"])
def test_rounds_of_trees_with_rejected_siblings_equal_plain_text(model, layout):
    """Ragged acceptance for several rounds: the root only, a deep path, nothing, on slots that differ."""
    generator = torch.Generator().manual_seed(11)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    texts = [ids(3, 1), ids(8, 2), ids(1, 3)]
    cache = new_cache(model, 3, layout)
    fill(model, cache, [Part(t, [], []) for t in texts])
    for number in range(7):
        sizes = [draw(0 if s == 2 else 1, 9) for s in range(3)]
        parts = []
        for s, size in enumerate(sizes):
            parents = [draw(max(0, i - 3), i) if i else -1 for i in range(size)]
            parts.append(Part(texts[s], ids(size, 60 + 10 * number + s), parents))
        rows = rows_of(parts, padding=number % 3, bound=CAPACITY if number % 2 else None)
        expect_plain(model, rows, logits_of(model, rows, cache), parts)
        leaves = [draw(-1, n) if n else -1 for n in sizes]
        accepted = [(p.path(leaf), p.text(leaf)) for p, leaf in zip(parts, leaves, strict=True)]
        commit(cache, rows, [path for path, _ in accepted], junk=number % 2 - 1)
        texts = [text for _, text in accepted]
        assert cache.length[:-1].tolist() == [len(t) for t in texts]
    assert len(texts[0]) >= 10 and len(texts[1]) >= 15, "too little was accepted to prove anything"
