"""Public peers that commands compare with, run on the same weights. Installed packages only, used as published."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelkit.loading import checkpoint_files, read_tensors

from .draft.dflash import DFlashDrafter
from .draft.dflash_config import DFlashConfig
from .sources import drafter_folder, shape_file, target_source


def transformers_model(engine: Any) -> Any:
    """The same target as transformers loads it; with random weights of its own where ours are random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = target_source(engine.config.target.path)
    dtype, device = engine.target.dtype, engine.target.device
    if source.is_dir():
        return AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype).to(device).eval()
    config = AutoConfig.for_model(**json.loads(source.read_text(encoding="utf-8")))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def transformers_drafter(engine: Any) -> Any:
    """A DFlash drafter as transformers' own speculation takes it.

    transformers has one class of such drafters, Muse-Glimmer's. Its network is the published one under other names, as
    long as all layers are full and bidirectional.

    Raises:
        ValueError: the installed transformers has no DFlash speculation, or the drafter has what it cannot express.
    """
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError:
        raise ValueError("the installed transformers has no DFlash speculation (5.17 has)") from None
    ours = engine.drafter.published
    check_expressible(ours, engine.target.config.num_hidden_layers)
    layers, rope = ours.model, ours.model.rope
    config = MuseGlimmerAssistantConfig(
        hidden_size=layers.hidden_size, intermediate_size=layers.intermediate_size,
        num_hidden_layers=layers.num_hidden_layers, num_attention_heads=layers.num_attention_heads,
        num_key_value_heads=layers.num_key_value_heads, head_dim=layers.head_dim, rms_norm_eps=layers.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        max_position_embeddings=layers.max_position_embeddings,
        layer_types=["full_attention"] * layers.num_hidden_layers, block_size=engine.drafter.block,
        mask_token_id=ours.mask_token_id, target_layer_ids=list(ours.target_layer_ids),
    )  # fmt: skip
    with torch.device(engine.target.device):
        drafter = MuseGlimmerAssistantModel(config).to(engine.target.dtype).eval()
    path = engine.config.draft.config.path
    if shape_file(path) is None:
        _load_drafter(drafter, drafter_folder(path))
    return drafter


def check_expressible(ours: DFlashConfig, target_layers: int) -> None:
    """Refuse a drafter that transformers' class cannot express.

    Args:
        ours: the published drafter.
        target_layers: of its target.

    Raises:
        ValueError: sliding or causal layers, scaled embeddings or logits, other rotary embedding, biases, or a tap of
            the target's last layer.
    """
    plain = (ours.input_embedding_scale, ours.output_multiplier, ours.final_logit_softcapping) == (1.0, 1.0, None)
    if any(ours.causal) or any(window is not None for window in ours.model.windows) or not plain:
        raise ValueError("only full, bidirectional layers without scaled embeddings or logits")
    if ours.model.rope.type != "default" or ours.model.qkv_bias or ours.model.output_bias:
        raise ValueError("only plain rotary embedding and no biases")
    if max(ours.target_layer_ids) == target_layers - 1:
        raise ValueError("it taps the target's last layer behind the final norm, published drafters before it")


def _load_drafter(drafter: Any, folder: Path) -> None:
    """Fill transformers' drafter from a published folder; every tensor has a place there, or this raises."""
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    stored = read_tensors(checkpoint_files(folder))
    drafter.load_state_dict({names.get(name, name): tensor for name, tensor in stored})


def transformers_variants(engine: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """Ways of transformers' `generate`, by a name that says what is compiled: each makes its keyword arguments."""
    found: dict[str, Callable[[], dict[str, Any]]] = {"transformers generate, eager": dict}
    if engine.target.device.type == "cuda":  # elsewhere `generate` never compiles
        found["transformers generate, compiled, static cache"] = lambda: {"cache_implementation": "static"}
    if isinstance(engine.drafter, DFlashDrafter):
        found["transformers dflash, eager"] = lambda: {
            "speculation_type": "dflash",
            "assistant_model": transformers_drafter(engine),
        }
    return found


def transformers_greedy(model: Any, ids: list[int], most: int, **settings: Any) -> list[int]:
    """Greedy `generate` of one prompt; returns the new tokens."""
    prompt = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=False, **settings
        )
    new: list[int] = out[0, len(ids) :].tolist()
    return new


def transformers_step_ms(model: Any, prompts: Tensor, most: int, **settings: Any) -> float:
    """Milliseconds of a decoding step inside `generate`, prefill left out; a first run of the same size warms up.

    Args:
        model: as `transformers_model` makes it.
        prompts: int64 [B, T].
        most: new tokens.
        **settings: for `generate`.

    Returns:
        Mean time from one step to the next: a token of each prompt, or a round where it speculates.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):  # type: ignore[misc]
        """Asked after each step; never stops anything."""

        def __init__(self) -> None:
            self.seen: list[float] = []

        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.seen.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    for _ in range(2):
        clock = Clock()
        with torch.no_grad():
            model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=most, min_new_tokens=most,
                do_sample=False, stopping_criteria=StoppingCriteriaList([clock]), **settings,
            )  # fmt: skip
    return (clock.seen[-1] - clock.seen[0]) * 1e3 / max(len(clock.seen) - 1, 1)


def reason(error: BaseException) -> str:
    """Why a peer failed, on one line."""
    lines = str(error).strip().splitlines()
    return f"failed: {type(error).__name__}: {lines[0] if lines else ''}"[:160]
