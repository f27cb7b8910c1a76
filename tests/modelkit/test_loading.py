"""Reading checkpoints: what loads, and what is refused with one sentence that names the culprit."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelkit import ModelConfig, load_model
from modelkit.loading import Stored

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
TOKENS = torch.tensor([[1, 5, 9, 2]])


@pytest.fixture
def tensors(tiny_model) -> dict[str, Tensor]:
    """An untied checkpoint under its published names."""
    state = tiny_model().state_dict()
    return {n if n == HEAD else f"model.{n}": t.clone() for n, t in state.items()}


@pytest.fixture
def expected(tiny_model) -> Tensor:
    return tiny_model().score(TOKENS)


@pytest.fixture
def write(tmp_path, tiny_config) -> Callable[..., Path]:
    """`write(tensors, shards=1, tie_word_embeddings=True, ...)`; None removes a key of the config."""

    def to_folder(tensors: dict[str, Tensor], shards: int = 1, **changes) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        config = {k: v for k, v in (tiny_config | changes).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        names, weight_map = sorted(tensors), {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            save_file({n: tensors[n] for n in names[number::shards]}, folder / file)
            weight_map |= dict.fromkeys(names[number::shards], file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return to_folder


def refused(folder: Path, *parts: str, config_only: bool = False, layout=None) -> None:
    """Loading raises one sentence that has all the parts."""
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_folder(folder) if config_only else load_model(folder, dtype="float32", layout=layout)
    message = str(caught.value)
    assert all(part in message for part in parts) and "\n" not in message and len(message) < 500, message


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_single_file_and_shards_load_the_same(write, tensors, expected, shards):
    model = load_model(write(tensors, shards), dtype="float32")
    torch.testing.assert_close(model.score(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert not model.training and not any(p.requires_grad or p.is_meta for p in model.parameters())


def test_every_parameter_is_the_stored_tensor(write, tensors):
    model = load_model(write(tensors), dtype="float32", fuse=False)
    found = model.state_dict()
    assert found.keys() == {n.removeprefix("model.") for n in tensors}
    assert all(torch.equal(found[n.removeprefix("model.")], t) for n, t in tensors.items())


class Cut:
    """A layout: some rows of a K projection, zeros for a norm, all of the rest but the first layer."""

    def place(self, model):
        assert all(p.is_meta for p in model.parameters())
        model.layers[0] = torch.nn.Identity()
        parts = {
            name: SimpleNamespace(slices=tuple(map(slice, p.shape)), zero=name == "norm.weight")
            for name, p in model.named_parameters(remove_duplicate=False)
        }
        parts[K_PROJ.removeprefix("model.")].slices = (slice(3, 9), slice(None))
        return parts


@pytest.mark.parametrize("tied", [False, True])
def test_a_layout_says_what_is_read_of_each_tensor(write, tensors, monkeypatch, tied):
    monkeypatch.setattr(Stored, "whole", property(lambda _: pytest.fail("read whole"), lambda *_: None), raising=False)
    if tied:
        tensors[HEAD] = tensors[EMBEDDING].clone()
    folder = write(tensors, tie_word_embeddings=tied)
    model = load_model(folder, dtype="float32", layout=Cut(), fuse=False)
    found = dict(model.named_parameters(remove_duplicate=False))
    for stored, tensor in tensors.items():
        name = stored.removeprefix("model.")
        if name.startswith("layers.0."):
            assert name not in found
        else:
            wanted = tensor[3:9] if stored == K_PROJ else tensor * (name != "norm.weight")
            assert torch.equal(found.pop(name), wanted), name
    assert not found and isinstance(model.layout, Cut) and (model.lm_head.weight is model.embed_tokens.weight) == tied
    random, whole = (load_model(folder, dtype="float32", layout=x, fuse=False, random_seed=3) for x in (Cut(), None))
    for name, tensor in random.named_parameters():
        parameter = whole.get_parameter(name)
        wanted = parameter[3:9] if name == K_PROJ.removeprefix("model.") else parameter * (name != "norm.weight")
        assert torch.equal(tensor, wanted), name
    fused = load_model(folder, dtype="float32", layout=Cut()).layers[1].self_attn.qkv_proj.weight
    assert torch.equal(
        fused,
        torch.cat([tensors[K_PROJ.replace("k_", f"{x}_")][slice(3, 9) if x == "k" else slice(None)] for x in "qkv"]),
    )
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    refused(write(tensors, tie_word_embeddings=tied), "layers.0.self_attn.k_proj.weight", "missing", layout=Cut())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtypes(write, tensors, name):
    model = load_model(write(tensors), dtype=name)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, name)} == {model.dtype}
    assert model.new_cache(slots=1, capacity=4, scratch=4).layers[0].k.dtype == model.dtype
    assert model.inverse_frequencies.dtype == torch.float32


def test_unknown_dtype_is_refused(write, tensors):
    with pytest.raises(ValueError, match=r"'float8'.*float32, bfloat16, float16"):
        load_model(write(tensors), dtype="float8")


def test_prefix_is_optional(write, tensors, expected):
    bare = {n.removeprefix("model."): t for n, t in tensors.items()}
    found = load_model(write(bare), dtype="float32").score(TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    refused(write(tensors | {"embed_tokens.weight": tensors[EMBEDDING] + 1}), "embed_tokens.weight", "prefix")


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_tied_head_is_the_embedding(write, tensors, stored, fuse):
    head = tensors.pop(HEAD)
    if stored:
        tensors[HEAD] = tensors[EMBEDDING].clone()
    model = load_model(write(tensors, tie_word_embeddings=True), dtype="float32", fuse=fuse)
    assert model.lm_head.weight is model.embed_tokens.weight
    untied = load_model(write(tensors | {HEAD: tensors[EMBEDDING].clone()}), dtype="float32", fuse=fuse)
    assert untied.lm_head.weight.data_ptr() != untied.embed_tokens.weight.data_ptr()
    assert torch.equal(model.score(TOKENS), untied.score(TOKENS))
    assert not torch.equal(head, tensors[EMBEDDING])


def test_tied_config_with_another_head_is_refused(write, tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][3, 4] += 1
    refused(write(tensors, tie_word_embeddings=True), HEAD, "embed_tokens.weight")
    tensors[HEAD] = tensors[EMBEDDING][:5].clone()
    refused(write(tensors, tie_word_embeddings=True), HEAD)


@pytest.mark.parametrize("owner", ["model.layers.0.self_attn.", "model.", ""])
def test_derived_tensors_are_left_out(write, tensors, expected, owner):
    name = f"{owner}rotary_emb.inv_freq"
    found = load_model(write(tensors | {name: torch.ones(4)}), dtype="float32").score(TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [HEAD, EMBEDDING, K_PROJ, "model.norm.weight"])
@pytest.mark.parametrize("shards", [1, 2])
def test_missing_tensor(write, tensors, name, shards):
    del tensors[name]
    refused(write(tensors, shards), "1 tensor", "missing", name.removeprefix("model."))


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight",
             "model.layers.0.self_attn.q_proj.bias", "lm_head.bias", "visual.weight"],
)  # fmt: skip
def test_unknown_tensor(write, tensors, name):
    refused(write(tensors | {name: torch.ones(8)}), name, "1 tensor")


@pytest.mark.parametrize("shape", [(15, 32), (32, 16), (16,), (1, 16, 32)])
def test_wrong_shape(write, tensors, shape):
    refused(write(tensors | {K_PROJ: torch.ones(shape)}), K_PROJ, str(list(shape)), "[16, 32]")


def test_weights_that_are_not_floating_are_refused(write, tensors):
    refused(write(tensors | {K_PROJ: torch.ones(16, 32, dtype=torch.int8)}), K_PROJ, "int8")


def test_tensor_in_two_shards(write, tensors):
    folder, names = write(tensors, 2), sorted(tensors)
    assert HEAD in names[::2], "the head should be in the first shard"
    second = {n: tensors[n] for n in [*names[1::2], HEAD]}
    save_file(second, folder / "model-00002-of-00002.safetensors")
    refused(folder, "two files", HEAD)


def test_missing_shard(write, tensors):
    folder = write(tensors, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model.safetensors.index.json", "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 400, 9000])
def test_truncated_file(write, tensors, keep):
    folder = write(tensors)
    content = (folder / "model.safetensors").read_bytes()
    assert len(content) > 2 * keep
    (folder / "model.safetensors").write_bytes(content[:keep])
    refused(folder, "model.safetensors", "truncated")


def test_truncated_shard_is_named(write, tensors):
    folder = write(tensors, 2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(folder, shard.name, "truncated")


def test_not_safetensors(write, tensors):
    folder = write(tensors)
    torch.save(tensors, folder / "model.safetensors")
    refused(folder, "model.safetensors", "not a safetensors file")


@pytest.mark.parametrize("weight_map", [{}, None, ["a"], "a"])
def test_index_without_a_usable_map(write, tensors, weight_map):
    folder = write(tensors, 2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "model.safetensors.index.json", "weight_map")


@pytest.mark.parametrize("content", ["{}", "[]", "{"])
def test_bad_index(write, tensors, content):
    folder = write(tensors, 2)
    (folder / "model.safetensors.index.json").write_text(content)
    refused(folder, "model.safetensors.index.json")


def test_no_weights_and_bin_only(write, tensors):
    folder = write(tensors)
    (folder / "model.safetensors").unlink()
    refused(folder, str(folder), "neither model.safetensors nor model.safetensors.index.json")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(folder, "pytorch_model.bin", "only safetensors")


def test_missing_folder_and_missing_config(write, tensors, tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "does not exist")
    folder = write(tensors)
    (folder / "config.json").unlink()
    refused(folder, "config.json", "missing")


@pytest.mark.parametrize("content", ["", "{", "{'a': 1}", "[1]", "null", '"x"', b"\xff\xfe{}"])
def test_bad_json(write, tensors, content):
    folder = write(tensors)
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(folder, "config.json", "JSON", config_only=True)


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (None, None, ()),
        (2, {"eos_token_id": [5, 2]}, (5, 2)),
        (2, {}, (2,)),
    ],
)
def test_eos_ids(write, tensors, config, generation, eos):
    folder = write(tensors, eos_token_id=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.from_folder(folder).eos_token_ids == eos
