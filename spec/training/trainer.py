"""The training loop: target's features, blocks, loss, optimiser step, checkpoints that resume exactly.

Everything drawn at a step follows from the seed, the step and the process alone, so a checkpoint is weights, optimiser
state and a step number. Weights and optimiser are fp32; the arithmetic is bf16 unless the target is fp32. Several
processes (torchrun) share the work by data parallelism: drafters are small, so sharding their weights would gain
nothing, and neither would overlapping the one sum of their gradients with anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pickle
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelkit.compile import compile_function
from modelkit.model import Transformer

from ..draft.dflash_config import DFlashConfig
from ..draft.dflash_model import DFlashModel
from .ahead import made_ahead
from .attention import attention_of
from .blocks import Blocks, documents, draft_hidden, draw_anchors, make_blocks, next_anchors, teacher_rows
from .config import OptimiserConfig, TrainingConfig
from .features import Features, target_features
from .folder import write_folder
from .loss import (
    LOSSES,
    Head,
    Loss,
    Outcome,
    acceptance,
    block_loss,
    lengths,
    make_chunk_loss,
    spine_counts,
    whole_lengths,
)
from .optimiser import learning_rate, make_optimisers
from .packing import Batch, Batches, Corpus

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
MEASURED = 256  # sequences of held-out documents
ROUNDS = 3  # from evenly drawn anchors to those of serving
AHEAD = 3  # steps whose batches are made before they are used
SPREAD = 0.02  # of fresh matrices, as Qwen3's own
# What may differ between a run and its continuation: no result depends on it but by rounding.
FREE = ("checkpoint_every", "log_every", "chunk_blocks", "attention", "compile")


class DraftLoss(nn.Module):
    """Drafter and loss.

    Args:
        drafter: its parameters are the only ones.
        target: its embedding and head are read, frozen.
        loss: the strategy.
        config: how to run it.
        compiled: compile the drafter and the loss.
    """

    def __init__(
        self, drafter: DFlashModel, target: Transformer, loss: Loss, config: OptimiserConfig, compiled: bool
    ) -> None:
        super().__init__()
        published = drafter.config
        self.drafter, self.loss, self.chunk_blocks, self.balance = drafter, loss, config.chunk_blocks, config.balance
        # Not parameters of this module: a list hides them from it.
        self._embedding = [target.embed_tokens.weight.detach()]
        head = Head(
            weight=target.lm_head.weight.detach(), multiplier=published.output_multiplier,
            cap=published.final_logit_softcapping,
        )  # fmt: skip
        self.chunk_loss = compile_function(make_chunk_loss(loss, head, config.soft_labels), compiled)
        self.attention = attention_of(config.attention, target.device)
        self.hidden = compile_function(self._hidden, compiled)

    def _hidden(self, batch: Batch, features: Features, blocks: Blocks) -> tuple[Tensor, Tensor | None]:
        """Of the drafter and, with soft labels, of the target, [N, L, H]; the anchors' own rows predict nothing."""
        embedded = F.embedding(blocks.token, self._embedding[0]) * self.drafter.config.input_embedding_scale
        hidden = draft_hidden(self.drafter, features.taps, embedded, batch, blocks, self.attention)
        teacher = None if features.hidden is None else teacher_rows(features.hidden, blocks)
        return hidden[:, :, 1:].flatten(0, 1), teacher

    def forward(self, batch: Batch, features: Features, blocks: Blocks) -> Outcome:
        """Loss of the batch's blocks; arguments as in `draft_hidden`."""
        hidden, teacher = self.hidden(batch, features, blocks)
        return block_loss(
            hidden, blocks.label[:, :, 1:].flatten(0, 1), blocks.real[:, :, 1:].flatten(0, 1), documents(batch, blocks),
            loss=self.loss, chunk_loss=self.chunk_loss, chunk_blocks=self.chunk_blocks, balance=self.balance,
            teacher=teacher,
        )  # fmt: skip


def fresh_drafter(published: DFlashConfig, hidden: int, seed: int) -> DFlashModel:
    """A drafter before training: matrices of normal numbers, norms 1; made on the CPU, the same for every device."""
    model = DFlashModel(published, hidden)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, SPREAD, generator=generator)
    return model


class Trainer:
    """One process of a run.

    Args:
        config: the run.
        target: frozen; not changed.
        published: the drafter's config.json.
        corpus: training data.
        run: what identifies the run; a checkpoint of another one is refused.
        rank, world: of the process.

    Raises:
        ValueError: no usable document, or the output folder is not this run's.
    """

    def __init__(
        self, config: TrainingConfig, target: Transformer, published: dict[str, Any], corpus: Corpus, *,
        run: dict[str, Any], rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self.config, self.train_config, self.target, self.published = config, config.train, target, published
        self.rank, self.world = rank, world
        train = config.train
        self.run = run | {
            "drafter": published,
            "loss": {"name": config.loss.name} | dataclasses.asdict(config.loss.config),
            "train": {k: v for k, v in dataclasses.asdict(train).items() if k not in FREE},
            "world": world,
            "dtype": [str(target.dtype), config.output.dtype],
            "data": {"documents": corpus.documents, "tokens": len(corpus.token)},
        }
        self.folder = Path(config.output.folder).expanduser()
        trained_on, self.held_out = corpus.split(train.held_out)
        self.batches = Batches(
            trained_on, length=train.sequence_length, sequences=train.sequences, seed=train.seed, rank=rank, world=world
        )
        drafter_config = DFlashConfig.from_dict(published, "[drafter]")
        self.taps, self.block = drafter_config.target_layer_ids, drafter_config.block_size
        self.mask_token = drafter_config.mask_token_id
        self.drafter = fresh_drafter(drafter_config, target.config.hidden_size, train.seed).to(target.device)
        self.drafter.prepare()
        compiled = target.device.type == "cuda" if train.compile is None else train.compile
        loss = LOSSES.get(config.loss.name)(config.loss.config)  # type: ignore[call-arg]
        self.model = DraftLoss(self.drafter, target, loss, train, compiled)
        self.features = compile_function(
            partial(target_features, target, self.taps, attention=self.model.attention, hidden=train.soft_labels > 0),
            compiled,
        )
        self.optimisers = make_optimisers(self.drafter, train, target.device)
        self.step = 0
        self._resume()
        self._inputs = made_ahead(self._input, itertools.count(self.step), AHEAD)

    def _resume(self) -> None:
        file = self.folder / CHECKPOINT
        if not file.is_file():
            self._cut_log()
            return
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
            raise ValueError(f"{file} cannot be read ({type(error).__name__}): delete it to begin again") from error
        check_run(saved["run"], self.run, self.folder)
        self.drafter.load_state_dict(saved["model"])
        for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step = saved["step"]
        self._cut_log()

    def _cut_log(self) -> None:
        """Drop lines of steps that come again, and what is no line: the process may have died while it wrote one."""
        log = self.folder / LOG
        if self.rank or not log.is_file():
            return
        kept = []
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= self.step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        partial = log.with_name(LOG + ".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, log)

    def save(self) -> None:
        """Write the checkpoint, and the drafter as it is now in the published format; the first process does."""
        if self.rank:
            return
        saved = {
            "run": self.run, "step": self.step, "model": self.drafter.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / (CHECKPOINT + ".partial")
        torch.save(saved, partial)
        os.replace(partial, self.folder / CHECKPOINT)
        # Behind the checkpoint: a folder with a drafter and no checkpoint is taken for somebody else's.
        write_folder(self.folder, self.published, self.drafter, self.config.output.dtype)

    def blocks(self, step: int, batch: Batch) -> Blocks:
        """The step's blocks at anchors of its own."""
        generator = torch.Generator().manual_seed((self.train_config.seed << 40) + step * self.world + self.rank)
        anchor, drawn = draw_anchors(batch, self.train_config.anchors, generator)
        return make_blocks(batch, anchor, drawn, block=self.block, mask_token=self.mask_token)

    def _input(self, step: int) -> tuple[Batch, Blocks]:
        batch = self.batches[step]
        blocks = self.blocks(step, batch)
        return (batch.pinned(), blocks.pinned()) if self.target.device.type == "cuda" else (batch, blocks)

    def outcome(self, batch: Batch, blocks: Blocks, features: Features | None = None) -> Outcome:
        """What the drafter makes of a batch's blocks, on whatever device they are; ready for backward.

        `features`: of the batch, if they are known already.
        """
        batch, blocks = batch.to(self.target.device), blocks.to(self.target.device)
        features = features or self._features(batch)
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.dtype != torch.float32):
            outcome: Outcome = self.model(batch, features, blocks)
        return outcome

    @torch.no_grad()
    def _features(self, batch: Batch) -> Features:
        features: Features = self.features(batch)
        return features

    @torch.no_grad()
    def following(self, batch: Batch, blocks: Blocks, outcome: Outcome) -> Blocks:
        """The blocks of the rounds after these; everything on the device."""
        anchor, drawn = next_anchors(batch, blocks, lengths(outcome.right, outcome.real))
        return make_blocks(batch, anchor, drawn, block=self.block, mask_token=self.mask_token)

    def run_step(self) -> dict[str, Tensor]:
        """One optimiser step.

        Returns:
            loss, gradient norm, accuracy of each depth and acceptance length, on the device.
        """
        train = self.train_config
        outcome = self.outcome(*next(self._inputs))
        self.drafter.zero_grad(set_to_none=True)
        torch.autograd.backward(outcome.loss)
        self._average()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), train.clip)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(train, self.step)
            optimiser.step()
        self.step += 1
        accuracy, length = acceptance(outcome)
        return {"loss": outcome.loss.detach(), "norm": norm, "accuracy": accuracy, "acceptance_length": length}

    def _average(self) -> None:
        """Give every process the mean of all gradients."""
        if self.world == 1:
            return
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        torch.distributed.all_reduce(flat)
        parts = torch.split(flat / self.world, [g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def run_all(self, stop_after: int | None = None) -> None:
        """Train from the step at hand to the last one, or to `stop_after`; ends with a checkpoint.

        Raises:
            RuntimeError: the loss is not finite.
        """
        from tqdm import tqdm

        train = self.train_config
        end = min(train.steps, stop_after or train.steps)
        if self.step >= end:
            return
        hidden = True if self.rank else None
        recent: list[dict[str, Tensor]] = []
        since = time.perf_counter()
        with tqdm(total=train.steps, initial=self.step, unit="step", disable=hidden) as bar:
            while self.step < end:
                recent.append(self.run_step())
                bar.update(1)
                if self.step % train.log_every == 0 or self.step == end:
                    now = time.perf_counter()
                    bar.set_postfix_str(self._log(recent, now - since))
                    recent, since = [], now
                if self.step == train.steps:
                    self._measure()
                if self.step % train.checkpoint_every == 0 or self.step == end:
                    self.save()

    def _measure(self) -> None:
        """Figures of the documents that were not trained on: into the log, and the discount into the drafter's file.

        At most `MEASURED` sequences of them; a held-out part that does not fill one step is not measured.
        """
        train, device = self.train_config, self.target.device
        try:
            batches = Batches(
                self.held_out, length=train.sequence_length, sequences=train.sequences, seed=train.seed
            )  # fmt: skip
        except ValueError:  # too few documents
            return
        counts = torch.zeros(2, 2, dtype=torch.int64, device=device)
        even, followed = torch.zeros(2, 2, device=device)
        for step in range(min(batches.steps_of_an_epoch, max(MEASURED // train.sequences, 1))):
            batch = batches[step]
            blocks = self.blocks(step, batch).to(device)
            batch = batch.to(device)
            features = self._features(batch)
            outcome = self.outcome(batch, blocks, features)
            counts += spine_counts(outcome)
            even += whole_lengths(outcome)
            for _ in range(ROUNDS):
                blocks = self.following(batch, blocks, outcome)
                outcome = self.outcome(batch, blocks, features)
            followed += whole_lengths(outcome)
        (on, on_right), (off, off_right) = counts.tolist()
        found: dict[str, Any] = {}
        for name, sums in (("held_out_acceptance_length", even), ("held_out_round_length", followed)):
            length, blocks = sums.tolist()
            if blocks:  # else the answers are all shorter than a block
                found[name] = length / blocks
        if on_right and off_right:
            found["off_spine"] = min(max(round(off_right / off / (on_right / on), 3), 0.001), 1.0)
            self.published = self.published | {"flashtree": {"off_spine": found["off_spine"]}}
        if not self.rank:
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps({"step": self.step} | found) + "\n")

    def _log(self, recent: list[dict[str, Tensor]], seconds: float) -> str:
        mean: dict[str, Any] = {
            name: torch.stack([r[name].float() for r in recent]).mean(0).tolist() for name in recent[0]
        }
        if not math.isfinite(mean["loss"]):
            raise RuntimeError(f"the loss at step {self.step} is {mean['loss']}: try a smaller learning_rate")
        if not self.rank:
            self.folder.mkdir(parents=True, exist_ok=True)
            line = {
                "step": self.step, "epoch": self.batches.place(self.step - 1)[0],
                "learning_rate": learning_rate(self.train_config, self.step - 1),
                "steps_per_second": len(recent) / seconds,
            }  # fmt: skip
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(line | mean) + "\n")
        accuracy = mean["accuracy"]
        some = " ".join(f"{accuracy[i]:.2f}" for i in sorted({0, len(accuracy) // 2, len(accuracy) - 1}))
        return f"loss {mean['loss']:.3f}, right {some}, acceptance {mean['acceptance_length']:.2f}"


def check_output(folder: Path) -> None:
    """Refuse an output folder that holds anything but a run's checkpoint.

    Raises:
        ValueError: it does.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output folder {folder} is a file")
    if folder.is_dir() and not (folder / CHECKPOINT).is_file():
        strange = [p.name for p in folder.iterdir() if p.name != LOG and not p.name.endswith(".partial")]
        if strange:
            raise ValueError(f"output folder {folder} holds {strange[0]} but no checkpoint; give another folder")


def check_run(saved: dict[str, Any], run: dict[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        ValueError: it differs; the message says where.
    """

    def flat(value: Any, name: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {name: json.loads(json.dumps(value))}
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}" if name else key).items()}

    old, new = flat(saved), flat(run)
    if changed := sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)):
        shown = ", ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in changed[:3])
        raise ValueError(f"output folder {folder} holds a checkpoint of another run ({shown}); give another folder")
