"""The table of parallel layouts and what one must offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from modelkit.registry import Registry


class Layout(Protocol):
    """How a model's parameters are spread over processes. See also `parallel.spread.Spread`, layouts by table.

    Attributes:
        from_first: process 0's tensor in every process, on the device and in a compiled step; None: there is one only.
    """

    Config: ClassVar[type[Any]]
    from_first: Callable[[Tensor], Tensor] | None

    def connect(self, device: str) -> None:
        """Meet the other processes, before anything is loaded.

        Args:
            device: the model's, as the config has it.

        Raises:
            ValueError: more or fewer processes were started than the layout is for.
        """
        ...

    def place(self, module: Any) -> Mapping[str, Any] | None:
        """Prepare a module on the meta device; see `modelkit.borders.Layout`."""
        ...

    def of_drafter(self) -> Layout | None:
        """The layout of the drafter; None keeps it whole in every process."""
        ...


LAYOUTS: Registry[Layout] = Registry("parallel")
