"""Reports changes in the condition of the job, and of its workers, to the chronicle, for accounting.

Owns what was last reported. Decides nothing: it looks at the state after each step.
"""

from __future__ import annotations

from elastic_driver.core.placement import is_drained
from elastic_driver.core.standing import Standing, standing_of
from elastic_driver.core.state import State, WorkerPhase
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.chronicle import Chronicle


class Standings:
    """Reports one job's changes. Used on the event loop only.

    Args:
        chronicle: takes the reports.
    """

    def __init__(self, chronicle: Chronicle) -> None:
        self._chronicle = chronicle
        self._seen: State | None = None
        self._standing: Standing | None = None
        self._booting: dict[WorkerId, None] = {}
        self._places: frozenset[tuple[str, int | None]] = frozenset()
        self._drained: dict[WorkerId, None] = {}

    def started(self, worker: WorkerId) -> None:
        """Record that a worker's process runs."""
        self._booting[worker] = None

    def exited(self, worker: WorkerId) -> None:
        """Record that it has ended."""
        self._booting.pop(worker, None)
        self._drained.pop(worker, None)

    def look(self, state: State) -> None:
        """Report what has changed. To be called after each step, when its commands have been carried out."""
        # Most reports after a takeover are no news, and this looks at all workers.
        if state is not self._seen:
            self._seen = state
            standing = standing_of(state)
            if standing != self._standing:
                self._standing = standing
                self._chronicle.stands(standing)
        ready = [worker for worker in self._booting if self._is_up(state, worker)]
        if ready:
            for worker in ready:
                del self._booting[worker]
            self._chronicle.workers_ready(ready)
        if state.drained != self._places:
            self._places = state.drained
            self._look_at_places(state)

    @staticmethod
    def _is_up(state: State, worker: WorkerId) -> bool:
        record = state.workers.find(worker)
        return record is not None and record.phase in (WorkerPhase.READY, WorkerPhase.MEMBER)

    def _look_at_places(self, state: State) -> None:
        living = [record.worker for record in state.workers]
        drained = dict.fromkeys(one for one in living if is_drained(state, one.hostname, one.slot))
        new = [worker for worker in drained if worker not in self._drained]
        back = [worker for worker in self._drained if worker not in drained]
        self._drained = drained
        if new:
            self._chronicle.workers_drained(new, undone=False)
        if back:
            self._chronicle.workers_drained(back, undone=True)
