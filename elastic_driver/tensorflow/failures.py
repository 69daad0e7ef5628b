"""The classification of closures' errors: which process is at fault, and whether to run the closure again.

Owns the rules of TensorFlow's own coordinator, and their two tolerances. Pure, except that the constructor reads the
environment.
"""

from __future__ import annotations

import enum
import os
from collections import Counter

import tensorflow as tf

from elastic_driver.tensorflow.private import JUDGED, failed_parameter_servers, is_worker_failure


class Verdict(enum.Enum):
    """The consequence of a closure's error."""

    AGAIN = enum.auto()  # the closure runs again, on any worker
    LOST = enum.auto()  # likewise, and its worker is lost
    FAILED = enum.auto()  # the error is raised in the script


class Judge:
    """Classifies the errors of closures. Not thread-safe: use it under a lock.

    Args:
        workers: the initial number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._ps_limit = int(os.environ.get("TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES", "3"))
        self._timeout_limit = int(os.environ.get("TF_COORDINATOR_IGNORE_TRANSIENT_TIMEOUTS", str(workers // 10)))
        self._ps_failures: Counter[int] = Counter()
        self._timeouts = 0

    def judge(self, error: BaseException, *, cancelled: bool) -> Verdict:
        """Classify an error of a closure.

        Args:
            error: the error.
            cancelled: whether the closure was canceled.
        """
        if not isinstance(error, JUDGED):
            return Verdict.FAILED
        if cancelled and isinstance(error, tf.errors.CancelledError):
            return Verdict.AGAIN
        servers = failed_parameter_servers(error)
        if servers and self._ps_limit > 0:
            # A worker reports the same error for a short network failure as for a dead parameter server.
            self._ps_failures.update(servers)
            if all(self._ps_failures[server] < self._ps_limit for server in servers):
                return Verdict.AGAIN
        if isinstance(error, tf.errors.DeadlineExceededError) and self._timeout_limit > 0:
            self._timeouts += 1
            if self._timeouts < self._timeout_limit:
                return Verdict.AGAIN
        if isinstance(error, tf.errors.CancelledError) and "/job:" in str(error):
            # The error of steps that used a lost connection between a worker and a parameter server.
            return Verdict.AGAIN
        return Verdict.LOST if is_worker_failure(error) else Verdict.FAILED
