"""Pipeline stages: which layers run where, and what travels between them.

Every process makes the same collectives in the same order, whatever its stage: what leaves a stage is broadcast along
the pipeline, fixed-width. So no process can wait for a message that no other one sends, and steps stay graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .collectives import Group


def balanced(weights: Sequence[int], stages: int) -> list[range]:
    """Consecutive layers for each stage such that the heaviest stage is as light as possible.

    Args:
        weights: bytes of each layer; at least as many as stages.
        stages: how many.
    """
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    # best[n]: (heaviest stage, ends) for the first n layers and the stages so far.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(1, stages + 1):
        further: dict[int, tuple[int, list[int]]] = {}
        for end in range(stage, len(weights) - (stages - stage) + 1):
            options = [
                (max(heaviest, total[end] - total[start]), [*ends, end])
                for start, (heaviest, ends) in best.items()
                if start < end
            ]
            further[end] = min(options)
        best = further
    ends = best[len(weights)][1]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class PipelineStage:
    """This process's stage; see `modelkit.borders.Stage`.

    Args:
        group: one process of each stage, in order.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def enter(self, x: Tensor) -> Tensor:
        """What the stage before has made of the embedding; later stages' turns come in `leave`."""
        for stage in range(self._group.rank):
            x = self._group.broadcast(x, stage)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Hand on our stream, then follow it to the end."""
        for stage in range(self._group.rank, self._group.size):
            x = self._group.broadcast(x, stage)
        return x

    def collect(self, features: Tensor) -> Tensor:
        """A feature is another stage's or ours: the sum with zeros is exact."""
        return self._group.all_reduce(features)
