"""The drafter as a folder in the published (z-lab) format, which the `dflash` drafter loads as any other.

Knows config.json and model.safetensors, not how the weights came about.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelkit.config import ModelConfig, read_json
from modelkit.loading import parse_dtype

from ..draft.dflash_config import DFlashConfig
from .config import ShapeConfig
from .store import write_atomically

DEFAULT_TAPS = 5
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters")


def default_taps(layers: int) -> tuple[int, ...]:
    """Five layers from the second to the third-last, as published drafters spread them; fewer of shallow targets."""
    spread = [round(1 + i * (layers - 4) / (DEFAULT_TAPS - 1)) for i in range(DEFAULT_TAPS)]
    return tuple(sorted({min(max(i, 0), layers - 1) for i in spread}))


def published_config(shape: ShapeConfig, folder: Path) -> dict[str, Any]:
    """The config.json of a drafter of this shape for the target in a folder.

    Raises:
        ValueError: the shape does not fit the target.
    """
    target, raw = ModelConfig.from_folder(folder), read_json(folder / "config.json")
    taps = shape.target_layer_ids or default_taps(target.num_hidden_layers)
    if not 0 <= min(taps) <= max(taps) < target.num_hidden_layers:
        raise ValueError(f"target_layer_ids = {list(taps)}: the target has layers 0..{target.num_hidden_layers - 1}")
    _check_mask_token(shape.mask_token_id, target, raw)
    sliding = shape.sliding_window is not None
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "num_target_layers": target.num_hidden_layers,
        "num_hidden_layers": shape.layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size or target.intermediate_size,
        "num_attention_heads": shape.num_attention_heads or target.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads or target.num_key_value_heads,
        "head_dim": shape.head_dim or target.head_dim,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * shape.layers,
        "use_sliding_window": sliding,
        "sliding_window": shape.sliding_window,
        "is_causal": shape.causal,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(taps),
        },
    }
    if target.final_logit_softcapping is not None:
        config["dflash_config"]["final_logit_softcapping"] = target.final_logit_softcapping
    config |= {key: raw[key] for key in ROTARY if raw.get(key) is not None}
    DFlashConfig.from_dict(config, "[drafter]")  # refuses what does not fit together
    return config


def _check_mask_token(token: int, target: ModelConfig, raw: dict[str, Any]) -> None:
    if token >= target.vocab_size:
        raise ValueError(f"mask_token_id = {token}: the target's ids are 0..{target.vocab_size - 1}")
    taken = {"an end token": target.eos_token_ids, "bos": (target.bos_token_id,), "pad": (raw.get("pad_token_id"),)}
    for name, ids in taken.items():
        if token in ids:
            raise ValueError(f"mask_token_id = {token} is {name} of the target; take an id that texts do not use")


def parameter_count(config: dict[str, Any]) -> int:
    """Numbers in the drafter's file."""
    hidden, dim, layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = hidden * dim * heads + 3 * hidden * config["intermediate_size"] + 2 * hidden + 2 * dim
    return int(layers * layer + len(config["dflash_config"]["target_layer_ids"]) * hidden**2 + 2 * hidden)


def write_folder(folder: Path, config: dict[str, Any], model: nn.Module, dtype: str) -> None:
    """Write or replace the drafter; each file is there whole or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kind: torch.dtype = parse_dtype(dtype)
    tensors = {name: p.detach().to(device="cpu", dtype=kind).contiguous() for name, p in model.named_parameters()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    write_atomically(folder / "config.json", json.dumps(config | {"torch_dtype": dtype}, indent=2) + "\n")
