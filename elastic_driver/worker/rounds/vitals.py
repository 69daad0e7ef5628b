"""This process's vitals, which it writes to a page of memory shared with its agent.

Owns the page; stacks.py owns the stacks behind it. The native extension writes the page (native/vitals/page.h); without
it there is none. Nothing here raises or waits: training must not notice.
"""

from __future__ import annotations

from typing import Any

from elastic_driver.worker.engine.native_loader import NativeUnavailableError, load
from elastic_driver.worker.rounds import stacks


class _Page:
    """This process's page, or none.

    Attributes:
        native: the extension, once it has opened the page.
        has_stepped: whether an optimizer reports steps: then commits do not count as steps.
    """

    def __init__(self) -> None:
        self.native: Any = None
        self.has_stepped = False


_page = _Page()


def begin(path: str) -> None:
    """Open the page at this path, if possible. Idempotent."""
    if not path:
        return
    try:
        native = load()
    except NativeUnavailableError:
        return
    if not native.vitals_open(path):
        return  # the agent has another version or user; or another process is the worker
    if _page.native is None and stacks.answer(native, path):
        native.vitals_dumps_at(stacks.DUMP_SIGNAL)
    _page.native = native


def enter_round(round_id: int, rank: int) -> None:
    """Record this process's round; the rank is -1 outside of rounds."""
    if _page.native is not None:
        _page.native.vitals_round(round_id, rank)


def note_step() -> None:
    """Count a step of an optimizer."""
    if _page.native is not None:
        _page.has_stepped = True
        _page.native.vitals_step()


def note_commit(commits: int) -> None:
    """Record the number of commits. Counts as a step, in a script without an optimizer that reports them."""
    if _page.native is not None:
        _page.native.vitals_commit(commits)
        if not _page.has_stepped:
            _page.native.vitals_step()
