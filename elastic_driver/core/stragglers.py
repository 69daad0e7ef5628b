"""Which workers are slower than the others: by the time that their steps take without waiting.

Owns the scores. Reads no clock and does no I/O: looks at workers come in, findings go out. In a synchronous training
all ranks make as many steps a second; who is slow is the one for whom the others wait. So what counts of a step is a
rank's own time: what it took, less what it has waited in collectives.

Looks come about once a second, and tell when the last step ended: what is between two of them are whole steps. A score
is of a window of 20 steps, or of two looks where those have more. Within it a slow step now and then (a collection of
garbage, a page that comes from the disc) counts for a quarter more than usual, however slow it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals

SLOWER = 1.2
"""Who is slower by this over a window is named: a rank of 1.3 times the median has to be found in 20 of its steps, and
steps differ."""
GONE = 1.1
"""Who is slower by less is a straggler no more; between the two nothing changes."""
FLOOR_S = 0.002
"""Steps that are shorter than this without waiting are scheduling noise: a time slice is 3 ms."""

_WINDOW_STEPS, _WINDOW_LOOKS = 20, 2
_CAP = 1.25
# A worker is named when it is beyond what the others' values, which differ by chance, explain in years.
_SIGMAS = 5.0
# Nearly all of the window has to be slow, if only by this: not a part of it that was very slow.
_ALL_SLOWER, _NEARLY_ALL = 1.05, 0.75
# Of so many members the values tell how much they differ; of fewer only what differs within each, which is little.
_ENOUGH_FOR_SPREAD, _MOST_WITHIN = 8, 0.045


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """A worker is slower than the others.

    Attributes:
        worker, rank: which.
        own_s, median_s: a step without waiting, seconds: its own, and the median of all.
        against_others: the median as a share of its own.
        against_past: its own best as a share of its own.
        steps: in the window.
    """

    worker: WorkerId
    rank: int
    own_s: float
    median_s: float
    against_others: float
    against_past: float
    steps: int


@dataclass(frozen=True, slots=True)
class StragglerGone:
    """It is so no more: why, in words, and for how long it was."""

    worker: WorkerId
    rank: int
    why: str
    took_s: float


@dataclass(slots=True)
class _Member:
    base: Vitals
    is_within: bool = False  # whether the step after the base was begun in this round
    looks: deque[tuple[int, float]] = field(default_factory=deque)  # steps, and their own time in all
    steps: int = 0
    own_s: float | None = None
    best_s: float | None = None
    noise: float = 0.0


class StragglerWatch:
    """The members of a round, and which of them are slow."""

    def __init__(self) -> None:
        self._round_id = 0
        self._ranks: dict[WorkerId, int] = {}
        self._members: dict[WorkerId, _Member] = {}
        self._slow: dict[WorkerId, float] = {}
        self._gone: list[StragglerGone] = []
        self._is_new = False

    def begin(self, round_id: int, ranks: Mapping[WorkerId, int], now: float) -> None:
        """A round begins: its members, and their ranks. What a step takes may be another thing in it."""
        for worker in list(self._slow):
            self._end(worker, "a new round began", now)
        self._round_id, self._ranks, self._members = round_id, dict(ranks), {}

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
        base = member.base
        done = vitals.steps - base.steps
        if done < 1 or vitals.stepped_at_s is None or vitals.at_s <= base.at_s:
            return
        member.base = vitals
        if not member.is_within or base.stepped_at_s is None:
            member.is_within = True  # the meeting of the round was in that
            return
        took_s = vitals.stepped_at_s - base.stepped_at_s
        looks = member.looks
        looks.append((done, max(0.0, took_s - max(0.0, vitals.waited_then_s - base.waited_then_s))))
        member.steps += done
        while len(looks) > _WINDOW_LOOKS and member.steps - looks[0][0] >= _WINDOW_STEPS:
            member.steps -= looks.popleft()[0]
        if member.steps < _WINDOW_STEPS or len(looks) < _WINDOW_LOOKS:
            return
        groups = _per_step(looks)
        cap_s = _CAP * median_low([own_s for _, own_s in groups])
        counted, total_s, square = 0, 0.0, 0.0
        for steps, each_s in groups:
            capped_s = min(each_s, cap_s)
            counted += steps
            total_s += steps * capped_s
            square += steps * capped_s * capped_s
        member.own_s = own_s = total_s / counted
        member.noise = (max(0.0, square / counted - own_s * own_s) / max(1, len(groups) - 1)) ** 0.5
        member.best_s = own_s if member.best_s is None else min(own_s, member.best_s)
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
        limit_s = median_s * max(SLOWER, 1 + _SIGMAS * _spread(ordered, [m for _, _, m in values], median_s))
        least_s = min(limit_s, GONE * median_s)
        slow = [(own_s, worker, member) for own_s, worker, member in values if own_s > least_s]
        slow.sort(key=lambda one: self._ranks[one[1]])
        over = dict.fromkeys(worker for _, worker, _ in slow)
        for worker in [each for each in self._slow if each not in over and each in self._members]:
            self._end(worker, "it is as fast as the others", now)
        for own_s, worker, member in slow:
            if worker in self._slow or own_s < max(limit_s, FLOOR_S) or not trains(worker):
                continue
            groups = _per_step(member.looks)
            if sum(each_s >= _ALL_SLOWER * median_s for _, each_s in groups) < _NEARLY_ALL * len(groups):
                continue
            self._slow[worker] = now
            best_s = member.best_s or own_s
            found.append(
                StragglerFound(
                    worker, self._ranks[worker], own_s, median_s, median_s / own_s, best_s / own_s, member.steps
                )
            )
        found += self._gone
        self._gone = []
        return found

    def _end(self, worker: WorkerId, why: str, now: float) -> None:
        self._gone.append(StragglerGone(worker, self._ranks[worker], why, now - self._slow.pop(worker)))


def _per_step(looks: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of each look its steps, and the own time of one."""
    return [(steps, own_s / steps) for steps, own_s in looks]


def _spread(ordered: Sequence[float], members: Sequence[_Member], median_s: float) -> float:
    """By how much windows differ by chance, as a share of the median."""
    within = sorted(member.noise for member in members)[len(members) // 2] / median_s
    if len(ordered) < _ENOUGH_FOR_SPREAD:
        return min(within, _MOST_WITHIN)
    quarter = len(ordered) // 4
    # Of a normal distribution, between the quarters there are 1.35 standard deviations.
    return (ordered[-1 - quarter] - ordered[quarter]) / 1.35 / median_s
