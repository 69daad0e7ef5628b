"""How far a script says that it has come, how fast, and what that leaves.

Owns the arithmetic, and what counts as known. Pure: the time is told. Scripts say it by ``checkpoint_point(step=...,
total=...)``; nothing here counts for a decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

# A speed is that of so long, seconds: changes of the membership change it.
_SPAN_S = 120.0
# Of less than that nobody can tell a speed.
_LEAST_S = 5.0
# What is kept of that: reports come once a second from each worker.
_MOST_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known.

    Attributes:
        step: how far it has come; None when nobody has said.
        total: how far it goes; None when nobody has said.
        per_s: steps a second in the present round; None when that cannot be told yet.
        left_s: the seconds that are left; None when that cannot be told.
    """

    step: int | None = None
    total: int | None = None
    per_s: float | None = None
    left_s: float | None = None

    @property
    def percentage(self) -> int | None:
        """From 0 to 99: that it has come to its end, the job's end says."""
        if self.step is None or not self.total:
            return None
        return max(0, min(99, 100 * self.step // self.total))


class Progress:
    """Of the present round: what was lost with the one before is not progress.

    Attributes:
        newest_commit: the furthest worker's, also when that has ended since.
    """

    def __init__(self) -> None:
        self.newest_commit = 0
        self._round_id = 0
        self._total = 0
        # A script may train several times, from 0 on each time: which of them, and by worker, with its last step.
        self._training = 0
        self._of_workers: dict[Hashable, tuple[int, int]] = {}
        self._samples: deque[tuple[float, int]] = deque(maxlen=_MOST_SAMPLES)

    def begin_round(self, commits: int) -> None:
        """A round goes on from so many commits."""
        self.newest_commit = commits

    def reached(self, commits: int) -> None:
        """A worker has made so many."""
        self.newest_commit = max(self.newest_commit, commits)

    def told(self, worker: Hashable, round_id: int, step: int, total: int, now: float) -> None:
        """A worker has said how far it has come. One that goes back within a round has begun another training.

        Args:
            worker: which.
            round_id: its round; of one that has passed nothing counts.
            step: how far.
            total: how far it goes; 0 when it does not say.
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
        """What is known now."""
        if not self._samples:
            return Estimate(total=self._total or None)
        last_at, step = self._samples[-1]
        while len(self._samples) > 1 and self._samples[0][0] < last_at - _SPAN_S:
            self._samples.popleft()
        first_at, first = self._samples[0]
        # Until now: a job that stands still becomes slower.
        took_s = now - first_at
        per_s = (step - first) / took_s if took_s >= _LEAST_S and step > first else None
        left_s = None
        if per_s is not None and self._total:
            left_s = max(0.0, (self._total - step) / per_s)
        return Estimate(step, self._total or None, per_s, left_s)
