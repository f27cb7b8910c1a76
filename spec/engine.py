"""The engine: loads a target with its strategies, and runs requests in rounds. `step` is the map of a round.

    spec/draft: propose -> spec/tree: build -> modelkit/model: forward -> sampling: accept -> state and cache: commit

Everything a round decides is decided on the device; the host launches rounds and reads their tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelkit.compile import Step, compile_step
from modelkit.demo import DEMO_NAME, prepare_demo_model
from modelkit.loading import load_model
from modelkit.registry import unknown_name
from modelkit.rows import Rows, chain, flatten
from parallel import LAYOUTS
from sampling import SAMPLERS, NodeContext, SlotParams

from .config import GenerateConfig, load_config
from .draft import DRAFTERS, unperturbed
from .readback import Readback
from .requests import Completion, Piece, Request, Settings, prepare
from .running import Running
from .state import RoundState
from .text import Prompt, load_tokenizer
from .tree import TREES
from .types import Tree

DEFAULT_MAX_MODEL_LEN = 8192


class Engine:
    """A target, a drafter, a tree policy and a sampler, with caches for a fixed number of slots.

    Build it with `Engine.from_config`. One thread at a time may use it.
    """

    def __init__(self, config: GenerateConfig, progress: Any = None) -> None:
        self.config = config
        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        folder = target_folder(config.target.path, progress)
        layout = LAYOUTS.get(config.parallel.name)(config.parallel.config)  # type: ignore[call-arg]
        self.target = load_model(
            folder, dtype=config.target.dtype, device=config.target.device, layout=layout,
            kernels=config.compile.kernels,
        )  # fmt: skip
        self.tokenizer = load_tokenizer(folder)
        model_limit = self.target.config.max_position_embeddings
        self.capacity = config.engine.max_model_len or min(model_limit, DEFAULT_MAX_MODEL_LEN)
        if self.capacity > model_limit:
            raise ValueError(f"max_model_len = {self.capacity}: the target was made for {model_limit} positions")
        slots = config.engine.slots
        self.sampler = SAMPLERS.get(config.sampling.name)(config.sampling.config)  # type: ignore[call-arg]
        self.tree = TREES.get(config.tree.name)(config.tree.config)  # type: ignore[call-arg]
        self.drafter = DRAFTERS.get(config.draft.name)(  # type: ignore[call-arg]
            config.draft.config,
            target=self.target,
            slots=slots,
            capacity=self.capacity,
            candidates=self.tree.candidates,
        )
        self.nodes = self.tree.nodes(self.drafter.depth)
        scratch = max(slots * self.nodes, config.engine.prefill_chunk, self.drafter.rows)
        cache = self.target.new_cache(
            slots=slots, capacity=self.capacity, scratch=scratch, page_size=config.engine.page_size
        )
        sampling = SlotParams(
            slots=slots, vocab_size=self.target.config.vocab_size, device=self.target.device,
            features=self.sampler.features,
        )  # fmt: skip
        self.state = RoundState(
            cache=cache, sampling=sampling, capacity=self.capacity, depth=self.drafter.depth,
            features=self.drafter.features, dtype=self.target.dtype,
        )  # fmt: skip
        self._mode = config.compile.resolved_mode(config.target.device)
        self._greedy = self.sampler.always_argmax(self.sampler.params())
        self._steps: dict[tuple[int, bool, bool], Step] = {}
        self._readback = Readback(self.state)
        self._busy = False

    @classmethod
    def from_config(
        cls, source: str | Path | GenerateConfig | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> Engine:
        """Build an engine.

        Args:
            source: a shipped config's name, a TOML path, tables, or a `GenerateConfig`.
            overrides: dotted keys to values, for example {"tree.budget": 63}.

        Raises:
            ValueError: the config, the target or the drafter is not usable; the message says what is wrong.
        """
        return cls(load_config(source, overrides))

    @property
    def verify_tokens(self) -> int:
        """Rows a slot's verification takes: the tree's budget and the root."""
        return self.nodes

    @torch.no_grad()
    def step(self, rows: int, bound: int, plain: bool = False, greedy: bool | None = None) -> None:
        """One round of all active slots. No host decision: the same operations whatever the data.

        Args:
            rows: R, a host constant: (active slots) * N.
            bound: host-known upper bound of every committed length.
            plain: one row a slot and no drafter.
            greedy: no active request wants more than the argmax of the logits; None: as the config's defaults are.
        """
        state, drafter = self.state, self.drafter
        greedy = self._greedy if greedy is None else greedy
        if plain:
            tree = root_only(state.anchor)
        else:
            proposal = drafter.propose(state, bound, unperturbed if greedy else self._perturb)
            tree = self.tree.build(proposal, state.anchor)
        flat = self._flat_rows(tree, rows, bound)
        output = self.target(flat, state.cache, () if plain else drafter.taps)
        logits = self.target.head(output.hidden)
        accepted = self.sampler.accept(logits, node_context(flat, state, greedy))
        count = state.emit(accepted)
        state.remember(output.taps, accepted.path, count)
        self.target.backend.commit(state.cache, accepted.path, count)

    def _perturb(self, logits: Tensor, depth: int = 0) -> Tensor:
        """The sampler's change of a drafter's logits [S, D, V] for the tokens from `depth` on behind the anchors."""
        at = torch.arange(1, logits.shape[1] + 1, device=logits.device) + depth
        return self.sampler.perturb(logits, self.state.length[:, None] + at, self.state.sampling)

    def _flat_rows(self, tree: Tree, rows: int, bound: int) -> Rows:
        state = self.state
        count = torch.where(state.active, tree.token.shape[1], 0)
        return flatten(
            token=tree.token, parent=tree.parent, valid=tree.valid & state.active[:, None], visible=tree.visible,
            position=state.length[:, None] + tree.depth, count=count, rows=rows, bound=bound,
        )  # fmt: skip

    @torch.no_grad()
    def prefill(self, slot: int, request: Request, plain: bool = False) -> None:
        """Admit a request: run its prompt through the target in chunks and emit the first token."""
        state, slots = self.state, self.state.slots
        prompt = torch.tensor(request.prompt_ids, device=self.target.device)
        limit = min(len(request.prompt_ids) + request.max_new_tokens, self.capacity)
        state.admit(slot, prompt, limit, request.stop_ids, request.sampling)
        self.drafter.reset(slot)
        one = torch.zeros(slots, dtype=torch.int64, device=prompt.device)
        one[slot] = 1
        for start in range(0, len(prompt), self.config.engine.prefill_chunk):
            chunk = prompt[start : start + self.config.engine.prefill_chunk]
            size = len(chunk)
            rows = chain(
                token=chunk.expand(slots, size), start=one * start, count=one * size, rows=size, bound=start
            )  # fmt: skip
            output = self.target(rows, state.cache, () if plain else self.drafter.taps)
            every = rows.rectangle()
            state.cache.commit(every, one * size)
            if not plain:
                features = None if output.taps is None else output.taps[every]
                self.drafter.ingest(features, one * size)
        logits = self.target.head(output.hidden[-1:])
        greedy = self.sampler.always_argmax(request.sampling)
        state.emit(self.sampler.accept(logits, last_row(slot, prompt, state, greedy)))

    def compiled_step(self, rows: int, plain: bool = False, greedy: bool | None = None) -> Step:
        """The round for a row bucket as one callable without arguments; compiled on first use unless the mode is eager.

        It reads whatever context there is: its bound is the capacity. Arguments as in `step`.
        """
        greedy = self._greedy if greedy is None else greedy
        key = (rows, plain, greedy)
        if key not in self._steps:
            step = functools.partial(self.step, rows, self.capacity, plain, greedy)
            self._steps[key] = compile_step(step, self._mode)
        return self._steps[key]

    def _launch(self, running: dict[int, Running], plain: bool) -> None:
        rows = len(running) * (1 if plain else self.nodes)
        greedy = all(self.sampler.always_argmax(live.request.sampling) for live in running.values())
        if self._mode == "none":
            behind = len(self._readback) * (self.state.depth + 1)
            self.step(rows, min(max(r.committed for r in running.values()) + behind, self.capacity), plain, greedy)
        else:
            self.compiled_step(rows, plain, greedy)()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        plain: bool = False,
        progress: bool = False,
        **changes: Any,
    ) -> list[Completion]:
        """Complete prompts, as many at a time as the engine has slots.

        Args:
            prompts: a list of texts, of token-id lists, or of chat-message lists; one text alone is a list of one.
            settings: see `Settings`; a list has one for each prompt.
            plain: decode without speculation.
            progress: show a progress bar on standard error.
            **changes: fields of `Settings` by name: max_new_tokens=128, stop=["."], ...

        Returns:
            One `Completion` a prompt, in order.

        Raises:
            ValueError: a prompt or a setting is not usable. Nothing has run then.
        """
        done = dict(self.completions(prompts, settings, plain=plain, progress=progress, **changes))
        return [done[index] for index in range(len(done))]

    def generate_plain(
        self, prompts: str | Sequence[Prompt], settings: Settings | Sequence[Settings] | None = None, **changes: Any
    ) -> list[Completion]:
        """`generate` without speculation: the baseline and the oracle."""
        return self.generate(prompts, settings, plain=True, **changes)

    def completions(
        self,
        prompts: str | Sequence[Prompt],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        plain: bool = False,
        progress: bool = False,
        **changes: Any,
    ) -> Iterator[tuple[int, Completion]]:
        """`generate`, but each completion as soon as it is finished, with its prompt's index."""
        requests = self._prepare(prompts, settings, changes)
        return self._finished(requests, plain, progress)

    def stream(
        self, prompt: Prompt, settings: Settings | None = None, *, plain: bool = False, **changes: Any
    ) -> Iterator[Piece]:
        """Complete one prompt, piece by piece; the last piece carries the `Completion`. Arguments as in `generate`.

        Text is released only when later tokens cannot change it; nothing after a stop is ever shown. Closing the
        iterator early frees the engine.
        """
        return self._pieces(self._prepare([prompt], settings, changes), plain)

    def _prepare(
        self, prompts: str | Sequence[Prompt], settings: Settings | Sequence[Settings] | None, changes: dict[str, Any]
    ) -> list[Request]:
        if isinstance(settings, list | tuple):
            if isinstance(prompts, str) or len(prompts) != len(settings):
                raise ValueError(f"{len(settings)} settings: give as many as there are prompts")
            pairs = zip(prompts, settings, strict=True)
            return [request for prompt, one in pairs for request in self._prepare([prompt], one, changes)]
        if settings is not None and not isinstance(settings, Settings):
            raise ValueError(f"settings must be a Settings, got {settings!r}; give single ones by name")
        known = [field.name for field in dataclasses.fields(Settings)]
        for name in changes:
            if name not in known:
                raise unknown_name("setting", name, known)
        resolved = dataclasses.replace(settings or Settings(), **changes)
        defaults = self.config.generate
        ignore_eos = defaults.ignore_eos if resolved.ignore_eos is None else resolved.ignore_eos
        return prepare(
            prompts, resolved, tokenizer=self.tokenizer, vocab_size=self.target.config.vocab_size,
            capacity=self.capacity, max_new_tokens=defaults.max_new_tokens,
            eos_ids=() if ignore_eos else self.target.config.eos_token_ids, max_stop_ids=self.state.max_stop_ids,
            sampling=functools.partial(self.sampler.params, **resolved.sampling),
        )  # fmt: skip

    def _finished(self, requests: list[Request], plain: bool, progress: bool) -> Iterator[tuple[int, Completion]]:
        with progress_bar(len(requests), progress) as bar, contextlib.closing(self._serve(requests, plain)) as served:
            for index, piece in served:
                if piece.completion is not None:
                    bar.update(1)
                    yield index, piece.completion

    def _pieces(self, requests: list[Request], plain: bool) -> Iterator[Piece]:
        with contextlib.closing(self._serve(requests, plain)) as served:
            for _, piece in served:
                yield piece

    def _serve(self, requests: Sequence[Request], plain: bool) -> Generator[tuple[int, Piece], None, None]:
        if self._busy:
            raise ValueError("the engine is still busy with a stream that was not finished; exhaust or close it first")
        self._busy = True
        self._readback.clear()
        waiting = deque(enumerate(requests))
        running: dict[int, Running] = {}
        try:
            while waiting or running:
                for slot in [s for s in range(self.state.slots) if s not in running][: len(waiting)]:
                    yield from self._collect(running, all_rounds=True)
                    index, request = waiting.popleft()
                    began = time.perf_counter()
                    self.prefill(slot, request, plain)
                    self._readback.push({slot: None})
                    tokens, reasons, _ = self._readback.pop()
                    running[slot] = Running.start(index, request, self, plain, began)
                    yield from self._take(running, slot, tokens, reasons, first=True)
                if running:
                    self._launch(running, plain)
                    self._readback.push({slot: live.index for slot, live in running.items()})
                    yield from self._collect(running, all_rounds=False)
        finally:
            self._readback.clear()
            for slot in range(self.state.slots):
                self.state.retire(slot)
            self._busy = False

    def _collect(self, running: dict[int, Running], all_rounds: bool) -> Iterator[tuple[int, Piece]]:
        """Take over finished rounds; on a GPU the last one launched stays in flight unless `all_rounds`."""
        while len(self._readback) > (0 if all_rounds else self._readback.lag):
            tokens, reasons, owners = self._readback.pop()
            for slot, index in owners.items():
                # A slot may have ended, or changed hands, while the round was in flight.
                if slot in running and running[slot].index == index:
                    yield from self._take(running, slot, tokens, reasons)

    def _take(
        self, running: dict[int, Running], slot: int, tokens: list[list[int]], reasons: list[int], first: bool = False
    ) -> Iterator[tuple[int, Piece]]:
        live = running[slot]
        piece = live.take(tokens[slot], reasons[slot], first)
        if piece.completion is not None:
            del running[slot]
            self.state.retire(slot)
            warn_if_nothing_accepted(piece.completion, self.config.draft.name)
        yield live.index, piece


def target_folder(path: str, progress: Any = None) -> Path:
    """The folder of a target: a path, or the demo model's name, which is prepared if need be."""
    folder = Path(path).expanduser()
    if not folder.is_dir() and path == DEMO_NAME:
        return prepare_demo_model(progress)
    if not folder.is_dir():
        raise ValueError(f"target {path!r} is neither a folder nor '{DEMO_NAME}' (models are not downloaded)")
    return folder


def root_only(anchor: Tensor) -> Tree:
    """Trees of the anchors alone: a plain step."""
    one = torch.ones_like(anchor)[:, None]
    return Tree(token=anchor[:, None], parent=-one, depth=one - 1, valid=one.bool(), visible=one.bool()[:, :, None])


def node_context(rows: Rows, state: RoundState, greedy: bool) -> NodeContext:
    """The rows as a sampling strategy sees them."""
    depth = rows.position - state.cache.length[rows.slot]
    return NodeContext(
        token=rows.token, parent=rows.parent, depth=depth, position=rows.position, slot=rows.slot, local=rows.local(),
        valid=rows.valid, ancestors=rows.ancestors, slots=state.slots, max_depth=state.depth, params=state.sampling,
        greedy=greedy,
    )  # fmt: skip


def last_row(slot: int, prompt: Tensor, state: RoundState, greedy: bool) -> NodeContext:
    """The prompt's last row as a tree of one root."""
    zero = torch.zeros(1, dtype=torch.int64, device=prompt.device)
    return NodeContext(
        token=prompt[-1:], parent=zero - 1, depth=zero, position=zero + len(prompt) - 1, slot=zero + slot, local=zero,
        valid=zero == 0, ancestors=torch.ones(1, 1, dtype=torch.int32, device=prompt.device), slots=state.slots,
        max_depth=state.depth, params=state.sampling, greedy=greedy,
    )  # fmt: skip


def warn_if_nothing_accepted(completion: Completion, drafter: str) -> None:
    """A drafter of which nothing is ever accepted is more likely miswired than merely bad."""
    stats = completion.stats
    if stats.num_spec_steps >= 20 and not stats.num_accepted_draft_tokens:
        warnings.warn(
            f"not one token of drafter '{drafter}' was accepted in {stats.num_spec_steps} rounds: the output is right, "
            "but nothing is gained; does the drafter fit this target?",
            stacklevel=3,
        )


def progress_bar(total: int, show: bool) -> contextlib.AbstractContextManager[Any]:
    """A tqdm bar over completions on standard error."""
    from tqdm import tqdm

    bar: contextlib.AbstractContextManager[Any] = tqdm(total=total, disable=None if show else True, unit="prompt")
    return bar
