"""Which workers are slower than the others: by the time that their steps take without waiting.

Owns the scores. Reads no clock and does no I/O: looks at workers come in, findings go out. In a synchronous training
all ranks make as many steps a second; who is slow is the one for whom the others wait. So what counts of a step is a
rank's own time: what it took, less what it has waited in collectives.

A worker's page keeps the own times of its last steps, and a look at it tells the mean of twenty of them. In it a slow
step now and then (a collection of garbage, a page that comes from the disc) counts for a quarter more than usual,
however slow it was.
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
"""Who is slower by this over a window is named: a rank of 1.3 times the median has to be found in 20 of its steps, and
steps differ."""
GONE = 1.1
"""Who is slower by less is a straggler no more; between the two nothing changes."""
FLOOR_S = 0.002
"""Steps that are shorter than this without waiting are scheduling noise: a time slice is 3 ms."""

# A worker is named when it is beyond what the others' values, which differ by chance, explain in years.
_SIGMAS = 5.0
# Of so many members the values tell how much they differ; of fewer only how much each differs from its own last one.
_ENOUGH_FOR_SPREAD = 8
_MOST_CHANGES, _ENOUGH_CHANGES, _MOST_BY_CHANGES = 64, 4, 0.045
# Half of the normally distributed are within so many standard deviations of the middle.
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
        self._over: dict[WorkerId, float] = {}  # who may be one, and the look at it that has shown that
        self._changes: deque[float] = deque(maxlen=_MOST_CHANGES)
        self._gone: list[StragglerGone] = []
        self._is_new = False

    def begin(self, round_id: int, ranks: Mapping[WorkerId, int], now: float) -> None:
        """A round begins: its members, and their ranks. What a step takes may be another thing in it."""
        for worker in list(self._slow):
            self._end(worker, "a new round began", now)
        self._round_id, self._ranks, self._members, self._over = round_id, dict(ranks), {}, {}
        self._changes.clear()

    def forget(self, worker: WorkerId, now: float) -> None:
        """It has ended."""
        if worker in self._slow:
            self._end(worker, "it has ended", now)
        self._members.pop(worker, None)

    def take(self, worker: WorkerId, vitals: Vitals) -> None:
        """A look at a worker. One that is not later than the last one changes nothing."""
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
        """Who is a straggler since the last look, or is one no more. To be called about once a second.

        Args:
            now: the present, seconds.
            trains: whether a worker is a member of the present round that trains in it.
        """
        found: list[StragglerFound | StragglerGone] = [*self._gone]
        self._gone = []
        if not self._is_new:
            return found
        self._is_new = False
        values = [(m.own_s, worker, m) for worker, m in self._members.items() if m.own_s is not None]
        # The median of a few that happened to come first is not the others'.
        if len(values) < 2 or 2 * len(values) <= len(self._ranks):
            return found
        ordered = sorted(own_s for own_s, _, _ in values)
        # Of two, which is the slow one nobody can say; the faster one shows what can be had.
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
                continue  # another look has to show it, too
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
        """By how much two members' values differ by chance, as a share of the median: one standard deviation."""
        if len(ordered) >= _ENOUGH_FOR_SPREAD:
            quarter = len(ordered) // 4
            return (ordered[-1 - quarter] - ordered[quarter]) / (2 * _PROBABLE) / median_s
        if len(self._changes) < _ENOUGH_CHANGES:
            return 0.0
        # Twice the same worker's differ as two workers' do.
        return min(median(self._changes) / _PROBABLE, _MOST_BY_CHANGES)

    def _end(self, worker: WorkerId, why: str, now: float) -> None:
        self._gone.append(StragglerGone(worker, self._ranks[worker], why, now - self._slow.pop(worker)))
