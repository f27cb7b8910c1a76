"""Reading the config.json of a published DFlash drafter (z-lab format), refusing what is not implemented by name.

Source: the public reference repository and the `dflash` 0.1.0 package; field names as they stand in published files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelkit.config import ModelConfig, read_json, wrong_types

# Keys of dflash_config that need code this drafter does not have. A value that switches the feature off is fine.
UNSUPPORTED = (
    "projector_type", "enable_confidence_head", "sample_from_anchor", "shift_label", "attention_sink_bias",
    "attention_value_scale", "pure_draft_prefix_len", "markov_rank", "markov_head_type", "gru_hidden_dim", "emb_dim",
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "confidence_head_with_markov",
    "draft_vocab_size",
)  # fmt: skip
KNOWN = (
    "target_layer_ids", "mask_token_id", "block_size", "causal", "num_target_layers", "mask_token",
    "use_aux_hidden_state", "use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig:
    """A DFlash drafter.

    Attributes:
        model: sizes of its Qwen3-style layers; `windows` per layer.
        block_size: tokens of a block, the anchor counted.
        target_layer_ids: tapped target layers, 0-based; a tap is the layer's output.
        mask_token_id: id that fills the block after the anchor.
        causal: per layer, whether a block row sees only rows before it.
        num_target_layers: layers of the target it was trained for, None if the file does not say.
        input_embedding_scale, output_multiplier, final_logit_softcapping: extras for targets that scale.
        off_spine: for the tree policy `spine_first`, measured when the drafter was trained; None: the file, not one of
            ours, does not say. It stands outside of `dflash_config`, where other readers do not mind it.
    """

    model: ModelConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    causal: tuple[bool, ...]
    num_target_layers: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    off_spine: float | None = None

    @classmethod
    def from_file(cls, file: Path) -> DFlashConfig:
        """Read a drafter's config.json."""
        return cls.from_dict(read_json(file), str(file))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> DFlashConfig:
        """Read a parsed config.json.

        Raises:
            ValueError: not a DFlash drafter, a key is missing (`target_layer_ids` is never guessed), or the file asks
                for something that is not implemented.
        """
        with wrong_types(where):
            return cls._read(config, where)

    @classmethod
    def _read(cls, config: Mapping[str, Any], where: str) -> DFlashConfig:
        architectures = config.get("architectures") or []
        if "dflash_config" not in config or not any("DFlash" in str(name) for name in architectures):
            raise ValueError(f"{where}: not a DFlash drafter (architectures {architectures}, dflash_config missing?)")
        if architectures != ["DFlashDraftModel"]:
            raise ValueError(f"{where}: architecture {architectures} is not implemented; known: DFlashDraftModel")
        nested = dict(config["dflash_config"])
        _refuse_unsupported(config, nested, where)
        for key in ("target_layer_ids", "mask_token_id"):
            if nested.get(key) is None:
                raise ValueError(f"{where}: dflash_config has no {key}; it cannot be guessed")
        taps = nested["target_layer_ids"]
        if not isinstance(taps, list) or not taps or not all(isinstance(i, int) and i >= 0 for i in taps):
            raise ValueError(f"{where}: target_layer_ids {taps!r} must be a list of layer indices >= 0")
        both = nested.get("block_size"), config.get("block_size")
        if None not in both and both[0] != both[1]:
            raise ValueError(f"{where}: block_size is {both[0]} in dflash_config but {both[1]} at the top level")
        block = both[0] if both[0] is not None else both[1]
        if not isinstance(block, int) or block < 2:
            raise ValueError(f"{where}: block_size {block!r} must be an integer of at least 2")
        model = _layers_config(config, nested, where)
        flag = _first(config.get("is_causal"), nested.get("causal"))
        if flag is None and _all_sliding(config, nested):
            flag = False
        causal = tuple(w is not None if flag is None else bool(flag) for w in model.windows)
        return cls(
            model=model, block_size=block, target_layer_ids=tuple(taps), mask_token_id=int(nested["mask_token_id"]),
            causal=causal, num_target_layers=_first(config.get("num_target_layers"), nested.get("num_target_layers")),
            input_embedding_scale=float(_extra(config, nested, "input_embedding_scale") or 1.0),
            output_multiplier=float(_extra(config, nested, "output_multiplier") or 1.0),
            final_logit_softcapping=_extra(config, nested, "final_logit_softcapping") or None,
            off_spine=_off_spine(config, where),
        )  # fmt: skip


def _off_spine(config: Mapping[str, Any], where: str) -> float | None:
    ours = config.get("flashtree")
    value = ours.get("off_spine") if isinstance(ours, Mapping) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ValueError(f"{where}: flashtree.off_spine = {value!r}: must be a number in (0, 1]")
    return float(value)


def _extra(config: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> Any:
    return _first(nested.get(key), config.get(key))


def _refuse_unsupported(config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> None:
    for key in UNSUPPORTED:
        value = _extra(config, nested, key)
        if value not in (None, False, 0, [], "dflash"):
            raise ValueError(f"{where}: dflash_config.{key} = {value!r} is not implemented")
    if unknown := sorted(set(nested) - set(KNOWN) - set(UNSUPPORTED)):
        raise ValueError(f"{where}: dflash_config has unknown keys: {', '.join(unknown)}")
    if config.get("model_type") != "qwen3":
        raise ValueError(
            f"{where}: drafter layers of type {config.get('model_type')!r} are not implemented; known: qwen3"
        )


def _layers_config(config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> ModelConfig:
    """The layers as a Qwen3 ModelConfig; `use_swa` with `swa_window_size` is another spelling of all-sliding layers."""
    plain = dict(config)
    plain.pop("final_logit_softcapping", None)
    if nested.get("use_swa"):
        if not nested.get("swa_window_size"):
            raise ValueError(f"{where}: dflash_config.use_swa is set without swa_window_size")
        if plain.get("sliding_window") is None:
            plain["sliding_window"] = nested["swa_window_size"]
        if plain["sliding_window"] != nested["swa_window_size"]:
            raise ValueError(f"{where}: swa_window_size and sliding_window disagree")
        plain["use_sliding_window"] = True
        if _all_sliding(config, nested):
            plain["layer_types"] = ["sliding_attention"] * int(config["num_hidden_layers"])
    elif "sliding_attention" in (plain.get("layer_types") or ()):
        plain.setdefault("use_sliding_window", True)  # an explicit false beside sliding layers is refused below
    return ModelConfig.from_dict(plain, where)


def _first(*values: Any) -> Any:
    """The first that is not null: published files write nulls beside the value that counts."""
    return next((value for value in values if value is not None), None)


def _all_sliding(config: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    """Whether `use_swa` makes every layer sliding; such layers see their whole block (vLLM's rule)."""
    return bool(nested.get("use_swa")) and "sliding_attention" not in (config.get("layer_types") or ())
