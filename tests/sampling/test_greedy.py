"""Greedy: the argmax of each row, lowest id first, and the deepest path of rows that the target agrees with."""

import random

import pytest
import torch

from modelkit.rows import flatten, pack_bits
from sampling import SAMPLERS, NodeContext, walk

V = 7
GREEDY = SAMPLERS.build({"name": "greedy"})


def context(trees, *, max_depth, rows=None):
    """Rows of trees as the engine lays them out; a tree is a list of (token, parent, valid), None an idle slot."""
    width = max(len(tree) for tree in trees if tree)
    slots = len(trees)
    token, parent, depth = (torch.zeros(slots, width, dtype=torch.int64) for _ in range(3))
    valid = torch.zeros(slots, width, dtype=torch.bool)
    visible = torch.eye(width, dtype=torch.bool).repeat(slots, 1, 1)
    for s, tree in enumerate(trees):
        for n, (t, p, real) in enumerate(tree or []):
            token[s, n], parent[s, n], valid[s, n] = t, p, real
            if p >= 0:
                depth[s, n] = depth[s, p] + 1
                visible[s, n] |= visible[s, p]
    count = torch.tensor([width if tree else 0 for tree in trees])
    start = 10 + torch.arange(slots)[:, None]
    flat = flatten(
        token=token, parent=parent, valid=valid, ancestors=pack_bits(visible), position=start + depth,
        count=count, rows=rows or slots * width, bound=0,
    )  # fmt: skip
    base = torch.cat([start[:, 0], start.new_zeros(1)])[flat.slot]
    return NodeContext(
        token=flat.token, parent=flat.parent, depth=(flat.position - base).clamp(min=0), position=flat.position,
        slot=flat.slot, local=flat.local(), valid=flat.valid, ancestors=flat.ancestors, slots=slots,
        max_depth=max_depth, width=flat.width if flat.uniform else 0,
    )  # fmt: skip


def logits_for(choice):
    """Logits [R, V] whose argmax is `choice`."""
    return torch.nn.functional.one_hot(torch.as_tensor(choice), V).float()


def lists(accepted):
    return accepted.path.tolist(), accepted.token.tolist(), accepted.count.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("row", "index"),
    [([1, 3, 3, 2], 1), ([3, 3, 3, 3], 0), ([-1, -2, -1, -1], 0), ([0, 0, 5, 5], 2), ([float("-inf"), 1, 1, 0], 1)],
)
def test_the_lowest_id_of_equals(row, index, dtype):
    logits = torch.tensor([row], dtype=dtype)
    nodes = context([[(0, -1, True)]], max_depth=0)
    assert lists(GREEDY.accept(logits, nodes)) == ([[0]], [[index]], [1])
    # In a wide vocabulary too, where argmax is vectorised, and beside a draft of the other one of the two.
    wide = torch.full((3, 5000), -9.0, dtype=dtype)
    wide[:, [17, 1234, 4999]] = 2.0
    nodes = context([[(0, -1, True), (1234, 0, True), (17, 0, True)]], max_depth=1)
    assert lists(GREEDY.accept(wide, nodes)) == ([[0, 2]], [[17, 17]], [2])


#         0
#       /   \
#     1:a    2:b
#     / \      \
#   3:c  4:d    5:e
TREE = [(0, -1, True), (1, 0, True), (2, 0, True), (3, 1, True), (4, 1, True), (5, 2, True)]


@pytest.mark.parametrize(
    ("choice", "path", "token"),
    [
        ([6, 3, 5, 0, 0, 0], [0], [6]),  # no child is right: the bonus alone
        ([1, 6, 5, 0, 0, 0], [0, 1], [1, 6]),
        ([1, 4, 5, 0, 6, 0], [0, 1, 4], [1, 4, 6]),  # the second sibling
        ([2, 3, 5, 6, 6, 1], [0, 2, 5], [2, 5, 1]),  # the other branch, though 3 fits its own parent
        ([2, 3, 6, 6, 6, 6], [0, 2], [2, 6]),
    ],
)
def test_the_walk(choice, path, token):
    found = lists(GREEDY.accept(logits_for(choice), context([TREE], max_depth=3)))
    missing = [-1] * (4 - len(path))
    assert found == ([path + missing], [token + missing], [len(path)])


@pytest.mark.parametrize("invalid", [1, 4])
def test_nothing_below_an_invalid_row_is_accepted(invalid):
    tree = [(t, p, n != invalid) for n, (t, p, _) in enumerate(TREE)]
    path, token, count = lists(GREEDY.accept(logits_for([1, 4, 5, 0, 6, 0]), context([tree], max_depth=2)))
    assert (path, token, count) == {1: ([[0, -1, -1]], [[1, -1, -1]], [1]), 4: ([[0, 1, -1]], [[1, 4, -1]], [2])}[
        invalid
    ]


@pytest.mark.parametrize("rows", [None, 12, 15])
def test_several_slots_one_of_them_idle(rows):
    """The idle slot as rows that are not valid (None), left out, or left out with padding at the end."""
    nodes = context([TREE, None, TREE], max_depth=2, rows=rows)
    choices = [[1, 4, 5, 0, 6, 0], [0] * 6, [2, 3, 5, 6, 6, 1]]
    if rows:
        choices[1] = []
    choice = [c for part in choices for c in part]
    accepted = GREEDY.accept(logits_for(choice + [0] * (len(nodes.token) - len(choice))), nodes)
    first = 6 if rows else 12  # of the last slot
    assert accepted.path.tolist() == [[0, 1, 4], [-1, -1, -1], [first, first + 2, first + 5]]
    assert accepted.token.tolist() == [[1, 4, 6], [-1, -1, -1], [2, 5, 1]]
    assert accepted.count.tolist() == [3, 0, 3]


@pytest.mark.parametrize("size", [2, 9, 31, 32, 33, 70])
def test_walk_equals_a_loop(size):
    """Random trees around the borders of bit words, some rows invalid, against following matching children by hand."""
    rng = random.Random(size)
    for _ in range(40):
        trees = []
        for _ in range(3):
            tree, taken = [(rng.randrange(V), -1, True)], set()
            while len(tree) < size:
                # Deep trees with few tokens, so that long paths are right; siblings differ in token.
                parent, token = rng.randrange(max(0, len(tree) - 6), len(tree)), rng.randrange(V)
                fits = (parent, token) not in taken
                taken.add((parent, token))
                tree.append((token, parent, fits and rng.random() < 0.9))
            trees.append(tree)
        trees[rng.randrange(3)] = None
        nodes = context(trees, max_depth=size, rows=2 * size + 1)
        target = torch.randint(0, V, nodes.token.shape, generator=torch.Generator().manual_seed(rng.randrange(9**9)))
        found = walk(target, nodes)
        start = 0
        for s, tree in enumerate(trees):
            path = [] if tree is None else [0]
            while path:
                below = [n for n, (t, p, real) in enumerate(tree) if p == path[-1] and real and t == target[start + p]]
                if not below:
                    break
                path.append(below[0])
            rows = [start + n for n in path]
            assert found.count[s] == len(path)
            assert found.path[s].tolist() == rows + [-1] * (size + 1 - len(rows))
            assert found.token[s].tolist() == [int(target[r]) for r in rows] + [-1] * (size + 1 - len(rows))
            start += size if tree else 0


@pytest.mark.parametrize("temperature", [0.7, 1e-9, 1, -1, float("nan"), float("inf")])
def test_other_temperatures_are_refused(temperature):
    known = f"sampler 'greedy' decodes at 0 only; samplers: {', '.join(SAMPLERS.names())}"
    with pytest.raises(ValueError, match=known):
        GREEDY.params(temperature=temperature)
    with pytest.raises(ValueError, match=known):
        SAMPLERS.build({"name": "greedy", "temperature": temperature})


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0])
def test_zero_is_greedy(temperature):
    params = GREEDY.params(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1, seed=1)  # none of them matters
    assert params.temperature == 0 and GREEDY.always_argmax(params)
    assert SAMPLERS.build({"name": "greedy", "temperature": temperature}).config.temperature == 0
    assert GREEDY.lossless


@pytest.mark.parametrize(
    "change",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"logit_bias": {3: 1.0}}, {"banned_token_ids": (3,)}],
)
def test_what_greedy_would_ignore_is_refused(change):
    with pytest.raises(ValueError, match=r"(penalties|logit_bias): sampler 'greedy' takes the argmax of the logits"):
        GREEDY.params(**change)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(bad):
    """A fault of the slot whose path they are on, and of nobody else."""
    logits = torch.cat([logits_for([1, 4, 5, 0, 6, 0])] * 2)
    logits[2, 0] = logits[6 + 4, 2] = bad  # off the first tree's path; the leaf of the second one's
    accepted = GREEDY.accept(logits, context([TREE, TREE], max_depth=2))
    assert accepted.fault.tolist() == [0, 1]
    assert accepted.token[0].tolist() == [1, 4, 6]


def test_the_engine_refuses_before_anything_runs(tiny_targets):
    from spec import Engine

    tables = {"target": {"path": str(tiny_targets["llama"])}, "draft": {"name": "ngram"}}
    engine = Engine.from_config(tables | {"sampling": {"name": "greedy"}})
    with pytest.raises(ValueError, match=r"temperature = 0.7: sampler 'greedy' decodes at 0 only; samplers: .*greedy"):
        engine.generate([[1, 2]], temperature=0.7)
    assert int(engine.state.round) == 0
