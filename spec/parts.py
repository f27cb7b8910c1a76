"""The parts of a round, each a step of its own over buffers of fixed shape: for timing, traces and debugging.

Run one after another they are one round: they call what `Engine.step` calls. Only the values that `step` passes from
one part to the next are kept in buffers here. Knows nothing of clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modelkit.cache import KVCache
from modelkit.compile import Step
from modelkit.rows import chain

from .engine import Engine
from .held import Held
from .requests import Request
from .types import Tree


class Parts:
    """A drafted round of all slots, in parts.

    Making one runs the round's parts but the commit once (for the shapes) and puts the state back. Host processors are
    no part.

    Args:
        engine: every slot must hold a request; see `occupy`.
        bound: upper bound of every committed length; the parts are right as long as it is one.
    """

    def __init__(self, engine: Engine, bound: int) -> None:
        self.engine, self.bound, self.rows = engine, bound, engine.state.slots * engine.nodes
        if engine.host.processors:
            raise ValueError("the parts of a round are timed without host processors; leave host_processors out")
        saved = Saved(engine)
        with torch.no_grad():
            self.proposal = Held(engine.propose(bound, engine.greedy))
            self.trees = Held(engine.plant(self.proposal.get()))
            self.verified = Held(engine.verify(self.trees.get(), self.rows, bound))
            self.accepted = Held(engine.accept(self.verified.get(), engine.greedy, self.proposal.get().draws))
        saved.restore()

    @torch.no_grad()
    def draft(self) -> None:
        """Take in the features committed last, propose."""
        self.proposal.put(self.engine.propose(self.bound, self.engine.greedy))

    @torch.no_grad()
    def tree(self) -> None:
        """Build the trees of the last proposal."""
        self.trees.put(self.engine.plant(self.proposal.get()))

    @torch.no_grad()
    def verify(self) -> None:
        """Lay the trees out as rows, one forward of the target, the head."""
        self.verified.put(self.engine.verify(self.trees.get(), self.rows, self.bound))

    @torch.no_grad()
    def accept(self) -> None:
        """Walk the trees with the logits."""
        self.accepted.put(self.engine.accept(self.verified.get(), self.engine.greedy, self.proposal.get().draws))

    @torch.no_grad()
    def commit(self) -> None:
        """Emit, keep features and K/V: the only part that lengthens the context."""
        self.engine.commit(self.verified.get(), self.accepted.get())

    def in_order(self) -> dict[str, Step]:
        """The parts by name; all of them are a round."""
        return {name: getattr(self, name) for name in ("draft", "tree", "verify", "accept", "commit")}


class Verify:
    """A verification of given width: a chain of `rows` nodes a slot, whatever the tree policy makes.

    Args:
        engine: every slot must hold a request.
        rows: nodes a slot, the root counted.
        bound: see `Parts`.
    """

    def __init__(self, engine: Engine, rows: int, bound: int) -> None:
        slots, device = engine.state.slots, engine.target.device
        self.engine, self.rows, self.bound = engine, slots * rows, bound
        node = torch.arange(rows, device=device).expand(slots, rows)
        token = node % engine.target.config.vocab_size
        self.trees = Held(Tree.line(token=token, valid=node >= 0))
        with torch.no_grad():
            self.verified = Held(engine.verify(self.trees.get(), self.rows, bound))

    @torch.no_grad()
    def step(self) -> None:
        """As `Parts.verify`."""
        self.verified.put(self.engine.verify(self.trees.get(), self.rows, self.bound))


class AttentionAlone(nn.Module):
    """The attention of all layers over a chain of `rows` nodes a slot, with random queries, no projections.

    Args:
        engine: every slot must hold a request.
        rows: nodes a slot.
        bound: see `Parts`.
    """

    def __init__(self, engine: Engine, rows: int, bound: int) -> None:
        super().__init__()
        self.engine, self.bound, self.rows = engine, bound, engine.state.slots * rows
        config, target = engine.target.config, engine.target
        shape = (self.rows, target.attention.heads, config.head_dim)
        self.register_buffer("q", torch.randn(shape, device=target.device, dtype=target.dtype), persistent=False)
        self.register_buffer("out", torch.zeros_like(self.q), persistent=False)
        token = torch.zeros(engine.state.slots, rows, dtype=torch.int64, device=target.device)
        self.register_buffer("token", token, persistent=False)

    q: Tensor
    out: Tensor
    token: Tensor

    @torch.no_grad()
    def forward(self) -> None:
        """Each layer reads its own context, with the layer before as its queries: else the compiler would drop layers.

        The fresh K/V are whatever the scratch holds.
        """
        engine, config = self.engine, self.engine.target.config
        cache = engine.state.cache
        count = torch.full_like(engine.state.length, self.token.shape[1])
        rows = chain(token=self.token, start=engine.state.length, count=count, rows=self.rows, bound=self.bound)
        plans, q = engine.target.plans(rows, cache), self.q
        for index, window in enumerate(engine.target.windows):
            view = cache.view(index)
            k, v = view.scratch_k[: self.rows], view.scratch_v[: self.rows]
            q = plans[window].attend(q, k, v, view, config.head_dim**-0.5)
        self.out.copy_(q)


class PrefillChunk(nn.Module):
    """The target's forward over `prefill_chunk` rows of slot 0 behind its context; nothing is committed."""

    def __init__(self, engine: Engine, bound: int) -> None:
        super().__init__()
        self.engine, self.bound, self.size = engine, bound, engine.config.engine.prefill_chunk
        slots, device, config = engine.state.slots, engine.target.device, engine.target.config
        token = (torch.arange(self.size, device=device) % config.vocab_size).repeat(slots, 1)
        self.register_buffer("token", token, persistent=False)
        count = torch.zeros(slots, dtype=torch.int64, device=device)
        count[0] = self.size
        self.register_buffer("count", count, persistent=False)
        hidden = torch.zeros(self.size, config.hidden_size, dtype=engine.target.dtype, device=device)
        self.register_buffer("hidden", hidden, persistent=False)

    token: Tensor
    count: Tensor
    hidden: Tensor

    @torch.no_grad()
    def forward(self) -> None:
        """All layers and the final norm, no head."""
        engine = self.engine
        rows = chain(token=self.token, start=engine.state.length, count=self.count, rows=self.size, bound=self.bound)
        self.hidden.copy_(engine.target(rows, engine.state.cache, engine.drafter.taps).hidden)


class Saved:
    """An engine's round state as it was, to run a part again from the same place.

    K/V behind the committed lengths are left as they are: nothing reads them.
    """

    def __init__(self, engine: Engine) -> None:
        state = engine.state
        buffers = [*state.buffers(recurse=False), *state.sampling.buffers(), state.cache.length]
        if (cache := getattr(engine.drafter, "cache", None)) is not None:
            buffers.append(cache.length)
        self._kept = [(buffer, buffer.clone()) for buffer in buffers]

    def restore(self) -> None:
        """Put them back, in place."""
        for buffer, value in self._kept:
            buffer.copy_(value)


def _endless(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Request]:
    return engine._prepare(list(prompts), None, {"max_new_tokens": engine.capacity, "ignore_eos": True})


def occupy(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Put a request that never ends by itself into every slot, by the engine's own prefill.

    Args:
        engine: idle.
        prompts: token ids, one a slot; each slot's committed length is its prompt's.

    Raises:
        ValueError: a prompt leaves no room in the context.
    """
    assert len(prompts) == engine.state.slots, "one prompt a slot"
    for slot, request in enumerate(_endless(engine, prompts)):
        engine.prefill(slot, request)


@torch.no_grad()
def furnish(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """As `occupy`, with noise for K/V in place of a prefill: parts take the same time, and no prefill is compiled.

    Args:
        engine: idle.
        prompts: as `occupy` takes them, all of one length.

    Raises:
        ValueError: as `occupy`.
    """
    assert len(prompts) == engine.state.slots and len(set(map(len, prompts))) == 1
    state, length = engine.state, len(prompts[0])
    for slot, request in enumerate(_endless(engine, prompts)):
        engine.empty(slot)
        state.admit(slot, request.prompt_ids, engine.capacity, request.stop_ids, request.sampling)
        # For the token that a prefill emits.
        state.tokens[slot, length] = state.anchor[slot] = state.tokens[slot, length - 1]
    state.total[:] = length + 1
    for cache in (state.cache, getattr(engine.drafter, "cache", None)):
        if isinstance(cache, KVCache):
            cache.length[:-1] = length
            for layer in cache.all_layers():
                layer.k.normal_()
                layer.v.normal_()


def vacate(engine: Engine) -> None:
    """Retire every slot."""
    for slot in range(engine.state.slots):
        engine.state.retire(slot)
