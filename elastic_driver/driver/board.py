"""The workers' vitals as they came last, and the rates that follow from two of them.

Owns those of the job's living workers. Decides nothing, and asks nobody: agents send them, and
who wants to know reads them here.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals

# Rates are of what happened in about this time.
_WINDOW_S = 5.0


@dataclass(slots=True)
class _Entry:
    vitals: Vitals
    taken_at: float
    past: deque[Vitals] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a worker does now.

    Attributes:
        steps_per_s: of its training; None while it is not known.
        cpu: processors that it keeps busy; None while it is not known.
    """

    steps_per_s: float | None = None
    cpu: float | None = None


class Board:
    """See above. Used on the event loop only.

    Args:
        clock: the job's time, seconds.
        on_vitals: told of each look at a worker, once it stands here.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_vitals: Callable[[WorkerId, Vitals, float], None] = lambda worker, vitals, now: None,
    ) -> None:
        self._clock = clock
        self.on_vitals = on_vitals
        self._entries: dict[WorkerId, _Entry] = {}

    def take(self, worker: WorkerId, vitals: Vitals) -> None:
        """An agent has looked at a worker. A look that is not later than the last one is dropped."""
        now = self._clock()
        entry = self._entries.get(worker)
        if entry is None:
            entry = self._entries[worker] = _Entry(vitals, now)
        elif vitals.at_s <= entry.vitals.at_s:
            return
        elif vitals.pid != entry.vitals.pid:  # another process speaks for it, whose counts begin anew
            entry.past.clear()
        entry.vitals, entry.taken_at = vitals, now
        entry.past.append(vitals)
        while len(entry.past) > 2 and vitals.at_s - entry.past[1].at_s >= _WINDOW_S:
            entry.past.popleft()
        self.on_vitals(worker, vitals, now)

    def forget(self, worker: WorkerId) -> None:
        """The worker has ended."""
        self._entries.pop(worker, None)

    def of(self, worker: WorkerId) -> Vitals | None:
        """The last look at a worker; None before the first."""
        entry = self._entries.get(worker)
        return None if entry is None else entry.vitals

    def age_s(self, worker: WorkerId) -> float:
        """How long ago the last look at a worker came, seconds."""
        return self._clock() - self._entries[worker].taken_at

    def rates(self, worker: WorkerId) -> Rates:
        """What it did in the last seconds."""
        entry = self._entries.get(worker)
        if entry is None or len(entry.past) < 2:
            return Rates()
        first, last = entry.past[0], entry.past[-1]
        took_s = last.at_s - first.at_s
        return Rates(max(0, last.steps - first.steps) / took_s, max(0.0, last.cpu_s - first.cpu_s) / took_s)

    def steps_per_s(self) -> float | None:
        """The median of what the workers do that tell of steps; None where none does."""
        known = [
            rate
            for worker, entry in self._entries.items()
            if entry.vitals.steps and (rate := self.rates(worker).steps_per_s) is not None
        ]
        return statistics.median(known) if known else None

    def __iter__(self) -> Iterator[tuple[WorkerId, Vitals]]:
        for worker, entry in self._entries.items():
            yield worker, entry.vitals
