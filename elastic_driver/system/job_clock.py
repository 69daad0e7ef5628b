"""The driver's own time, which stands still while the driver does.

A driver that was stopped (Ctrl-Z, a suspended machine), starved, or blocked by a disc that hangs, has not heard what
happened meanwhile: it lies in its sockets and pipes. Were its time limits over when it goes on, it would vote out
workers that have long done what they had to do. So all limits of a job are of this clock, which takes no longer step
than ``most_s`` from one look at it to the next, and is looked at more often than that for as long as the loop runs.
Likewise it stands still while a job has no driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

# Longer than any one thing that the loop does; short beside what workers are given.
MOST_S = 1.0
# What it stood still beyond that is reported from here on. A busy machine is no news.
_REPORTED_FROM_S = 5.0


class Timer(Protocol):
    """A call that is due."""

    def cancel(self) -> None:
        """It is not called any more."""


CallLater = Callable[[float, Callable[[], object]], Timer]
"""Calls a function on the running loop after so many seconds: a JobClock's, or a loop's own."""


class JobClock:
    """Seconds that never go back. Used by one thread.

    Args:
        source: the real time; ``time.monotonic`` by default.
        most_s: its longest step. Well below all limits that are measured with it.
        begins: what it says first, for a job that had another driver before; None for what the real time is.
    """

    def __init__(
        self,
        source: Callable[[], float] = time.monotonic,
        *,
        most_s: float = MOST_S,
        begins: float | None = None,
    ) -> None:
        self._source = source
        self._most_s = most_s
        self._looked_at = source()
        self._ahead_s = 0.0 if begins is None else begins - self._looked_at
        self.lost_s = 0.0  # how long it has stood still

    def __call__(self) -> float:
        """The present."""
        now = self._source()
        self.lost_s += max(0.0, now - self._looked_at - self._most_s)
        self._looked_at = now
        return now - self.lost_s + self._ahead_s

    async def keep(self, on_standstill: Callable[[float], None]) -> None:
        """Looks at it often enough. Runs until it is cancelled.

        Args:
            on_standstill: called after each longer standstill, with its seconds.
        """
        reported_s = self.lost_s
        while True:
            await asyncio.sleep(self._most_s / 2)
            self()
            if self.lost_s - reported_s >= _REPORTED_FROM_S:
                on_standstill(self.lost_s - reported_s + self._most_s)
            reported_s = self.lost_s

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Calls it on the running loop after this time."""
        return _Timer(self, self() + delay_s, callback)


class _Timer:
    """See Timer."""

    def __init__(self, clock: JobClock, due: float, callback: Callable[[], object]) -> None:
        self._clock, self._due, self._callback = clock, due, callback
        self._loop = asyncio.get_running_loop()
        self._call = self._loop.call_later(due - clock(), self._look)

    def cancel(self) -> None:
        self._call.cancel()

    def _look(self) -> None:
        left_s = self._due - self._clock()
        if left_s > 0:
            self._call = self._loop.call_later(left_s, self._look)
        else:
            self._callback()


@contextlib.asynccontextmanager
async def time_limit(limit_s: float, call_later: CallLater | None = None) -> AsyncIterator[None]:
    """Ends what takes longer with TimeoutError.

    Args:
        limit_s: the time.
        call_later: measures it; the running loop's when None.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = (call_later or loop.call_later)(limit_s, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()
