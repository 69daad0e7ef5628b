"""What this process says of itself to its agent, on the page of vitals that it was given.

Owns that there is a page; the stacks behind it are of stacks.py. The page is the native extension's (see
native/vitals/page.h): without it nothing is said. Nothing here raises, and nothing waits: training has no part in it.
"""

from __future__ import annotations

from typing import Any

from elastic_driver.worker.engine.native_loader import NativeUnavailableError, load
from elastic_driver.worker.rounds import stacks


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
    if _page.native is None and stacks.answer(native, path):
        native.vitals_dumps_at(stacks.DUMP_SIGNAL)
    _page.native = native


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
