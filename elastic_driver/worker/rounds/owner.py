"""Whether the process that owns this worker, its driver, is alive, though it may be stopped and answer nothing.

Owns what a worker says while it waits for it. A driver that
was stopped (Ctrl-Z), or that writes to a disc that hangs, goes on some time, and all that its workers hold is worth
waiting for that. Only one that is dead, or of which nothing can be known, is given up after a while.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from elastic_driver.system.process_name import ProcessName
from elastic_driver.worker.settings import worker_settings

# From /proc/PID/stat (proc(5)); all others are said to be alive.
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "blocked, perhaps by a disc that hangs"}


class Owner:
    """The process that owns this one. May be asked by several threads at once.

    Args:
        name: as :func:`~elastic_driver.system.process_name.name_of_this_process` gave it there.
    """

    def __init__(self, name: str) -> None:
        named = ProcessName.parse(name)
        self._process = named if named is not None and named.is_of_this_place else None
        self._lock = threading.Lock()  # guards the two below
        self._silent_since: float | None = None  # since when it has been silent, once that was said
        self._answered_at = float("-inf")

    def state(self) -> str | None:
        """Alive, stopped or the like, in words; None when it is dead, or when that cannot be known from here."""
        state = None if self._process is None else self._process.state()
        return None if state is None else _STATES.get(state, "running")

    def is_waited_for(self, since: float) -> bool:
        """Whether to ask on, however long it takes: it is alive. Says so once.

        Args:
            since: when the request was made that it has not answered, ``time.monotonic()``.
        """
        state = self.state()
        if state is None:
            return False
        with self._lock:
            # A request of before the last answer is only late.
            is_news = self._silent_since is None and since > self._answered_at
            if is_news:
                self._silent_since = since
        if is_news:
            silent_s = time.monotonic() - since
            _say(
                f"the driver has not answered for {silent_s:.0f} s, but its process is alive ({state}); waiting for it"
            )
        return True

    def has_answered(self) -> None:
        """After a wait. Says so once."""
        with self._lock:
            since, self._silent_since = self._silent_since, None
            self._answered_at = time.monotonic()
        if since is not None:
            _say(f"the driver answers again after {time.monotonic() - since:.0f} s; going on")


def _say(text: str) -> None:
    """One line on standard error. May block while a driver that is stopped does not read it."""
    with contextlib.suppress(OSError, ValueError):
        print(f"elastic_driver: {text}", file=sys.stderr, flush=True)


_owner: Owner | None = None


def owner() -> Owner:
    """The process's one owner, as its environment names it."""
    global _owner
    if _owner is None:
        _owner = Owner(worker_settings().owner)
    return _owner
