"""Host processors: a user's own Python on the logits of every row, between the target and the sampler.

They are for what PyTorch cannot trace: grammars, automata, tables in Python. They run on the CPU and outside every
graph, on the target's own logits, before anything that `filters.py` does. Whoever calls them brings the rows' text;
nothing here knows an engine.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import NOT_FINITE, NodeContext
from .filters import Changed, checked, processor_name

# How a config names a processor: "module:name", or the callable itself.
GivenProcessor = str | Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostContext(NodeContext):
    """The rows as a host processor sees them: tensors on the CPU, and the text that each row's logits follow.

    `valid` is False for every row that cannot matter (padding, nodes without a candidate, slots that have ended).
    `params` and `draws` are None.

    Attributes:
        prompts: token ids of the prompt of each slot's request, S lists; empty where no row is valid.
        outputs: what each of them has emitted so far, S lists.
    """

    prompts: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[int]]

    def texts(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Row, prompt and output of each valid row: its logits are those of the token after prompt and output.

        The output ends with the row's own path in its tree: its last `depth` tokens are drafts.
        """
        paths: dict[int, list[int]] = {}
        columns = (self.valid, self.parent, self.token, self.slot)
        for row, (valid, parent, token, slot) in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
            if valid and (parent < 0 or parent in paths):
                paths[row] = [*paths[parent], token] if parent >= 0 else []
                yield row, list(self.prompts[slot]), [*self.outputs[slot], *paths[row]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostProcessor:
    """A user's `(logits fp32 [R, V], HostContext) -> logits [R, V]`, with the name that errors call it by."""

    name: str
    function: Callable[[Tensor, HostContext], Tensor]

    def __call__(self, logits: Tensor, context: HostContext) -> Tensor:
        """Its result as fp32 on the CPU.

        Raises:
            RuntimeError: it raised something; the message names it, the cause is attached.
            ValueError: it did not return logits of that shape.
        """
        try:
            given = self.function(logits, context)
        except Exception as error:
            raise RuntimeError(f"host processor '{self.name}' failed: {type(error).__name__}: {error}") from error
        return checked(given, logits, self.name).cpu()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Logits fp32 [R, V] as host processors left them, and an index into FAULTS for each row, int64 [R]."""

    logits: Tensor
    fault: Tensor


def processed(logits: Tensor, context: HostContext, processors: Sequence[HostProcessor]) -> Scores:
    """Run the processors one after another; results are where the logits [R, V] were.

    They get a copy that they may write into. Without a valid row they are not called.
    """
    x = logits.to("cpu", torch.float32, copy=True)
    best = x.amax(-1)
    fault = torch.where(best.isnan() | (best == torch.inf), NOT_FINITE, torch.zeros_like(context.slot))
    if bool(context.valid.any()):
        for process in processors:
            x = process(x, context)
    fault = Changed(x=x, fault=fault, processed=True).faults(x.amax(-1))
    return Scores(logits=x.to(logits.device), fault=fault.to(logits.device))


def find_processor(given: GivenProcessor, key: str) -> Callable[..., Any]:
    """The callable that a config names.

    Args:
        given: "package.module:name", or the callable itself.
        key: of [sampling], for messages.

    Raises:
        ValueError: it cannot be imported or called.
    """
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    try:
        processor: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"[sampling] {key}: '{given}' cannot be imported: {error}") from error
    if not callable(processor):
        raise ValueError(f"[sampling] {key}: '{given}' is not callable")
    return processor


def host_processors(given: Sequence[GivenProcessor]) -> tuple[HostProcessor, ...]:
    """Those of a config's `host_processors`; raises as `find_processor`."""
    return tuple(
        HostProcessor(
            name=one if isinstance(one, str) else processor_name(one), function=find_processor(one, "host_processors")
        )
        for one in given
    )
