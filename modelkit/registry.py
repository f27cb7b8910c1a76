"""Name -> class tables, and the reading of a strategy's own Config from a plain table.

Knows nothing of what the strategies do. Every pluggable part of flashtree (drafters, trees, samplers, layouts) is
one `Registry`; a config names an entry ("best_first") or any importable class ("my_pkg.trees:Mine").
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")
C = TypeVar("C", bound=type)


def unknown_name(what: str, given: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not known: what is, and the nearest."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return ValueError(f"unknown {what} '{given}'; known: {', '.join(names) or 'none'}{hint}")


FIELD_TYPES: dict[type, dict[str, Any]] = {}


def field_types(config_type: type) -> dict[str, Any]:
    """Types of a dataclass's fields by name; kept, as spelling them out takes longer than checking values by them."""
    if config_type not in FIELD_TYPES:
        FIELD_TYPES[config_type] = typing.get_type_hints(config_type)
    return FIELD_TYPES[config_type]


def read_value(annotation: Any, value: Any) -> Any:
    """A value read from TOML or JSON as a dataclass field's annotation wants it; TypeError if it does not fit.

    Lists become tuples where the annotation says tuple, whole numbers become floats where it says float.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for arg in args:
            try:
                return read_value(arg, value)
            except TypeError:
                continue
        raise TypeError
    if annotation is Any:
        return value
    if origin is typing.Literal:
        fits = value in args
    elif annotation is None or annotation is type(None):
        fits = value is None
    elif origin is tuple or origin is list:
        return _read_sequence(origin, args, value)
    elif origin is Callable:
        fits = callable(value)
    elif origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError
        return {read_value(args[0], key): read_value(args[1], item) for key, item in value.items()}
    elif annotation is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise TypeError from None
        fits = False
    elif annotation is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    else:
        fits = isinstance(value, annotation)
    if not fits:
        raise TypeError
    return value


def _read_sequence(kind: type, args: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise TypeError
    if kind is list or (len(args) == 2 and args[1] is Ellipsis):
        return kind(read_value(args[0], item) for item in value)
    if len(value) != len(args):
        raise TypeError
    return tuple(read_value(arg, item) for arg, item in zip(args, value, strict=True))


def spell_type(annotation: Any) -> str:
    """An annotation as messages show it."""
    if typing.get_origin(annotation) is typing.Literal:
        return f"choice of {', '.join(map(repr, typing.get_args(annotation)))}"
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)


def parse_config(config_type: type[T], table: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a table, refusing unknown keys and values of the wrong type.

    Args:
        config_type: a dataclass; its `__post_init__` checks the ranges.
        table: keys and values as TOML or JSON give them. Lists become tuples.
        where: how messages name the table, for example "[tree]".

    Raises:
        ValueError: an unknown key, a missing key without a default, or a value of the wrong type or range.
    """
    fields = {f.name: f for f in dataclasses.fields(config_type) if f.init}  # type: ignore[arg-type]
    annotations = field_types(config_type)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            raise ValueError(f"{where}: {unknown_name('key', key, fields)}")
        try:
            values[key] = read_value(annotations[key], value)
        except TypeError:
            raise ValueError(f"{where}: {key} = {value!r} is not a {spell_type(annotations[key])}") from None
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{where}: the key '{name}' is missing ({spell_type(annotations[name])})")
    try:
        return config_type(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class Registry(Generic[T]):
    """A table of strategy classes of one kind, each with a frozen dataclass `Config` of its own.

    Args:
        kind: what an entry is called in messages and in the config ("tree", "draft", ...).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator that files the class under `name`; a second class of that name is refused."""

        def file(cls: C) -> C:
            if name in self._classes:
                raise ValueError(f"{self.kind} '{name}' is registered already, as {self._classes[name].__qualname__}")
            if not dataclasses.is_dataclass(getattr(cls, "Config", None)):
                raise ValueError(f"{self.kind} '{name}' needs a dataclass named Config inside the class")
            self._classes[name] = cls
            return cls

        return file

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._classes)

    def get(self, name: str) -> type[T]:
        """The class behind a registered name or a "package.module:Class" path.

        Raises:
            ValueError: nothing of that name; the message lists what is known and the nearest name.
        """
        if ":" not in name:
            if name not in self._classes:
                raise unknown_name(self.kind, name, self._classes)
            return self._classes[name]
        module, _, attribute = name.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{self.kind} '{name}' cannot be imported: {error}") from error
        if not isinstance(cls, type) or not dataclasses.is_dataclass(getattr(cls, "Config", None)):
            raise ValueError(f"{self.kind} '{name}' is not a class with a dataclass named Config")
        return typing.cast("type[T]", cls)

    def config(self, table: Mapping[str, Any]) -> tuple[str, Any]:
        """Split a config table into the entry's name and that entry's own parsed Config.

        Raises:
            ValueError: no `name`, an unknown one, or a table that the entry's Config refuses.
        """
        rest = dict(table)
        name = rest.pop("name", None)
        if name is None:
            raise ValueError(f"[{self.kind}]: the key 'name' is missing; known: {', '.join(self.names())}")
        if not isinstance(name, str):
            raise ValueError(f"[{self.kind}]: name = {name!r} is not a str; known: {', '.join(self.names())}")
        config_type = self.get(name).Config  # type: ignore[attr-defined]
        return name, parse_config(config_type, rest, f"[{self.kind}]")

    def build(self, table: Mapping[str, Any], **runtime: Any) -> T:
        """Build the entry that a config table names: `cls(config, **runtime)`."""
        name, config = self.config(table)
        return self.get(name)(config, **runtime)  # type: ignore[call-arg]
