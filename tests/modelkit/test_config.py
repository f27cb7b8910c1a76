"""What a config.json must say: whatever would change results is read or refused, never guessed."""

import pytest

from modelkit import ModelConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def read(tiny_config, **changes) -> ModelConfig:
    """Read the tiny config with some keys changed; None removes a key."""
    config = {k: v for k, v in (tiny_config | changes).items() if v is not None}
    return ModelConfig.from_dict(config, "some/config.json")


REFUSED = [
    ({"model_type": "gpt2"}, ["gpt2", "llama", "qwen3"]),
    ({"model_type": "llama4"}, ["llama4"]),
    ({"model_type": None}, ["model type"]),
    ({"rope_theta": None}, ["rope_theta"]),
    ({"rope_theta": None, "rope_scaling": YARN}, ["rope_theta"]),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, ["rope_theta"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope"]),
    ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, ["yarm"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["yarn", "original_max_position_embeddings"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, ["high_freq_factor"]),
    ({"rope_scaling": YARN | {"beta_fats": 3}}, ["beta_fats"]),
    ({"rope_scaling": YARN | {"theta": 3.0}}, ["theta"]),
    ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"hidden_act": "gelu"}, ["gelu", "silu"]),
    ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ({"head_dim": 7}, ["head_dim", "7"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
    ({"num_key_value_heads": -2}, ["num_key_value_heads", "-2"]),
    ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ({"vocab_size": True}, ["vocab_size", "True"]),
    *[
        ({key: None}, [key, "missing"])
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "rms_norm_eps", "max_position_embeddings",
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("changes", "parts"), REFUSED, ids=[str(c)[:70] for c, _ in REFUSED])
def test_refused(tiny_config, changes, parts):
    with pytest.raises(ValueError) as caught:
        read(tiny_config, **changes)
    message = str(caught.value)
    assert all(part in message for part in parts) and "\n" not in message, message


QWEN = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
SLIDING = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": 5, "max_window_layers": 0}, (None, None)),
        (QWEN, (None, 5)),
        (QWEN | {"layer_types": SLIDING[::-1]}, (5, None)),
        (QWEN | {"max_window_layers": 2}, (None, None)),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_of_qwen(tiny_config, model_type, keys, windows):
    assert read(tiny_config, model_type=model_type, **keys).windows == windows


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        (QWEN | {"max_window_layers": None}, "max_window_layers"),
        (QWEN | {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (QWEN | {"layer_types": SLIDING[:1]}, "1 layer types for 2 layers"),
        (QWEN | {"sliding_window": 0}, "sliding_window"),
        (QWEN | {"sliding_window": 5.5}, "5.5"),
        (QWEN | {"use_sliding_window": False, "layer_types": SLIDING}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_refused_windows_of_qwen(tiny_config, model_type, keys, part):
    with pytest.raises(ValueError, match=part):
        read(tiny_config, model_type=model_type, **keys)


@pytest.mark.parametrize(
    ("keys", "default"),
    [
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
    ],
)
def test_a_missing_sliding_window_is_not_no_window(tiny_config, keys, default):
    """null means none, but transformers takes 4096 where the key is missing: do the same, or refuse."""
    assert ModelConfig.from_dict(tiny_config | keys | {"sliding_window": None}).windows == (None, None)
    assert 6 in ModelConfig.from_dict(tiny_config | keys | {"sliding_window": 6}).windows
    try:
        found = ModelConfig.from_dict(tiny_config | keys).windows
    except ValueError as error:
        assert "sliding_window" in str(error)
    else:
        assert found == default


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_attention_factor_belongs_to_yarn_only(tiny_config, kind):
    """transformers ignores it elsewhere: applied, it changes results."""
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    scaling = {"rope_type": kind, "factor": 2.0, "attention_factor": 3.0}
    scaling |= extra if kind == "llama3" else {}
    try:
        found = read(tiny_config, rope_scaling=scaling).rope.attention_factor
    except ValueError as error:
        assert "attention_factor" in str(error)
    else:
        assert found == 1.0


def test_rope_scaling_added_to_a_new_config_is_not_ignored(tiny_config):
    """As model cards tell users to do: in a file of transformers 5 both keys are then there."""
    new = {"rope_type": "default", "rope_theta": 100.0}
    try:
        found = read(tiny_config, rope_theta=None, rope_parameters=new, rope_scaling=YARN).rope
    except ValueError as error:
        assert "rope_scaling" in str(error)
    else:
        assert found.type == "yarn"


def test_rope_parameters_by_layer_type_are_not_ignored(tiny_config):
    nested = {"full_attention": YARN | {"rope_theta": 7.0}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ValueError, match="rope"):
        read(tiny_config, rope_parameters=nested)


def test_families_fix_what_their_config_does_not_say(tiny_config):
    biased = {"attention_bias": True, "mlp_bias": True}
    found = {}
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        config = read(tiny_config, model_type=family, sliding_window=4, **biased)
        found[family] = (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert found == {
        "llama": (True, True, True, False), "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False), "qwen3": (True, True, False, True),
    }  # fmt: skip
