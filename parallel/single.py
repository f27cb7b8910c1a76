"""The layout of one process: everything on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

from .base import LAYOUTS


@LAYOUTS.register("single")
class Single:
    """One process, one device; parameters stay as they were loaded."""

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """Nothing to choose."""

    def __init__(self, config: Config) -> None:
        import torch.distributed as dist

        self.config = config
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if world != 1:
            raise ValueError(f"layout 'single' runs in one process, but {world} were started; known: {LAYOUTS.names()}")

    def place(self, module: Any) -> None:
        """Leave the module as it is."""
