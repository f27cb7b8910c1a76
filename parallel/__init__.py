"""Parallel layouts as strategy classes."""

from . import single as _single  # both register their strategies
from . import tensor as _tensor
from .base import LAYOUTS, Layout

__all__ = ["LAYOUTS", "Layout"]
del _single, _tensor
