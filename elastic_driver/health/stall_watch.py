"""Reports of a job's stalls: while they last, and when they are over.

Owns since when the round trains, and the reported stall. :mod:`elastic_driver.health.stalls` defines a stall.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_driver.core.standing import JobActivity, standing_of
from elastic_driver.core.state import State
from elastic_driver.health.findings import Stalled, StallEnded
from elastic_driver.health.hangs import HangWatch
from elastic_driver.health.stalls import Stall


class StallWatch:
    """Watches whether the round makes progress at all.

    Args:
        hangs: has the observations of the workers.

    Attributes:
        stall: the reported one; None while the round makes progress.
    """

    def __init__(self, hangs: HangWatch) -> None:
        self._hangs = hangs
        self.stall: Stall | None = None
        self._trains_since: float | None = None  # None while it does not train

    def change(self, state: State, now: float, *, is_replaced: bool) -> list[Stalled | StallEnded]:
        """Apply a step of the core, which may end a round: report its stall first.

        Args:
            state: the job, after the step.
            now: the job's time, seconds.
            is_replaced: whether another round has begun.
        """
        doing = standing_of(state).doing
        trains = doing is JobActivity.TRAINING
        found: list[Stalled | StallEnded] = []
        if (is_replaced or not trains) and self._trains_since is not None:
            is_broken = is_replaced or doing in (JobActivity.FORMING, JobActivity.WAITING_FOR_SLOTS)
            stall = self._find(state, now, self._trains_since, is_broken=is_broken)
            found = ([] if stall is None else self._begin(stall, now)) + self._end(now, resumed=False)
            self._trains_since = None
        if trains and self._trains_since is None:
            self._trains_since = now
        return found

    def look(self, state: State, now: float) -> list[Stalled | StallEnded]:
        """Return new findings. To be called twice a second."""
        if self._trains_since is None:
            return []
        stall = self._find(state, now, self._trains_since)
        return self._end(now, resumed=True) if stall is None else self._begin(stall, now)

    def _find(self, state: State, now: float, since: float, *, is_broken: bool = False) -> Stall | None:
        stall = self._hangs.stall(now, lost=[silence.hostname for silence in state.silent], is_broken=is_broken)
        return stall if stall is None or stall.since >= since else replace(stall, since=since)

    def _begin(self, stall: Stall, now: float) -> list[Stalled | StallEnded]:
        """Begin a stall, or update the workers that a known one waits for."""
        if self.stall is None:
            self.stall = stall
            return [Stalled(now - stall.since, stall.waits_for)]
        if stall.waits_for:
            self.stall = replace(self.stall, waits_for=stall.waits_for)
        return []

    def _end(self, now: float, *, resumed: bool) -> list[Stalled | StallEnded]:
        stall, self.stall = self.stall, None
        return [] if stall is None else [StallEnded(now - stall.since, stall.waits_for, resumed)]
