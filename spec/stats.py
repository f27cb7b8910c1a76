"""What speculation did for a request, by vLLM's names and definitions. Counts only tokens really emitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(kw_only=True)
class Stats:
    """Counts of one request, or of several added up.

    Attributes:
        prompt_tokens, completion_tokens: as a user counts them; the first completion token comes from the prefill.
        per_step_accepted: draft tokens accepted by each round; a round emits one more, the bonus. A round cut short
            by a stop token or a limit counts what it emitted, less one.
        draft_tokens_per_step: nodes of the tree without the root (the budget), so that a rate is not mistaken for a
            length.
        depth: L, deepest a draft can go.
        prefill_seconds, decode_seconds: wall time.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    per_step_accepted: list[int] = dataclasses.field(default_factory=list)
    draft_tokens_per_step: int = 0
    depth: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def num_spec_steps(self) -> int:
        """Rounds."""
        return len(self.per_step_accepted)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens emitted."""
        return sum(self.per_step_accepted)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens a round, the bonus counted; 1 for a request without rounds."""
        return 1 + self.num_accepted_draft_tokens / max(self.num_spec_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens (tree nodes)."""
        drafted = self.draft_tokens_per_step * self.num_spec_steps
        return self.num_accepted_draft_tokens / drafted if drafted else 0.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of rounds that accepted a draft token at each depth (unconditional, so it never rises)."""
        steps = max(self.num_spec_steps, 1)
        return [sum(a > d for a in self.per_step_accepted) / steps for d in range(self.depth)]

    @property
    def acceptance_histogram(self) -> list[int]:
        """Rounds that accepted 0, 1, ... draft tokens."""
        return [self.per_step_accepted.count(n) for n in range(self.depth + 1)]

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens after the first, over decode time."""
        return max(self.completion_tokens - 1, 0) / self.decode_seconds if self.decode_seconds else 0.0

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Several requests, run one after another, as one."""
        whole = cls()
        for part in parts:
            for name in ("prompt_tokens", "completion_tokens", "prefill_seconds", "decode_seconds"):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
            whole.per_step_accepted += part.per_step_accepted
            whole.draft_tokens_per_step, whole.depth = part.draft_tokens_per_step, max(whole.depth, part.depth)
        return whole

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        names = (
            "mean_acceptance_length", "draft_acceptance_rate", "acceptance_rate_per_position", "num_spec_steps",
            "num_accepted_draft_tokens", "tokens_per_second", "acceptance_histogram",
        )  # fmt: skip
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}
