"""How long a process that leaves its round waits for the others.

Owns the decision only; context.py asks for it and acts on it.
"""

from __future__ import annotations


class Patience:
    """Runs out when no operation has finished for a while.

    Args:
        limit_s: how long that is.
        operation_s: how long one operation may take before it counts as stuck.
        now: as of time.monotonic(), like all points in time here.
    """

    def __init__(self, limit_s: float, operation_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._operation_s = max(operation_s, limit_s)
        self._finished = 0
        self._since = now  # when the last operation finished, as far as known

    def is_over(self, now: float, *, finished: int, carries_out: bool) -> bool:
        """Return whether to stop waiting.

        Args:
            now: the time.
            finished: operations of this process that are over; each one is a reason to wait for the next.
            carries_out: whether an operation is running. It is not abandoned half done, but is not progress either: a
                process that has joined runs those of others for as long as they train.
        """
        if finished > self._finished:
            self._finished = finished
            self._since = now
        return now - self._since >= (self._operation_s if carries_out else self._limit_s)
