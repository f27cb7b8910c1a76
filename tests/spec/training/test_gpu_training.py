"""Training on GPUs: compiled flex attention, features and loss against the dense path, and runs in bf16."""

import json
import os
import subprocess
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


@pytest.mark.parametrize(
    "kind", [{}, {"drafter.causal": True, "train.soft_labels": 0.5}, {"drafter.sliding_window": 20}], ids=str
)
def test_compiled_training_gives_the_dense_features_and_gradients(kind, tmp_path):
    gradients = []
    for changes in (
        {"train.attention": "flex", "train.compile": True},
        {"train.attention": "dense", "train.compile": False},
    ):
        run = trainer(tmp_path, "float32", kind | changes)
        batch = run.batches[0].to(run.target.device)
        outcome = run.outcome(batch, run.blocks(0, batch))
        outcome.loss.backward()
        with torch.no_grad():
            features = run.features(batch).taps
        gradients.append([features, outcome.loss.detach(), *(p.grad for p in run.drafter.parameters())])
    for flex, dense in zip(*gradients, strict=True):
        torch.testing.assert_close(flex, dense, rtol=2e-2, atol=2e-3 * float(dense.abs().max()))


def test_a_run_in_bf16_learns_its_texts_and_compiles_nothing_again(tmp_path):
    run = trainer(tmp_path, "bfloat16", {"train.learning_rate": 1e-2, "train.held_out": 0.3})
    losses = [float(run.run_step()["loss"]) for _ in range(3)]
    graphs = Counters.read().graphs
    torch.cuda.set_sync_debug_mode("error")  # a step waits for nothing
    try:
        later = [run.run_step()["loss"] for _ in range(57)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses += [float(loss) for loss in later]
    run.save()
    run._measure()
    assert Counters.read().graphs == graphs
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(p.dtype == torch.float32 for p in run.drafter.parameters())
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.multi_gpu
def test_two_gpus_learn(tmp_path):
    """Two processes sum their gradients and learn."""
    trainer(tmp_path, "bfloat16", {})  # writes target and data
    settings = {
        "target.path": tmp_path / "target", "target.device": "cuda", "data.folder": tmp_path / "data",
        "drafter.layers": 2, "drafter.target_layer_ids": "[3,0]", "drafter.mask_token_id": tiny.MASK,
        "drafter.num_attention_heads": 6, "drafter.num_key_value_heads": 2, "drafter.intermediate_size": 16,
        "train.steps": 40, "train.sequence_length": 128, "train.sequences": 2, "train.anchors": 16,
        "train.learning_rate": 3e-3, "train.log_every": 1, "output.folder": tmp_path / "two",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "spec.cli"]
    command += ["train", "--config", "train-smollm2", "--only", "train"]
    command += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()[:40]]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
