"""Counts how many of the received items are persisted, so that they would outlive this process.

Owns two counts, and the callbacks that wait for the second. The items, and where they are persisted (on disk, in a
file, on a terminal), are up to the caller; they are persisted in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Keeping:
    """Counts received and persisted items. Used on one event loop only, except for :meth:`keep_soon`.

    Attributes:
        came: how many have been received.
        kept: how many of those are persisted.
    """

    def __init__(self) -> None:
        self.came = self.kept = 0
        self._waiting: list[tuple[int, int, Callable[[], object]]] = []  # a heap
        self._serial = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # guards the following
        self._kept_soon = 0
        self._is_due = False

    def comes(self) -> int:
        """Count one more received item. Returns how many that makes."""
        self._loop = self._loop or asyncio.get_running_loop()
        self.came += 1
        return self.came

    def keep(self, many: int) -> None:
        """Record that so many of the received items are persisted. Harmless when repeated."""
        self.kept = max(self.kept, many)
        while self._waiting and self._waiting[0][0] <= self.kept:
            heappop(self._waiting)[2]()

    def keep_soon(self, many: int) -> None:
        """Have keep() called on the loop, from any thread; once for many calls in a row."""
        with self._lock:
            self._kept_soon = max(self._kept_soon, many)
            if self._is_due or self._loop is None:
                return
            self._is_due = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._keep_now)

    def _keep_now(self) -> None:
        with self._lock:
            self._is_due = False
            many = self._kept_soon
        self.keep(many)

    def when_kept(self, many: int, call: Callable[[], object]) -> None:
        """Call this once when so many items are persisted, which they are not yet."""
        heappush(self._waiting, (many, next(self._serial), call))
