"""What a sampling strategy sees and returns, and the table of strategies.

A strategy turns the target's logits at every row of the verified trees into the tokens that are emitted. It knows rows
and logits only: neither drafters, nor models, nor caches.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from modelkit.registry import Registry

from .params import SamplingParams, SlotParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draws:
    """Candidates that were drawn, and from what; the same for all parents of a depth.

    Attributes:
        ids: int64 [S, L, k], draws without replacement, in the order in which they were drawn.
        log_q: fp32 [S, L, V], log-probabilities that they were drawn from. They, and so the draws of a depth, may
            depend on draws of lesser depths, never on deeper ones.
    """

    ids: Tensor
    log_q: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeContext:
    """The verified rows, as tensors (R rows of S slots, W bit words; see the row layout in docs/concepts/round.md).

    Attributes:
        token: int64 [R], the token each row put into the target.
        parent: int64 [R], row index of the parent, -1 for roots.
        depth: int64 [R], 0 for roots.
        position: int64 [R], absolute position of the row's token.
        slot: int64 [R], S for padding.
        local: int64 [R], index of the row within its slot.
        valid: bool [R]; an invalid root marks an idle slot.
        ancestors: int32 [R, W], bit j: local row j of the slot is an ancestor or the row itself.
        slots: S.
        max_depth: L, a host constant.
        width: N where every slot has exactly N rows (R = S * N), else 0; a host constant.
        params: the slots' sampling parameters; None where a strategy needs none.
        greedy: host constant: no request of this forward wants anything but the argmax of the logits.
        draws: where the rows' tokens come from, if they were drawn (see `draws.Drawn`); None if they are a function of
            what is known, or if there are roots only.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    position: Tensor
    slot: Tensor
    local: Tensor
    valid: Tensor
    ancestors: Tensor
    slots: int
    max_depth: int
    width: int = 0
    params: SlotParams | None = None
    greedy: bool = False
    draws: Draws | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Outcome of a round, before stop tokens and limits.

    Attributes:
        path: int64 [S, L + 1], row indices of the accepted path, root first; -1 past the end.
        token: int64 [S, L + 1], tokens emitted: accepted drafts, then the bonus; -1 past the end.
        count: int64 [S], tokens emitted (= rows on the path); 0 for idle slots.
        fault: int64 [S], what made a row of the path useless, an index into FAULTS; 0 is nothing. None: not looked at.
    """

    path: Tensor
    token: Tensor
    count: Tensor
    fault: Tensor | None = None


# Why a request cannot go on, by the number that travels on the device.
FAULTS = (
    "nothing",
    "step verify: the target's logits are NaN or infinite",
    "step accept: every token is banned (by banned_token_ids or a processor)",
    "step accept: a processor made logits that are NaN or infinite",
)
NOT_FINITE, ALL_BANNED, BAD_PROCESSOR = 1, 2, 3


class Sampler(Protocol):
    """A sampling strategy.

    Attributes:
        Config: its part of the config.
        lossless: whether outputs follow the target's law exactly.
        chains_only: whether it needs a tree policy without siblings.
        takes_parts: whether it reduces logits through `SlotParams.vocabulary` only, so that a process may have a part
            of them; a strategy without this attribute does not, and gets whole ones. Nor do user's processors.
        features: what of `params.FEATURES` requests may use; each costs time in every round that samples.
        use_kernels: set by the engine where kernels may run; a strategy without kernels has no such attribute.
        host_processors: what the engine has to do to the logits before `accept`, see `host.HostProcessor`; a strategy
            whose config has none has no such attribute.
    """

    Config: ClassVar[type[Any]]
    lossless: ClassVar[bool]
    chains_only: ClassVar[bool]
    features: tuple[str, ...]

    def params(self, **changes: Any) -> SamplingParams:
        """A request's parameters: the config's, changed.

        Raises:
            ValueError: out of range, or nothing that this strategy can serve.
        """
        ...

    def always_argmax(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters gets nothing but the argmax of the logits that `accept` is given."""
        ...

    def perturb(self, logits: Tensor, position: Tensor, params: SlotParams) -> Tensor:
        """Change a drafter's logits before its candidates are taken, so that they resemble what will be accepted.

        Args:
            logits: [S, D, V].
            position: int64 [S, D], absolute positions of the tokens proposed.
            params: of the slots.
        """
        ...

    def accept(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """Decide the tokens of a round from the target's logits [R, V]; on the device, in fixed shapes."""
        ...


SAMPLERS: Registry[Sampler] = Registry("sampling")


def walk(target: Tensor, nodes: NodeContext) -> Acceptance:
    """Accept the deepest row whose ancestors all carry the token that the target chose at their parent.

    Shared by every strategy that gives each row one target token (greedy, gumbel, token matching). No loop and no
    host: a row is on a matching path when none of its ancestor bits is set in its slot's words of mismatches. Siblings
    differ in token, so such rows are one path a slot. Masks over all rows rather than scatters: they fuse.

    Args:
        target: int64 [R], the target's token after each row.
        nodes: the rows.
    """
    device, slots, width = target.device, nodes.slots, nodes.width

    def rows(x: Tensor) -> Tensor:  # [R, ...] as [S, N, ...], or as [1, R, ...] of which each slot looks at its own
        return x.view(slots, width, *x.shape[1:]) if width else x[None]

    own = rows(nodes.slot) == torch.arange(slots, device=device)[:, None]
    match = own & rows(nodes.valid & ((nodes.parent < 0) | (nodes.token == target[nodes.parent.clamp(min=0)])))
    local, ancestors = rows(nodes.local), rows(nodes.ancestors)
    bit = torch.ones_like(ancestors[..., 0]) << (local % 32).to(torch.int32)
    word = torch.arange(ancestors.shape[-1], device=device)[:, None]
    wrong = (own & ~match)[:, None] & (local[:, None] // 32 == word)  # [S, W, N or R]
    mismatch = torch.where(wrong, bit[:, None], 0).sum(-1, dtype=torch.int32)  # of different bits
    accepted = match & ((ancestors & mismatch[:, None]) == 0).all(-1)
    level = torch.arange(nodes.max_depth + 1, device=device)[:, None]
    here = accepted[:, None] & (rows(nodes.depth)[:, None] == level)  # [S, L + 1, N or R]
    path = torch.where(here, rows(torch.arange(target.shape[0], device=device))[:, None], -1).amax(-1)
    token = torch.where(path < 0, -1, target[path.clamp(min=0)])
    return Acceptance(path=path, token=token, count=(path >= 0).sum(-1))


def with_fault(accepted: Acceptance, row_fault: Tensor | None) -> Acceptance:
    """Add the faults of the rows on the path (the highest number, where there are several).

    Args:
        accepted: what the walk gave. A fault that is there already stays where the rows have none.
        row_fault: int64 [R], indices into FAULTS; None is none. Rows off the path do not matter: nothing was taken from
            them.
    """
    if row_fault is None:
        return accepted
    fault = torch.where(accepted.path < 0, 0, row_fault[accepted.path.clamp(min=0)]).amax(-1)
    if accepted.fault is not None:
        fault = torch.where(fault > 0, fault, accepted.fault)
    return Acceptance(path=accepted.path, token=accepted.token, count=accepted.count, fault=fault)
