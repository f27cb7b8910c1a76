"""Compiled training on the CPU: traced whole, once, and the same as eager training.

`torch.compile` is replaced by what traces and differentiates the same function and runs it eagerly: this tests tracing,
no compiler. Flex attention refuses a backward on the CPU, where only its fused kernels lack one; its plain one is used.
"""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dflash_helpers as tiny  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from modelkit import load_model  # noqa: E402
from spec.training import trainer as trainer_module  # noqa: E402
from spec.training.attention import flex_attention  # noqa: E402
from spec.training.config import load_training_config  # noqa: E402
from spec.training.folder import published_config  # noqa: E402
from spec.training.store import Document, Store, target_identity  # noqa: E402
from spec.training.trainer import Trainer  # noqa: E402

COMPILE = torch.compile


@pytest.fixture
def folders(tmp_path):
    target = tiny.save_folder(tmp_path / "target", tiny.TARGET, tiny.random_weights(tiny.TARGET, 1))
    store, generator = Store(tmp_path / "data", target_identity(target)), torch.Generator().manual_seed(4)
    sizes = torch.randint(10, 30, (48,), generator=generator).tolist()
    texts = [torch.randint(tiny.MASK, (size,), generator=generator).tolist() for size in sizes]
    store.use_recipe({})
    store.add(0, [Document(prompt=text[:3], answer=text[3:]) for text in texts])
    yield tmp_path
    torch._dynamo.reset()


def trainer(root, changes):
    tables = {
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"folder": str(root / "data")},
        "drafter": {"mask_token_id": tiny.MASK, "layers": 2, "block_size": 5, "target_layer_ids": [3, 0]},
        "train": {
            "steps": 6,
            "sequence_length": 40,
            "sequences": 2,
            "anchors": 6,
            "chunk_blocks": 5,
            "held_out": 0.3,
            "optimiser": "adamw",  # the products of Muon, in bf16, make much of small differences
        },
        "output": {"folder": str(root / str(len(changes)))},
    }
    config = load_training_config(tables, changes)
    model = load_model(root / "target", dtype="float32", device="cpu", kernels="reference")
    corpus = Store(root / "data", target_identity(root / "target")).load()
    return Trainer(config, model, published_config(config.drafter, root / "target"), corpus, run={})


@pytest.mark.parametrize(
    "kind", [{}, {"train.soft_labels": 0.5, "drafter.causal": True, "drafter.sliding_window": 20}], ids=str
)
def test_compiled_steps_are_the_eager_ones_and_compile_nothing_again(kind, folders, monkeypatch):
    eager = trainer(folders, kind)
    expected = [eager.run_step() for _ in range(4)]

    def compile(function, **how):
        assert how["fullgraph"] and not how["dynamic"]
        return COMPILE(function, backend="aot_eager", fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(trainer_module, "attention_of", lambda *_: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch._dynamo.reset()
    counters.clear()
    run = trainer(folders, kind | {"train.compile": True})
    for number, want in enumerate(expected):
        got = run.run_step()
        for name in ("loss", "norm"):
            torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4, msg=f"{name} of step {number}")
        if number == 0:
            graphs = counters["stats"]["unique_graphs"]
    run.save()
    run._measure()  # the same shapes: nothing new either
    assert counters["stats"]["unique_graphs"] == graphs == 4  # features, drafter, a whole chunk and the last one
    assert not counters["graph_break"]
    for got, want in zip(run.drafter.parameters(), eager.drafter.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-4)
