"""Counts changes, and waits for the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Changes:
    """Counts changes, and wakes the tasks that wait for one. Used on the event loop only.

    Attributes:
        count: how many there have been.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: dict[asyncio.Future[None], None] = {}  # woken in the order in which they came

    def report(self) -> None:
        """Count a change, and wake all that wait."""
        self.count += 1
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seen: int) -> None:
        """Wait until there are more changes than that."""
        if self.count == seen:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[future] = None
            try:
                await future
            finally:
                self._waiting.pop(future, None)

    async def wait_until(self, holds: Callable[[], bool], limit_s: float) -> None:
        """Wait until the condition holds, for at most limit_s seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not holds():
                    await self.wait(self.count)
