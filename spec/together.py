"""Commands under torchrun: process 0 prints, and the first process that fails speaks for all and ends them.

Everything else about a command is the same in every process; see docs/concepts/layouts.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from modelkit.compile import forget
from parallel import process

from .cli import interrupted, is_users

WATCH_SECONDS = 1.0
LEAVE_SECONDS = 10.0  # for parting; all processes have done everything by then


def run_together(main: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command in one of several processes.

    A process that fails does not return from here: it reports, unless another one has, and ends at once, since the
    others may wait for it in a collective for ever.

    Args:
        main: the command.
        arguments: parsed.

    Returns:
        The command's exit code.
    """
    errors = sys.stderr
    process.meet()
    if process.rank():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
        # A signal ends a process that waits in a collective only if Python does not want to see it first.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for name in ("json", "output"):  # files that are written: figures and traces of each process in one of its own
            if isinstance(path := getattr(arguments, name, None), str):
                setattr(arguments, name, str(Path(path).with_stem(f"{Path(path).stem}-{process.rank()}")))
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=[done], daemon=True)
    watch.start()
    try:
        code = main(arguments)
        process.wait_for_all()
    except BaseException as error:
        _end(error, errors)
    done.set()  # from here on the store may go away
    watch.join()  # the end of Python does not become a thread that is inside the store
    # A communicator is destroyed only once no captured graph holds it: NCCL waits for that, without end.
    forget()
    gc.collect()
    late = threading.Timer(LEAVE_SECONDS, os._exit, [code])
    late.daemon = True
    late.start()
    sys.stdout.flush()
    process.leave()
    late.cancel()
    return code


def _end(error: BaseException, errors: TextIO) -> None:
    """Report an error, if it is the first one, and end this process."""
    code, text = 1, "".join(traceback.format_exception(error))
    if isinstance(error, KeyboardInterrupt):
        code, text = 130, f"{interrupted}\n"
    elif process.is_lost_peer(error):
        text = f"flashtree: error: another process has ended; torchrun says which ({str(error)[:200]})\n"
    elif (isinstance(error, ValueError | ImportError | RuntimeError) and is_users(error)) or isinstance(error, OSError):
        code = 2
        if not os.environ.get("FLASHTREE_TRACEBACK"):
            text = f"flashtree: error: {error}\n"
    if process.is_first_error(text):
        where = f"(process {process.rank()} of {process.started()}) " if process.rank() else ""
        print(f"{where}{text}", end="", file=errors, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _watch(done: threading.Event) -> None:
    """End this process once another one has failed, wherever it waits."""
    failed = process.failure_seen()
    while not done.wait(WATCH_SECONDS):
        if failed():
            os._exit(1)
