"""The one time at which all listeners hear of a happening, so that what they say of it agrees to the last digit."""

from __future__ import annotations

import time
from collections.abc import Callable


class Instant:
    """Used by one thread.

    Args:
        clock: seconds that never go back, whatever becomes of the time of day.

    Attributes:
        began: when this was made.
        at: when the happening was that is being told of; seconds of the clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = self.at = clock()
        self._telling = False

    def __call__(self) -> float:
        """The present; while a happening is told of, its time."""
        if not self._telling:
            self.at = self._clock()
        return self.at

    def __enter__(self) -> None:
        self.at = self._clock()
        self._telling = True

    def __exit__(self, *_: object) -> None:
        self._telling = False
