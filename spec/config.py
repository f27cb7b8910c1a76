"""One complete run as data: `GenerateConfig`, from a shipped name, a TOML file, tables or keyword arguments.

Each TOML table is a folder of the code: [draft], [tree], [sampling] and [parallel] name a strategy and carry that
strategy's own settings. TOML and overrides ("tree.budget" = 63) are the only ways in; resolved once, then frozen.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from modelkit.loading import DTYPES
from modelkit.registry import Registry, parse_config
from parallel import LAYOUTS
from sampling import SAMPLERS

from .draft import DRAFTERS
from .tree import TREES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """The model that decides the tokens: a checkpoint folder, or "smollm2-135m-instruct" for the demo model."""

    path: str
    dtype: str = "bfloat16"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: the folder of a checkpoint")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}; known: {', '.join(DTYPES)}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """How steps run.

    Attributes:
        mode: "auto" is "reduce-overhead" (each round one CUDA graph) on CUDA devices and "none" elsewhere. "none" is
            eager: every operation by itself, for debugging and for CPUs.
        kernels: "auto" is "triton" on CUDA devices and "reference" (plain PyTorch) elsewhere.
    """

    mode: Literal["auto", "none", "default", "reduce-overhead"] = "auto"
    kernels: Literal["auto", "reference", "triton"] = "auto"

    def resolved_mode(self, device: str) -> str:
        """The mode on a device."""
        if self.mode != "auto":
            return self.mode
        return "reduce-overhead" if device.startswith("cuda") else "none"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes fixed when the engine is built.

    Attributes:
        slots: requests decoded at the same time.
        max_model_len: most tokens of a request, prompt and output together; None takes the model's own limit, at most
            8192.
        prefill_chunk: prompt tokens run through the target at once.
        page_size: positions a cache page; None gives each slot one page.
        threads: CPU threads of PyTorch; None leaves PyTorch's choice.
    """

    slots: int = 1
    max_model_len: int | None = None
    prefill_chunk: int = 256
    page_size: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "max_model_len", "prefill_chunk", "page_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestConfig:
    """Defaults of a request; each can be given per call."""

    max_new_tokens: int = 256
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A registered strategy's name and its own parsed Config."""

    name: str
    config: Any


REGISTRIES: dict[str, Registry[Any]] = {
    "draft": DRAFTERS,
    "tree": TREES,
    "sampling": SAMPLERS,
    "parallel": LAYOUTS,
}
DEFAULTS = {"tree": "best_first", "sampling": "gumbel", "parallel": "single"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """A complete run. Build it with `load_config` or `GenerateConfig.from_tables`."""

    target: TargetConfig
    draft: Strategy
    tree: Strategy
    sampling: Strategy
    parallel: Strategy
    compile: CompileConfig
    engine: EngineConfig
    generate: RequestConfig

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> GenerateConfig:
        """Parse tables as TOML gives them.

        Raises:
            ValueError: an unknown table, key or name, or a value out of range.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        whole: dict[str, Any] = {}
        for name, table in tables.items():
            if name not in fields:
                raise ValueError(f"unknown table [{name}]; known: {', '.join(fields)}")
            if not isinstance(table, Mapping):
                raise ValueError(f"[{name}] must be a table, got {table!r}")
        for name, registry in REGISTRIES.items():
            table = dict(tables.get(name, {}))
            if name in DEFAULTS:
                table.setdefault("name", DEFAULTS[name])
            strategy, config = registry.config(table)
            whole[name] = Strategy(name=strategy, config=config)
        plain = (("target", TargetConfig), ("compile", CompileConfig), ("engine", EngineConfig))
        for name, kind in (*plain, ("generate", RequestConfig)):
            whole[name] = parse_config(kind, tables.get(name, {}), f"[{name}]")
        return cls(**whole)

    def to_tables(self) -> dict[str, dict[str, Any]]:
        """The tables that give this config again; keys that are None are left out."""
        tables: dict[str, dict[str, Any]] = {}
        for field in dataclasses.fields(self):
            part = getattr(self, field.name)
            table = {"name": part.name} if isinstance(part, Strategy) else {}
            config = part.config if isinstance(part, Strategy) else part
            # Not asdict: that would copy callables, and a user's may hold anything.
            values = {key.name: getattr(config, key.name) for key in dataclasses.fields(config)}
            tables[field.name] = table | {key: value for key, value in values.items() if value is not None}
        return tables


TRAINING_PREFIX = "train-"


def shipped_configs(training: bool = False) -> dict[str, Path]:
    """Configs inside the package, by name: of `generate` and its like, or those of `train`."""
    folder = Path(str(resources.files("spec"))) / "configs"
    paths = sorted(folder.glob("*.toml"))
    return {path.stem: path for path in paths if path.stem.startswith(TRAINING_PREFIX) == training}


def load_config(
    source: str | Path | GenerateConfig | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> GenerateConfig:
    """Resolve a config.

    Args:
        source: a shipped name, a TOML path, tables, or a GenerateConfig.
        overrides: dotted keys to values, {"tree.budget": 63}. Naming another strategy of a table drops that table's
            other keys: they belong to the strategy that was there.

    Raises:
        ValueError: no such config, not TOML, or a value that is refused.
    """
    if isinstance(source, GenerateConfig):
        source = source.to_tables()
    return GenerateConfig.from_tables(read_tables(source, overrides, shipped_configs(), DEFAULTS))


def read_tables(
    source: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    shipped: Mapping[str, Path],
    defaults: Mapping[str, str],
) -> dict[str, Any]:
    """The tables of a config with its overrides, not parsed yet.

    Args:
        source: a shipped name, a TOML path, or tables.
        overrides: dotted keys to values, see `load_config`.
        shipped: what a name may be.
        defaults: strategies of tables that name none.

    Raises:
        ValueError: no such config, not TOML, or an override that is not written table.key.
    """
    if isinstance(source, Mapping):
        tables = {name: dict(table) if isinstance(table, Mapping) else table for name, table in source.items()}
    else:
        tables = _read_toml(source, shipped)
    changes = dict(overrides or {})
    for key in sorted(changes, key=lambda key: not key.endswith(".name")):
        table, dot, name = key.partition(".")
        if not dot or not name or "." in name:
            raise ValueError(f"override '{key}': write it as table.key, for example tree.budget")
        entry = tables.setdefault(table, {})
        if not isinstance(entry, dict):
            raise ValueError(f"[{table}] must be a table, got {entry!r}")
        if name == "name" and entry.get("name", defaults.get(table)) != changes[key]:
            entry.clear()
        entry[name] = changes[key]
    return tables


def _read_toml(source: str | Path, shipped: Mapping[str, Path]) -> dict[str, Any]:
    path = Path(source).expanduser()
    if str(source) in shipped:
        path = shipped[str(source)]
    elif not path.is_file():
        if path.suffix != ".toml":
            import difflib

            close = difflib.get_close_matches(str(source), shipped, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"no config '{source}'; shipped: {', '.join(shipped)}, or a path to a .toml file{hint}")
        raise ValueError(f"config file {path} does not exist")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    return tables


def parse_override(text: str) -> tuple[str, Any]:
    """One `--set table.key=value`: the value as TOML or JSON would read it, else a string.

    Raises:
        ValueError: there is no "=".
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: write it as table.key=value, for example tree.budget=63")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value.strip()
