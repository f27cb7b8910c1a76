"""Runs of the trainer: resumed exactly, the target left alone, files that the drafter loads, mistakes refused early."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dflash_helpers as tiny  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from modelkit import load_model  # noqa: E402
from modelkit.config import ModelConfig  # noqa: E402
from spec.cli import main  # noqa: E402
from spec.draft.dflash_config import DFlashConfig  # noqa: E402
from spec.sources import shapes  # noqa: E402
from spec.training.config import OptimiserConfig, load_training_config  # noqa: E402
from spec.training.folder import default_taps, parameter_count, published_config  # noqa: E402
from spec.training.optimiser import learning_rate  # noqa: E402
from spec.training.store import Document, Store, target_identity  # noqa: E402
from spec.training.trainer import FREE, Trainer, fresh_drafter  # noqa: E402


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    root = tmp_path_factory.mktemp("trainer")
    return tiny.save_folder(root / "target", tiny.TARGET, tiny.random_weights(tiny.TARGET, 1))


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "data"
    store, generator = Store(folder, target_identity(target)), torch.Generator().manual_seed(4)
    sizes = torch.randint(10, 30, (24,), generator=generator).tolist()
    texts = [torch.randint(tiny.MASK, (size,), generator=generator).tolist() for size in sizes]
    store.use_recipe({})
    store.add(0, [Document(prompt=text[:3], answer=text[3:]) for text in texts])
    return folder


def tables(target, data, output):
    return {
        "target": {"path": str(target), "dtype": "float32"},
        "data": {"folder": str(data), "documents": 24, "shard_documents": 24},
        "drafter": {"mask_token_id": tiny.MASK, "layers": 2, "block_size": 5, "target_layer_ids": [3, 0]},
        "train": {"steps": 8, "sequence_length": 40, "sequences": 2, "anchors": 4, "checkpoint_every": 3},
        "output": {"folder": str(output), "dtype": "float32"},
    }


def trainer(target, data, output, changes=None, **kwargs):
    config = load_training_config(tables(target, data, output), changes)
    model = load_model(target, dtype="float32", device="cpu", kernels="reference")
    corpus = Store(data, target_identity(target)).load()
    published = published_config(config.drafter, target)
    return Trainer(config, model, published, corpus, run={"target": target_identity(target)}, **kwargs)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_run_in_two_halves_is_the_run_in_one(optimiser, target, data, tmp_path):
    changes = {"train.optimiser": optimiser}
    whole = trainer(target, data, tmp_path / "whole", changes)
    whole.run_all()
    trainer(target, data, tmp_path / "halves", changes).run_all(stop_after=4)
    torch.manual_seed(99)  # nothing may depend on the process's own random state
    second = trainer(target, data, tmp_path / "halves", changes)
    assert second.step == 4
    second.run_all()
    for name in ("whole", "halves"):
        assert trainer(target, data, tmp_path / name, changes).step == 8
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halves"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    logs = [
        [json.loads(line) for line in (tmp_path / n / "log.jsonl").read_text().splitlines()]
        for n in ("whole", "halves")
    ]
    assert logs[0][-1]["step"] == logs[1][-1]["step"] == 8
    before, after = (torch.load(tmp_path / n / "checkpoint.pt", weights_only=True) for n in ("whole", "halves"))
    for one, two in zip(before["optimisers"], after["optimisers"], strict=True):
        for a, b in zip(one["state"].values(), two["state"].values(), strict=True):
            assert a and all(torch.equal(a[key], b[key]) for key in a)


def test_a_run_that_was_killed_logs_no_step_twice(target, data, tmp_path):
    changes = {"train.log_every": 1}
    first = trainer(target, data, tmp_path / "out", changes)
    first.run_all(stop_after=3)
    for _ in range(2):  # two more steps, logged and lost
        first._log([first.run_step()], 1.0)
    with (tmp_path / "out" / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "los')  # killed while it wrote
    trainer(target, data, tmp_path / "out", changes).run_all()
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))


def test_a_run_killed_before_its_first_checkpoint_logs_no_step_twice(target, data, tmp_path):
    lost = trainer(target, data, tmp_path / "out")
    lost._log([lost.run_step()], 1.0)
    trainer(target, data, tmp_path / "out")
    assert (tmp_path / "out" / "log.jsonl").read_text() == ""


# Another value of every option that a run's weights depend on.
DECISIVE = {
    "steps": 80, "sequence_length": 48, "sequences": 1, "anchors": 3, "soft_labels": 0.5, "balance": 2.0,
    "optimiser": "adamw", "learning_rate": 2e-3, "warmup": 0.5, "weight_decay": 0.5, "clip": 1e-3, "seed": 1,
    "held_out": 0.5,
}  # fmt: skip


def test_every_option_of_training_is_decisive_or_free():
    names = {field.name for field in dataclasses.fields(OptimiserConfig)}
    assert names == DECISIVE.keys() | set(FREE)


@pytest.mark.parametrize("name", DECISIVE)
def test_no_option_of_training_is_ignored(name, target, data, tmp_path, monkeypatch):
    # A drafter that has learned nothing is equally bad everywhere: let it look better at some blocks.
    monkeypatch.setattr("spec.training.loss.lengths", lambda right, real: torch.arange(len(right)) % 3 + 1.0)
    weights = []
    for changes in ({}, {f"train.{name}": DECISIVE[name]}):
        run = trainer(target, data, tmp_path / str(len(changes)), changes)
        run.run_step()
        run.run_step()
        weights.append(torch.cat([p.detach().flatten() for p in run.drafter.parameters()]))
    assert not torch.equal(*weights)


def test_only_the_drafter_learns(target, data, tmp_path):
    run = trainer(target, data, tmp_path / "out")
    before = {name: p.clone() for name, p in run.target.named_parameters()}
    fresh = {name: p.clone() for name, p in run.drafter.named_parameters()}
    run.run_all(stop_after=2)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in run.target.named_parameters())
    trained = {id(p) for o in run.optimisers for group in o.param_groups for p in group["params"]}
    assert trained == {id(p) for p in run.model.parameters()} == {id(p) for p in run.drafter.parameters()}
    assert all(not torch.equal(p, fresh[name]) for name, p in run.drafter.named_parameters())
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == fresh.keys()  # no embedding, no head


def test_anchors_are_drawn_anew_in_each_epoch(target, data, tmp_path):
    run = trainer(target, data, tmp_path / "out")
    batch = run.batches[0]
    assert torch.equal(run.blocks(0, batch).anchor, run.blocks(0, batch).anchor)
    assert not torch.equal(run.blocks(0, batch).anchor, run.blocks(5, batch).anchor)


def test_processes_draw_their_own(target, data, tmp_path):
    one, two = (trainer(target, data, tmp_path / "out", {"train.sequences": 1}, rank=r, world=1) for r in (0, 1))
    one.world = two.world = 2
    assert not torch.equal(one.blocks(0, one.batches[0]).anchor, two.blocks(0, one.batches[0]).anchor)


def test_documents_held_out_are_measured_and_not_trained_on(target, data, tmp_path):
    run = trainer(target, data, tmp_path / "out", {"train.held_out": 0.25, "train.log_every": 8})
    assert run.batches.corpus.documents + run.held_out.documents == 24 and 3 <= run.held_out.documents <= 9
    # A drafter that is right half of the time on the spine and a quarter behind it.
    counts = torch.tensor([[100, 50], [40, 10]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec.training.trainer.spine_counts", lambda outcome: counts)
        run.run_all()
    *_, trained, measured = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert trained["step"] == measured["step"] == 8 and measured["off_spine"] == 0.5
    assert measured["held_out_acceptance_length"] >= 1 and measured["held_out_round_length"] >= 1
    assert DFlashConfig.from_file(tmp_path / "out" / "config.json").off_spine == 0.5
    assert trainer(target, data, tmp_path / "out", {"train.held_out": 0.25, "train.log_every": 8}).step == 8


def test_a_drafter_that_is_never_right_off_the_spine_can_be_loaded(target, data, tmp_path):
    run = trainer(target, data, tmp_path / "out", {"train.held_out": 0.25})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec.training.trainer.spine_counts", lambda outcome: torch.tensor([[10000, 5000], [20000, 1]]))
        run.run_all()
    assert DFlashConfig.from_file(tmp_path / "out" / "config.json").off_spine == 0.001


def test_too_few_documents_to_hold_out(target, data, tmp_path):
    run = trainer(target, data, tmp_path / "out")
    assert run.held_out.documents == 0
    run.run_all()
    assert DFlashConfig.from_file(tmp_path / "out" / "config.json").off_spine is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_is_a_published_drafter(dtype, target, data, tmp_path):
    changes = {"output.dtype": dtype, "drafter.sliding_window": 6, "drafter.causal": True}
    run = trainer(target, data, tmp_path / "out", changes)
    run.run_all(stop_after=1)
    config = DFlashConfig.from_file(tmp_path / "out" / "config.json")
    assert (config.block_size, config.target_layer_ids, config.num_target_layers) == (5, (3, 0), 4)
    assert config.causal == (True, True) and config.model.windows == (6, 6)
    assert config.model.rope == run.target.config.rope and config.model.rms_norm_eps == run.target.config.rms_norm_eps
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(t.dtype) for t in stored.values()} == {f"torch.{dtype}"}
    published = json.loads((tmp_path / "out" / "config.json").read_text())
    assert sum(t.numel() for t in stored.values()) == parameter_count(published)
    engine = tiny.make_engine(target, tmp_path / "out", {"name": "chain"})
    assert engine.generate([[1, 2, 3]], max_new_tokens=9)[0].token_ids


def test_the_shipped_drafter_is_small(tmp_path):
    shutil.copy(shapes()["smollm2-135m"], tmp_path / "config.json")
    config = load_training_config("train-smollm2")
    published = published_config(config.drafter, tmp_path)
    assert 2 * parameter_count(published) <= 25e6
    model = fresh_drafter(DFlashConfig.from_dict(published, "x"), published["hidden_size"], 0)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(published)
    assert published["dflash_config"]["target_layer_ids"] == list(default_taps(30))


def test_default_taps():
    assert default_taps(36) == (1, 9, 17, 25, 33) and default_taps(32) == (1, 8, 15, 22, 29)  # as published
    assert default_taps(3) == (0, 1)


REFUSED = {
    "train.steps": (0, "steps = 0: must be at least 1"),
    "train.warmup": (1.0, "warmup = 1.0"),
    "train.soft_labels": (1.5, r"soft_labels = 1.5: must be in \[0, 1\]"),
    "train.optimiser": ("sgd", "'muon', 'adamw'"),
    "train.bogus": (1, "unknown key 'bogus'"),
    "trian.steps": (1, r"unknown table \[trian\]"),
    "loss.name": ("decai", "did you mean 'decay'"),
    "data.temperatures": ([], "must be a list of temperatures"),
    "data.prompt_temperatures": ([0.0], "the same one"),
    "data.documents": (25, "multiple of shard_documents = 24"),
    "drafter.block_size": (41, "block_size = 41 does not fit into .* sequence_length = 40"),
    "drafter.target_layer_ids": ([1, 4], "the target has layers 0..3"),
    "drafter.mask_token_id": (53, "the target's ids are 0..52"),
    "train.sequence_length": (4, "does not fit"),
    "train.seed": (2**23, "seed = 8388608: must be in 0..8388607"),
    "train.sequences": (50, "one step takes 50"),
    "train.attention": ("flex", "no backward on 'cpu'"),
    "evaluate.prompts": (["nowhere.jsonl"], "nowhere.jsonl does not exist"),
    "evaluate.budgets": ([0], "must be at least 1"),
    "evaluate.trees": (["spine_frist"], "did you mean 'spine_first'"),
    "evaluate.samplers": (["gumbel", "rejektion"], "did you mean 'rejection'"),
    "evaluate.temperatures": ([0.0, -1.0], r"temperatures = \[0.0, -1.0\]: must be a list of temperatures"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_refused(key, target, data, tmp_path, capsys):
    value, message = REFUSED[key]
    config = tmp_path / "train.toml"
    lines = []
    for name, table in tables(target, data, tmp_path / "out").items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    config.write_text("\n".join(lines))
    assert main(["train", "--config", str(config), "--only", "train", "--set", f"{key}={json.dumps(value)}"]) == 2
    error = capsys.readouterr().err
    assert pytest.importorskip("re").search(message, error), error
    assert not (tmp_path / "out").exists()


def test_output_folders_of_others_are_refused(target, data, tmp_path):
    trainer(target, data, tmp_path / "out").run_all(stop_after=1)
    with pytest.raises(ValueError, match=r"another run \(train.learning_rate was 0.001, is 0.1\)"):
        trainer(target, data, tmp_path / "out", {"train.learning_rate": 0.1})
    with pytest.raises(ValueError, match=r"another run .*dtype"):
        trainer(target, data, tmp_path / "out", {"output.dtype": "bfloat16"})
    trainer(target, data, tmp_path / "out", {"train.chunk_blocks": 1, "train.log_every": 3})  # may differ
    config = tmp_path / "train.toml"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    lines = []
    for name, table in tables(target, data, tmp_path / "taken").items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    config.write_text("\n".join(lines))
    assert main(["train", "--config", str(config)]) == 2
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["thesis.txt"]


def test_a_damaged_checkpoint_is_told(target, data, tmp_path):
    trainer(target, data, tmp_path / "out").run_all(stop_after=1)
    (tmp_path / "out" / "checkpoint.pt").write_text("garbage")
    with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read"):
        trainer(target, data, tmp_path / "out")


def test_an_end_during_the_first_save_locks_nothing(target, data, tmp_path, monkeypatch):
    def killed(*rest):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("spec.training.trainer.write_folder", killed)
        trainer(target, data, tmp_path / "out").run_all(stop_after=1)
    again = trainer(target, data, tmp_path / "out")
    again.run_all(stop_after=2)
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("taken", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_a_mask_token_that_texts_use_is_refused(taken, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.TARGET | {taken: tiny.MASK}))
    assert ModelConfig.from_folder(tmp_path)
    config = load_training_config(tables(tmp_path, tmp_path, tmp_path))
    with pytest.raises(ValueError, match="take an id that texts do not use"):
        published_config(config.drafter, tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run(target, data, tmp_path):
    run = trainer(target, data, tmp_path / "out")
    with torch.no_grad():
        run.drafter.fc.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="the loss at step 8 is nan: try a smaller learning_rate"):
        run.run_all()


def test_two_processes_step_by_their_mean_gradient(target, data, tmp_path):
    """One step under torchrun against the same step by hand."""
    changes = {"train.steps": 1, "train.sequences": 1}
    config = tmp_path / "train.toml"
    lines = []
    for name, table in tables(target, data, tmp_path / "out").items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    config.write_text("\n".join(lines))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "spec.cli"]
    command += ["train", "--config", str(config), "--only", "train"]
    command += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    ranks = [trainer(target, data, tmp_path / "hand", changes, rank=rank, world=2) for rank in range(2)]
    for run in ranks:
        batch = run.batches[0]
        run.outcome(batch, run.blocks(0, batch)).loss.backward()
    first, second = (list(run.drafter.parameters()) for run in ranks)
    assert not torch.equal(first[0].grad, second[0].grad)
    for a, b in zip(first, second, strict=True):
        a.grad = (a.grad + b.grad) / 2
    torch.nn.utils.clip_grad_norm_(first, 1.0)
    for optimiser in ranks[0].optimisers:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(ranks[0].train_config, 0)
        optimiser.step()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in ranks[0].drafter.named_parameters():
        torch.testing.assert_close(stored[name], parameter.detach(), rtol=1e-3, atol=1e-5)
