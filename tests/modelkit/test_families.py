"""Logits of every family and feature equal transformers', in both spellings of config.json, fused or not."""

import dataclasses

import pytest
import torch

from modelkit import ModelConfig, load_model
from modelkit.context import ContextHeads
from modelkit.rope import RopeConfig

TOLERANCE = 1e-4
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
YARN = {"rope_type": "yarn", "factor": 6.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3 narrow": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": YARN,
    "yarn betas": YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
    "yarn exact range": YARN | {"beta_fast": 4.0, "truncate": False},
    "yarn truncated": YARN | {"beta_fast": 4.0, "truncate": True},
    "yarn attention factor": YARN | {"attention_factor": 0.7},
    "yarn mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.6},
    "yarn one mscale": YARN | {"mscale": 2.0},
    "yarn equal mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn range of no width": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn range past the end": YARN | {"original_max_position_embeddings": 16384, "rope_theta": 10.0},
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {
    "mist": [{"sliding_window": w} for w in (None, 1, 5, 28, 64)],
    "qwen": [
        {"use_sliding_window": False, "sliding_window": 5},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 28, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ALTERNATING},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ALTERNATING, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
    ],
}


def old_spelling(config: dict) -> dict:
    """config.json as files before transformers 5 have it."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind} | rope
    config["torch_dtype"] = config.pop("dtype")
    layers, first = config["num_hidden_layers"], config.get("max_window_layers")
    first = layers if first is None or not config.get("use_sliding_window") else first
    by_rule = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if config.get("layer_types") == by_rule:
        config.pop("layer_types", None)
    return {key: value for key, value in config.items() if key != "transformers_version"}


@pytest.fixture
def check(save_transformers, relative):
    """Compare one tiny model with transformers: new spelling and fused, old spelling and not fused."""
    from transformers import AutoConfig

    def run(family: str, **options) -> None:
        saved = save_transformers(family, **options)
        new, old = saved.config, old_spelling(saved.config)
        assert "rope_theta" in new["rope_parameters"] and "rope_parameters" not in old
        for config, fuse in ((new, True), (old, False)):
            folder = saved.write_config(config)
            model = load_model(folder, dtype="float32", fuse=fuse)
            assert hasattr(model.layers[0].self_attn, "q_proj") != fuse
            assert relative(model.score(saved.tokens), saved.logits) <= TOLERANCE
        reread = AutoConfig.from_pretrained(folder).to_dict()
        reread["rope_parameters"].pop("type", None)
        assert all(reread[key] == new[key] for key in ("rope_parameters", "layer_types") if key in new)

    return run


def rope(name: str) -> dict:
    return {"rope_parameters": {"rope_theta": 10000.0} | ROPES[name]}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_types(check, family, name):
    check(family, head_dim=16, **rope(name))


@pytest.mark.parametrize(("family", "options"), [(f, w) for f in FAMILIES[1:] for w in WINDOWS[f[:4]]])
def test_windows(check, family, options):
    check(family, head_dim=16, **rope("yarn betas"), **options)


@pytest.mark.parametrize(("head_dim", "tied"), [(None, False), (8, True), (32, False), (32, True)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_tying(check, family, kv_heads, head_dim, tied):
    sizes = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    check(family, **rope("default"), **sizes, **({} if head_dim is None else {"head_dim": head_dim}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": False}),
        ("llama", {"attention_bias": False, "mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True} | WINDOWS["qwen"][1]),
    ],
)
def test_biases(check, family, biases, tied):
    check(family, head_dim=16, num_key_value_heads=1, tie_word_embeddings=tied, **rope("llama3"), **biases)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("window", [4, 4096])
def test_a_window_that_is_switched_off_is_no_window(save_transformers, family, window):
    saved = save_transformers(family, head_dim=16, **rope("default"))
    off = {"use_sliding_window": False, "sliding_window": window, "max_window_layers": 0}
    for base in (saved.config, old_spelling(saved.config)):
        logits = load_model(saved.write_config(base), dtype="float32").score(saved.tokens)
        model = load_model(saved.write_config(base | off), dtype="float32")
        assert model.config.windows == (None,) * 3
        assert torch.equal(model.score(saved.tokens), logits)


def test_llama_has_no_window_whatever_its_config_says(save_transformers, relative):
    saved = save_transformers("llama", **rope("default"))
    folder = saved.write_config(saved.config | {"sliding_window": 4})
    assert relative(load_model(folder, dtype="float32").score(saved.tokens), saved.logits) <= TOLERANCE


def breakages(config: ModelConfig) -> dict[str, dict]:
    """Configs with one feature broken."""
    window = next(w for w in config.windows if w)
    yarn = config.rope
    return {
        "window + 1": {"windows": tuple(w and window + 1 for w in config.windows)},
        "window - 1": {"windows": tuple(w and window - 1 for w in config.windows)},
        "no window": {"windows": (None,) * 3},
        "window on every layer": {"windows": (window,) * 3},
        "default rope": {"rope": RopeConfig(theta=yarn.theta)},
        "linear rope": {"rope": RopeConfig(theta=yarn.theta, type="linear", factor=yarn.factor)},
        "llama3 rope": {"rope": dataclasses.replace(yarn, type="llama3")},
        "theta": {"rope": dataclasses.replace(yarn, theta=yarn.theta / 2)},
        "factor": {"rope": dataclasses.replace(yarn, factor=yarn.factor - 1)},
        "truncate": {"rope": dataclasses.replace(yarn, truncate=True)},
        "beta_fast": {"rope": dataclasses.replace(yarn, beta_fast=32.0)},
        "attention_factor": {"rope": dataclasses.replace(yarn, attention_factor=1.0)},
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_broken_feature_moves_the_logits(save_transformers, relative, family):
    options = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    saved = save_transformers(family, head_dim=16, **rope("yarn exact range"), **options)
    model = load_model(saved.folder, dtype="float32")
    config = model.config
    moved = {}
    for name, change in breakages(config).items():
        model.config = dataclasses.replace(config, **change)
        model.prepare()
        moved[name] = relative(model.score(saved.tokens), saved.logits)
    model.config = config
    model.prepare()
    attention = model.layers[0].self_attn
    norms = family == "qwen3"
    broken = [attention.q_norm.weight, attention.k_norm.weight] if norms else [attention.qkv_proj.bias]
    for number, parameter in enumerate(broken):
        kept = parameter.detach().clone()
        parameter.data.fill_(1.0 if norms else 0.0)
        moved[f"parameter {number}"] = relative(model.score(saved.tokens), saved.logits)
        parameter.data.copy_(kept)
    assert min(moved.values()) > 100 * TOLERANCE, moved
    assert relative(model.score(saved.tokens), saved.logits) <= TOLERANCE


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_context_projection_is_the_projection_of_k_and_v(save_transformers, family, fuse):
    biases = {} if family == "qwen2" else {"attention_bias": True}
    saved = save_transformers(family, head_dim=16, **rope("default"), **biases)
    attention = load_model(saved.folder, dtype="float32", fuse=fuse).layers[1].self_attn
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    _, k, v = attention.project(x.view(10, 48))
    if fuse:
        found = ContextHeads([attention], torch.ones(8), 1.0, 16).project(x.flatten(0, 1))
        found = tuple(part.view(2, 5, 2, 16) for part in found)
    else:
        found = attention.project_context(x)
    for part, expected in zip(found, (k, v), strict=True):
        torch.testing.assert_close(part, expected.view(2, 5, 2, 16), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nested", [True, False])
def test_theta_is_read_in_both_spellings(tiny_config, nested):
    theta = {"rope_theta": 1e6}
    rope_keys = {"rope_parameters": {"rope_type": "default"} | theta} if nested else theta
    plain = {key: value for key, value in tiny_config.items() if key != "rope_theta"}
    found = ModelConfig.from_dict(plain | rope_keys).rope.inverse_frequencies(128)
    assert float(found[32] * 1000) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("shape", [(5,), (1, 2, 3)])
def test_score_refuses_other_ranks(tiny_model, shape):
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        tiny_model().score(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_score_of_nothing_is_nothing_or_a_clear_error(tiny_model, shape):
    try:
        found = tiny_model().score(torch.zeros(shape, dtype=torch.int64))
    except ValueError as error:
        assert "token_ids" in str(error)
    else:
        assert found.shape == (*shape, 61)


@pytest.mark.parametrize("bad", [-1, 61])
def test_score_refuses_ids_outside_the_vocabulary(tiny_model, bad):
    with pytest.raises(ValueError, match=r"0\.\.60"):
        tiny_model().score(torch.tensor([[3, bad, 5]]))
    with pytest.raises(ValueError, match="float32"):
        tiny_model().score(torch.ones(1, 3))


def test_logits_are_soft_capped_where_the_config_says_so(tiny_model):
    tokens = torch.arange(12)[None]
    plain = tiny_model().score(tokens)
    capped = tiny_model(final_logit_softcapping=1.5).score(tokens)
    assert plain.abs().max() > 2
    torch.testing.assert_close(capped, 1.5 * torch.tanh(plain / 1.5))


def test_int32_ids_and_batch_rows_are_independent(tiny_model):
    model = tiny_model(windows=(None, 3))
    tokens = torch.randint(0, 61, (3, 8), generator=torch.Generator().manual_seed(0))
    together = model.score(tokens.int())
    for row, text in zip(together, tokens, strict=True):
        torch.testing.assert_close(row, model.score(text[None])[0], rtol=1e-5, atol=1e-5)
