"""A plain, dense reference of the DFlash drafter: no cache, no batching, one query row at a time.

Written from the written facts alone (architecture, masks, positions, config spellings), to test other code
against. The arithmetic runs in the dtype of ``features`` (fp32 or fp64), rotary tables included.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]
Weights = dict[str, Tensor]


# ---------------------------------------------------------------- reading config.json
def dflash_value(config: Config, name: str, default: Any = None) -> Any:
    """A field that lives in ``dflash_config`` (preferred) or at the top level."""
    for place in (config.get("dflash_config") or {}, config):
        if place.get(name) is not None:
            return place[name]
    return default


def block_size(config: Config) -> int:
    return int(dflash_value(config, "block_size", 16))


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def layer_type(config: Config, layer: int) -> str:
    types = config.get("layer_types")
    if types:
        return str(types[layer])
    late = layer >= config.get("max_window_layers", 28)  # the Qwen3 rule where the list is absent
    sliding = config.get("use_sliding_window") and config.get("sliding_window") and late
    return "sliding_attention" if sliding else "full_attention"


def layer_window(config: Config, layer: int) -> int | None:
    """Window of a sliding layer (it counts the current token), None where everything is visible."""
    if layer_type(config, layer) != "sliding_attention" or config.get("use_sliding_window") is False:
        return None
    window = config.get("sliding_window")
    return None if window is None else int(window)


def layer_is_causal(config: Config, layer: int) -> bool:
    if config.get("is_causal") is not None:
        return bool(config["is_causal"])
    nested = (config.get("dflash_config") or {}).get("causal")
    return bool(nested) if nested is not None else layer_type(config, layer) == "sliding_attention"


def is_visible(query: int, key: int, start: int, causal: bool, window: int | None) -> bool:
    """May the row at absolute position ``query`` see ``key``? Context is every key below ``start``."""
    if causal and key >= start and key > query:
        return False
    if window is not None:
        if query - key >= window:
            return False
        if not causal and key - query >= window:
            return False
    return True


# ---------------------------------------------------------------- rotary embedding
def rope_parameters(config: Config) -> Config:
    """``rope_parameters`` (newer files) or ``rope_theta`` + ``rope_scaling`` (older ones) as one dict."""
    merged: Config = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    merged.setdefault("rope_type", merged.get("type", "default"))
    if merged.get("rope_theta") is None:
        theta = config.get("rope_theta")
        merged["rope_theta"] = 10000.0 if theta is None else theta
    if merged.get("original_max_position_embeddings") is None:
        merged["original_max_position_embeddings"] = config.get("max_position_embeddings")
    return merged


def rope_frequencies(config: Config, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin (1 except for yarn)."""
    params, dim = rope_parameters(config), head_dim(config)
    theta, kind = float(params["rope_theta"]), params["rope_type"]
    original = params["original_max_position_embeddings"]
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype) / dim)
    if kind == "default":
        return plain, 1.0
    factor = float(params["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        low, high = float(params["low_freq_factor"]), float(params["high_freq_factor"])
        out = []
        for freq in plain:
            turns = original * float(freq) / (2 * math.pi)  # whole turns inside the original context
            keep = min(max((turns - low) / (high - low), 0.0), 1.0)
            out.append(keep * freq + (1.0 - keep) * freq / factor)
        return torch.stack(out), 1.0
    if kind == "yarn":
        return _yarn_frequencies(params, plain, dim, theta, factor, float(original))
    raise NotImplementedError(f"rope type {kind!r}")


def _yarn_frequencies(
    params: Config, plain: Tensor, dim: int, theta: float, factor: float, original: float
) -> tuple[Tensor, float]:
    def pair_with(turns: float) -> float:  # (real) index of the pair that makes so many turns
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with(float(params.get("beta_fast") or 32))
    high = pair_with(float(params.get("beta_slow") or 1))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high
    out = []
    for pair, freq in enumerate(plain):
        scaled = min(max((pair - low) / (high - low), 0.0), 1.0)
        out.append(scaled * freq / factor + (1.0 - scaled) * freq)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = params.get("attention_factor")
    if scale is None:
        one, other = params.get("mscale"), params.get("mscale_all_dim")
        scale = temperature(one) / temperature(other) if one and other else temperature(1.0)
    return torch.stack(out), float(scale)


def apply_rope(x: Tensor, positions: list[int], config: Config) -> Tensor:
    """Rotate x [rows, heads, head_dim]; pair i is (i, i + head_dim / 2)."""
    freqs, scale = rope_frequencies(config, x.dtype)
    angles = torch.tensor(positions, dtype=x.dtype)[:, None, None] * freqs
    cos, sin = angles.cos() * scale, angles.sin() * scale
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# ---------------------------------------------------------------- modules
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    out, bias = x @ weights[f"{name}.weight"].T, weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def keys_values(x: Tensor, weights: Weights, config: Config, layer: int, first: int) -> tuple[Tensor, Tensor]:
    """K (normed, rotated) and V, [rows, kv heads, head_dim], of rows at positions first, first + 1, ..."""
    attn, shape = f"layers.{layer}.self_attn", (len(x), config["num_key_value_heads"], head_dim(config))
    k = linear(x, weights, f"{attn}.k_proj").reshape(shape)
    k = rms_norm(k, weights[f"{attn}.k_norm.weight"], config["rms_norm_eps"])
    k = apply_rope(k, list(range(first, first + len(x))), config)
    return k, linear(x, weights, f"{attn}.v_proj").reshape(shape)


def decoder_layer(
    x: Tensor, context: Tensor, weights: Weights, config: Config, layer: int, causal: bool, window: int | None
) -> Tensor:
    """One Qwen3 block: rows x [B, H] sit right behind the context rows [start, H], which only give K, V."""
    start, name, eps = len(context), f"layers.{layer}", config["rms_norm_eps"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], head_dim(config)
    normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
    context_k, context_v = keys_values(context, weights, config, layer, 0)
    block_k, block_v = keys_values(normed, weights, config, layer, start)
    k, v = torch.cat([context_k, block_k]), torch.cat([context_v, block_v])
    q = linear(normed, weights, f"{name}.self_attn.q_proj").reshape(len(x), heads, dim)
    q = rms_norm(q, weights[f"{name}.self_attn.q_norm.weight"], eps)
    q = apply_rope(q, list(range(start, start + len(x))), config)
    rows = []
    for row in range(len(x)):
        seen = [p for p in range(len(k)) if is_visible(start + row, p, start, causal, window)]
        outs = []
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = k[seen, kv_head] @ q[row, head] * dim**-0.5
            outs.append(torch.softmax(scores, dim=0) @ v[seen, kv_head])
        rows.append(torch.cat(outs))
    x = x + linear(torch.stack(rows), weights, f"{name}.self_attn.o_proj")
    normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
    gate = linear(normed, weights, f"{name}.mlp.gate_proj")
    gated = gate * torch.sigmoid(gate) * linear(normed, weights, f"{name}.mlp.up_proj")
    return x + linear(gated, weights, f"{name}.mlp.down_proj")


# ---------------------------------------------------------------- the drafter
def _context(weights: Weights, config: Config, features: Tensor) -> tuple[Weights, Tensor]:
    weights = {name: tensor.to(features.dtype) for name, tensor in weights.items()}
    projected = linear(features, weights, "fc")
    return weights, rms_norm(projected, weights["hidden_norm.weight"], config["rms_norm_eps"])


@torch.no_grad()
def dense_block_logits(
    weights: Weights,
    config: Config,
    features: Tensor,
    block_ids: Tensor,
    start: int,
    embed: Tensor,
    head: Tensor,
) -> tuple[Tensor, Tensor]:
    """One drafter forward: (hidden [B, H] after the final norm, logits [B, V]).

    ``features`` [start, K*H] are the target taps of positions 0 .. start - 1, ``block_ids`` [B] the anchor
    (at position start) and the masks. Row k >= 1 predicts the token at start + k; row 0 predicts nothing.
    """
    assert features.shape[0] == start, "features of every committed position are needed"
    weights, context = _context(weights, config, features)
    x = embed.to(features.dtype)[block_ids] * dflash_value(config, "input_embedding_scale", 1.0)
    for layer in range(config["num_hidden_layers"]):
        causal, window = layer_is_causal(config, layer), layer_window(config, layer)
        x = decoder_layer(x, context, weights, config, layer, causal, window)
    hidden = rms_norm(x, weights["norm.weight"], config["rms_norm_eps"])
    logits = hidden @ head.to(features.dtype).T * dflash_value(config, "output_multiplier", 1.0)
    cap = dflash_value(config, "final_logit_softcapping")
    return hidden, torch.tanh(logits / cap) * cap if cap else logits


@torch.no_grad()
def dense_context_kv(weights: Weights, config: Config, features: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per layer K (after k_norm and rope) and V of every context row, each [start, kv heads, head_dim]."""
    weights, context = _context(weights, config, features)
    return [keys_values(context, weights, config, i, 0) for i in range(config["num_hidden_layers"])]


# ---------------------------------------------------------------- a Qwen3 target, from the same block
@torch.no_grad()
def dense_qwen3_target(weights: Weights, config: Config, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Full causal forward over ids [n]: (residual stream after each layer, logits [n, V])."""
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    x, outputs = weights["embed_tokens.weight"][ids], []
    for layer in range(config["num_hidden_layers"]):
        x = decoder_layer(x, x[:0], weights, config, layer, True, layer_window(config, layer))
        outputs.append(x)
    hidden = rms_norm(x, weights["norm.weight"], config["rms_norm_eps"])
    return outputs, hidden @ weights.get("lm_head.weight", weights["embed_tokens.weight"]).T
