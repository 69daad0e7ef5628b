"""The one time at which all listeners hear of a happening, so that what they say of it agrees to the last digit."""

from __future__ import annotations

import time
from collections.abc import Callable


class Instant:
    """Used by one thread. What is told of in a ``with`` has one time; inside another one, that one's.

    Args:
        clock: seconds that never go back, whatever becomes of the time of day.

    Attributes:
        began: when this was made.
        at: when the happening was that is being told of; seconds of the clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = self.at = clock()
        self._tellings = 0

    def __call__(self) -> float:
        """The present; while a happening is told of, its time."""
        if not self._tellings:
            self.at = self._clock()
        return self.at

    def __enter__(self) -> None:
        if not self._tellings:
            self.at = self._clock()
        self._tellings += 1

    def __exit__(self, *_: object) -> None:
        self._tellings -= 1
