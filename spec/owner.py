"""One owner of every decision: what process 0 decides is what all processes act on.

Sums in another order differ by an ULP, so at a near-tie two processes may choose different tokens; from then on they
would run different rounds, or wait for each other for ever. A few hundred bytes a round prevent it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
FromFirst = Callable[[Tensor], Tensor]


def agreed(value: T, from_first: FromFirst | None) -> T:
    """Process 0's value of a dataclass of integer and bool tensors, in one message of fixed width.

    Args:
        value: ours; other fields are kept.
        from_first: process 0's tensor; None: there is one process, nothing to do.
    """
    if from_first is None:
        return value
    fields: Any = dataclasses.fields(value)  # type: ignore[arg-type]
    ours = {field.name: getattr(value, field.name) for field in fields}
    ours = {name: part for name, part in ours.items() if isinstance(part, Tensor)}
    flat = from_first(torch.cat([part.reshape(-1).to(torch.int64) for part in ours.values()]))
    pieces = torch.split(flat, [part.numel() for part in ours.values()])
    first = {
        name: piece.view(part.shape).to(part.dtype) for (name, part), piece in zip(ours.items(), pieces, strict=True)
    }
    return dataclasses.replace(value, **first)  # type: ignore[type-var]
