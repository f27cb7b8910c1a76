"""What a model is, as data: `ModelConfig`, read from a published config.json.

Knows the spellings of the Llama, Mistral, Qwen2 and Qwen3 dense families (old and transformers-5 style); no module
anywhere asks for a family's name again. Whatever changes results is read or refused, never guessed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .rope import RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What a family's code fixes and its config.json does not say."""

    qkv_bias: bool | None = None  # None: read `attention_bias`
    output_bias: bool | None = None
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    window: str = "none"  # none | all_layers | layer_types


FAMILIES: dict[str, _Family] = {
    "llama": _Family(reads_mlp_bias=True),
    "mistral": _Family(qkv_bias=False, output_bias=False, window="all_layers"),
    "qwen2": _Family(qkv_bias=True, output_bias=False, window="layer_types"),
    "qwen3": _Family(qk_norm=True, window="layer_types"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only dense transformer. Sizes are counts of elements; `windows[i]` is None for full attention."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    final_logit_softcapping: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps {self.rms_norm_eps} is not a small positive number")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if len(self.windows) != self.num_hidden_layers:
            raise ValueError(f"{len(self.windows)} layer types for {self.num_hidden_layers} layers")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a config.json that is already parsed.

        Args:
            config: the file's content.
            where: the file's name for messages.

        Raises:
            ValueError: an unknown `model_type`, or a missing or unsupported key that would change results.
        """
        with wrong_types(where):
            return cls._read(config, where)

    @classmethod
    def _read(cls, config: Mapping[str, Any], where: str) -> ModelConfig:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise ValueError(f"{where}: unknown model type {model_type!r}; known: {', '.join(FAMILIES)}")
        family = FAMILIES[model_type]
        need = _Reader(config, where)
        heads, hidden = need.integer("num_attention_heads"), need.integer("hidden_size")
        layers = need.integer("num_hidden_layers")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{where}: hidden_act '{config['hidden_act']}' is not implemented; known: silu")
        if config.get("attn_logit_softcapping") is not None:
            raise ValueError(f"{where}: attn_logit_softcapping is not implemented")
        if config.get("quantization_config") is not None:
            raise ValueError(f"{where}: quantised checkpoints (quantization_config) are not implemented")
        bias = bool(config.get("attention_bias", False))
        eos = config.get("eos_token_id")
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in eos):
            raise ValueError(f"{where}: eos_token_id {eos!r} must be a token id or a list of them")
        return cls(
            model_type=model_type,
            vocab_size=need.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=need.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=need.integer("num_key_value_heads", heads),
            head_dim=need.integer("head_dim", hidden // heads),
            rms_norm_eps=float(need.value("rms_norm_eps")),
            rope=RopeConfig.from_dict(config, where),
            max_position_embeddings=need.integer("max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            windows=layer_windows(config, layers, family.window, where),
            qk_norm=family.qk_norm,
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=bias if family.output_bias is None else family.output_bias,
            mlp_bias=family.reads_mlp_bias and bool(config.get("mlp_bias", False)),
            final_logit_softcapping=config.get("final_logit_softcapping") or None,
            eos_token_ids=tuple(eos),
            bos_token_id=config.get("bos_token_id"),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint folder; `generation_config.json`, where present, decides the eos ids."""
        folder = Path(folder)
        config = read_json(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            generation = read_json(folder / "generation_config.json")
            if "eos_token_id" in generation:
                config["eos_token_id"] = generation["eos_token_id"]
        return cls.from_dict(config, str(folder / "config.json"))


@contextlib.contextmanager
def wrong_types(where: str) -> Iterator[None]:
    """Turn what a value of the wrong type makes the reading code raise into one sentence that names the file."""
    try:
        yield
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where}: a value has the wrong type ({error})") from None
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from None


def layer_windows(config: Mapping[str, Any], layers: int, rule: str, where: str) -> tuple[int | None, ...]:
    """Window of each layer by the family's rule: `none`, `all_layers` (Mistral) or `layer_types` (Qwen)."""
    listed = config.get("layer_types") if rule == "layer_types" else None
    if unknown := set(listed or ()) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"{where}: unknown layer_types {', '.join(sorted(unknown))}")
    switched_on = rule == "all_layers" or (rule == "layer_types" and bool(config.get("use_sliding_window", False)))
    if switched_on and "sliding_window" not in config:
        raise ValueError(f"{where}: the key 'sliding_window' is missing (null means none); it would change results")
    window = config.get("sliding_window") if switched_on else None
    if rule == "none" or window is None:
        if "sliding_attention" in (listed or ()):
            raise ValueError(f"{where}: layer_types has sliding layers but sliding_window is not set or switched off")
        return (None,) * layers
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"{where}: sliding_window {window!r} is not a positive integer")
    if rule == "all_layers":
        return (window,) * layers
    kinds = listed
    if kinds is None:
        first = config.get("max_window_layers")
        if first is None:
            raise ValueError(f"{where}: use_sliding_window is set but neither layer_types nor max_window_layers is")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class _Reader:
    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def value(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise ValueError(f"{self.where}: the key '{key}' is missing")
        return self.config[key]

    def integer(self, key: str, default: int | None = None) -> int:
        value = default if default is not None and self.config.get(key) is None else self.value(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.where}: {key} = {value!r} is not a positive integer")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is missing, is not JSON, or is not an object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value
