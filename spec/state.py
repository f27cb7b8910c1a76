"""RoundState: everything a round reads and writes between its steps, on the device, in buffers of fixed shape.

The host launches rounds and reads results late, from a ring of emitted tokens; stop ids, token limits and the cache
limit act here, on the device. Knows neither drafters nor trees nor models.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from modelkit.cache import KVCache
from modelkit.rows import Rows
from sampling import Acceptance, Draws, NodeContext, SamplingParams, SlotParams

RING = 8
# Reasons above LENGTH are LENGTH plus an index into sampling.FAULTS.
RUNNING, STOPPED, LENGTH = 0, 1, 2


class RoundState(nn.Module):
    """State of S slots.

    Attributes (all buffers):
        tokens: int64 [S, capacity + 1], prompt and emitted tokens.
        total: int64 [S], how many of them are known; in a round `total = committed length + 1`.
        prompt: int64 [S], how many tokens the prompt has; nothing in it ends a request.
        anchor: int64 [S], last emitted token, not yet through the target.
        limit: int64 [S], `total` may not pass it.
        stop_ids: int64 [S, M], -1 padded.
        reason: int64 [S], RUNNING, STOPPED, LENGTH, or more: a fault.
        active: bool [S], a request is in the slot and it has not ended.
        pending, pending_count: features [S, L + 1, K * H] of the rows committed last, int64 [S].
        ring [RING, S, 2 + L + 1], round []: count, reason and emitted tokens of the last rounds.

    Args:
        cache: the target's.
        sampling: the slots' sampling parameters.
        capacity: positions a slot of that cache holds.
        depth: L.
        features: K * H, 0 for a drafter that taps nothing.
        dtype: of the features.
        max_stop_ids: M.
    """

    def __init__(
        self, *, cache: KVCache, sampling: SlotParams, capacity: int, depth: int, features: int, dtype: torch.dtype,
        max_stop_ids: int = 16,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sampling = sampling
        slots, device = cache.slots, cache.length.device
        self.cache, self.capacity, self.depth, self.max_stop_ids = cache, capacity, depth, max_stop_ids

        def whole(name: str, *shape: int, fill: int = 0) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=torch.int64, device=device), persistent=False)

        whole("tokens", slots, capacity + 1)
        whole("total", slots)
        whole("prompt", slots)
        whole("anchor", slots)
        whole("limit", slots)
        whole("stop_ids", slots, max_stop_ids, fill=-1)
        whole("reason", slots)
        whole("pending_count", slots)
        whole("ring", RING, slots, 2 + depth + 1)
        whole("round")
        self.register_buffer("active", torch.zeros(slots, dtype=torch.bool, device=device), persistent=False)
        pending = torch.zeros(slots, depth + 1, features, dtype=dtype, device=device)
        self.register_buffer("pending", pending, persistent=False)

    tokens: Tensor
    total: Tensor
    prompt: Tensor
    anchor: Tensor
    limit: Tensor
    stop_ids: Tensor
    reason: Tensor
    pending: Tensor
    pending_count: Tensor
    ring: Tensor
    round: Tensor
    active: Tensor

    @property
    def slots(self) -> int:
        """S."""
        return self.total.shape[0]

    @property
    def length(self) -> Tensor:
        """Committed positions of each slot, int64 [S]."""
        return self.cache.length[:-1]

    def nodes(self, rows: Rows, greedy: bool, draws: Draws | None = None) -> NodeContext:
        """Rows behind the committed lengths as a sampling strategy sees them; the others: see `NodeContext`."""
        return NodeContext(
            token=rows.token, parent=rows.parent, depth=rows.position - self.cache.length[rows.slot],
            position=rows.position, slot=rows.slot, local=rows.local(), valid=rows.valid, ancestors=rows.ancestors,
            slots=self.slots, max_depth=self.depth, width=rows.width if rows.uniform else 0, params=self.sampling,
            greedy=greedy, draws=draws,
        )  # fmt: skip

    def admit(
        self, slot: int, prompt: list[int], limit: int, stop_ids: list[int], sampling: SamplingParams | None = None
    ) -> None:
        """Put a request into an idle slot (host side, between rounds). The caches are not touched.

        Args:
            slot: which.
            prompt: at most capacity - 1 token ids.
            limit: most tokens, prompt included.
            stop_ids: at most M ids that end the request.
            sampling: how to choose its tokens; None is greedy.
        """
        missing = self.max_stop_ids - len(stop_ids)
        if missing < 0:
            raise ValueError(f"{len(stop_ids)} stop ids; at most {self.max_stop_ids} are possible")
        numbers = [len(prompt), len(prompt), limit, RUNNING, 0]
        fields = (self.total, self.prompt, self.limit, self.reason, self.pending_count)
        packed = sent([*numbers, *stop_ids, *[-1] * missing, *prompt], self.total.device)
        given = torch.split(packed, [*[1] * len(fields), self.max_stop_ids, len(prompt)])
        places = [field[slot : slot + 1] for field in fields]
        torch._foreach_copy_([*places, self.stop_ids[slot], self.tokens[slot, : len(prompt)]], given)
        self.sampling.admit(slot, sampling or SamplingParams(), given[-1])
        self.active[slot].fill_(True)  # an assigned number would be copied to the device, and the host wait for that

    def rewind(self, slot: int) -> None:
        """Have a request that was just admitted begin at its prompt's first token, the rest of it ahead (host side).

        Rounds of one token then take the prompt itself, see `prompted`, beside slots that are past theirs.
        """
        self.total[slot].fill_(1)
        self.anchor[slot].copy_(self.tokens[slot, 0])

    def prompted(self, accepted: Acceptance) -> Acceptance:
        """What was accepted, of one token a slot, with the next token of prompts that are still ahead in its place."""
        ahead = (self.total < self.prompt)[:, None]
        return dataclasses.replace(
            accepted, token=torch.where(ahead, self.tokens.gather(1, self.total[:, None]), accepted.token)
        )

    def retire(self, slot: int) -> None:
        """End whatever is in a slot (host side)."""
        self.active[slot].fill_(False)

    def emit(self, accepted: Acceptance) -> Tensor:
        """Take over a round's tokens, cut at stop ids and limits; ends slots that are done, or whose logits failed.

        Args:
            accepted: what the sampler accepted.

        Returns:
            int64 [S], tokens really emitted: so many rows of the path may be committed.
        """
        token, width = accepted.token, accepted.token.shape[1]
        step = torch.arange(width, device=token.device)
        count = torch.minimum(accepted.count, (self.limit - self.total).clamp(min=0))
        fault = torch.zeros_like(count) if accepted.fault is None else accepted.fault
        failed = self.active & (fault > 0)
        count = torch.where(self.active & ~failed, count, 0)
        # Id by id, which fuses with what follows; one reduction over them all would be a kernel of its own.
        is_stop = torch.zeros_like(token, dtype=torch.bool)
        for number in range(self.max_stop_ids):
            is_stop = is_stop | (token == self.stop_ids[:, number, None])
        is_stop = is_stop & (step < count[:, None]) & (self.total[:, None] + step >= self.prompt[:, None])
        first = torch.where(is_stop, step, width).amin(-1)
        stopped = first < width
        count = torch.where(stopped, first + 1, count)
        inside = step < count[:, None]
        place = torch.where(inside, self.total[:, None] + step, self.capacity)
        slot = torch.arange(self.slots, device=token.device)[:, None]
        self.tokens[slot, place] = torch.where(inside, token, 0)  # scatter_ would copy the buffer to and fro
        self.total += count
        last = token.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.anchor.copy_(torch.where(count > 0, last, self.anchor))
        full = self.active & ~stopped & (self.total >= self.limit)
        self.reason.copy_(torch.where(stopped, STOPPED, torch.where(full, LENGTH, self.reason)))
        self.reason.copy_(torch.where(failed, LENGTH + fault, self.reason))
        self.active &= ~(stopped | full | failed)
        self.sampling.record(token, count)
        self.publish(torch.where(inside, token, -1), count)
        return count

    def publish(self, token: Tensor, count: Tensor) -> None:
        """Put tokens [S, at most L + 1], -1 past the end, and their counts [S] into the ring."""
        padded = torch.nn.functional.pad(token, (0, self.depth + 1 - token.shape[1]), value=-1)
        entry = torch.cat([count[:, None], self.reason[:, None], padded], 1)
        self.ring.index_copy_(0, (self.round % RING).view(1), entry[None])  # one piece: one copy to the host
        self.round += 1

    def remember(self, taps: Tensor | None, path: Tensor, count: Tensor) -> None:
        """Keep the tapped features of the committed rows for the drafter's next step."""
        if taps is not None:
            self.pending.copy_(taps[path.clamp(min=0)])
        self.pending_count.copy_(count)


def sent(numbers: list[int], device: torch.device) -> Tensor:
    """int64 [N] on a device, without waiting for it."""
    tensor = torch.tensor(numbers)
    if device.type == "cuda":  # from pageable memory the copy would wait for all that was launched
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
