"""Which device each process of a run takes, and that one that is not there is refused before anything is written."""

import pytest
import torch

from spec.cli import main
from spec.train import _on_own_device
from spec.training.config import load_training_config


@pytest.fixture
def devices(monkeypatch):
    """Pretends to (processes, our number on the machine, GPUs); the list holds what was made current."""
    current = []

    def pretend(processes, number, gpus):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return pretend


@pytest.mark.parametrize(
    ("asked", "processes", "number", "device", "index"),
    [("cuda", 1, 0, "cuda", 0), ("cuda:1", 1, 0, "cuda:1", 1), ("cuda", 8, 5, "cuda:1", 1), ("cpu", 8, 5, "cpu", None)],
)
def test_writers_and_evaluators_share_devices(asked, processes, number, device, index, devices):
    current = devices(processes, number, 2)
    config = load_training_config("train-smollm2", {"target.device": asked})
    assert _on_own_device(config).target.device == device
    assert current == ([] if index is None else [index])


@pytest.mark.parametrize(
    ("processes", "number", "gpus", "part", "missing"),
    [
        (1, 0, 0, "data", "'cuda'"), (1, 0, 0, "train", "'cuda'"), (1, 0, 0, "evaluate", "'cuda'"),
        (3, 2, 2, "train", "'cuda:2'"),
    ],
)  # fmt: skip
def test_a_device_that_is_not_there(processes, number, gpus, part, missing, devices, tiny_targets, tmp_path, capsys):
    devices(processes, number, gpus)
    (tmp_path / "prompts.jsonl").write_text('{"token_ids": [1, 2]}\n')
    sets = [
        f"target.path={tiny_targets['qwen3']}", "drafter.target_layer_ids=[0]", f"data.folder={tmp_path}/data",
        f"output.folder={tmp_path}/drafter", f'evaluate.prompts=["{tmp_path}/prompts.jsonl"]',
    ]  # fmt: skip
    arguments = ["train", "--only", part, *(word for change in sets for word in ("--set", change))]
    assert main(arguments) != 0
    assert capsys.readouterr().err == f"flashtree: error: device {missing} is not there: {gpus} CUDA device(s) found\n"
    assert not (tmp_path / "data").exists()
