"""The KV cache's promises: writes land where they should, stale content is never seen, slots are apart."""

import pytest
import torch
from torch import Tensor

from modelkit.cache import KVCache
from modelkit.rows import chain

CAPACITY = 24
WINDOWS = {"full": (None, None), "windowed": (None, 3)}
LAYOUTS = {"static": None, "paged": 4, "permuted": 4, "ragged pages": 5}


@pytest.fixture(params=WINDOWS)
def model(request, tiny_model):
    return tiny_model(windows=WINDOWS[request.param])


def new_cache(model, layout: str = "static", slots: int = 3) -> KVCache:
    cache = model.new_cache(slots=slots, capacity=CAPACITY, scratch=64, page_size=LAYOUTS[layout])
    if layout == "permuted":
        order = torch.randperm(cache.table.numel(), generator=torch.Generator().manual_seed(5))
        cache.set_table(order.view(cache.table.shape))
    return cache


def text(count: int, seed: int) -> Tensor:
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def step(model, cache, tokens: list[Tensor], *, bound=None, uniform=True, keep=True) -> list[Tensor]:
    """Feed each slot its tokens, commit them (unless told not to), return each slot's logits."""
    count = torch.tensor([len(t) for t in tokens])
    width = max(1, int(count.max()))
    padded = torch.full((len(tokens), width), 7)
    for s, t in enumerate(tokens):
        padded[s, : len(t)] = t
    start = cache.length[:-1].clone()
    total = len(tokens) * width if uniform else int(count.sum()) + 1
    bound = int(start.max()) if bound is None else bound
    rows = chain(token=padded, start=start, count=count, rows=total, bound=bound)
    logits = model.head(model(rows, cache).hidden)
    if keep:
        cache.commit(rows.row_offset[:-1, None] + torch.arange(width), count)
    return [logits[o : o + n] for o, n in zip(rows.row_offset.tolist(), count.tolist(), strict=False)]


def stored(cache: KVCache) -> dict[str, Tensor]:
    """Copies of every layer's pages."""
    return {f"{i}.{n}": getattr(layer, n).clone() for i, layer in enumerate(cache.layers) for n in ("k", "v")}


def places(cache: KVCache, slot: int, start: int, stop: int) -> set[tuple[int, int]]:
    size = cache.page_size
    return {(int(cache.table[slot, p // size]), p % size) for p in range(start, stop)}


def changed(before: dict[str, Tensor], cache: KVCache) -> set[tuple[int, int]]:
    """(page, offset) of every place whose bytes differ in some layer, the dummy slot's pages left out."""
    found = set()
    for name, after in stored(cache).items():
        differs = (after != before[name]).any(-1).any(1)
        found |= {(int(p), int(o)) for p, o in differs.nonzero()}
    return {(p, o) for p, o in found if p not in cache.table[-1].tolist()}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 20])
def test_short_and_long_rows_of_a_batch_equal_themselves_alone(model, chunk, uniform):
    texts = [text(3, 1), text(9, 2), text(20, 3)]
    cache = new_cache(model)
    found: list[list[Tensor]] = [[], [], []]
    for i in range(0, 20, chunk):
        logits = step(model, cache, [t[i : i + chunk] for t in texts], uniform=uniform)
        for parts, part in zip(found, logits, strict=True):
            parts.append(part)
    assert cache.length.tolist() == [3, 9, 20, 0]
    for parts, t in zip(found, texts, strict=True):
        close(torch.cat(parts), model.score(t[None])[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_commit_writes_the_accepted_entries_and_nothing_else(model, layout):
    cache = new_cache(model, layout)
    step(model, cache, [text(5, 1), text(2, 2), text(4, 3)])
    scratch = [cache.layers[0].scratch_k.clone(), cache.layers[1].scratch_v.clone()]
    before, length = stored(cache), cache.length.clone()
    step(model, cache, [text(6, 4), text(6, 5), text(6, 6)], keep=False)
    assert changed(before, cache) == set() and torch.equal(cache.length, length)
    assert not torch.equal(cache.layers[0].scratch_k, scratch[0])
    path = torch.tensor([[0, 2, 5, 1, 3], [7, 6, 8, 9, 10], [12, -1, -1, -1, -1]])
    cache.commit(path, torch.tensor([3, 0, 1]))
    assert changed(before, cache) == places(cache, 0, 5, 8) | places(cache, 2, 4, 5)
    assert cache.length.tolist() == [8, 2, 5, 0]
    for layer in cache.layers:
        for position, row in ((5, 0), (6, 2), (7, 5)):
            ((page, offset),) = places(cache, 0, position, position + 1)
            assert torch.equal(layer.k[page, :, offset], layer.scratch_k[row])
            assert torch.equal(layer.v[page, :, offset], layer.scratch_v[row])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_past_the_capacity_land_nowhere(model, layout):
    cache = new_cache(model, layout)
    for _ in range(2):
        step(model, cache, [text(11, 1), text(3, 2), text(11, 3)])
    before = stored(cache)
    step(model, cache, [text(6, 4), text(0, 5), text(1, 6)])
    assert changed(before, cache) == places(cache, 0, 22, 24) | places(cache, 2, 22, 23)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_append_at_a_destination_equals_commit(model, layout):
    direct, scratch = new_cache(model, layout), new_cache(model, layout)
    for cache in (direct, scratch):
        step(model, cache, [text(5, 1), text(2, 2), text(4, 3)])
    before = stored(direct)
    step(model, scratch, [text(3, 4)] * 3, keep=False)
    count = torch.tensor([3, 1, 0])
    page, offset = direct.destination(count, 3)
    for i, layer in enumerate(scratch.layers):
        k, v = (rows[:9].view(3, 3, *rows.shape[1:]) for rows in (layer.scratch_k, layer.scratch_v))
        direct.append(i, k, v, page, offset)
    assert direct.length.tolist() == [5, 2, 4, 0], "the caller advances the length"
    assert changed(before, direct) == places(direct, 0, 5, 8) | places(direct, 1, 2, 3)
    scratch.commit(torch.arange(9).view(3, 3), count)
    direct.length[:-1] += count
    assert changed(stored(direct), scratch) == set()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stale_content_changes_nothing(model, layout):
    """Whatever lies behind the committed lengths, in scratch and in the dummy slot's pages."""
    clean, stale = new_cache(model, layout), new_cache(model, layout)
    outputs = []
    for cache in (clean, stale):
        step(model, cache, [text(5, 1), text(1, 2), text(9, 3)])
        if cache is stale:
            kept = [place for s, n in enumerate((5, 1, 9)) for place in places(cache, s, 0, n)]
            for layer in cache.layers:
                layer.scratch_k.fill_(1e4)
                layer.scratch_v.fill_(1e4)
                for pages in (layer.k, layer.v):
                    copy = pages.clone()
                    pages.fill_(1e4)
                    for page, offset in kept:
                        pages[page, :, offset] = copy[page, :, offset]
        first = step(model, cache, [text(2, 4), text(4, 5), text(0, 6)], bound=CAPACITY, uniform=False)
        outputs.append(first + step(model, cache, [text(1, 7)] * 3, bound=CAPACITY))
    for found, expected in zip(*reversed(outputs), strict=True):
        close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("uniform", [True, False])
def test_a_request_that_went_nan_does_not_reach_other_slots(model, uniform):
    cache = new_cache(model)
    model.embed_tokens.weight[13] = float("nan")
    clean = [t.clamp(max=12) for t in (text(2, 1), text(6, 2), text(3, 3))]
    sick = torch.tensor([4, 13, 5, 6])
    found = step(model, cache, [clean[0], sick, clean[2]], uniform=uniform)
    assert found[1][1:].isnan().all()
    for s in (0, 2):
        close(found[s], model.score(clean[s][None])[0])


@torch.no_grad()
def test_a_slot_is_clean_after_a_request_that_went_nan(model):
    cache = new_cache(model)
    model.embed_tokens.weight[13] = float("nan")
    step(model, cache, [torch.tensor([4, 13, 5, 6])] * 3)
    cache.reset(0)
    clean = text(6, 2).clamp(max=12)
    nothing = clean[:0]
    expected = model.score(clean[None])[0]
    for part in (slice(0, 3), slice(3, 6)):
        found = step(model, cache, [clean[part], nothing, nothing], bound=CAPACITY)
        close(found[0], expected[part])


def test_reset_forgets_one_slot(model):
    cache = new_cache(model)
    old, new = [text(6, s) for s in range(3)], text(4, 9)
    step(model, cache, old)
    cache.reset(1)
    assert cache.length.tolist() == [6, 0, 6, 0]
    logits = step(model, cache, [text(4, 8), new, text(4, 7)], bound=CAPACITY)
    close(logits[1], model.score(new[None])[0])
    close(logits[2], model.score(torch.cat([old[2], text(4, 7)])[None])[0, 6:])


@pytest.mark.parametrize("rows", [4, 6])
@torch.no_grad()
def test_a_forward_of_idle_slots_only(model, rows):
    cache = new_cache(model)
    step(model, cache, [text(3, 1)] * 3)
    before, zero = stored(cache), torch.zeros(3, dtype=torch.int64)
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    idle = chain(token=tokens, start=cache.length[:-1], count=zero, rows=rows, bound=3)
    assert not idle.valid.any()
    assert model(idle, cache).hidden.isfinite().all()
    cache.commit(tokens, zero)
    assert changed(before, cache) == set() and cache.length.tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [8, 7])
@torch.no_grad()
def test_a_block_sees_forward_only_when_it_is_not_causal(tiny_model, causal, rows):
    model = tiny_model()
    count, start = torch.tensor([4, 3]), torch.zeros(2, dtype=torch.int64)

    def hidden(token: Tensor) -> Tensor:
        block = chain(token=token, start=start, count=count, rows=rows, bound=0, causal=causal)
        return model(block, None).hidden

    token = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    base = hidden(token)
    last, beyond = token.clone(), token.clone()
    last[0, 3], beyond[1, 3] = 40, 40
    moved = (hidden(last) - base).abs().amax(1)
    assert moved[3] > 0.01 and bool((moved[:3] > 1e-3).all()) != causal
    assert moved[4:7].max() < 1e-5 and (not causal or moved[:3].max() < 1e-5)
    assert (hidden(beyond) - base).abs()[:7].max() < 1e-5, "a row past the count is seen"


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_window_holds_in_both_directions_of_a_block(tiny_model, causal):
    model = tiny_model(num_hidden_layers=1, windows=(3,))
    count, start = torch.tensor([7]), torch.tensor([0])

    def hidden(token: Tensor) -> Tensor:
        block = chain(token=token, start=start, count=count, rows=7, bound=0, causal=causal)
        return model(block, None).hidden

    token = torch.arange(7)[None]
    changed_token = token.clone()
    changed_token[0, 3] = 40
    moved = (hidden(changed_token) - hidden(token)).abs().amax(1) > 1e-4
    assert moved.tolist() == [False, not causal, not causal, True, True, True, False]
