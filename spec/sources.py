"""Where models come from: checkpoint folders, the demo model and its drafter, and shapes (a config.json alone).

A shape is a config.json inside the package, by name, or one of the caller's, by path. Nothing can be generated from
one: `flashtree bench` fills it with random weights, because times depend on sizes alone.
"""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Any

from modelkit.demo import DEMO_NAME, prepare_demo_model

DRAFTER_SUFFIX = "-dflash"


def shapes() -> dict[str, Path]:
    """Shapes inside the package, by name. A drafter's is its target's name with "-dflash" behind it."""
    folder = Path(str(resources.files("spec"))) / "shapes"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def drafters() -> dict[str, Path]:
    """Trained drafters inside the package, by name: their targets' names with "-dflash" behind them."""
    folder = Path(str(resources.files("spec"))) / "drafters"
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}


def drafter_folder(path: str) -> Path:
    """What a drafter's path means: the caller's folder, or one inside the package by name.

    Raises:
        ValueError: neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    shipped = drafters()
    if path not in shipped:
        close = difflib.get_close_matches(path, shipped, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else f"; shipped: {', '.join(shipped)}"
        raise ValueError(f"drafter folder {folder} does not exist{hint}")
    return shipped[path]


def target_shapes() -> list[str]:
    """Names of the shapes that are targets."""
    return [name for name in shapes() if not name.endswith(DRAFTER_SUFFIX)]


def drafter_shape(target: str) -> str | None:
    """Name of the drafter's shape that goes with a target's, None if none is shipped."""
    name = target + DRAFTER_SUFFIX
    return name if name in shapes() else None


def shape_file(path: str) -> Path | None:
    """The config.json that a path means, if it means a shape: a shipped name, or a file."""
    if Path(path).expanduser().is_file():
        return Path(path).expanduser()
    return None if Path(path).expanduser().is_dir() else shapes().get(path)


def refuse_shape(what: str, path: str) -> None:
    """Refuse a shape where weights are needed.

    Args:
        what: "target" or "drafter".
        path: as the config has it.

    Raises:
        ValueError: the path means a shape.
    """
    if shape_file(path) is not None:
        raise ValueError(
            f"{what} {path!r} is a shape without weights: only `flashtree bench` and `trace --shape` take random ones"
        )


def target_source(path: str, progress: Any = None) -> Path:
    """What a target's path means: a checkpoint folder (the demo model is prepared if need be), or a shape's file.

    Raises:
        ValueError: neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path == DEMO_NAME:
        return prepare_demo_model(progress)
    found = shape_file(path)
    if found is not None and found.stem not in target_shapes() and found.stem in shapes():
        raise ValueError(f"'{path}' is a drafter's shape, not a target's; targets: {', '.join(target_shapes())}")
    if found is None:
        close = difflib.get_close_matches(path, target_shapes(), n=1)
        hint = f"; did you mean the shape '{close[0]}'?" if close else ""
        raise ValueError(f"target {path!r} is neither a folder nor '{DEMO_NAME}' (models are not downloaded){hint}")
    return found
