"""The latest vitals of the workers, and the rates derived from two of them.

Owns those of the job's living workers, for the status and all other consumers. Decides nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from elastic_driver.codec import Count, Seconds
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals

# Rates cover about this time.
_WINDOW_S = 5.0
# The workers' activity during a standstill of the driver is determined for those that last this long. Only longer ones
# are reported.
_STANDSTILL_S = 2.0
# A worker that has waited this long in a collective makes no progress.
_WAITS_S = 2.0


@dataclass(frozen=True, slots=True)
class VitalsKept:
    """The counts of a VitalsTable as stored in the journal, for a driver that takes over the job.

    Attributes:
        steps: steps of the job.
        round_id, round_steps: its round at the time, and the number of these steps in it.
        operations, payload_bytes: by kind, of ended processes.
        waited_s: of the same processes.
    """

    steps: Count
    round_id: Count
    round_steps: Count
    operations: dict[str, Count]
    payload_bytes: dict[str, Count]
    waited_s: Seconds


@dataclass(slots=True)
class _Entry:
    vitals: Vitals
    taken_at: float
    past: deque[Vitals] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Rates:
    """The current activity of a worker.

    Attributes:
        steps_per_s: steps of its training; None while unknown.
        cpu: processors that it keeps busy; None while unknown.
    """

    steps_per_s: float | None = None
    cpu: float | None = None


class VitalsTable:
    """The last observation of each worker. Times ``now`` are the job's, seconds.

    Attributes:
        steps: steps of the job so far, including repeated ones.
        known_lost_s: for how long the job's clock had stood still when that was counted.
    """

    def __init__(self) -> None:
        self.known_lost_s = 0.0
        self._before: dict[WorkerId, Vitals] = {}  # the last observations before the driver stood still
        self._entries: dict[WorkerId, _Entry] = {}
        # Totals of ended processes.
        self._past_operations: Counter[str] = Counter()
        self._past_bytes: Counter[str] = Counter()
        self._past_waited_s = 0.0
        # Steps of the job: those before the current round, and each member's count when it began.
        self.steps = self._steps_before = 0
        self._round_id = 0
        self._begun_at: dict[WorkerId, int] = {}
        self._taken_over = 0  # steps of the current round that another driver has counted

    def kept(self) -> VitalsKept:
        """Return the counts, for the journal."""
        return VitalsKept(
            self.steps,
            self._round_id,
            self.steps - self._steps_before,
            dict(self._past_operations),
            dict(self._past_bytes),
            self._past_waited_s,
        )

    def go_on(self, kept: VitalsKept) -> None:
        """Continue from the counts of a driver that has died. Must be called first.

        Steps of its round's members since then do not count: their counts at the beginning of the round are unknown.
        """
        self.steps, self._round_id, self._taken_over = kept.steps, kept.round_id, kept.round_steps
        self._steps_before = kept.steps - kept.round_steps
        self._past_operations, self._past_bytes = Counter(kept.operations), Counter(kept.payload_bytes)
        self._past_waited_s = kept.waited_s

    def take(self, worker: WorkerId, vitals: Vitals, now: float, *, lost_s: float = 0.0) -> bool:
        """Record an observation of a worker.

        Args:
            worker: the worker.
            vitals: what its agent has observed.
            now: when it came.
            lost_s: for how long the job's clock has stood still so far.

        Returns:
            Whether it is later than the last observation of the worker. Otherwise it is dropped.
        """
        if lost_s - self.known_lost_s >= _STANDSTILL_S:
            self._before = dict(self)
        self.known_lost_s = lost_s
        entry = self._entries.get(worker)
        if entry is None:
            entry = self._entries[worker] = _Entry(vitals, now)
        elif vitals.at_s <= entry.vitals.at_s:
            return False
        elif vitals.pid != entry.vitals.pid or vitals.submitted < entry.vitals.submitted:
            # Another process, or another program in it, reports for the worker, with new counts.
            self._keep(entry.vitals)
            entry.past.clear()
        self._count_steps(worker, vitals, entry.past[-1] if entry.past else None)
        entry.vitals, entry.taken_at = vitals, now
        entry.past.append(vitals)
        while len(entry.past) > 2 and vitals.at_s - entry.past[1].at_s >= _WINDOW_S:
            entry.past.popleft()
        return True

    def _count_steps(self, worker: WorkerId, vitals: Vitals, before: Vitals | None) -> None:
        if vitals.round_id > self._round_id:
            self._round_id, self._steps_before = vitals.round_id, self.steps
            self._begun_at.clear()
            self._taken_over = 0
        if vitals.round_id == self._round_id:
            at_first = max(0, vitals.steps - self._taken_over) if self._taken_over else 0
            begun_at = self._begun_at.setdefault(worker, at_first if before is None else before.steps)
            if (before is None and not self._taken_over) or vitals.steps < begun_at:
                begun_at = self._begun_at[worker] = 0  # another process
            self.steps = max(self.steps, self._steps_before + vitals.steps - begun_at)

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that has ended."""
        entry = self._entries.pop(worker, None)
        if entry is not None:
            self._keep(entry.vitals)

    def _keep(self, vitals: Vitals) -> None:
        self._past_waited_s += vitals.waited_s
        for each in vitals.traffic:
            self._past_operations[each.kind] += each.operations
            self._past_bytes[each.kind] += each.payload_bytes

    def of(self, worker: WorkerId) -> Vitals | None:
        """Return the last observation of a worker; None before the first."""
        entry = self._entries.get(worker)
        return None if entry is None else entry.vitals

    def age_s(self, worker: WorkerId, now: float) -> float:
        """Return the age of the last observation of a worker, seconds."""
        return now - self._entries[worker].taken_at

    def went_on(self, round_id: int, *, lost_s: float) -> bool | None:
        """Return whether the workers trained on in a round while the driver last stood still; None if unknown."""
        if lost_s - self.known_lost_s >= _STANDSTILL_S:
            return None  # nothing has come since
        heard = [(old, new) for worker, old in self._before.items() if (new := self.of(worker)) is not old]
        if not heard:
            return None
        return all(
            new is not None
            and (new.pid, new.round_id) == (old.pid, round_id)
            and (new.steps, new.finished) != (old.steps, old.finished)
            and new.waits_s < _WAITS_S
            for old, new in heard
        )

    def rates(self, worker: WorkerId, now: float) -> Rates:
        """Return a worker's rates over the last seconds."""
        entry = self._entries.get(worker)
        if entry is None or len(entry.past) < 2 or self.age_s(worker, now) > _WINDOW_S:
            return Rates()
        first, last = entry.past[0], entry.past[-1]
        took_s = last.at_s - first.at_s
        return Rates(max(0, last.steps - first.steps) / took_s, max(0.0, last.cpu_s - first.cpu_s) / took_s)

    # --- for the status --------------------------------------------------------------------------------------------

    def commits(self, worker: WorkerId) -> int:
        """Return the number of the latest commit that a worker has reported; 0 before the first observation."""
        vitals = self.of(worker)
        return 0 if vitals is None else vitals.commits

    def entry(self, worker: WorkerId, now: float) -> dict[str, object] | None:
        """Return a worker's vitals for the status; None before the first observation."""
        vitals = self.of(worker)
        if vitals is None:
            return None
        age_s, rates = self.age_s(worker, now), self.rates(worker, now)
        return {
            "state": vitals.state,
            "traced": vitals.traced,
            "cpu": _rounded(rates.cpu),
            "rss_bytes": vitals.rss_bytes,
            "steps": vitals.steps,
            "steps_per_s": None if vitals.pulse_s is None else _rounded(rates.steps_per_s),
            "waits_s": round(vitals.waits_s, 3),
            "waited_s": round(vitals.waited_s, 3),
            "commits": vitals.commits,
            "committed_s": _rounded(vitals.committed_s, age_s),
            "pulse_s": _rounded(vitals.pulse_s, age_s),
            "can_dump": vitals.can_dump,
        }

    def summary(self, members: Collection[WorkerId], now: float) -> dict[str, object]:
        """Return the totals of all workers for the status.

        Args:
            members: the members of the current round.
            now: the job's time, seconds.
        """
        operations, payload = Counter(self._past_operations), Counter(self._past_bytes)
        for _, vitals in self:
            for each in vitals.traffic:
                operations[each.kind] += each.operations
                payload[each.kind] += each.payload_bytes
        return {
            "steps_per_s": _rounded(self.steps_per_s(now, members)),
            "steps": self.steps,
            "waiting": self.waiting(now),
            "collectives": [
                {"kind": kind, "operations": operations[kind], "payload_bytes": payload[kind]}
                for kind in sorted(operations)
            ],
            "waited_s": round(self._past_waited_s + sum(vitals.waited_s for _, vitals in self), 3),
        }

    def waiting(self, now: float) -> list[dict[str, object]]:
        """Return the collectives that lack ranks, the oldest first."""
        found = [
            (each.since_s + self.age_s(worker, now), each)
            for worker, vitals in self
            if vitals.rank == 0
            for each in vitals.waiting
        ]
        found.sort(key=lambda item: -item[0])
        return [
            {"name": each.name, "since_s": round(since_s, 3), "missing": list(each.missing)} for since_s, each in found
        ]

    def steps_per_s(self, now: float, workers: Iterable[WorkerId] | None = None) -> float | None:
        """Return the median step rate of these workers, or of all, as far as they report steps; None if none does."""
        known = [
            rate
            for worker in (self._entries if workers is None else workers)
            if (vitals := self.of(worker)) is not None
            and vitals.steps
            and (rate := self.rates(worker, now).steps_per_s) is not None
        ]
        return statistics.median(known) if known else None

    def __iter__(self) -> Iterator[tuple[WorkerId, Vitals]]:
        for worker, entry in self._entries.items():
            yield worker, entry.vitals


def _rounded(value: float | None, age_s: float = 0.0) -> float | None:
    return None if value is None else round(value + age_s, 3)
