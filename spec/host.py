"""Where host processors come in: between the target's logits and the sampler, in eager steps and in compiled ones.

A compiled step cannot hold a call of the user's Python, so it becomes two, with the host between them. This brings the
rows and their text from the device; it knows neither what a processor does nor what a sampler makes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from modelkit.compile import Step, compile_step
from sampling import Draws, HostContext, NodeContext, Sampler
from sampling.host import Scores, processed

from .held import Held
from .state import RoundState
from .types import Verified

if TYPE_CHECKING:
    from .engine import Engine

T = TypeVar("T")


class Host:
    """The host processors of an engine's sampler, and the state that has the rows' text.

    Args:
        sampler: of the engine.
        state: of the rounds.
    """

    def __init__(self, sampler: Sampler, state: RoundState) -> None:
        self.processors = getattr(sampler, "host_processors", ())
        self.state = state

    def scores(self, logits: Tensor, nodes: NodeContext) -> Scores:
        """What the processors make of logits [R, V]; waits for the device."""
        return processed(logits, self.context(nodes), self.processors)

    def verified(self, verified: Verified) -> Verified:
        """A round's logits as the processors leave them; as they are where there are no processors."""
        if not self.processors:
            return verified
        scores = self.scores(verified.logits, self.state.nodes(verified.rows, greedy=False))
        return dataclasses.replace(verified, logits=scores.logits, fault=scores.fault)

    def context(self, nodes: NodeContext) -> HostContext:
        """The rows on the CPU, with the text of the slots that they belong to."""
        state = self.state
        slot, total, prompt = nodes.slot.cpu(), state.total.tolist(), state.prompt.tolist()
        valid = nodes.valid.cpu() & torch.nn.functional.pad(state.active.cpu(), (0, 1))[slot]
        tokens, used = state.tokens[:, : max(total)].cpu(), set(slot[valid].tolist())
        texts = [tokens[s, : total[s]].tolist() if s in used else [] for s in range(state.slots)]
        return HostContext(
            token=nodes.token.cpu(), parent=nodes.parent.cpu(), depth=nodes.depth.cpu(), position=nodes.position.cpu(),
            slot=slot, local=nodes.local.cpu(), valid=valid, ancestors=nodes.ancestors.cpu(), slots=nodes.slots,
            max_depth=nodes.max_depth, width=nodes.width,
            prompts=[text[:n] for text, n in zip(texts, prompt, strict=True)],
            outputs=[text[n:] for text, n in zip(texts, prompt, strict=True)],
        )  # fmt: skip


class TwoSteps(Generic[T]):
    """A step as two compiled ones and what the host does between them.

    Args:
        first: gives a dataclass of tensors, which is kept at fixed addresses from then on.
        between: changes it; not compiled.
        second: takes it.
        mode: see `compile_step`.
    """

    def __init__(
        self, *, first: Callable[[], T], between: Callable[[T], T], second: Callable[[T], None], mode: str
    ) -> None:
        self._first, self._between, self._second, self._mode = first, between, second, mode
        self._held: Held | None = None
        self._steps: tuple[Step, Step] | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        """Run it; the first half's first run is eager, since it shows what is to be kept."""
        if self._held is None or self._steps is None:
            self._held = held = Held(self._first())
            self._steps = (
                compile_step(lambda: held.put(self._first()), self._mode),
                compile_step(lambda: self._second(held.get()), self._mode),
            )
        else:
            self._steps[0]()
        self._held.put(self._between(self._held.get()))
        self._steps[1]()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfRound:
    """A round up to the target's logits, and what its candidates were drawn from."""

    verified: Verified
    draws: Draws | None


def round_in_two(engine: Engine, rows: int, plain: bool, greedy: bool, mode: str) -> Step:
    """`Engine.step` in compiled halves; arguments as there."""

    def first() -> HalfRound:
        tree, draws = engine.grow(engine.capacity, plain, greedy)
        verified = engine.verify(tree, rows, engine.capacity, plain)
        fault = torch.zeros_like(verified.rows.token)
        return HalfRound(
            verified=dataclasses.replace(verified, logits=verified.logits.float(), fault=fault), draws=draws
        )

    def second(half: HalfRound) -> None:
        engine.commit(half.verified, engine.accept(half.verified, greedy, half.draws))

    return TwoSteps(
        first=first, second=second, mode=mode,
        between=lambda half: dataclasses.replace(half, verified=engine.host.verified(half.verified)),
    )  # fmt: skip
