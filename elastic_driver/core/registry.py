"""WorkerStateRegistry: the workers expected to report in a round, and their reports. A barrier kept as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from elastic_driver.core.roster import Roster
from elastic_driver.hosts import WorkerId


class WorkerState(StrEnum):
    """What a worker has reported in a round."""

    READY = "READY"  # it asks for the next round
    SUCCESS = "SUCCESS"  # its process ended with exit code 0
    FAILURE = "FAILURE"  # its process ended otherwise, was stopped, or stayed silent for too long


class Record(NamedTuple):
    """The report of a worker."""

    worker: WorkerId
    state: WorkerState


@dataclass(frozen=True, slots=True)
class WorkerStateRegistry:
    """The reports of one round, or of the workers started for the first.

    A value: recording returns a new registry. Nothing blocks inside it; its owner checks :attr:`complete`.

    Attributes:
        expected: the workers that have to report, in rank (or start) order.
        records: the reports, in order of arrival; the last report of a worker counts.
    """

    expected: tuple[WorkerId, ...]
    records: Roster[Record] = field(default_factory=Roster)
    # The set of expected workers, and the number of successes. Derived, and passed on: computed once for each round.
    _known: frozenset[WorkerId] | None = field(default=None, compare=False, repr=False)
    _successes: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self._known is None:
            object.__setattr__(self, "_known", frozenset(self.expected))
        if self._successes is None:
            count = sum(1 for record in self.records if record.state is WorkerState.SUCCESS)
            object.__setattr__(self, "_successes", count)

    def record(self, worker: WorkerId, state: WorkerState) -> WorkerStateRegistry:
        """Record a report. A report of an unexpected worker, or after its process has ended, changes nothing."""
        if self._known is None or worker not in self._known:
            return self
        if self.state_of(worker) in (WorkerState.SUCCESS, WorkerState.FAILURE):
            return self
        successes = self.successes + (state is WorkerState.SUCCESS)
        return replace(self, records=self.records.without(worker).put(Record(worker, state)), _successes=successes)

    def expecting(self, *workers: WorkerId) -> WorkerStateRegistry:
        """Expect these workers too."""
        return replace(self, expected=(*self.expected, *workers), _known=None)

    def without(self, worker: WorkerId) -> WorkerStateRegistry:
        """No longer expect this worker."""
        return replace(
            self,
            expected=tuple(other for other in self.expected if other != worker),
            records=self.records.without(worker),
            _known=None,
            _successes=None,
        )

    @property
    def successes(self) -> int:
        """The number of workers that have ended well."""
        assert self._successes is not None
        return self._successes

    def state_of(self, worker: WorkerId) -> WorkerState | None:
        """Return the report of the worker; None for none yet."""
        record = self.records.find(worker)
        return None if record is None else record.state

    def workers_in(self, state: WorkerState) -> tuple[WorkerId, ...]:
        """Return the workers with this report, in order of arrival."""
        return tuple(worker for worker, reported in self.records if reported is state)

    @property
    def missing(self) -> tuple[WorkerId, ...]:
        """The expected workers that have not reported, in rank order."""
        return tuple(worker for worker in self.expected if self.state_of(worker) is None)

    @property
    def complete(self) -> bool:
        """Whether all expected workers have reported."""
        return len(self.records) == len(self.expected)
