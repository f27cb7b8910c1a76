"""Drafters: strategies that propose what the target may say next."""

from . import dflash as _dflash  # each import registers a drafter
from . import ngram as _ngram
from . import self_draft as _self_draft
from .base import DRAFTERS, BlockConfig, Drafter, Perturb, unperturbed

__all__ = ["DRAFTERS", "BlockConfig", "Drafter", "Perturb", "unperturbed"]
del _dflash, _ngram, _self_draft
