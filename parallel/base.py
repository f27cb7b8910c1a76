"""The table of parallel layouts and what one must offer."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from modelkit.registry import Registry


class Layout(Protocol):
    """How a model's parameters are spread over processes."""

    Config: ClassVar[type[Any]]

    def place(self, module: Any) -> None:
        """Turn a loaded module into this process's part of it, in place."""
        ...


LAYOUTS: Registry[Layout] = Registry("parallel")
