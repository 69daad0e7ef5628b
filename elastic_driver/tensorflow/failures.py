"""What an error of a closure means: whose fault it is, and whether the closure is to run again.

Owns TensorFlow's rules for that, as its own coordinator has them, and their two tolerances. Pure, but for the
environment that is read when it is made.
"""

from __future__ import annotations

import enum
import os
from collections import Counter

import tensorflow as tf

from elastic_driver.tensorflow.private import JUDGED, failed_parameter_servers, is_worker_failure


class Verdict(enum.Enum):
    """What becomes of a closure that has failed."""

    AGAIN = enum.auto()  # it runs again, anywhere
    LOST = enum.auto()  # so it does, and its worker is lost
    FAILED = enum.auto()  # its error is the script's


class Judge:
    """See above. To be used under a lock.

    Args:
        workers: how many there are at first.
    """

    def __init__(self, workers: int) -> None:
        self._ps_limit = int(os.environ.get("TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES", "3"))
        self._timeout_limit = int(os.environ.get("TF_COORDINATOR_IGNORE_TRANSIENT_TIMEOUTS", str(workers // 10)))
        self._ps_failures: Counter[int] = Counter()
        self._timeouts = 0

    def judge(self, error: BaseException, *, cancelled: bool) -> Verdict:
        """What this error of a closure means.

        Args:
            error: of it.
            cancelled: whether it was told to end.
        """
        if not isinstance(error, JUDGED):
            return Verdict.FAILED
        if cancelled and isinstance(error, tf.errors.CancelledError):
            return Verdict.AGAIN
        servers = failed_parameter_servers(error)
        if servers and self._ps_limit > 0:
            # A worker that has lost its way to one for a moment says the same as when that one is gone.
            self._ps_failures.update(servers)
            if all(self._ps_failures[server] < self._ps_limit for server in servers):
                return Verdict.AGAIN
        if isinstance(error, tf.errors.DeadlineExceededError) and self._timeout_limit > 0:
            self._timeouts += 1
            if self._timeouts < self._timeout_limit:
                return Verdict.AGAIN
        if isinstance(error, tf.errors.CancelledError) and "/job:" in str(error):
            # What a lost connection between a worker and a parameter server makes of the steps that used it.
            return Verdict.AGAIN
        return Verdict.LOST if is_worker_failure(error) else Verdict.FAILED
