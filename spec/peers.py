"""Public peers that commands compare with, run on the same weights. Installed packages only."""

from __future__ import annotations

from typing import Any


def transformers_model(engine: Any) -> Any:
    """The same target as transformers loads it."""
    from transformers import AutoModelForCausalLM

    from .engine import target_folder

    folder = str(target_folder(engine.config.target.path))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.target.dtype)
    return model.to(engine.config.target.device).eval()


def transformers_greedy(model: Any, ids: list[int], most: int, **settings: Any) -> list[int]:
    """Greedy `generate` of one prompt; returns the new tokens."""
    import torch

    prompt = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=False, **settings
        )
    new: list[int] = out[0, len(ids) :].tolist()
    return new
