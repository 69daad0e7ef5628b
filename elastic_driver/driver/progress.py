"""A script's progress: how far it has come, its speed, and the time left.

Owns the arithmetic, and what counts as known. Pure: the time is an argument. Scripts report progress by
``checkpoint_point(step=..., total=...)``; no decision depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

# A speed is measured over this time, seconds: changes of the membership change it.
_SPAN_S = 120.0
# A shorter time does not give a speed.
_LEAST_S = 5.0
# Samples within that time: each worker reports once a second.
_MOST_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """The known progress.

    Attributes:
        step: the last step; None if none was reported.
        total: the number of steps; None if it was not reported.
        per_s: steps a second in the current round; None while unknown.
        left_s: the seconds that are left; None if unknown.
    """

    step: int | None = None
    total: int | None = None
    per_s: float | None = None
    left_s: float | None = None

    @property
    def percentage(self) -> int | None:
        """From 0 to 99: only the end of the job means 100."""
        if self.step is None or not self.total:
            return None
        return max(0, min(99, 100 * self.step // self.total))


class Progress:
    """The progress of the current round: what was lost with the one before does not count.

    Attributes:
        newest_commit: that of the furthest worker, even if it has ended since.
    """

    def __init__(self) -> None:
        self.newest_commit = 0
        self._round_id = 0
        self._total = 0
        # A script may train several times, each time from 0: the current training; and by worker, its training and last
        # step.
        self._training = 0
        self._of_workers: dict[Hashable, tuple[int, int]] = {}
        self._samples: deque[tuple[float, int]] = deque(maxlen=_MOST_SAMPLES)

    def begin_round(self, commits: int) -> None:
        """Begin a round that resumes from this number of commits."""
        self.newest_commit = commits

    def reached(self, commits: int) -> None:
        """Record the number of commits of a worker."""
        self.newest_commit = max(self.newest_commit, commits)

    def told(self, worker: Hashable, round_id: int, step: int, total: int, now: float) -> None:
        """Record a worker's progress. A smaller step within a round belongs to another training.

        Args:
            worker: the worker.
            round_id: its round; reports of past ones do not count.
            step: its last step.
            total: the number of steps; 0 if it was not reported.
            now: the time, seconds.
        """
        if round_id < self._round_id:
            return
        if round_id > self._round_id:
            self._round_id, self._training = round_id, 0
            self._of_workers.clear()
            self._samples.clear()
        training, last = self._of_workers.get(worker, (self._training, 0))
        if step < last:
            training += 1
        self._of_workers[worker] = training, step
        if training < self._training:
            return
        if training > self._training:
            self._training, self._total = training, 0
            self._samples.clear()
        self._total = total or self._total
        if not self._samples or step > self._samples[-1][1]:
            self._samples.append((now, step))

    def estimate(self, now: float) -> Estimate:
        """Return the known progress at this time."""
        if not self._samples:
            return Estimate(total=self._total or None)
        last_at, step = self._samples[-1]
        while len(self._samples) > 1 and self._samples[0][0] < last_at - _SPAN_S:
            self._samples.popleft()
        first_at, first = self._samples[0]
        # Measured until now: the speed of a job at a standstill decreases.
        took_s = now - first_at
        per_s = (step - first) / took_s if took_s >= _LEAST_S and step > first else None
        left_s = None
        if per_s is not None and self._total:
            left_s = max(0.0, (self._total - step) / per_s)
        return Estimate(step, self._total or None, per_s, left_s)
