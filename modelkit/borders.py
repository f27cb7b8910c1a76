"""What a parallel layout may put at the borders of modules: narrow hooks, None on a single device.

A layout (see `parallel`) lives outside and implements these protocols; the model code calls a hook where it is set and
knows neither processes nor placements. A hook that is None leaves no trace in a compiled step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

# An activation [R, H] from one side of a module's border to the other. What spreads rows may add padding rows behind.
Border = Callable[[Tensor], Tensor]


class FusedSum(Protocol):
    """A border that sums over processes, and may do so in the kernel that adds the sum and norms."""

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of everybody's x."""
        ...

    def fuses(self, x: Tensor) -> bool:
        """Whether `add_norm` takes a residual stream [R, H] such as x; the same answer in all processes."""
        ...

    def add_norm(self, addend: Tensor, x: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
        """See `kernels.add_norm`; addend [splits, R, H] is this process's share of what is added to x."""
        ...


class Part(Protocol):
    """What this process holds of a parameter.

    Attributes:
        slices: one for each dimension of the whole parameter.
        zero: it holds zeros of that shape: another process's part is the one that is added.
    """

    slices: tuple[slice, ...]
    zero: bool


class Layout(Protocol):
    """How a model is spread over processes, as the loader sees it."""

    def place(self, module: nn.Module) -> Mapping[str, Part] | None:
        """Prepare a module on the meta device: set hooks and local sizes, drop layers that other processes hold.

        Args:
            module: nothing is loaded yet, nothing is fused; its parameters have their whole shapes.

        Returns:
            The part of each parameter that this process holds, by name, aliases (a tied head) included; what it does
            not hold at all is missing. None: it holds everything.

        Raises:
            ValueError: the layout does not fit the module; the message names the parameter and the numbers.
        """
        ...

    def of_drafter(self) -> Layout | None:
        """The layout of a drafter whose target has this one; None keeps it whole in every process."""
        ...


class Stage(Protocol):
    """A pipeline stage's borders with the others; every process calls all three in every forward."""

    def enter(self, x: Tensor) -> Tensor:
        """The stream this stage starts from; x [R, H] is the embedding."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """The stream after the last stage; x [R, H] is this stage's."""
        ...

    def collect(self, features: Tensor) -> Tensor:
        """Features [R, F] of all stages; where other stages' layers stand this one has zeros."""
        ...


class Vocabulary(Protocol):
    """Embedding and head of which this process holds a part of the vocabulary. More in `sampling.vocabulary`."""

    def embed(self, token: Tensor, weight: Tensor) -> Tensor:
        """Whole embeddings [.., H] of global token ids from this process's rows of the table."""
        ...

    def gathering(self) -> None:
        """Have `deliver` give whole logits, for samplers that cannot do with a part."""
        ...

    def deliver(self, logits: Tensor) -> Tensor:
        """Logits [.., V] of this process as samplers and drafters want them."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary."""
        ...

    def top_candidates(self, logits: Tensor, k: int, local: Any) -> tuple[Tensor, Tensor]:
        """As `Reference.top_candidates`, which `local` is, for the whole vocabulary."""
        ...
