"""`flashtree train`: data that the target writes, the drafter's training, its evaluation; each can be run by itself.

All that can be refused is refused before anything takes long. Under torchrun every process runs this; they share the
writing, the training and the runs of the evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.process import local_device, rank, started

from .cli import add_config_arguments, check_writable

if TYPE_CHECKING:
    from .training.config import TrainingConfig
    from .training.store import Store

PARTS = ("data", "train", "evaluate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flashtree train`."""
    add_config_arguments(parser, "train-smollm2")
    parser.add_argument("--only", choices=PARTS, help="one part: write data, train on what is there, or evaluate")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop at step N; run again to go on")
    parser.add_argument("--json", metavar="FILE", help="write the evaluation to this file")


def run(arguments: argparse.Namespace) -> int:
    """`flashtree train`."""
    from modelkit.loading import check_device

    from .config import parse_override
    from .sources import refuse_shape, target_source
    from .training.config import load_training_config
    from .training.folder import published_config
    from .training.store import Store, target_identity
    from .training.trainer import check_output

    config = load_training_config(arguments.config, dict(parse_override(text) for text in arguments.overrides))
    if arguments.stop_after is not None and arguments.stop_after < 1:
        raise ValueError(f"--stop-after {arguments.stop_after}: must be at least 1")
    parts = PARTS if arguments.only is None else (arguments.only,)
    refuse_shape("target", config.target.path)
    folder = target_source(config.target.path, _say)
    published = published_config(config.drafter, folder)
    output = Path(config.output.folder).expanduser()
    if "train" in parts:
        check_output(output)
        check_device(local_device(config.target.device))  # each trains on one of its own; other parts may share one
    _check_evaluation(config, output, arguments)
    store = Store(Path(config.data.folder).expanduser(), target_identity(folder))
    if "data" in parts:
        _write_data(config, store)
    if "train" in parts and not _train(config, published, store, arguments.stop_after):
        return 0
    if "evaluate" in parts:
        _evaluate(_on_own_device(config), output, arguments)
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # at once, as other processes write there too
    sys.stderr.flush()


def _check_evaluation(config: TrainingConfig, output: Path, arguments: argparse.Namespace) -> None:
    from .prompts import pick_prompts
    from .training.evaluate import runs

    runs(output, config.target, config.compile, config.evaluate)
    if config.evaluate.prompts:
        pick_prompts(config.evaluate.prompts, config.evaluate.limit)
        check_writable(arguments.json)
    elif arguments.json or arguments.only == "evaluate":
        raise ValueError("nothing to evaluate on: give [evaluate] prompts, a list of prompt files")


def _write_data(config: TrainingConfig, store: Store) -> None:
    from .training.generate import missing_shards, write_data

    if missing_shards(config.data, store):
        write_data(_on_own_device(config), store, _say)
    if not rank():
        _say(f"data: {store.documents} documents, {store.tokens} answer tokens in {store.folder}")


def _on_own_device(config: TrainingConfig) -> TrainingConfig:
    """With the device of this process; where there are more processes than devices, some share one."""
    from modelkit.loading import use_device

    device = local_device(config.target.device, share=True)
    use_device(device)
    return dataclasses.replace(config, target=dataclasses.replace(config.target, device=device))


def _train(config: TrainingConfig, published: dict[str, Any], store: Store, stop_after: int | None) -> bool:
    """Whether the run is complete now."""
    import torch

    from modelkit.loading import load_model, use_device

    from .sources import target_source
    from .training.folder import parameter_count
    from .training.trainer import Trainer

    corpus = store.load()
    device = local_device(config.target.device)
    use_device(device)
    if started() > 1:
        torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        source = target_source(config.target.path)
        target = load_model(source, dtype=config.target.dtype, device=device, kernels="reference")
        run = {"target": store.manifest["target"]}
        trainer = Trainer(config, target, published, corpus, run=run, rank=rank(), world=started())
        if not rank():
            count = parameter_count(published)
            _say(f"drafter: {count} parameters, {2 * count / 1e6:.1f} MB in bf16; step {trainer.step} of "
                 f"{config.train.steps}")  # fmt: skip
        trainer.run_all(stop_after)
        return trainer.step >= config.train.steps
    finally:
        if started() > 1:
            torch.distributed.destroy_process_group()


def _evaluate(config: TrainingConfig, output: Path, arguments: argparse.Namespace) -> None:
    from .training.evaluate import evaluate, report, write_json

    if not config.evaluate.prompts:
        if not rank():
            _say(f"drafter: {output} (not evaluated: no [evaluate] prompts)")
        return
    records = evaluate(output, config.target, config.compile, config.evaluate, _say)
    if records is None:
        return
    print(f"{output}, {config.evaluate.max_new_tokens} new tokens")
    print(report(records))
    if arguments.json:
        write_json(arguments.json, records)
