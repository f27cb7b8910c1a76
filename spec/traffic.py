"""Bytes that each part of a round must move: the floor that its time is held against.

Counted are weights once, context K/V once and, where logits are only read, those. Not counted are activations, fresh
K/V, the tree and logits written behind a GEMM: at the widths of a round they are small, and most stay in the L2 cache.
Where a layout spreads the models, these are the bytes of one process.
"""

from __future__ import annotations

from modelkit.model import Transformer

from .draft.dflash import DFlashDrafter
from .engine import Engine


def weight_bytes(model: Transformer, head: bool = True) -> int:
    """A target's layers and final norm, and its head once; the embedding table is looked up, not read.

    Args:
        model: the target.
        head: False for a forward without logits.
    """
    parts = [*model.layers.parameters(), *model.norm.parameters()]
    return sum(p.numel() * p.element_size() for p in parts) + (head_bytes(model) if head else 0)


def head_bytes(model: Transformer) -> int:
    """The head's matrix, V * H elements (also where it is tied to the embedding)."""
    return model.lm_head.weight.numel() * model.lm_head.weight.element_size()


def context_bytes(windows: tuple[int | None, ...], heads: int, head_dim: int, element: int, context: int) -> int:
    """K and V of one slot's context in all layers: sum over layers of 2 * min(context, window) * Hkv * D * element.

    Args:
        windows: of each layer, None for full attention.
        heads: KV heads.
        head_dim: D.
        element: bytes of an element.
        context: committed positions.
    """
    seen = sum(context if window is None else min(context, window) for window in windows)
    return 2 * seen * heads * head_dim * element


def part_bytes(engine: Engine, context: int) -> dict[str, int | None]:
    """Bytes of each part with all slots at one context length; None: nothing that counts, or not known.

        verify, plain step  layers + norm + head + slots * K/V
        attention           slots * K/V
        prefill chunk       layers + norm + K/V of one slot
        draft (dflash)      drafter + slots * its K/V + the target's head
        accept              slots * rows * V logits
        round               draft + verify

    Args:
        engine: gives sizes.
        context: committed positions of every slot.
    """
    target, slots = engine.target, engine.state.slots
    config, element = target.config, target.dtype.itemsize
    one = context_bytes(target.windows, target.attention.kv_heads, config.head_dim, element, context)
    verify = weight_bytes(target) + slots * one
    draft = None
    if isinstance(engine.drafter, DFlashDrafter):
        model = engine.drafter.model
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        kept = context_bytes(model.windows, model.attention.kv_heads, model.attention.dim, element, context)
        draft = weights + slots * kept + head_bytes(target)
    return {
        "plain step": verify,
        "verify": verify,
        "attention": slots * one,
        "draft": draft,
        "tree": None,
        "accept": slots * engine.nodes * target.lm_head.weight.shape[0] * element,
        "commit": None,
        "round": verify + (draft or 0),
        "prefill chunk": weight_bytes(target, head=False) + one,
    }
