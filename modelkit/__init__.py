"""Model building blocks: configs, one Transformer, caches, attention, checkpoint loading."""

from .config import ModelConfig
from .loading import load_model
from .model import Transformer

__all__ = ["ModelConfig", "Transformer", "load_model"]
