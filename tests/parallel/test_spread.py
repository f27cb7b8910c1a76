"""What a layout makes of a model: parts, memory, borders, and what it refuses. The oracle is DTensor."""

import json
from pathlib import Path

import pytest
import torch
from test_layouts import BOTH, FILTERED, GREEDY, PIPELINE, PROMPTS, TENSOR, tables

from modelkit import load_model
from parallel.stages import balanced
from spec import Engine

SEQUENCE = {"name": "sequence"}
TEXTS = [PROMPTS[1][:9], PROMPTS[1][9:18]]


@pytest.mark.parametrize("parallel", [TENSOR, SEQUENCE], ids=lambda table: table["name"])
@pytest.mark.parametrize(("size", "kv_heads", "tied"), [(2, 2, False), (2, 1, True), (4, 2, True), (4, 4, False)])
def test_logits_are_those_of_eager_dtensor(group, targets, size, kv_heads, tied, parallel):
    path = targets(kv_heads, tied)
    lowered = torch.tensor(group(size).scores(path, parallel, TEXTS))
    oracle = torch.tensor(group(size).eager(path, parallel, TEXTS))
    assert (lowered == lowered[:1]).all(), "processes differ"
    torch.testing.assert_close(lowered, oracle, rtol=1e-5, atol=2e-5)
    expected = load_model(path, dtype="float32").score(torch.tensor(TEXTS))
    torch.testing.assert_close(lowered[0], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("size", "parallel"), [(2, PIPELINE), (4, PIPELINE), (4, BOTH)], ids=["pp2", "pp4", "tp2pp2"])
def test_logits_of_a_pipeline(group, targets, size, parallel):
    found = torch.tensor(group(size).scores(targets(2), parallel, TEXTS))
    expected = load_model(targets(2), dtype="float32").score(torch.tensor(TEXTS))
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 2)])
def test_a_layout_added_by_its_table_alone(group, targets, drafter, size, kv_heads):
    """Activations are split by rows between blocks; 1, 7 and other numbers of rows do not divide."""
    for sampling, draft in ((GREEDY, "dflash"), (FILTERED, "self")):
        config = tables(targets(kv_heads), SEQUENCE, draft, sampling=sampling, drafter=drafter)
        expected = Engine.from_config(config | {"parallel": {"name": "single"}}).generate(PROMPTS, max_new_tokens=10)
        for tokens, _, _ in group(size).generate(config, PROMPTS, max_new_tokens=10):
            assert tokens == [out.token_ids for out in expected]


def test_biases_windows_and_qk_norms(group, tiny_targets, make_target):
    """Biases of outputs are added once; a window cuts; a bias of q, k and v is shared out as its heads are."""
    llama = {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2, "head_dim": 16}
    for path in (tiny_targets["qwen2_windowed"], tiny_targets["qwen3"], make_biased(make_target, llama)):
        found = torch.tensor(group(2).scores(str(path), TENSOR, TEXTS))
        expected = load_model(path, dtype="float32").score(torch.tensor(TEXTS))
        torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-5, atol=5e-5)


def make_biased(make_target, options):
    """A target with a bias in every linear layer."""
    from safetensors.torch import load_file, save_file

    folder = make_target(3, **options)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "_proj" in name]:
        generator = torch.Generator().manual_seed(len(name))
        weights[name.replace("weight", "bias")] = torch.randn(weights[name].shape[0], generator=generator) * 0.3
    weights = {name: tensor for name, tensor in weights.items() if "q_norm" not in name and "k_norm" not in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_each_process_holds_its_part(group, targets, drafter):
    whole = {n: p.numel() for n, p in load_model(targets(2), dtype="float32").named_parameters()}
    spread = {n for n in whole if "norm" not in n}
    config = tables(targets(2), TENSOR, drafter=drafter)
    for size in (2, 4):
        members = group(size).held(config)
        for name in spread:
            # Four processes share two KV heads, so K and V, a quarter of qkv each, are there twice.
            times = 1.5 if size == 4 and "qkv" in name else 1
            assert sum(count[name] for count, *_ in members) == whole[name] * times, name
        assert len({caches for _, _, caches, _ in members}) == 1
        assert members[0][2] * size == (1 if size == 2 else 2) * cache_elements(targets(2), config)
    stages = group(4).held(config | {"parallel": PIPELINE})
    assert [own for *_, own in stages] == [[0], [1], [2], [3]]
    assert sum(count[name] for count, *_ in stages for name in count if name.startswith("layers")) == sum(
        n for name, n in whole.items() if name.startswith("layers")
    )
    assert max(sum(count.values()) for count, *_ in stages) < 1.1 * min(sum(count.values()) for count, *_ in stages)


def cache_elements(path, config):
    engine = Engine.from_config(config | {"parallel": {"name": "single"}, "target": {"path": path, "dtype": "float32"}})
    return sum(buffer.numel() for layer in engine.state.cache.layers for buffer in layer.buffers())


def test_random_weights_are_the_same_under_every_layout(group, targets, tmp_path):
    shape = tmp_path / "shape.json"
    shape.write_text((Path(targets(2)) / "config.json").read_text())
    config = tables(str(shape), TENSOR, "ngram")
    names = ("embed_tokens.weight", "layers.1.mlp.down_proj.weight")
    whole = Engine(load(config), random_weights=True).target
    parts = group(2).random_weights(config, names)
    for index, (name, dim) in enumerate(zip(names, (0, 1), strict=True)):
        joined = torch.cat([torch.tensor(part[index]) for part in parts], dim)
        assert torch.equal(joined, whole.get_parameter(name))


def load(config):
    from spec.config import load_config

    return load_config(config | {"parallel": {"name": "single"}})


def test_balanced_stages():
    assert balanced([1] * 7, 3) in (
        [range(0, 3), range(3, 5), range(5, 7)],
        [range(0, 2), range(2, 4), range(4, 7)],
        [range(0, 2), range(2, 5), range(5, 7)],
    )
    assert balanced([9, 1, 1, 1, 9], 3) == [range(0, 1), range(1, 4), range(4, 5)]
    assert balanced([5, 5], 2) == [range(0, 1), range(1, 2)]


GATE, Q, K = "layers.0.mlp.gate_proj.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
# Processes, layout, changes of the target, what the message says.
REFUSED = {
    "few heads": (4, TENSOR, {"num_attention_heads": 2}, "degree 4, more than its 2 heads can use"),
    "odd heads": (4, TENSOR, {"num_attention_heads": 6}, f"degree 4, which does not divide 6 heads ({Q}"),
    "KV heads": (
        4, TENSOR, {"num_attention_heads": 12, "num_key_value_heads": 6},
        f"degree 4 and 6 KV heads ({K}, 6 x 16): one must",
    ),
    "width": (4, TENSOR, {"intermediate_size": 90}, f"{GATE} [90, 64]: dimension 0 has 90, which 4 processes (kv"),
    "stages": (4, PIPELINE, {"num_hidden_layers": 3}, "4 pipeline stages, more than its 3 layers"),
    "processes": (2, TENSOR | {"degree": 4}, {}, "degree = 4 makes 4 process(es), but 2 were started; run under"),
    "product": (2, BOTH | {"stages": 2}, {}, "stages = 2 times degree = 2 makes 4 process(es), but 2 were started"),
    "pipeline processes": (2, PIPELINE | {"stages": 3}, {}, "stages = 3 makes 3 process(es), but 2 were started"),
    "single": (2, {"name": "single"}, {}, "layout 'single' runs in one process, but 2 were started"),
    "unmatched": (
        2, {"name": "misspelt"}, {}, "pattern 'layers.*.self_attn.qq_proj.*' matches no parameter; the nearest is"
    ),
    "no placement": (2, {"name": "incomplete"}, {}, "parameter embed_tokens.weight has no placement; patterns: "),
    "no module": (2, {"name": "borderless"}, {}, "pattern 'layers.*.ffn' matches no module"),
    "no border": (2, {"name": "wrong_border"}, {}, "module 'norm' (RMSNorm) has no border 'leave'"),
    "no dimension": (2, {"name": "other_mesh"}, {}, "placement on mesh dimension 'ep'; the mesh has pp, kv, rep"),
    "vocabulary": (2, {"name": "two_vocabularies"}, {}, "embed_tokens.weight and lm_head.weight must have the same"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_load(group, make_target, name):
    size, parallel, options, message = REFUSED[name]
    shape = {"head_dim": 16, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 96}
    path = make_target(1, **shape | options) if "heads" not in name else make_shape(make_target, shape | options)
    (said,) = group(size).refused("build", tables(str(path), parallel, "ngram"))
    assert message in said and len(said) < 700, said


def test_a_device_of_its_own_for_each_process(group):
    assert group(2).refused("connect", TENSOR, "cuda:1") == ["device 'cuda:1' for each of 2 processes; write 'cuda'"]


def make_shape(make_target, options):
    """A target whose number of heads the shared tiny weights do not have: refused before they are read."""
    folder = make_target(1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | options))
    return folder


def test_the_drafter_is_checked_too(group, targets, make_drafter):
    taps = {"mask_token_id": 96, "target_layer_ids": [0, 2, 3]}
    few = make_drafter(7, num_hidden_layers=2, num_target_layers=4, dflash_config=taps)
    (said,) = group(4).refused("build", tables(targets(2), PIPELINE, drafter=str(few)))
    assert "of the drafter: 4 pipeline stages, more than its 2 layers can use" in said and "replicate" in said
    group(4).build(tables(targets(2), PIPELINE | {"draft": "replicate"}, drafter=str(few)))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "tensor", "degree": 0}, "degree = 0: must be at least 1"),
        ({"name": "pipeline", "stages": -1}, "stages = -1"),
        ({"name": "tensor_pipeline"}, "degree and stages: give one of them"),
        ({"name": "tensor", "draft": "none"}, "draft"),
        ({"name": "tensr"}, "did you mean 'tensor'"),
    ],
)
def test_refused_configs(table, message):
    from parallel import LAYOUTS

    with pytest.raises(ValueError, match=message):
        LAYOUTS.config(table)


def test_one_process_alone(targets, drafter):
    """Started by itself a layout for several says how to start it; one of as many as there are is fine."""
    for parallel in (TENSOR, PIPELINE, BOTH | {"degree": 1}):
        config = tables(targets(2), parallel, drafter=drafter)
        outs, expected = (
            Engine.from_config(config | change).generate(PROMPTS, max_new_tokens=4)
            for change in ({}, {"parallel": {"name": "single"}})
        )
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        Engine.from_config(tables(targets(2), TENSOR | {"degree": 2}, drafter=drafter))
