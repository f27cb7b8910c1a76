"""Draft trees against a plain heap, what every policy promises, and the walk that accepts a path."""

import math
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import heap_reference as heap  # noqa: E402
from dflash_helpers import paths  # noqa: E402

from modelkit.rows import flatten, unpack_bits  # noqa: E402
from sampling import SAMPLERS, NodeContext, walk  # noqa: E402
from spec.tree import MAX_BUDGET, TREES  # noqa: E402
from spec.types import Proposal, Tree  # noqa: E402

INF = math.inf


def proposal(rows, ids, edge=None):
    """Of nested lists, a slot each: [S][L][k]; edges [S][L - 1][k][k], for the depths after the first."""
    score = torch.tensor(rows)
    if edge is not None:
        edge = torch.tensor(edge)
        edge = torch.cat([torch.full_like(edge[:, :1], math.nan), edge], 1)  # depth 0 is unused
        score[:, 1:] = math.nan
    return Proposal(ids=torch.tensor(ids), score=score, edge=edge)


def build(proposal, name, **settings):
    """The policy's tree, its promises checked; roots are 1000, 1001, ..."""
    policy = TREES.build({"name": name} | settings)
    slots, nodes = proposal.ids.shape[0], policy.nodes(proposal.depth)
    root = torch.arange(1000, 1000 + slots)
    tree = policy.build(proposal, root)
    assert tree.token.shape == tree.parent.shape == tree.depth.shape == tree.valid.shape == (slots, nodes)
    assert tree.ancestors.shape == (slots, nodes, -(-nodes // 32)) and tree.ancestors.dtype == torch.int32
    assert tree.valid.dtype == torch.bool
    seen = unpack_bits(tree.ancestors, nodes)
    for s in range(slots):
        parent, token, depth, valid = (t[s].tolist() for t in (tree.parent, tree.token, tree.depth, tree.valid))
        assert (parent[0], token[0], depth[0], valid[0]) == (-1, 1000 + s, 0, True)
        assert all(0 <= parent[i] < i for i in range(1, nodes))
        ancestors = [{0}]
        for i in range(1, nodes):
            ancestors.append(ancestors[parent[i]] | {i})
        assert [set(row.nonzero()[:, 0].tolist()) for row in seen[s]] == ancestors
        real = [i for i in range(1, nodes) if valid[i]]
        assert all(valid[parent[i]] and depth[i] == depth[parent[i]] + 1 for i in real)
        assert len({(parent[i], token[i]) for i in real}) == len(real), "two children with the same token"
    return tree


def score_of(path, rows, ids):
    return math.fsum(rows[d][ids[d].index(token)] for d, token in enumerate(path))


def random_edges(rng, rows, k, missing=0.0):
    """[L - 1][k][k]: each parent has its own order of the depth's scores, some of them missing."""
    return [[[-INF if rng.random() < missing else x for x in rng.sample(row, k)] for _ in range(k)] for row in rows[1:]]


def single(values):
    """Rounded to fp32, so that the heap adds the very numbers that the policy adds."""
    return torch.tensor(values).double().tolist()


# ---------------------------------------------------------------- spine first
@pytest.mark.parametrize("off_spine", [1.0, 0.3, 0.01])
@pytest.mark.parametrize(("depths", "k", "budget"), [(3, 4, 2), (5, 3, 12), (4, 2, 40), (7, 3, 9), (1, 5, 3)])
def test_spine_first_equals_its_definition(depths, k, budget, off_spine):
    for seed in range(6):
        rows, ids, rng = heap.random_case(seed * 10 + depths, depths, k)
        rows = single(rows)
        edge = [[rng.sample(rows[0], k)], *random_edges(rng, rows, k, missing=0.2)]
        for edges in (None, edge):
            tree = build(
                proposal([rows], [ids], None if edges is None else [edge[1:]]), "spine_first", budget=budget,
                off_spine=off_spine,
            )  # fmt: skip

            def children(ranks, edges=edges, rows=rows):
                return rows[len(ranks)] if edges is None or not ranks else edges[len(ranks)][ranks[-1]]

            assert set(paths(tree, 0)) == set(heap.spine_first_tree(children, ids, budget, off_spine))


def test_the_spine_is_drafted_whatever_its_score():
    rows = [[-0.1, -3.0], [-5.0, -5.1], [-6.0, -9.0]]
    case = proposal([rows], [[[1, 2], [3, 4], [5, 6]]])
    assert set(paths(build(case, "spine_first", budget=4, off_spine=0.3), 0)) == {(1,), (1, 3), (1, 3, 5), (2,)}
    assert (1, 3, 5) not in paths(build(case, "best_first", budget=4), 0)


def test_below_a_sibling_is_dearer():
    """(2, 3) is likelier than (1, 4) by its path alone, and right less often."""
    rows = [[-0.6, -0.8], [-0.3, -0.6]]
    case = proposal([rows], [[[1, 2], [3, 4]]])
    assert set(paths(build(case, "spine_first", budget=4, off_spine=1.0), 0)) == {(1,), (1, 3), (2,), (2, 3)}
    assert set(paths(build(case, "spine_first", budget=4, off_spine=0.5), 0)) == {(1,), (1, 3), (2,), (1, 4)}


def test_the_discount_is_the_drafters_unless_the_config_has_one():
    class Drafter:
        off_spine = 0.7

    policy = TREES.build({"name": "spine_first"})
    assert policy.off_spine == 0.3
    policy.suit(Drafter())
    assert policy.off_spine == 0.7
    policy = TREES.build({"name": "spine_first", "off_spine": 0.2})
    policy.suit(Drafter())
    assert policy.off_spine == 0.2
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"off_spine = .*: must be in \(0, 1\]"):
            TREES.build({"name": "spine_first", "off_spine": wrong})


# ---------------------------------------------------------------- best first
@pytest.mark.parametrize("depths,k", [(3, 4), (1, 5), (4, 2), (2, 1), (7, 3), (15, 8), (9, 1), (5, 16)])
@pytest.mark.parametrize("budget", [1, 2, 5, 16, 70])
def test_best_first_equals_the_heap(depths, k, budget):
    for seed in range(4):
        cases = [heap.random_case(seed * 100 + slot, depths, k) for slot in range(3)]
        rows, ids, rngs = (list(part) for part in zip(*cases, strict=True))
        rows = single(rows)
        tree = build(proposal(rows, ids), "best_first", budget=budget)
        for s in range(3):
            expected = heap.heap_tree(rows[s], ids[s], budget)
            assert sorted(paths(tree, s)) == sorted(expected)
            assert len(expected) == min(budget, sum(k**d for d in range(1, depths + 1)))
        edges = [single(random_edges(rng, row, k, missing=0.2)) for rng, row in zip(rngs, rows, strict=True)]
        if depths > 1:
            tree = build(proposal(rows, ids, edges), "best_first", budget=budget)
            for s in range(3):
                ranks = [list(range(k))] * depths  # tokens of different ranks may be equal below different parents
                best = heap.heap_tree_edges(rows[s][0], edges[s], ranks, 4 * budget)
                best = [path for path in best if edge_score(path, rows[s][0], edges[s]) > -INF][:budget]
                named = [tuple(ids[s][d][r] for d, r in enumerate(path)) for path in best]
                assert sorted(paths(tree, s)) == sorted(named)


def edge_score(ranks, first, edge):
    return sum([first[ranks[0]], *(edge[d - 1][ranks[d - 1]][ranks[d]] for d in range(1, len(ranks)))])


def test_best_first_at_exact_ties():
    """Ties go to the lesser depth, then to the lower rank."""
    flat, ids = [[[math.log(0.25)] * 4] * 3], [[[1, 2, 3, 4]] * 3]
    assert paths(build(proposal(flat, ids), "best_first", budget=6), 0) == [(1,), (2,), (3,), (4,), (1, 1), (1, 2)]
    certain = [[[0.0, -INF]] * 2]  # a child ties with its parent
    assert paths(build(proposal(certain, [[[5, 6], [7, 8]]]), "best_first", budget=1), 0) == [(5,)]
    assert paths(build(proposal(certain, [[[5, 6], [7, 8]]]), "best_first", budget=5), 0) == [(5,), (5, 7)]
    pair = [[[-1.0, -2.0], [-1.0, -2.0]]]  # (5, 8) and (6, 7) score -3 both, (6,) scores -2 as (5, 7) does
    found = [paths(build(proposal(pair, [[[5, 6], [7, 8]]]), "best_first", budget=b), 0) for b in (2, 3, 4)]
    assert [set(f) for f in found] == [{(5,), (6,)}, {(5,), (6,), (5, 7)}, {(5,), (6,), (5, 7), (5, 8)}]


@pytest.mark.parametrize("seed", range(30))
def test_best_first_with_many_ties_is_as_good_as_the_heap(seed):
    rng = random.Random(seed)
    depths, k, budget = rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 40)
    rows = [sorted((rng.choice([0.0, -0.5, -1.0, -2.0, -INF]) for _ in range(k)), reverse=True) for _ in range(depths)]
    ids = [rng.sample(range(20), k) for _ in range(depths)]
    found = paths(build(proposal([rows], [ids]), "best_first", budget=budget), 0)
    best = [score_of(path, rows, ids) for path in heap.heap_tree(rows, ids, 10**4)]
    expected = [score for score in best if score > -INF][:budget]
    assert sorted(score_of(path, rows, ids) for path in found) == sorted(expected)


@pytest.mark.parametrize("budget", [0, -1, MAX_BUDGET + 1])
@pytest.mark.parametrize("name", ["best_first", "chain"])
def test_budgets_out_of_range_are_refused(name, budget):
    with pytest.raises(ValueError, match="budget"):
        TREES.build({"name": name, "budget": budget})


# ---------------------------------------------------------------- chain and static
@pytest.mark.parametrize("budget,length", [(None, 5), (3, 3), (1, 1), (9, 5)])
def test_chain(budget, length):
    rows = [[[-1.0, -2.0]] * 5, [[-1.0, -2.0]] * 2 + [[-INF, -INF]] + [[-1.0, -2.0]] * 2]
    ids = [[[10 * d + r for r in (1, 2)] for d in range(5)]] * 2
    settings = {} if budget is None else {"budget": budget}
    tree = build(proposal(rows, ids), "chain", **settings)
    assert tree.token[:, 1:].tolist() == [[10 * d + 1 for d in range(length)]] * 2
    assert tree.parent[0].tolist() == list(range(-1, length)) and tree.depth[1].tolist() == list(range(length + 1))
    assert [len(paths(tree, s)) for s in range(2)] == [length, min(length, 2)]  # nothing below a missing candidate
    edge = [[[[-1.0, -2.0], [-INF, -INF]]] * 4, [[[-1.0, -2.0]] * 2] * 2 + [[[-INF, -1.0], [-1.0, -1.0]]] * 2]
    tree = build(proposal(rows, ids, edge), "chain", **settings)
    assert [len(paths(tree, s)) for s in range(2)] == [length, min(length, 3)]


def grow(widths, first, edge, ids, path=()):
    """Static trees by recursion: [(rank path, exists)] in order of depth."""
    level, out = [((), True)], []
    for d, width in enumerate(widths):
        below = []
        for path, alive in level:
            scores = edge[d - 1][path[-1]] if edge and d else first[d]
            order = sorted(range(len(scores)), key=lambda r, scores=scores: (-scores[r], r))[:width]
            below += [((*path, r), alive and scores[r] > -INF) for r in order]
        out += below
        level = below
    return [(tuple(ids[d][r] for d, r in enumerate(path)), alive) for path, alive in out]


def test_static_topology():
    rows, ids = [[-1.0, -2.0, -3.0]] * 4, [[10 * d + r for r in (1, 2, 3)] for d in range(4)]
    tree = build(proposal([rows], [ids]), "static", widths=(2, 2, 1))
    assert tree.parent[0].tolist() == [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert tree.token[0, 1:].tolist() == [1, 2, 11, 12, 11, 12, 21, 21, 21, 21]
    with pytest.raises(ValueError, match="widths"):
        TREES.build({"name": "static", "widths": [1] * 5}).nodes(4)
    for widths in ([], [2, 0], [4] * 6):
        with pytest.raises(ValueError, match=r"widths|budget"):
            TREES.build({"name": "static", "widths": widths})


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("widths", [(3,), (2, 2, 1), (3, 1, 2, 1), (1, 1, 1, 1)])
def test_static_takes_the_best_ranks_of_each_parent(widths, edges):
    for seed in range(6):
        cases = [heap.random_case(seed * 10 + s, 4, 4) for s in range(2)]
        rows, ids, rngs = (list(part) for part in zip(*cases, strict=True))
        if seed % 2:  # some candidates are missing
            rows = [
                [[x if r < 2 or d == 2 else -INF for r, x in enumerate(row)] for d, row in enumerate(case)]
                for case in rows
            ]
        edge = [random_edges(rng, row, 4, 0.2) for rng, row in zip(rngs, rows, strict=True)] if edges else None
        tree = build(proposal(rows, ids, edge), "static", widths=widths)
        for s in range(2):
            expected = grow(widths, rows[s], edge and edge[s], ids[s])
            assert tree.valid[s, 1:].tolist() == [alive for _, alive in expected]
            assert paths(tree, s) == [path for path, alive in expected if alive]


# ---------------------------------------------------------------- every policy
@pytest.mark.parametrize("kind", ["marginals", "edges", "few candidates"])
@pytest.mark.parametrize("name", TREES.names())
def test_every_policy_keeps_the_promises_of_a_tree(name, kind):
    """`build` checks them; here for all registered policies with their own defaults, several slots at once."""
    k, depths = TREES.build({"name": name}).candidates, 6
    cases = [heap.random_case(seed, depths, k) for seed in range(3)]
    rows, ids, rngs = (list(part) for part in zip(*cases, strict=True))
    if kind == "few candidates":
        rows = [[[x if r <= s else -INF for r, x in enumerate(row)] for row in case] for s, case in enumerate(rows)]
    edge = [random_edges(rng, row, k, 0.3) for rng, row in zip(rngs, rows, strict=True)]
    tree = build(proposal(rows, ids, edge if kind == "edges" else None), name)
    again = build(proposal(rows[::-1], ids[::-1], edge[::-1] if kind == "edges" else None), name)
    assert all(paths(tree, s) == paths(again, 2 - s) for s in range(3)), "slots depend on each other"


# ---------------------------------------------------------------- the walk
def random_tree(rng, nodes, vocabulary):
    """(parent, token, valid): siblings that are valid differ; an invalid one may carry any token, and have children."""
    parent, token, valid = [-1], [0], [True]
    for i in range(1, nodes):
        parent.append(rng.randrange(i) if rng.random() < 0.4 else i - 1)
        taken = {token[j] for j in range(1, i) if parent[j] == parent[-1]}
        free = [t for t in range(vocabulary) if t not in taken]
        valid.append(bool(free) and rng.random() < 0.93)
        token.append(rng.choice(free) if valid[-1] else rng.randrange(vocabulary))
    return parent, token, valid


def context(trees, count, rows, depth):
    """The trees as the sampler gets them; only the first `count` nodes of a slot take part."""
    parent, token, valid = (torch.tensor(part) for part in zip(*trees, strict=True))
    depths = torch.zeros_like(parent)
    for i in range(1, parent.shape[1]):
        depths[:, i] = depths.gather(1, parent[:, i : i + 1])[:, 0] + 1
    tree = Tree.make(token=token, parent=parent, depth=depths, valid=valid, max_depth=depth)
    length = torch.arange(len(trees) + 1) * 7  # the dummy slot's too
    flat = flatten(
        token=token, parent=parent, valid=valid, ancestors=tree.ancestors, position=length[:-1, None] + depths,
        count=torch.tensor(count), rows=rows, bound=0,
    )  # fmt: skip
    return NodeContext(
        token=flat.token, parent=flat.parent, depth=flat.position - length[flat.slot], position=flat.position,
        slot=flat.slot, local=flat.local(), valid=flat.valid, ancestors=flat.ancestors, slots=len(trees),
        max_depth=depth, width=flat.width if flat.uniform else 0,
    )  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2, 9, 33, 70])
@pytest.mark.parametrize("ragged", [False, True])
def test_walk_equals_the_reference(nodes, ragged):
    accepted = []
    for seed in range(25):
        rng = random.Random(seed * 1000 + nodes)
        slots, depth, vocabulary = 4, nodes, 5
        trees = [random_tree(rng, nodes, vocabulary) for _ in range(slots)]
        idle = rng.randrange(slots)
        trees[idle][2][0] = seed % 2 == 0  # an invalid root: the slot is idle
        count = [rng.randint(0, nodes) for _ in trees] if ragged else [nodes] * slots
        rows = sum(count) + (rng.randint(0, 3) if ragged else 0)
        if not rows or (ragged and rows == slots * nodes):  # so many rows mean that every slot takes part with all
            continue
        nodes_of = context(trees, count, rows, depth)
        target = torch.tensor([rng.randrange(vocabulary) for _ in range(rows)])
        start = [sum(count[:s]) for s in range(slots)]
        for s, (parent, token, _) in enumerate(trees):
            for i in range(1, count[s]):  # mostly a child's token, so that walks go deep
                if rng.random() < 0.8:
                    target[start[s] + parent[i]] = token[i]
        found = walk(target, nodes_of)
        assert found.path.shape == found.token.shape == (slots, depth + 1)
        for s, (parent, token, valid) in enumerate(trees):
            wanted = []
            if count[s] and valid[0]:
                real = [t if ok else -7 for t, ok in zip(token, valid, strict=True)][: count[s]]
                wanted = heap.walk_reference(parent[: count[s]], real, target[start[s] : start[s] + count[s]].tolist())
            accepted.append((len(wanted), max(wanted, default=0)))
            padding = [-1] * (depth + 1 - len(wanted))
            assert found.count[s] == len(wanted)
            assert found.path[s].tolist() == [start[s] + i for i in wanted] + padding
            assert found.token[s].tolist() == [int(target[start[s] + i]) for i in wanted] + padding
    lengths, last = zip(*accepted, strict=True)
    assert min(lengths) == 0 and max(lengths) >= min(nodes - ragged, 6) and (nodes <= 33 or max(last) > 32)


def test_a_sibling_is_accepted():
    """Under the root 5 and 7, under both of them other branches; the target says 7, 8, 3."""
    tree = [-1, 0, 1, 0, 3, 3], [9, 5, 8, 7, 5, 8], [True] * 6
    says = torch.tensor([7, 8, 0, 8, 0, 3])
    nodes = context([tree], [6], 6, 3)
    for found in (walk(says, nodes), SAMPLERS.build({"name": "greedy"}).accept(torch.eye(10)[says], nodes)):
        assert found.path.tolist() == [[0, 3, 5, -1]]
        assert found.token.tolist() == [[7, 8, 3, -1]] and found.count.tolist() == [3]
    says[0] = 5  # the other branch: its child 8 is row 2, not row 5
    assert walk(says, nodes).path.tolist() == [[0, 1, 2, -1]]
    says[0] = 6
    assert walk(says, nodes).token.tolist() == [[6, -1, -1, -1]]
