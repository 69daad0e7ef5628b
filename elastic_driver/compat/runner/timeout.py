"""``horovod.runner.common.util.timeout``: a time limit that several steps share."""

from __future__ import annotations

import time

__all__ = ["Timeout", "TimeoutException"]


class TimeoutException(Exception):
    """The time is up."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A limit that runs from now on.

    Args:
        timeout: seconds.
        message: of the error; ``{activity}`` in it stands for what was waited for.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout, self._message = timeout, message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Seconds left, 0 at least."""
        return max(0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raises TimeoutException, which names the activity, if the time is up."""
        if self.timed_out():
            text = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{text}. Timeout after {self._timeout} seconds.")
