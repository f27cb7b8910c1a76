"""Plain heapq references of draft-tree building and of the walk that accepts a path.

A path is a tuple of token ids, one per depth; the root (anchor) is not part of it. Pop order: highest score,
then smallest depth, then smallest rank tuple. A score is the correctly rounded sum of the path's numbers
(math.fsum), so it depends neither on the order of the additions nor on the way to the node.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence

Path = tuple[int, ...]
Item = tuple[float, int, Path]  # (-score, depth, ranks): the heap gives the smallest first


def heap_tree(log_probs: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], budget: int) -> list[Path]:
    """DDTree's algorithm 1 on independent depths: the ``budget`` best prefixes, in pop order.

    ``log_probs[d][r]`` is the log-probability of the token of rank r at depth d + 1, sorted descending.
    Popping a node pushes its next sibling (last rank + 1) and its first child (rank 0 one level deeper).
    """
    depths = len(log_probs)
    for row in log_probs:
        assert all(a >= b for a, b in itertools.pairwise(row)), "log_probs must be sorted, best first"

    def item(ranks: Path) -> Item:
        return -math.fsum(log_probs[d][r] for d, r in enumerate(ranks)), len(ranks), ranks

    heap: list[Item] = [item((0,))] if depths else []
    out: list[Path] = []
    while heap and len(out) < budget:
        _, depth, ranks = heapq.heappop(heap)
        out.append(tuple(int(ids[d][r]) for d, r in enumerate(ranks)))
        sibling = (*ranks[:-1], ranks[-1] + 1)
        if sibling[-1] < len(log_probs[depth - 1]):
            heapq.heappush(heap, item(sibling))
        if depth < depths:
            heapq.heappush(heap, item((*ranks, 0)))
    return out


def heap_tree_edges(
    first: Sequence[float],
    edge: Sequence[Sequence[Sequence[float]]],
    ids: Sequence[Sequence[int]],
    budget: int,
) -> list[Path]:
    """Best-first with conditional scores: the children of a popped node are all pushed at once.

    ``ids`` [L][k]; ``first[r]`` scores rank r at depth 1; ``edge[d][p][r]`` scores rank r at depth index d
    (0-based) behind rank p at depth index d - 1. ``edge`` has L entries, of which number 0 is not read, or
    L - 1 entries, which are then those of the depth indices 1 .. L - 1. No row needs to be sorted.
    """
    depths, skipped = len(ids), len(ids) - len(edge)
    assert skipped in (0, 1) or depths == 0, "edge needs one table per depth (or per depth but the first)"

    def children(ranks: Path) -> Sequence[float]:
        return edge[len(ranks) - skipped][ranks[-1]] if ranks else first

    def item(ranks: Path) -> Item:
        return -math.fsum(children(ranks[:d])[r] for d, r in enumerate(ranks)), len(ranks), ranks

    heap: list[Item] = [item((r,)) for r in range(len(first))] if depths else []
    heapq.heapify(heap)
    out: list[Path] = []
    while heap and len(out) < budget:
        _, depth, ranks = heapq.heappop(heap)
        out.append(tuple(int(ids[d][r]) for d, r in enumerate(ranks)))
        if depth < depths:
            for r in range(len(children(ranks))):
                heapq.heappush(heap, item((*ranks, r)))
    return out


def spine_first_tree(
    children: Callable[[Path], Sequence[float]], ids: Sequence[Sequence[int]], budget: int, off_spine: float
) -> list[Path]:
    """The path of best children, then the best of what is left, in that order.

    ``children(ranks)`` scores the children of a path. Steps from a path that is not on the spine have the factor
    ``off_spine``; children of score -inf do not exist.
    """

    def best(ranks: Path) -> int:
        row = list(children(ranks))
        return row.index(max(row))

    def on_spine(ranks: Path) -> bool:
        return all(r == best(ranks[:d]) for d, r in enumerate(ranks))

    def score(ranks: Path) -> float:
        steps = [children(ranks[:d])[r] for d, r in enumerate(ranks)]
        return math.fsum(steps) + math.log(off_spine) * sum(not on_spine(ranks[:d]) for d in range(len(ranks)))

    chosen: list[Path] = []
    spine: Path = ()
    while len(spine) < len(ids) and len(chosen) < budget and max(children(spine)) > -math.inf:
        spine = (*spine, best(spine))
        chosen.append(spine)
    while len(chosen) < budget:
        offers = [
            (*path, r)
            for path in [(), *chosen] if len(path) < len(ids)
            for r in range(len(ids[0])) if (*path, r) not in chosen and score((*path, r)) > -math.inf
        ]  # fmt: skip
        if not offers:
            break
        chosen.append(min(offers, key=lambda ranks: (-score(ranks), len(ranks), ranks)))
    return [tuple(int(ids[d][r]) for d, r in enumerate(ranks)) for ranks in chosen]


def paths_to_rows(paths: Sequence[Path], anchor: int) -> tuple[list[int], list[int]]:
    """(parents, tokens) by row: row 0 is the root (parent -1), row i + 1 is ``paths[i]``."""
    rows: dict[Path, int] = {(): 0}
    parents, tokens = [-1], [int(anchor)]
    for path in paths:
        parents.append(rows[path[:-1]])  # a KeyError here: not prefix-closed, or a child before its parent
        tokens.append(path[-1])
        rows[path] = len(rows)
    assert len(rows) == len(parents), "the same path twice"
    return parents, tokens


def rows_to_paths(parents: Sequence[int], tokens: Sequence[int]) -> list[Path]:
    """The inverse: the token path of every row (the root's is empty)."""
    paths: list[Path] = [()]
    for row in range(1, len(parents)):
        paths.append((*paths[parents[row]], int(tokens[row])))
    return paths


def walk_reference(parents: Sequence[int], tokens: Sequence[int], target_tokens: Sequence[int]) -> list[int]:
    """Rows accepted from the root on, root included; ``target_tokens[rows[-1]]`` is then the next anchor.

    All three lists have one entry per row, the root's included (its token is not read); ``target_tokens[r]``
    is the target's token behind row r.
    """
    assert len(parents) == len(tokens) == len(target_tokens) and parents[0] == -1
    rows = [0]
    while True:
        wanted = target_tokens[rows[-1]]
        found = [r for r in range(1, len(parents)) if parents[r] == rows[-1] and tokens[r] == wanted]
        if not found:
            return rows
        assert len(found) == 1, "two children of one node with the same token"
        rows.append(found[0])


# ---------------------------------------------------------------- for tests of tree builders
def random_case(seed: int, depths: int, k: int) -> tuple[list[list[float]], list[list[int]], random.Random]:
    """(log_probs, ids, generator): peaked distributions over k + 2 tokens, of which the best k are listed."""
    rng = random.Random(seed)
    rows = []
    for _ in range(depths):
        weights = [rng.gammavariate(0.4, 1.0) + 1e-9 for _ in range(k + 2)]
        rows.append(sorted((math.log(w / sum(weights)) for w in weights), reverse=True)[:k])
    return rows, [rng.sample(range(100), k) for _ in range(depths)], rng


def brute_force(score: Callable[[Path], float], ids: Sequence[Sequence[int]], budget: int) -> list[Path]:
    """The best prefixes of a plain sort over all rank tuples; may fail to be a tree if scores can rise."""
    every = [r for d in range(1, len(ids) + 1) for r in itertools.product(range(len(ids[0])), repeat=d)]
    every.sort(key=lambda ranks: (-score(ranks), len(ranks), ranks))
    return [tuple(ids[d][r] for d, r in enumerate(ranks)) for ranks in every[:budget]]
