"""The one time at which all listeners hear of a happening, so that what they say of it agrees to the last digit."""

from __future__ import annotations

import time
from collections.abc import Callable


class Instant:
    """Used by one thread. What is told of in a ``with`` has one time; inside another one, that one's.

    Args:
        clock: seconds that never go back, whatever becomes of the time of day.
        before_s: for how long there was a job before this driver.

    Attributes:
        began: when the job began.
        at: when the happening was that is being told of; seconds of the clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, before_s: float = 0.0) -> None:
        self._clock = clock
        self.at = clock()
        self.began = self.at - before_s
        self._tellings = 0

    def __call__(self) -> float:
        """The present; while a happening is told of, its time."""
        if not self._tellings:
            self.at = self._clock()
        return self.at

    def since_start_s(self) -> float:
        """For how long there has been a job. From any thread."""
        return self._clock() - self.began

    def __enter__(self) -> None:
        if not self._tellings:
            self.at = self._clock()
        self._tellings += 1

    def __exit__(self, *_: object) -> None:
        self._tellings -= 1
