"""The gate through which results are written into memory that is the caller's: once shut, nobody writes any more.

For what no engine's own thread writes: a result that is copied to where it was asked for, by whichever thread waits
for it or by a thread that cannot be ended. When a round is over its gate is shut before anybody touches the state.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from elastic_driver.errors import HorovodInternalError


class WriteGate:
    """A context manager around each write, for any thread; entering raises HorovodInternalError once it is shut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._idle = threading.Condition(self._lock)
        self._writers = 0
        self._shut = ""

    def __enter__(self) -> None:
        with self._lock:
            if self._shut:
                raise HorovodInternalError(f"cannot deliver a result: {self._shut}")
            self._writers += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._writers -= 1
            if self._shut:
                self._idle.notify_all()

    def shut(self, why: str) -> None:
        """Lets nobody in any more. Never blocks."""
        with self._lock:
            self._shut = self._shut or why or "the round is over"

    def wait(self, limit_s: float) -> bool:
        """Blocks until nobody is writing, but for ``limit_s`` at most; whether nobody is."""
        deadline = time.monotonic() + limit_s
        with self._lock:
            # In pieces: a thread that waits for a lock with a limit is woken by no signal.
            while self._writers and (left_s := deadline - time.monotonic()) > 0:
                self._idle.wait(min(left_s, 0.1))
            return not self._writers
