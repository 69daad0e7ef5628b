"""The driver's own time, which stands still while the driver does.

A driver that was stopped (Ctrl-Z, a suspended machine), starved, or blocked by a hung disk has missed all events
meanwhile: they wait in its sockets and pipes. If its time limits had expired when it continues, it would vote out
workers that have long done their part. So all limits of a job are measured by this clock, which advances by at most
``most_s`` from one reading to the next, and is read more often than that for as long as the loop runs. It also stands
still while a job has no driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

# Longer than any one callback of the loop; short compared with the limits of workers.
MOST_S = 1.0
# Standstills beyond most_s are reported from this length on. A busy machine is not worth a report.
_REPORTED_FROM_S = 5.0


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel the call."""


CallLater = Callable[[float, Callable[[], object]], Timer]
"""Calls a function on the running loop after so many seconds: a JobClock's, or a loop's own."""


class JobClock:
    """Seconds that never go back. Used by one thread.

    Args:
        source: the real time; ``time.monotonic`` by default.
        most_s: its longest step. Well below all limits that are measured with it.
        begins: its first value, for a job that had another driver before; None for the real time.
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
        """Return the present time, seconds."""
        now = self._source()
        self.lost_s += max(0.0, now - self._looked_at - self._most_s)
        self._looked_at = now
        return now - self.lost_s + self._ahead_s

    async def keep(self, on_standstill: Callable[[float], None]) -> None:
        """Read it often enough. Runs until it is canceled.

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
        """Call a function on the running loop after this time."""
        return _Timer(self, self() + delay_s, callback)


class _Timer:
    """A call that waits anew if the clock has stood still."""

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
    """Raise TimeoutError in a block that takes longer.

    Args:
        limit_s: the limit, seconds.
        call_later: measures it; the running loop's if None.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = (call_later or loop.call_later)(limit_s, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()
