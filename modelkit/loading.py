"""Reading checkpoints: safetensors, single-file or sharded, into a module built on the meta device.

The rule: every parameter is filled exactly once, every tensor of the file is consumed or reported. Anything else is an
error that names the tensors. Where a layout spreads the module over processes, each reads its own parts only.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn

from .backend import make_backend
from .borders import Layout, Part
from .config import ModelConfig, read_json
from .layers import fuse_projections
from .model import Transformer

# Tensors that old exports carry although they follow from the config.
DERIVED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Transform = Callable[[str, Tensor], Tensor]


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """A torch dtype from its name ("bfloat16", "float32", "float16")."""
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ValueError(f"unknown dtype '{name}'; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, single or sharded.

    Raises:
        ValueError: there are none, or the index names files that are missing.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():  # as transformers does where both are there
        return [folder / "model.safetensors"]
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{index} has no usable weight_map (tensor names to file names)")
        names = sorted(set(places.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{index} names {len(missing)} missing file(s): {', '.join(missing[:3])}")
        if not names:
            raise ValueError(f"{index} has an empty weight_map")
        return [folder / name for name in names]
    other = sorted(p.name for p in folder.glob("*.bin")) if folder.is_dir() else []
    hint = f" (found {other[0]}: only safetensors is read)" if other else ""
    raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json{hint}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file, not read yet.

    Attributes:
        shape: of the whole.
        whole: reads it.
        cut: reads some slices of it, and no other bytes.
    """

    shape: tuple[int, ...]
    whole: Callable[[], Tensor]
    cut: Callable[[tuple[slice, ...]], Tensor]

    def read(self, part: Part | None) -> Tensor:
        """A part of the tensor; None is all of it."""
        if part is None:
            return self.whole()
        return torch.zeros_like(self.cut(part.slices)) if part.zero else self.cut(part.slices)


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the files, one at a time; errors as those of `stored_tensors`."""
    for name, stored in stored_tensors(files):
        yield name, stored.whole()


def stored_tensors(files: list[Path]) -> Iterator[tuple[str, Stored]]:
    """All tensors of the files by name; each can be read until the next one is asked for.

    Raises:
        ValueError: a file is truncated or is not safetensors, or two files hold the same tensor.
    """
    from safetensors import SafetensorError, safe_open

    seen: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    if name in seen:
                        raise ValueError(f"{file}: tensor {name} stands in two files of the checkpoint")
                    seen.add(name)
                    piece = handle.get_slice(name)
                    yield name, Stored(
                        shape=tuple(piece.get_shape()), whole=functools.partial(handle.get_tensor, name),
                        cut=piece.__getitem__,
                    )  # fmt: skip
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or is not a safetensors file ({error})") from None


def shapes_of(module: nn.Module, remove_duplicate: bool = False) -> dict[str, tuple[int, ...]]:
    """Parameters' shapes by name, aliases included."""
    return {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=remove_duplicate)}


def load_weights(
    module: nn.Module, folder: Path, *, dtype: torch.dtype, device: torch.device, shared: dict[str, str] | None = None,
    layout: Layout | None = None,
) -> list[str]:  # fmt: skip
    """Fill a module's parameters from a checkpoint folder.

    Args:
        module: built on the meta device; parameters are replaced.
        folder: holds the safetensors files; a `model.` prefix of tensor names is ignored.
        dtype: floating tensors are cast to it.
        device: where parameters go.
        shared: parameters that are another parameter's storage (tied head), name -> that other's name. A file may
            hold them all the same, if they are equal.
        layout: spreads the module over processes; see `borders.Layout`.

    Returns:
        Names of tensors in the file that were left out because they follow from the config.

    Raises:
        ValueError: tensors missing, unknown, twice there, or of another shape.
    """
    shared = shared or {}
    shapes = shapes_of(module)
    wanted = {name: shape for name, shape in shapes.items() if name not in shared}
    parts = None if layout is None else layout.place(module)
    found: set[str] = set()
    filled: dict[str, Tensor] = {}
    extra: dict[str, Tensor] = {}
    derived: list[str] = []
    unknown: list[str] = []
    for stored_name, stored in stored_tensors(checkpoint_files(folder)):
        name = stored_name.removeprefix("model.")
        if DERIVED.search(name):
            derived.append(stored_name)
        elif name in found:
            raise ValueError(f"{folder}: {name} is there with and without the prefix 'model.'")
        elif name not in shapes:
            unknown.append(stored_name)
        elif shapes[name] != stored.shape:
            raise ValueError(
                f"{folder}: {stored_name} has shape {list(stored.shape)}, the config asks for {list(shapes[name])}"
            )
        elif parts is None or name in parts:
            tensor = stored.read(None if parts is None else parts[name])
            if tensor.dtype not in (*DTYPES.values(), torch.float64):
                raise ValueError(f"{folder}: {stored_name} holds {tensor.dtype}; only float16 to float64 are read")
            (extra if name in shared else filled)[name] = tensor.to(device=device, dtype=dtype)
        found.add(name)
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"{folder}: {len(missing)} tensor(s) missing: {', '.join(missing[:4])}{_more(missing)}")
    if unknown:
        raise ValueError(
            f"{folder}: {len(unknown)} tensor(s) that the config has no place for: "
            f"{', '.join(unknown[:4])}{_more(unknown)}"
        )
    for name, tensor in extra.items():
        if not torch.equal(tensor.to(device=device, dtype=dtype), filled[shared[name]]):
            raise ValueError(f"{folder}: config says {name} is {shared[name]}, but the file holds another tensor")
    for name, tensor in filled.items():
        _fill(module, name, tensor)
    return derived


def _fill(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter by a tensor that needs no gradient."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _more(names: list[str]) -> str:
    return ", ..." if len(names) > 4 else ""


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a module without allocating its parameters."""
    with torch.device("meta"):
        return make()


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "cpu",
    layout: Layout | None = None,
    fuse: bool = True,
    kernels: str = "reference",
    random_seed: int | None = None,
) -> Transformer:
    """Load a published checkpoint folder.

    Args:
        path: folder with config.json and safetensors; with `random_seed` also a config.json alone.
        dtype: of parameters and caches.
        device: where the model lives.
        layout: spreads the model over processes (see `parallel`); None leaves it whole.
        fuse: fuse qkv and gate/up projections into one GEMM each.
        kernels: "reference", "triton" or "auto"; see `modelkit.backend`.
        random_seed: fill the parameters with noise instead of reading weights: shapes for timing.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        ValueError: the folder, its config or its weights are not usable; the message says what is wrong.
    """
    check_torch()
    check_device(device)
    folder = Path(path)
    if random_seed is not None and folder.is_file():
        config = ModelConfig.from_dict(read_json(folder), str(folder))
    elif folder.is_dir():
        config = ModelConfig.from_folder(folder)
    else:
        raise ValueError(f"model folder {folder} does not exist")
    model = build_on_meta(lambda: Transformer(config))
    assert isinstance(model, Transformer)
    model.layout = layout
    model.backend = make_backend(kernels, torch.device(device))
    shared = {"lm_head.weight": "embed_tokens.weight"} if config.tie_word_embeddings else {}
    where: dict[str, Any] = {"dtype": parse_dtype(dtype), "device": torch.device(device), "layout": layout}
    if random_seed is not None:
        random_weights(model, seed=random_seed, **where)
    else:
        load_weights(model, folder, shared=shared, **where)
    if config.tie_word_embeddings:
        model.tie()
    if fuse:
        fuse_projections(model)
    model.prepare()
    return model.eval()


def check_device(device: str | torch.device) -> None:
    """Refuse a device that is misspelt or not there."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; for example cpu, cuda, cuda:1") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device '{device}' is not supported; known: cpu, cuda")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device '{device}' is not there: {torch.cuda.device_count()} CUDA device(s) found")


def use_device(device: str | torch.device) -> None:
    """Make a CUDA device the current one: Triton launches, events and captured graphs are those of the current device.

    Raises:
        ValueError: as `check_device`.
    """
    check_device(device)
    found = torch.device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found.index or 0)


def random_weights(
    module: nn.Module, *, dtype: torch.dtype, device: torch.device, seed: int, layout: Layout | None = None
) -> None:
    """Fill a meta module with noise of a trained model's size: matrices 1 / sqrt(columns), norms about 1.

    The same noise under every layout: each process makes one whole parameter after another and keeps its parts.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shapes = shapes_of(module, remove_duplicate=True)
    parts = None if layout is None else layout.place(module)
    for name, shape in shapes.items():
        filled = torch.empty(shape, dtype=dtype, device=device)
        spread = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        filled.normal_(0.0, spread, generator=generator)
        if len(shape) == 1 and not name.endswith("bias"):
            filled += 1
        if parts is not None:
            if name not in parts:
                continue
            filled = filled[parts[name].slices].clone()
            if parts[name].zero:
                filled.zero_()
        _fill(module, name, filled)


def check_torch() -> None:
    """Refuse a torch below the supported floor."""
    requirement = RequirementCache("torch>=2.11")
    if not requirement:
        raise ValueError(f"flashtree needs torch>=2.11: {requirement}")
