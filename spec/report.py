"""Plain-text tables of results, and what they were measured on."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Sequence
from typing import Any

from .stats import Stats


def table(rows: Sequence[Sequence[str]], right: bool = True) -> str:
    """Rows as aligned columns; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) if right else c.ljust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def summary(speculative: Stats, plain: Stats | None) -> str:
    """Speculative beside plain decoding of the same prompts."""
    columns = [("speculative", speculative)] + ([("plain", plain)] if plain is not None else [])
    steps = [s.num_spec_steps or s.completion_tokens - 1 for _, s in columns]
    rows = [
        ["", *(name for name, _ in columns)],
        ["tokens", *(str(s.completion_tokens) for _, s in columns)],
        ["rounds", *(str(n) for n in steps)],
        ["mean acceptance length", *(f"{s.mean_acceptance_length:.2f}" for _, s in columns)],
        ["prefill, s", *(f"{s.prefill_seconds:.2f}" for _, s in columns)],
        ["tokens/s", *(f"{s.tokens_per_second:.1f}" for _, s in columns)],
    ]
    text = table(rows)
    rates = speculative.acceptance_rate_per_position
    if rates:
        text += "\nacceptance per depth: " + " ".join(f"{rate:.2f}" for rate in rates)
    if plain is not None and plain.tokens_per_second and speculative.tokens_per_second:
        text += f"\nspeed-up over plain decoding: {speculative.tokens_per_second / plain.tokens_per_second:.2f} x"
    return text


def machine_line(engine: Any) -> str:
    """What the figures were measured on."""
    import torch
    import transformers

    device = engine.target.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return (
        f"{where}, {torch.get_num_threads()} threads; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def progress_bar(total: int, show: bool) -> contextlib.AbstractContextManager[Any]:
    """A tqdm bar over completions on standard error."""
    from tqdm import tqdm

    bar: contextlib.AbstractContextManager[Any] = tqdm(total=total, disable=None if show else True, unit="prompt")
    return bar
