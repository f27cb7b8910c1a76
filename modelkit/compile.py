"""The one place where anything is compiled or captured.

A step is a callable without arguments and results: it reads and writes state that lives in module buffers, so it can be
captured whole in one CUDA graph. Each gets a compile of its own; shapes are fixed, so it is compiled once, and since
nothing that it was traced with ever changes, calling it checks nothing: a model's thousand checks take the host longer
than launching its graph.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .demo import cache_folder

Step = Callable[[], None]
MODES = ("none", "default", "reduce-overhead", "max-autotune")


def compile_step(step: Step, mode: str) -> Step:
    """A step in the given mode.

    Args:
        step: no arguments, no result, fixed shapes.
        mode: "none" runs it eagerly; the others are those of `torch.compile`.
    """
    if mode == "none":
        return step
    if mode not in MODES:
        raise ValueError(f"unknown compile mode '{mode}'; known: {', '.join(MODES)}")
    _prepare()
    options = dict(torch._inductor.list_mode_options(mode, dynamic=False))  # `mode` and `options` exclude each other
    options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
    compiled: Step = torch.compile(_of_its_own(step), options=options, fullgraph=True, dynamic=False)
    return torch.no_grad()(compiled)  # without gradients whoever calls


def _of_its_own(step: Step) -> Step:
    """The step behind a code object that no other step has.

    Dynamo keeps what it compiled by code object and tells entries apart by their checks, of which ours have none.
    """

    def call() -> None:
        step()

    code = call.__code__.replace()
    return types.FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)


def compile_function(function: Callable[..., Any], enabled: bool = True) -> Callable[..., Any]:
    """A function of tensors, for training: compiled whole, for each set of shapes it meets.

    Args:
        function: results go out as they are; gradients flow through where they did.
        enabled: False gives the function back.
    """
    if not enabled:
        return function
    _prepare()
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


def _prepare() -> None:
    keep_compiled_code()
    _tell_operators_apart()
    _shorten_log()
    _freeze_layouts()


def _tell_operators_apart() -> None:
    """Have kept code be found again only with the operators that it was made with.

    PyTorch's caches know an operator by its name alone: after a change of what one returns (into how many sums it
    splits a projection, say) they would give back a graph that expects what it returned before.
    """
    config: Any = torch.compiler.config
    if not config.cache_key_tag.endswith(operators()):
        config.cache_key_tag += operators()


@functools.cache
def operators() -> str:
    """Digest of what flashtree's operators are made of: its `kernels` folders, and other files that define some."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for package in ("modelkit", "parallel", "sampling", "spec"):
        for file in sorted((root / package).rglob("*.py")):
            content = file.read_bytes()
            if file.parent.name == "kernels" or b"@torch.library.custom_op(" in content:
                digest.update(content)
    return digest.hexdigest()[:16]


def _freeze_layouts() -> None:
    """Have inductor's templates settle the strides of what they read.

    PyTorch 2.11 notes the strides that a buffer has so far and may change them afterwards, trusting that a template can
    be given up for a call of ATen; flex attention cannot, and reads the wrong elements (pytorch/pytorch#172649, undone
    for flex attention by #175445 in 2.12). The function replaced is asked for nothing else there.
    """
    from torch._inductor import select_algorithm

    templates: Any = select_algorithm
    if torch.__version__.startswith("2.11."):
        templates.use_aten_gemm_kernels = lambda: False


def _shorten_log() -> None:
    """Name an operator in inductor's log without its arguments.

    Before torch 2.13 the log line about an operator that is met for the first time spells out its arguments, whether or
    not anything is logged; behind a deep network that text is exponential in the depth, and compiling never ends.
    """
    from torch._inductor import exc

    exc.OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"target: {target}")  # type: ignore[method-assign]


def forget() -> None:
    """Drop everything compiled in this process, with the memory that captured graphs hold."""
    torch._dynamo.reset()


def keep_compiled_code() -> None:
    """Have PyTorch and Triton keep compiled code beside flashtree's other files, unless the user has said where.

    PyTorch's own default is the folder of temporary files, which a restart or a clean-up empties.
    """
    # Graphs with our operators are cacheable as they are: AOTAutograd's cache takes every operator of `torch.library`,
    # inductor's refuses only higher-order ones that do not say `cacheable()`.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Importing torch._dynamo is enough for the variable to be set, to that default.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") not in (None, default_cache_dir()):
        return
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that cannot be written: PyTorch's default will do
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    # Else inductor points Triton below its own folder at some moment, and kernels would end up in two places.
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What the compiler did so far in this process.

    Attributes:
        graphs: frames compiled, again for other guards included: it must not grow once all buckets are warm.
        skipped: graphs that ran without being captured.
        partitions: pieces a graph was split into beyond the first.
        non_static_inputs: inputs whose addresses a captured graph had to copy.
    """

    graphs: int
    skipped: int
    partitions: int
    non_static_inputs: int

    @classmethod
    def read(cls) -> Counters:
        """The compiler's counters as of now."""
        from torch._dynamo.utils import counters

        inductor: Any = counters["inductor"]
        return cls(
            graphs=int(counters["stats"]["unique_graphs"]),
            skipped=int(inductor["cudagraph_skips"]),
            partitions=int(inductor["cudagraph_partitions"]),
            non_static_inputs=int(inductor["cudagraph_recorded_non_static_inputs"]),
        )
