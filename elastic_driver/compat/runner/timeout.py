"""``horovod.runner.common.util.timeout``: a time limit shared by several steps."""

from __future__ import annotations

import time

__all__ = ["Timeout", "TimeoutException"]


class TimeoutException(Exception):
    """The time limit has passed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A time limit that starts now.

    Args:
        timeout: seconds.
        message: the error's message; ``{activity}`` in it is replaced by the step that timed out.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout, self._message = timeout, message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Return the time left, seconds; at least 0."""
        return max(0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Return whether the time limit has passed."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException, which names the activity, if the time limit has passed."""
        if self.timed_out():
            text = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{text}. Timeout after {self._timeout} seconds.")
