"""The engine: loads a target with its strategies, and runs requests in rounds. `step` is the map of a round.

    spec/draft: propose -> spec/tree: build -> modelkit/model: forward -> sampling: accept -> state and cache: commit

Everything a round decides is decided on the device; the host launches rounds and reads their tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelkit.compile import Step, compile_step
from modelkit.loading import load_model, use_device
from parallel import LAYOUTS
from parallel.process import after_first, local_device, of_first, rank
from sampling import SAMPLERS, Acceptance, Draws, NodeContext, SlotParams
from sampling.base import with_fault

from .config import GenerateConfig, load_config
from .draft import DRAFTERS, unperturbed
from .draft.perturbed import perturbed
from .host import Host, round_in_two
from .owner import agreed
from .prefill import Prefill
from .readback import Readback
from .report import progress_bar
from .requests import Completion, Piece, Request, Settings, changed, prepare
from .serving import BUSY, serve
from .sources import refuse_shape, target_source
from .state import RoundState
from .strategies import check_strategies, takes_parts
from .text import Prompt, load_tokenizer
from .tree import TREES
from .types import Proposal, Tree, Verified
from .warm_up import greedy_kinds, size_for, warm_up

DEFAULT_MAX_MODEL_LEN = 8192
ROUND = "flashtree round"  # what a profile calls the launch of a round


class Engine:
    """A target, a drafter, a tree policy and a sampler, with caches for a fixed number of slots.

    Build it with `Engine.from_config`. One thread at a time may use it.

    Args:
        config: the run.
        progress: called with lines about what takes long.
        random_weights: a target or drafter may be a shape (a config.json alone) and gets random weights then; for
            timing, as its output means nothing.
    """

    def __init__(self, config: GenerateConfig, progress: Any = None, *, random_weights: bool = False) -> None:
        self.config = config
        if not random_weights:
            refuse_shape("target", config.target.path)
            refuse_shape("drafter", getattr(config.draft.config, "path", ""))
        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        device = local_device(config.target.device)
        use_device(device)
        layout = LAYOUTS.get(config.parallel.name)(config.parallel.config)  # type: ignore[call-arg]
        layout.connect(config.target.device)
        source = after_first(lambda: target_source(config.target.path, progress))
        self.target = load_model(
            source, dtype=config.target.dtype, device=device, layout=layout,
            kernels=config.compile.kernels, random_seed=0 if source.is_file() else None,
        )  # fmt: skip
        self.tokenizer = load_tokenizer(source)
        model_limit = self.target.config.max_position_embeddings
        self.capacity = config.engine.max_model_len or min(model_limit, DEFAULT_MAX_MODEL_LEN)
        if self.capacity > model_limit:
            raise ValueError(f"max_model_len = {self.capacity}: the target was made for {model_limit} positions")
        slots = config.engine.slots
        self.sampler = SAMPLERS.get(config.sampling.name)(config.sampling.config)  # type: ignore[call-arg]
        self.tree = TREES.get(config.tree.name)(config.tree.config)  # type: ignore[call-arg]
        check_strategies(config, self.sampler, self.tree)
        vocabulary: Any = self.target.vocabulary
        if vocabulary is not None and not takes_parts(self.sampler):
            vocabulary = vocabulary.gathering()
        self.drafter = DRAFTERS.get(config.draft.name)(  # type: ignore[call-arg]
            config.draft.config,
            target=self.target,
            slots=slots,
            capacity=self.capacity,
            candidates=self.tree.candidates,
        )
        if hasattr(self.tree, "suit"):
            self.tree.suit(self.drafter)
        for strategy in (self.tree, self.sampler):
            if hasattr(strategy, "use_kernels"):
                strategy.use_kernels = self.target.backend.name == "triton" and vocabulary is None
        self.nodes = self.tree.nodes(self.drafter.depth)
        scratch = max(slots * self.nodes, config.engine.prefill_chunk, self.drafter.rows)
        cache = self.target.new_cache(
            slots=slots, capacity=self.capacity, scratch=scratch, page_size=config.engine.page_size
        )
        sampling = SlotParams(
            slots=slots, vocab_size=self.target.config.vocab_size, device=self.target.device,
            features=self.sampler.features, vocabulary=vocabulary,
        )  # fmt: skip
        self.from_first = layout.from_first
        self.state = RoundState(
            cache=cache, sampling=sampling, capacity=self.capacity, depth=self.drafter.depth,
            features=self.drafter.features, dtype=self.target.dtype,
        )  # fmt: skip
        self._mode = config.compile.resolved_mode(config.target.device)
        self.host = Host(self.sampler, self.state)
        self.prefiller = Prefill(
            state=self.state, target=self.target, drafter=self.drafter, decide=self.decide, host=self.host,
            chunk=config.engine.prefill_chunk, mode=self._mode,
        )  # fmt: skip
        self.greedy = self.sampler.always_argmax(self.sampler.params())
        self._steps: dict[tuple[int, bool, bool], Step] = {}
        self.readback = Readback(self.state)
        # Only a compiled round is launched in less time than it runs, so that its predecessor's tokens can wait for it.
        self.runs_ahead = not self.eager and self.readback.lag > 0
        self.busy = False

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
    def eager(self) -> bool:
        """Whether nothing is compiled."""
        return self._mode == "none"

    @torch.no_grad()
    def step(self, rows: int, bound: int, plain: bool = False, greedy: bool | None = None) -> None:
        """One round of all active slots. No host decision: the same operations whatever the data.

        Args:
            rows: R, a host constant: (active slots) * N.
            bound: host-known upper bound of every committed length.
            plain: one row a slot and no drafter.
            greedy: no active request wants more than the argmax of the logits; None: as the config's defaults are.
        """
        greedy = self.greedy if greedy is None else greedy
        tree, draws = self.grow(bound, plain, greedy)
        verified = self.host.verified(self.verify(tree, rows, bound, plain))
        self.commit(verified, self.accept(verified, greedy, draws))

    def grow(self, bound: int, plain: bool, greedy: bool) -> tuple[Tree, Draws | None]:
        """Propose and build; the trees, and what their tokens were drawn from. Arguments as in `step`."""
        if plain:
            return Tree.root_only(self.state.anchor), None
        proposal = self.propose(bound, greedy)
        return self.plant(proposal), proposal.draws

    def propose(self, bound: int, greedy: bool) -> Proposal:
        """The drafter's candidates, chosen as the sampler is going to choose tokens; arguments as in `step`."""
        if greedy:
            return self.drafter.propose(self.state, bound, unperturbed)
        propose = functools.partial(self.drafter.propose, self.state, bound)
        return perturbed(propose, self.sampler, self.state.length, self.state.sampling)

    def plant(self, proposal: Proposal) -> Tree:
        """The trees that are verified, the same in every process."""
        return agreed(self.tree.build(proposal, self.state.anchor), self.from_first)

    def verify(self, tree: Tree, rows: int, bound: int, plain: bool = False) -> Verified:
        """One forward of the target over the trees' rows; arguments as in `step`."""
        flat = tree.flat(self.state.length, self.state.active, rows, bound)
        output = self.target(flat, self.state.cache, () if plain else self.drafter.taps)
        return Verified(rows=flat, logits=self.target.head(output.hidden), taps=output.taps)

    def accept(self, verified: Verified, greedy: bool, draws: Draws | None = None) -> Acceptance:
        """What the sampler makes of the logits; arguments as in `step`, and the proposal's draws."""
        return self.decide(verified.logits, self.state.nodes(verified.rows, greedy, draws), verified.fault)

    def decide(self, logits: Tensor, nodes: NodeContext, fault: Tensor | None = None) -> Acceptance:
        """The tokens of a round, the same in every process; see `Sampler.accept`, and `with_fault` for `fault`."""
        return agreed(with_fault(self.sampler.accept(logits, nodes), fault), self.from_first)

    def commit(self, verified: Verified, accepted: Acceptance) -> None:
        """Emit tokens, cut at stop ids and limits; keep the accepted rows' features and K/V."""
        state = self.state
        count = state.emit(accepted)
        state.remember(verified.taps, accepted.path, count)
        self.target.backend.commit(state.cache, accepted.path, count)

    @torch.no_grad()
    def prefill(self, slot: int, request: Request, plain: bool = False) -> None:
        """Run a request's prompt through the target in chunks, admit it and emit the first token. Only launches.

        The device waits for them: what the chunks do not need is launched while they run.
        """
        self.empty(slot)
        self.prefiller.begin(slot, request.prompt_ids, plain)
        self.admit(slot, request)
        self.prefiller.end(self.sampler.always_argmax(request.sampling))

    def empty(self, slot: int) -> None:
        """Forget what the caches hold of a slot. Only launches."""
        self.state.cache.reset(slot)
        self.drafter.reset(slot)

    def admit(self, slot: int, request: Request) -> None:
        """Put a request into an idle, emptied slot. Only launches."""
        limit = min(len(request.prompt_ids) + request.max_new_tokens, self.capacity)
        self.state.admit(slot, request.prompt_ids, limit, request.stop_ids, request.sampling)

    def warm_up(
        self,
        prompts: Sequence[Prompt] | None = None,
        *,
        plain: Sequence[bool] = (False, True),
        progress: Callable[[str], None] | None = None,
        **changes: Any,
    ) -> None:
        """Compile, capture and replay the steps that serving will use, and leave every buffer as it was.

        Without it each step is compiled when it is first needed, in the midst of a request. Eager engines have nothing
        to warm up.

        Args:
            prompts: only what these need; None is whatever may come.
            plain: kinds of decoding, without speculation (True) and with it (False).
            progress: called with a line of text before each step.
            **changes: fields of `Settings` that the prompts will come with.

        Raises:
            ValueError: a prompt or a setting is not usable, or a stream is still open.
        """
        if self.busy:
            raise ValueError(BUSY)
        lengths, kinds = None, greedy_kinds(self.sampler)
        if prompts is not None:
            requests = self._prepare(prompts, None, changes)
            lengths = [len(request.prompt_ids) for request in requests]
            kinds = {self.sampler.always_argmax(request.sampling) for request in requests}
        if not self.eager:
            warm_up(self, lengths, plain, kinds, progress)

    def compiled_step(self, rows: int, plain: bool = False, greedy: bool | None = None) -> Step:
        """The round for a row bucket as one callable without arguments; compiled on first use unless the mode is eager.

        It reads whatever context there is: its bound is the capacity. Arguments as in `step`.
        """
        greedy = self.greedy if greedy is None else greedy
        key = (rows, plain, greedy)
        if key not in self._steps and self.host.processors:
            self._steps[key] = round_in_two(self, rows, plain, greedy, self._mode)
        elif key not in self._steps:
            step = functools.partial(self.step, rows, self.capacity, plain, greedy)
            self._steps[key] = compile_step(step, self._mode)
        return self._steps[key]

    def has_step(self, active: int, plain: bool, greedy: bool) -> bool:
        """Whether `launch` has nothing to compile first."""
        return self.eager or (self._rows(active, plain), plain, greedy) in self._steps

    def _rows(self, active: int, plain: bool) -> int:
        slots = active if self.eager else size_for(self.state.slots, active)
        return slots * (1 if plain else self.nodes)

    def launch(self, active: int, bound: int, plain: bool, greedy: bool) -> None:
        """Start a round of so many active slots; the other arguments as in `step`."""
        rows = self._rows(active, plain)
        with torch.profiler.record_function(ROUND):
            if self.eager:
                self.step(rows, min(bound, self.capacity), plain, greedy)
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
        requests = of_first(self._prepare(prompts, settings, changes))
        return self._finished(requests, plain, progress and rank() == 0)

    def stream(
        self, prompt: Prompt, settings: Settings | None = None, *, plain: bool = False, **changes: Any
    ) -> Generator[Piece, None, None]:
        """Complete one prompt, piece by piece; the last piece carries the `Completion`. Arguments as in `generate`.

        Text is released only when later tokens cannot change it; nothing after a stop is ever shown. Closing the
        iterator early frees the engine.
        """
        return self._pieces(of_first(self._prepare([prompt], settings, changes)), plain)

    def _prepare(
        self, prompts: str | Sequence[Prompt], settings: Settings | Sequence[Settings] | None, changes: dict[str, Any]
    ) -> list[Request]:
        if isinstance(settings, list | tuple):
            if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not len(prompts) == len(settings) > 0:
                raise ValueError(f"{len(settings)} settings: give as many as there are prompts")
            pairs = zip(prompts, settings, strict=True)
            return [request for prompt, one in pairs for request in self._prepare([prompt], one, changes)]
        resolved = changed(settings, changes)
        defaults = self.config.generate
        ignore_eos = defaults.ignore_eos if resolved.ignore_eos is None else resolved.ignore_eos
        return prepare(
            prompts, resolved, tokenizer=self.tokenizer, vocab_size=self.target.config.vocab_size,
            capacity=self.capacity, max_new_tokens=defaults.max_new_tokens,
            eos_ids=() if ignore_eos else self.target.config.eos_token_ids, max_stop_ids=self.state.max_stop_ids,
            sampling=functools.partial(self.sampler.params, **resolved.sampling),
        )  # fmt: skip

    def _finished(self, requests: list[Request], plain: bool, progress: bool) -> Iterator[tuple[int, Completion]]:
        with progress_bar(len(requests), progress) as bar, contextlib.closing(serve(self, requests, plain)) as served:
            for index, piece in served:
                if piece.completion is not None:
                    bar.update(1)
                    yield index, piece.completion

    def _pieces(self, requests: list[Request], plain: bool) -> Generator[Piece, None, None]:
        with contextlib.closing(serve(self, requests, plain)) as served:
            for _, piece in served:
                yield piece
