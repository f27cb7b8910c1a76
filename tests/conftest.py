"""Fixtures of all tests: tiny published checkpoints made here, the shared fixtures, and the skip of GPU tests."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

VOCAB, HIDDEN, INNER = 97, 64, 96
GPUS = {"gpu": 1, "multi_gpu": 2}

COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "hidden_act": "silu",
    "max_position_embeddings": 256, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2},
    "qwen3": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3, "head_dim": 24,
        "num_key_value_heads": 1,
    },
    # The window is shorter than a draft is long, so that it cuts through the tree's own rows too.
    "qwen2_windowed": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "max_window_layers": 1,
        "use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": True,
    },
}  # fmt: skip
DRAFTER = COMMON | {
    "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 8,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1]},
}  # fmt: skip


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more CUDA devices than there are."""
    needed = max((count for mark, count in GPUS.items() if item.get_closest_marker(mark)), default=0)
    if needed and (found := torch.cuda.device_count()) < needed:
        pytest.skip(f"needs {needed} CUDA device(s), found {found}")


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The fixtures made with public implementations, which lie beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "fixtures"
    if not folder.is_dir():
        pytest.skip(f"the shared fixtures are not at {folder}")
    return folder


def _layer_shapes(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, kind = config["head_dim"], config["model_type"]
    widths = {"q": config["num_attention_heads"] * dim, "k": config["num_key_value_heads"] * dim}
    widths["v"] = widths["k"]
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        for letter, width in widths.items():
            yield f"{at}self_attn.{letter}_proj.weight", (width, HIDDEN)
            if kind == "qwen2":
                yield f"{at}self_attn.{letter}_proj.bias", (width,)
        yield f"{at}self_attn.o_proj.weight", (HIDDEN, widths["q"])
        for name in ("q_norm", "k_norm") if kind == "qwen3" else ():
            yield f"{at}self_attn.{name}.weight", (dim,)
        for name in ("gate", "up"):
            yield f"{at}mlp.{name}_proj.weight", (INNER, HIDDEN)
        yield f"{at}mlp.down_proj.weight", (HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (HIDDEN,)


def _target_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return shapes | dict(_layer_shapes(config, "model."))


def _drafter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (HIDDEN, taps * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    return shapes | dict(_layer_shapes(config, ""))


def _random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Sharp attention, norms away from 1, biases away from 0, and text that does not run in a circle."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            weights[name] = noise * 0.3
        elif len(shape) == 1:
            weights[name] = 1 + 0.2 * noise
        elif "embed" in name:
            # A tied head sees the last token itself in the residual stream: keep it small there.
            weights[name] = noise if "lm_head.weight" in shapes else noise * 0.3
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name or "lm_head" in name else 1.0
            weights[name] = noise * gain / math.sqrt(shape[1])
    return weights


def _save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny random targets by name, as published: config.json and model.safetensors, no tokenizer."""
    root = tmp_path_factory.mktemp("targets")
    folders = {}
    for seed, (name, options) in enumerate(TARGETS.items()):
        config = COMMON | options
        folders[name] = _save(root / name, config, _random_weights(_target_shapes(config), seed))
    return folders


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_target(seed, key=value, ...)`: the folder of another tiny random target."""

    def make(seed: int, **options: Any) -> Path:
        config = COMMON | TARGETS["qwen3"] | options
        weights = _random_weights(_target_shapes(config), seed)
        return _save(tmp_path_factory.mktemp("target") / "model", config, weights)

    return make


@pytest.fixture(scope="session")
def make_drafter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_drafter(seed, key=value, ...)`: the folder of another tiny random DFlash drafter."""

    def make(seed: int, **options: Any) -> Path:
        config = DRAFTER | options
        weights = _random_weights(_drafter_shapes(config), seed)
        return _save(tmp_path_factory.mktemp("drafter") / "model", config, weights)

    return make


@pytest.fixture(scope="session")
def tiny_drafters(tmp_path_factory: pytest.TempPathFactory, tiny_targets: dict[str, Path]) -> dict[str, Path]:
    """The folder of a random DFlash drafter in z-lab's format for each tiny target."""
    root = tmp_path_factory.mktemp("drafters")
    folders = {}
    for seed, name in enumerate(tiny_targets):
        config = DRAFTER | {"num_target_layers": TARGETS[name]["num_hidden_layers"]}
        folders[name] = _save(root / name, config, _random_weights(_drafter_shapes(config), 100 + seed))
    return folders


@pytest.fixture(scope="session")
def cpp_compiler() -> None:
    """Skip the test where inductor has nothing to compile its C++ with."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int], None]:
    """as_on_a_gpu(engine, lag); 1: as compiled on a GPU, where tokens are looked at while the next rounds run."""

    def prepare(engine: Any, lag: int) -> None:
        monkeypatch.setattr(engine.readback, "lag", lag)
        monkeypatch.setattr(engine, "runs_ahead", lag > 0)

    return prepare
