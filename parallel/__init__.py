"""Parallel layouts as strategy classes."""

from . import single as _single  # registers the strategy
from .base import LAYOUTS, Layout

__all__ = ["LAYOUTS", "Layout"]
del _single
