"""The gate through which results are written into memory that is the caller's: once shut, nobody writes any more.

For what no engine's own thread writes: a result that is copied to where it was asked for, by whichever thread waits
for it or by a thread that cannot be ended. When a round is over its gate is shut before anybody touches the state.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from elastic_driver.errors import HorovodInternalError

T = TypeVar("T")

# Seconds between two checks for threads inside. Acquiring their locks to wait would not do: a signal handler that
# raises right after would leave a lock held.
_LOOK_S = 0.0005


class _Call:
    __slots__ = ("__weakref__", "lock", "thread")

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held in the call
        self.thread = threading.get_ident()


class Inside:
    """The calls that threads are in, whatever a signal handler raises there.

    A counter would not do: a handler may raise between its increment and the code that undoes it. So each call holds a
    lock of its own, which the interpreter releases with the call's frame.
    """

    def __init__(self) -> None:
        self._calls: set[weakref.ref[_Call]] = set()  # changed and copied in one step

    def call(self, act: Callable[[], T]) -> T:
        """Calls, and returns what that returns. A call within a call is one of its own."""
        mine = _Call()
        self._calls.add(weakref.ref(mine, self._calls.discard))
        with mine.lock:
            return act()

    def threads(self) -> list[int]:
        """The threads that are in a call, by ``threading.get_ident()``."""
        calls = [call() for call in list(self._calls)]
        return [call.thread for call in calls if call is not None and call.lock.locked()]

    @property
    def busy(self) -> bool:
        """Whether any thread is in a call."""
        return bool(self.threads())


class WriteGate:
    """Lets threads write, until it is shut."""

    def __init__(self) -> None:
        self._inside = Inside()
        self._shut = ""

    def write(self, act: Callable[[], T]) -> T:
        """Calls what writes, and returns what that returns.

        Raises:
            HorovodInternalError: the gate is shut, and this thread is not inside already.
        """

        def unless_shut() -> T:
            # Once inside: whoever shuts the gate after this look sees this call.
            if self._shut and self._inside.threads().count(threading.get_ident()) == 1:
                raise HorovodInternalError(f"cannot deliver a result: {self._shut}")
            return act()

        return self._inside.call(unless_shut)

    def shut(self, why: str) -> None:
        """Lets nobody in any more. Never blocks."""
        self._shut = self._shut or why or "the round is over"

    @property
    def is_shut(self) -> bool:
        """Whether it is."""
        return bool(self._shut)

    def wait(self, limit_s: float) -> bool:
        """Blocks until nobody is writing, but for ``limit_s`` at most; whether nobody is."""
        deadline = time.monotonic() + limit_s
        while self._inside.busy:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True
