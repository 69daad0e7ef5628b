"""Stragglers: workers that are slower than the others, by the time of their steps without waiting.

Owns the scores. Reads no clock and does no I/O: observations go in, findings come out. In synchronous training all
ranks make as many steps a second; the slow one is the one that the others wait for. So a step is rated by a rank's own
time: its duration without the waits in collectives.

A worker's page keeps the own times of its last steps, and an observation contains the mean of twenty of them. In that
mean an occasional slow step (a garbage collection, a page that is read from disk) counts for at most a quarter more
than usual, however slow it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elastic_driver.health.findings import StragglerFound, StragglerGone
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import OWN_STEPS, Vitals

SLOWER = 1.2
"""A worker that is slower by this factor over a window is named: a rank of 1.3 times the median has to be found in 20
of its steps, and steps vary."""
GONE = 1.1
"""Below this factor it is no longer a straggler; between the two nothing changes."""
FLOOR_S = 0.002
"""Steps that are shorter than this without waiting are scheduling noise: a time slice is 3 ms."""

# A worker is named when its value is beyond the random variation that the others' values would show in years.
_SIGMAS = 5.0
# The values of this many members show how much they vary; with fewer, only the changes of each member's own values do.
_ENOUGH_FOR_SPREAD = 8
_MOST_CHANGES, _ENOUGH_CHANGES, _MOST_BY_CHANGES = 64, 4, 0.045
# Half of a normal distribution is within this many standard deviations of the mean.
_PROBABLE = 0.6745


@dataclass(slots=True)
class _Member:
    base: Vitals
    own_s: float | None = None
    best_s: float | None = None
    window_s: float = 0.0  # the last value that shares no step with the ones before it
    window_steps: int = 0


class StragglerWatch:
    """The members of a round, and which of them are slow."""

    def __init__(self) -> None:
        self._round_id = 0
        self._ranks: dict[WorkerId, int] = {}
        self._members: dict[WorkerId, _Member] = {}
        self._slow: dict[WorkerId, float] = {}
        self._over: dict[WorkerId, float] = {}  # candidates, and the observation that has shown it
        self._changes: deque[float] = deque(maxlen=_MOST_CHANGES)
        self._gone: list[StragglerGone] = []
        self._is_new = False

    def begin(self, round_id: int, ranks: Mapping[WorkerId, int], now: float) -> None:
        """Begin a round with these members and ranks. Steps may take different times in it."""
        for worker in list(self._slow):
            self._end(worker, "a new round began", now)
        self._round_id, self._ranks, self._members, self._over = round_id, dict(ranks), {}, {}
        self._changes.clear()

    def forget(self, worker: WorkerId, now: float) -> None:
        """Forget a worker that has ended."""
        if worker in self._slow:
            self._end(worker, "it has ended", now)
        self._members.pop(worker, None)

    def take(self, worker: WorkerId, vitals: Vitals) -> None:
        """Record an observation of a worker. One that is not later than the last one changes nothing."""
        if vitals.round_id != self._round_id or worker not in self._ranks:
            return
        member = self._members.get(worker)
        if member is None or member.base.pid != vitals.pid or vitals.steps < member.base.steps:
            if vitals.pulse_s is not None:
                self._members[worker] = _Member(vitals)
            return
        done, member.base = vitals.steps - member.base.steps, vitals
        own_s = vitals.own_s
        if own_s is None or (done < 1 and member.own_s is not None):
            return
        member.own_s = own_s
        member.best_s = own_s if member.best_s is None else min(own_s, member.best_s)
        if vitals.steps - member.window_steps >= OWN_STEPS:
            if member.window_s > 0:
                self._changes.append(abs(own_s - member.window_s) / member.window_s)
            member.window_s, member.window_steps = own_s, vitals.steps
        self._is_new = True

    def look(
        self, now: float, *, trains: Callable[[WorkerId], bool] = lambda worker: True
    ) -> list[StragglerFound | StragglerGone]:
        """Return new stragglers, and those that are no longer slow. To be called about once a second.

        Args:
            now: the present, seconds.
            trains: whether a worker is a member of the current round that trains in it.
        """
        found: list[StragglerFound | StragglerGone] = [*self._gone]
        self._gone = []
        if not self._is_new:
            return found
        self._is_new = False
        values = [(m.own_s, worker, m) for worker, m in self._members.items() if m.own_s is not None]
        # The median of the few values that happen to come first is not that of all.
        if len(values) < 2 or 2 * len(values) <= len(self._ranks):
            return found
        ordered = sorted(own_s for own_s, _, _ in values)
        # Of two, nobody can say which is the slow one; the faster one shows what is possible.
        median_s = ordered[0] if len(ordered) == 2 else ordered[len(ordered) // 2]
        if median_s <= 0:
            return found
        limit_s = median_s * max(SLOWER, 1 + _SIGMAS * self._spread(ordered, median_s))
        least_s = min(limit_s, GONE * median_s)
        slow = [(own_s, worker, member) for own_s, worker, member in values if own_s > least_s]
        slow.sort(key=lambda one: self._ranks[one[1]])
        over = {worker for _, worker, _ in slow}
        before, self._over = self._over, {}
        for worker in [each for each in self._slow if each not in over and each in self._members]:
            self._end(worker, "it is as fast as the others", now)
        for own_s, worker, member in slow:
            if worker in self._slow or own_s < max(limit_s, FLOOR_S) or not trains(worker):
                continue
            self._over[worker] = member.base.at_s
            if before.get(worker, member.base.at_s) == member.base.at_s:
                continue  # another observation has to confirm it
            self._slow[worker] = now
            found.append(
                StragglerFound(
                    worker,
                    self._ranks[worker],
                    own_s,
                    median_s,
                    median_s / own_s,
                    (member.best_s or own_s) / own_s,
                    OWN_STEPS,
                )
            )
        found += self._gone
        self._gone = []
        return found

    def _spread(self, ordered: Sequence[float], median_s: float) -> float:
        """Return the random variation between two members' values, as a share of the median: one standard deviation."""
        if len(ordered) >= _ENOUGH_FOR_SPREAD:
            quarter = len(ordered) // 4
            return (ordered[-1 - quarter] - ordered[quarter]) / (2 * _PROBABLE) / median_s
        if len(self._changes) < _ENOUGH_CHANGES:
            return 0.0
        # Two values of one worker vary as much as those of two workers.
        return min(median(self._changes) / _PROBABLE, _MOST_BY_CHANGES)

    def _end(self, worker: WorkerId, why: str, now: float) -> None:
        self._gone.append(StragglerGone(worker, self._ranks[worker], why, now - self._slow.pop(worker)))
