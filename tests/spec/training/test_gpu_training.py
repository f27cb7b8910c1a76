"""Training on a GPU: compiled flex attention and loss against the dense path, and a run in bf16."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dflash_helpers as tiny  # noqa: E402

from modelkit import load_model  # noqa: E402
from modelkit.compile import Counters  # noqa: E402
from spec.training.config import load_training_config  # noqa: E402
from spec.training.folder import published_config  # noqa: E402
from spec.training.store import Document, Store, target_identity  # noqa: E402
from spec.training.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.gpu

# Three query heads a key/value head, as the demo model's drafter has them.
SHAPE = {"layers": 2, "block_size": 16, "target_layer_ids": [3, 0], "num_attention_heads": 6, "num_key_value_heads": 2}


def trainer(root, dtype, changes):
    target = root / "target"
    if not target.is_dir():
        tiny.save_folder(target, tiny.TARGET, tiny.random_weights(tiny.TARGET, 1))
    identity = target_identity(target)
    store = Store(root / "data", identity)
    if not store.documents:
        generator = torch.Generator().manual_seed(4)
        sizes = torch.randint(20, 120, (64,), generator=generator).tolist()
        texts = [torch.randint(tiny.MASK, (size,), generator=generator).tolist() for size in sizes]
        store.use_recipe({})
        store.add(0, [Document(prompt=text[:3], answer=text[3:]) for text in texts])
    tables = {
        "target": {"path": str(target), "dtype": dtype, "device": "cuda"},
        "data": {"folder": str(root / "data")},
        "drafter": {"mask_token_id": tiny.MASK} | SHAPE,
        "train": {
            "steps": 60,
            "sequence_length": 128,
            "sequences": 2,
            "anchors": 16,
            "chunk_blocks": 8,
            "log_every": 1,
        },
        "output": {"folder": str(root / "out")},
    }
    config = load_training_config(tables, changes)
    model = load_model(target, dtype=dtype, device="cuda", kernels="reference")
    return Trainer(config, model, published_config(config.drafter, target), store.load(), run={})


@pytest.mark.parametrize("kind", [{}, {"drafter.causal": True}, {"drafter.sliding_window": 20}], ids=str)
def test_flex_attention_and_the_compiled_loss_give_the_dense_gradients(kind, tmp_path):
    gradients = []
    for changes in (
        {"train.attention": "flex", "train.compile": True},
        {"train.attention": "dense", "train.compile": False},
    ):
        run = trainer(tmp_path, "float32", kind | changes)
        batch = run.batches[0].to(run.target.device)
        outcome = run.outcome(batch, run.blocks(0, batch))
        outcome.loss.backward()
        gradients.append([outcome.loss.detach(), *(p.grad for p in run.drafter.parameters())])
    for flex, dense in zip(*gradients, strict=True):
        torch.testing.assert_close(flex, dense, rtol=2e-2, atol=2e-3 * float(dense.abs().max()))


def test_a_run_in_bf16_learns_its_texts_and_compiles_nothing_again(tmp_path):
    run = trainer(tmp_path, "bfloat16", {"train.learning_rate": 3e-3})
    losses = [float(run.run_step()["loss"]) for _ in range(3)]
    graphs = Counters.read().graphs
    losses += [float(run.run_step()["loss"]) for _ in range(57)]
    assert Counters.read().graphs == graphs
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(p.dtype == torch.float32 for p in run.drafter.parameters())
    run.save()
    assert (tmp_path / "out" / "model.safetensors").is_file()
