"""Who is frozen or hangs: looks at the heartbeats when it is time to, and reports whom they show.

Owns the heartbeats. Ends nobody: what a hang means, and that the worker is killed for it, is the core's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection

from elastic_driver.core.events import WorkerHung
from elastic_driver.health.heartbeats import Heartbeats
from elastic_driver.hosts import WorkerId

_LATE_S = 0.005


class Supervisor:
    """Watches over the workers of one job. Used on the event loop only.

    Args:
        heartbeats: when each was heard last.
        clock: the job's time, seconds.
        report: takes who hangs.
        works_for_s: for how long a host has been heard without a gap: its workers could not have been heard before.
        debugged: whether a debugger has stopped a worker, which is not blamed for its silence either.
    """

    def __init__(
        self,
        heartbeats: Heartbeats,
        *,
        clock: Callable[[], float],
        report: Callable[[WorkerHung], None],
        works_for_s: Callable[[str], float] = lambda hostname: math.inf,
        debugged: Callable[[WorkerId], bool] = lambda worker: False,
    ) -> None:
        self._debugged = debugged
        self._works_for_s = works_for_s
        self._heartbeats = heartbeats
        self._clock = clock
        self._report = report

    @property
    def interval_s(self) -> float:
        """How often workers are to be heard; 0 for never."""
        return self._heartbeats.interval_s

    def heard(self, worker: WorkerId, progress: int = 0, *, waiting: bool = True) -> None:
        """A worker lives. See :meth:`Heartbeats.heard`."""
        self._heartbeats.heard(worker, progress, waiting=waiting, now=self._clock())

    def alive(self, worker: WorkerId, *, submitted: int = 0, finished: int = 0) -> None:
        """A worker that is watched over lives. See :meth:`Heartbeats.alive`."""
        self._heartbeats.alive(worker, self._clock(), submitted=submitted, finished=finished)

    def forget(self, worker: WorkerId) -> None:
        """From here on its silence is no news."""
        self._heartbeats.forget(worker)

    def forget_all(self, *, but: Collection[WorkerId] = ()) -> None:
        """Likewise for all but these."""
        self._heartbeats.forget_all(but=but)

    async def watch_over(self) -> None:
        """Reports those that are frozen or hang. Runs until it is cancelled."""
        while self.interval_s:
            # A little later than due: clocks are not compared for equality.
            await asyncio.sleep(self._heartbeats.look_in_s(self._clock()) + _LATE_S)
            for worker, reason, silent in self._heartbeats.find(
                self._clock(), audible_s=self._audible_s, debugged=self._debugged
            ):
                self._report(WorkerHung(worker, reason, silent))

    def _audible_s(self, worker: WorkerId) -> float:
        return self._works_for_s(worker.hostname)
