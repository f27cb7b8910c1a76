"""Speculative decoding: drafters, draft trees, the engine and its commands.

Names are imported on first use, so that `flashtree --help` does not wait for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import GenerateConfig, load_config
    from .engine import Engine

__all__ = ["Engine", "GenerateConfig", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from .engine import Engine

        return Engine
    if name in ("GenerateConfig", "load_config"):
        from . import config

        return getattr(config, name)
    raise AttributeError(f"module 'spec' has no attribute '{name}'")
