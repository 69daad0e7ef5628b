"""The time of a happening, the same for all listeners, so that their records agree to the last digit."""

from __future__ import annotations

import time
from collections.abc import Callable


class Instant:
    """A clock that stands still while a happening is reported. Used by one thread.

    In a ``with`` the time is that of entering it; in a nested one, that of the outermost.

    Args:
        clock: returns seconds that never decrease, independent of the time of day.
        before_s: for how long the job had existed before this driver.

    Attributes:
        began: when the job began.
        at: the time of the present happening, in seconds of the clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, before_s: float = 0.0) -> None:
        self._clock = clock
        self.at = clock()
        self.began = self.at - before_s
        self._tellings = 0

    def __call__(self) -> float:
        """Return the present time; while a happening is reported, its time."""
        if not self._tellings:
            self.at = self._clock()
        return self.at

    def since_start_s(self) -> float:
        """Return for how long the job has existed. From any thread."""
        return self._clock() - self.began

    def __enter__(self) -> None:
        if not self._tellings:
            self.at = self._clock()
        self._tellings += 1

    def __exit__(self, *_: object) -> None:
        self._tellings -= 1
