"""How much of what has come would outlive this process.

Owns two counts, and who waits for the second. What comes, and where it is kept (on disc, in a file, on a terminal), is
whoever counts' business; it is kept in the order in which it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Keeping:
    """See above. Used on one event loop only, but for :meth:`keep_soon`.

    Attributes:
        came: how much has come.
        kept: how much of that is kept.
    """

    def __init__(self) -> None:
        self.came = self.kept = 0
        self._waiting: list[tuple[int, int, Callable[[], object]]] = []  # a heap
        self._serial = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # guards what follows
        self._kept_soon = 0
        self._is_due = False

    def comes(self) -> int:
        """One more has come. Returns how much that makes."""
        self._loop = self._loop or asyncio.get_running_loop()
        self.came += 1
        return self.came

    def keep(self, many: int) -> None:
        """So much of what has come is kept. Harmless when repeated."""
        self.kept = max(self.kept, many)
        while self._waiting and self._waiting[0][0] <= self.kept:
            heappop(self._waiting)[2]()

    def keep_soon(self, many: int) -> None:
        """Has keep() called on the loop, from any thread; of many calls in a row once."""
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
        """Has something called once, when so much is kept; it is not yet."""
        heappush(self._waiting, (many, next(self._serial), call))
