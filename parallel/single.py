"""The layout of one process: everything on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

from .base import LAYOUTS
from .process import met, started


@LAYOUTS.register("single")
class Single:
    """One process, one device; nothing is spread."""

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """Nothing to choose."""

    from_first = None

    def __init__(self, config: Config) -> None:
        self.config = config

    def connect(self, device: str) -> None:
        """Refuse company."""
        if met():
            raise ValueError(
                f"layout 'single' runs in one process, but {started()} were started; known: {LAYOUTS.names()}"
            )

    def place(self, module: Any) -> None:
        """Leave the module whole."""

    def of_drafter(self) -> None:
        """The drafter is whole too."""
