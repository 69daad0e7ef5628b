"""The gate for writing results to the caller's memory: once it is shut, nothing is written any more.

For results that the engine's own thread does not write: copied to the caller's memory by the waiting thread, or by a
thread that cannot be stopped. When a round is over, its gate is shut before anybody touches the state.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from elastic_driver.errors import HorovodInternalError

T = TypeVar("T")

# Seconds between two checks for threads inside. Waiting on their locks would not work: a signal handler that raises
# right after acquiring one would leave it held.
_LOOK_S = 0.0005


class _Call:
    __slots__ = ("__weakref__", "lock", "thread")

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held during the call
        self.thread = threading.get_ident()


class Inside:
    """The calls that threads are in, robust against signal handlers that raise.

    A counter would not work: a handler may raise between its increment and the code that undoes it. So each call holds
    its own lock, which the interpreter releases with the call's frame.
    """

    def __init__(self) -> None:
        self._calls: set[weakref.ref[_Call]] = set()  # changed and copied atomically

    def call(self, act: Callable[[], T]) -> T:
        """Call a function and return its result. Calls may nest."""
        mine = _Call()
        self._calls.add(weakref.ref(mine, self._calls.discard))
        with mine.lock:
            return act()

    def threads(self) -> list[int]:
        """Return the threads that are in a call, by ``threading.get_ident()``."""
        calls = [call() for call in list(self._calls)]
        return [call.thread for call in calls if call is not None and call.lock.locked()]

    @property
    def busy(self) -> bool:
        """Whether any thread is in a call."""
        return bool(self.threads())


class WriteGate:
    """Lets threads write until it is shut."""

    def __init__(self) -> None:
        self._inside = Inside()
        self._shut = ""

    def write(self, act: Callable[[], T]) -> T:
        """Call a function that writes, and return its result.

        Raises:
            HorovodInternalError: the gate is shut, and this thread is not inside already.
        """

        def unless_shut() -> T:
            # Checked inside: a shut() after this check sees this call.
            if self._shut and self._inside.threads().count(threading.get_ident()) == 1:
                raise HorovodInternalError(f"cannot deliver a result: {self._shut}")
            return act()

        return self._inside.call(unless_shut)

    def shut(self, why: str) -> None:
        """Reject new writers. Never blocks."""
        self._shut = self._shut or why or "the round is over"

    @property
    def is_shut(self) -> bool:
        """Whether the gate is shut."""
        return bool(self._shut)

    def wait(self, limit_s: float) -> bool:
        """Block until no thread is writing, but for ``limit_s`` at most; return whether none is."""
        deadline = time.monotonic() + limit_s
        while self._inside.busy:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True
