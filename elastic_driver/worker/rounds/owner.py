"""Whether this worker's owner, its driver's process, is alive, although it may be stopped and not answer.

Owns the messages while a worker waits for it. A driver that was stopped (Ctrl-Z) or writes to a hanging disk continues
at some point, and its workers' state is worth the wait. Only a driver that is dead, or whose state is unknown, is given
up after a while.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from elastic_driver.system.process_name import ProcessName
from elastic_driver.worker.settings import worker_settings

# From /proc/PID/stat (proc(5)); all other states are reported as running.
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "blocked, perhaps on a hanging disk"}


class Owner:
    """The process that owns this one. Thread-safe.

    Args:
        name: its name, from :func:`~elastic_driver.system.process_name.name_of_this_process` there.
    """

    def __init__(self, name: str) -> None:
        named = ProcessName.parse(name)
        self._process = named if named is not None and named.is_of_this_place else None
        self._lock = threading.Lock()  # guards the two below
        self._silent_since: float | None = None  # start of its silence, once that was reported
        self._answered_at = float("-inf")

    def state(self) -> str | None:
        """Return its state in words (running, stopped ...); None if it is dead, or unknown from here."""
        state = None if self._process is None else self._process.state()
        return None if state is None else _STATES.get(state, "running")

    def is_waited_for(self, since: float) -> bool:
        """Return whether to keep retrying without a limit, because it is alive. Prints that once.

        Args:
            since: when the unanswered request was made, ``time.monotonic()``.
        """
        state = self.state()
        if state is None:
            return False
        with self._lock:
            # A request from before the last answer is only late.
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
        """Note an answer after a wait. Prints that once."""
        with self._lock:
            since, self._silent_since = self._silent_since, None
            self._answered_at = time.monotonic()
        if since is not None:
            _say(f"the driver answers again after {time.monotonic() - since:.0f} s; continuing")


def _say(text: str) -> None:
    """Print one line on standard error. May block while a stopped driver does not read it."""
    with contextlib.suppress(OSError, ValueError):
        print(f"elastic_driver: {text}", file=sys.stderr, flush=True)


_owner: Owner | None = None


def owner() -> Owner:
    """Return the process's one owner, as named by its environment."""
    global _owner
    if _owner is None:
        _owner = Owner(worker_settings().owner)
    return _owner
