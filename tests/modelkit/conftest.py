"""Fixtures of modelkit's tests: checkpoints of transformers as the oracle, and tiny models made by hand."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelkit import ModelConfig, Transformer

VOCAB = 61


def _randomise(model: nn.Module, seed: int) -> None:
    """Weights large enough that features show: sharp attention, norms away from 1, biases away from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                p.copy_(noise * 0.5 if name.endswith("bias") else 1 + 0.3 * noise)
            elif "embed" in name:
                p.copy_(noise)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                p.copy_(noise * gain / math.sqrt(p.shape[1]))


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint folder that transformers wrote, and the logits of its model for `tokens`."""

    folder: Path
    tokens: Tensor
    logits: Tensor

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    def write_config(self, config: dict[str, Any]) -> Path:
        (self.folder / "config.json").write_text(json.dumps(config))
        return self.folder


@pytest.fixture
def save_transformers(tmp_path) -> Callable[..., Saved]:
    """`save(model_type, **config)`: a tiny random model of transformers, saved, with its own logits."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    def save(model_type: str, **options: Any) -> Saved:
        sizes = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
        config = transformers.AutoConfig.for_model(model_type, **(sizes | options))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.float().eval()
        _randomise(model, seed=1)
        folder = tmp_path / model_type
        model.save_pretrained(folder)
        tokens = torch.randint(0, VOCAB, (2, 29), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            return Saved(folder=folder, tokens=tokens, logits=model(tokens).logits)

    return save


@pytest.fixture(scope="session")
def relative() -> Callable[[Tensor, Tensor], float]:
    """Largest difference relative to the largest value of the second."""

    def distance(found: Tensor, expected: Tensor) -> float:
        assert found.shape == expected.shape and found.isfinite().all()
        return float((found - expected).abs().max() / expected.abs().max())

    return distance


@pytest.fixture(scope="session")
def tiny_config() -> dict[str, Any]:
    """A hand-written llama config.json."""
    return {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 100.0, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model(tiny_config) -> Callable[..., Transformer]:
    """`make(windows=(None, 5), ...)`: a tiny model in memory; keywords replace fields of its ModelConfig."""

    def make(seed: int = 3, **fields: Any) -> Transformer:
        model = Transformer(dataclasses.replace(ModelConfig.from_dict(tiny_config), **fields))
        _randomise(model, seed)
        model.prepare()
        return model.eval().requires_grad_(False)

    return make
