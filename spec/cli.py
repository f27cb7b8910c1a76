"""The console script `flashtree`: sub-commands, and how a user's mistake ends (one sentence, exit code 2).

Imports nothing heavy, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

interrupted = "flashtree: interrupted"
COMMANDS = {
    "generate": ("spec.generate", "complete prompts with speculative decoding"),
    "train": ("spec.train", "train a DFlash drafter for a target, on text that the target writes"),
    "bench": ("spec.bench", "time the parts of a round, or whole prompts, and public peers, in one run"),
    "trace": ("spec.trace", "profile rounds: launched ahead or not, idle time, kernels; writes a Chrome trace"),
    "check-lossless": ("spec.check_lossless", "compare tokens with plain decoding for drafters x trees"),
    "check-sampler": ("spec.check_sampler", "test a sampling strategy's joint law against the target's"),
}


def add_config_arguments(parser: argparse.ArgumentParser, default: str = "smollm2-dflash") -> None:
    """The two options that every command shares."""
    parser.add_argument("--config", default=default, help=f"shipped name or path of a TOML file (default {default})")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="TABLE.KEY=VALUE",
        help="change one key of the config, for example tree.budget=63; may be given again",
    )  # fmt: skip


def check_writable(path: str | None) -> None:
    """Refuse an output file that cannot be written, before the work whose result it should hold."""
    if path is not None:
        try:
            with open(path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from None


def run(main: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command; a caller's mistake becomes one sentence on standard error and exit code 2."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and main.__module__ != "spec.train":  # which shares its work itself
        from .together import run_together

        return run_together(main, arguments)
    try:
        return main(arguments)
    except (ValueError, ImportError, RuntimeError) as error:
        if os.environ.get("FLASHTREE_TRACEBACK") or not is_users(error):
            raise
        print(f"flashtree: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output is gone (a pipe into head); nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if os.environ.get("FLASHTREE_TRACEBACK"):
            raise
        print(f"flashtree: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130


def is_users(error: BaseException) -> bool:
    """Whether an exception was raised by a check of ours (a message for the user) rather than by a bug."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = str(last.tb_frame.f_globals.get("__name__", "")) if last is not None else ""
    return module in ("__main__", "") or module.split(".")[0] in ("modelkit", "sampling", "parallel", "spec")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flashtree")
    except PackageNotFoundError:
        return "(not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `flashtree`."""
    parser = argparse.ArgumentParser(
        prog="flashtree",
        description="Speculative decoding with block drafters and draft trees: the same tokens, faster.",
    )
    parser.add_argument("--version", action="version", version=f"flashtree {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = list(sys.argv[1:] if argv is None else argv)
    for name, (module, help_text) in COMMANDS.items():
        # Only the command at hand is imported.
        sub = commands.add_parser(name, help=help_text, description=help_text)
        if name in given[:1]:
            command: Any = importlib.import_module(module)
            command.add_arguments(sub)
            sub.set_defaults(main=command.run)
    arguments = parser.parse_args(given)
    return run(arguments.main, arguments)


if __name__ == "__main__":
    sys.exit(main())
