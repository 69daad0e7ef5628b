"""This process's stacks, dumped on a signal.

Owns the two signals: one writes the stacks to a file; SIGABRT prints them by faulthandler and ends the process.
faulthandler's own handlers read the frames of running threads, and may crash: even in a process that trains on. So a
thread of ours writes, with the interpreter's lock; faulthandler's handlers are for a second signal, when the
lock is not available (native/vitals/stacks.h), and for a process without the native extension.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from typing import Any

from elastic_driver.system.kernel import memory_file

# Near the upper end: libraries that use real-time signals begin at the lower one.
DUMP_SIGNAL = signal.SIGRTMAX - 4


def print_at_the_end() -> None:
    """Print the stacks on a fatal signal from now on; the driver sends one to a hanging worker."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # a standard error without a descriptor, in a notebook
            faulthandler.enable()


def answer(native: Any, path: str) -> bool:
    """Append stacks to this file on each ``DUMP_SIGNAL``, whichever thread holds the interpreter's lock.

    Args:
        native: the native extension.
        path: the file.

    Returns:
        Whether that was set up.
    """
    try:
        if signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
            return False  # the script has its own handler
        # Stays open as long as the process lives.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError):
        return False
    native.stacks_take_over(DUMP_SIGNAL)
    with contextlib.suppress(Exception):
        # Not if the script has its own handler, or has disabled faulthandler.
        if faulthandler.is_enabled() and signal.getsignal(signal.SIGABRT) is signal.SIG_DFL:
            native.stacks_take_over(signal.SIGABRT)
    with contextlib.suppress(RuntimeError):  # no thread is available: every second signal is answered
        threading.Thread(target=_write, args=(native, file), name="elastic-stacks", daemon=True).start()
    return True


def _write(native: Any, file: int) -> None:
    while True:
        asked = native.stacks_asked()
        if asked != DUMP_SIGNAL:
            native.stacks_die_of(asked)  # faulthandler writes, to the script's choice of file
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(file, all_threads=True)
        native.stacks_answered(asked)


def all_stacks() -> str:
    """Return all threads' stacks. Uses a file in memory: faulthandler holds the interpreter's lock while it writes."""
    with contextlib.suppress(OSError), os.fdopen(memory_file("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""
