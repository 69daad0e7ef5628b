"""What this process says of itself to its agent, on the page of vitals that it was given; and its stacks, when asked.

Owns that there is a page, and how stacks come into the file behind it. The page is the native extension's (see
native/vitals/page.h): without it nothing is said. Nothing here raises, and nothing waits: training has no part in it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from typing import Any

from elastic_driver.worker.engine.native_loader import NativeUnavailableError, load

# Near the upper end: libraries that take real-time signals begin at the lower one.
DUMP_SIGNAL = signal.SIGRTMAX - 4


class _Page:
    """This process's page, or none.

    Attributes:
        native: the extension, once it has the page.
        has_stepped: whether an optimizer has said that it steps: then commits are no steps.
    """

    def __init__(self) -> None:
        self.native: Any = None
        self.has_stepped = False


_page = _Page()


def begin(path: str) -> None:
    """Takes the page at this path for this process's, if it can be had. Harmless when repeated."""
    if not path:
        return
    try:
        native = load()
    except NativeUnavailableError:
        return
    if not native.vitals_open(path):
        return  # of an agent with another version, or of another user; or another process is the worker
    if _page.native is None and _can_dump(path):
        native.vitals_dumps_at(DUMP_SIGNAL)
    _page.native = native


def _can_dump(path: str) -> bool:
    """Has stacks written behind the page at the signal, whoever holds the interpreter's lock. Returns whether so."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
            return False  # the script's own
        # Open as long as the process lives.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True, chain=False)
        return True
    return False


def enter_round(round_id: int, rank: int) -> None:
    """This process is in a round from now on; -1 for the rank of one that is in none."""
    if _page.native is not None:
        _page.native.vitals_round(round_id, rank)


def note_step() -> None:
    """An optimizer steps."""
    if _page.native is not None:
        _page.has_stepped = True
        _page.native.vitals_step()


def note_commit(commits: int) -> None:
    """A state has its restore point; it counts so many commits. A step, in a script whose steps nobody else tells."""
    if _page.native is not None:
        _page.native.vitals_commit(commits)
        if not _page.has_stepped:
            _page.native.vitals_step()
