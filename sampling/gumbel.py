"""Gumbel sampling: every output is an exact draw from the target's law, and a function of the request and its seed.

The token at absolute position p is argmax(log p + g) with noise g keyed by (seed, p, token id). The drafter's scores
get the same g before its candidates are taken, so that drafts are right more often; the token emitted is the target's
own choice in any case, whatever the tree, so speculation cannot change it. (Daliri et al., arXiv 2408.07978.)
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .base import SAMPLERS, Acceptance, NodeContext, walk, with_fault
from .config import Sampling
from .filters import Filtered, changed, filtered, min_p_limit
from .noise import gumbel_noise, row_keys
from .params import SlotParams


@SAMPLERS.register("gumbel")
class Gumbel(Sampling):
    """Exact sampling with shared noise; at temperature 0 greedy. The default."""

    stream: ClassVar[int] = 0
    takes_parts: ClassVar[bool] = True

    def perturb(self, logits: Tensor, position: Tensor, params: SlotParams) -> Tensor:
        """The drafter's log-probabilities at the request's temperature, with the noise its tokens will meet."""
        slots, depth = logits.shape[:2]
        seed = params.seed[:-1, None].expand(slots, depth).flatten()
        if self.use_kernels:
            from .kernels.perturb import perturb_logits

            keys = row_keys(seed, position.flatten(), params.low_bits, self.stream)
            hot: Tensor = perturb_logits(logits, params.temperature[:-1].repeat_interleave(depth), keys)
            return hot
        temperature = params.temperature[:-1, None, None]
        own = params.vocabulary
        noise = gumbel_noise(seed, position.flatten(), own.size, params.low_bits, self.stream, own.first)
        noise, logits = noise.view(logits.shape), logits.float()
        best = own.amax(logits)
        sampled = temperature > 0
        return torch.where(sampled, (logits - best) / torch.where(sampled, temperature, 1.0) + noise, logits)

    def sampled(self, logits: Tensor, nodes: NodeContext) -> Acceptance:
        """The noisy argmax of each row, then the walk."""
        if self.use_kernels:
            token, fault = self._chosen(logits, nodes)
        else:
            rows = self.noisy(logits, nodes)
            assert nodes.params is not None
            token, fault = nodes.params.vocabulary.argmax(rows.score), rows.fault
        return with_fault(walk(token, nodes), fault)

    def _chosen(self, logits: Tensor, nodes: NodeContext) -> tuple[Tensor, Tensor]:
        """The argmax of `noisy` and the faults, int64 [R] each, by kernels."""
        from .kernels.choose import choose_tokens

        params, slot = nodes.params, nodes.slot
        assert params is not None
        rows = changed(logits, nodes, self.processors)
        keys = row_keys(params.seed[slot], nodes.position + 1, params.low_bits, self.stream)
        token, best = choose_tokens(
            rows.x, params.temperature[slot], keys,
            min_p_limit(params, slot), params.top_k[slot] if "top_k" in params.features else None,
            params.top_p[slot] if "top_p" in params.features else None,
        )  # fmt: skip
        return token, rows.faults(best)

    def noisy(self, logits: Tensor, nodes: NodeContext) -> Filtered:
        """The filtered scores of each row [R, V] with the noise of the token after it."""
        params = nodes.params
        assert params is not None
        rows = filtered(logits, nodes, self.processors)
        # What follows the row at position p is the token at p + 1.
        seed, sampled = params.seed[nodes.slot], params.temperature[nodes.slot] > 0
        own = params.vocabulary
        noise = gumbel_noise(seed, nodes.position + 1, own.size, params.low_bits, self.stream, own.first)
        return Filtered(score=rows.score + torch.where(sampled[:, None], noise, 0.0), fault=rows.fault)
