"""The line that shows the job's condition; and, for users without one, reports of long waits.

Owns the times of these. The core (:mod:`elastic_driver.core.explain`) and the chronicle word them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic_driver.core.state import JobPhase
from elastic_driver.driver.health import Health
from elastic_driver.driver.standstills import DriverStandstills
from elastic_driver.driver.status import JobStatus
from elastic_driver.driver.stepper import Stepper
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.status_line import figures
from elastic_driver.words import NoticeKind

# A start imports PyTorch, and a step may be long: how many times longer it is usual to wait for these.
_START_PATIENCE, _COMMIT_PATIENCE = 3.0, 12.0
# The status line counts seconds; updated twice as often, so that it skips none.
_TICK_S = 0.5


class StatusLine:
    """Updates the status line of one job. Used on the event loop only.

    Args:
        stepper: has the state.
        chronicle: shows the line.
        clock: the job's time, seconds.
        status: explains the condition of the job.
        health: has the suspected hangs, and the workers' progress.
        standstills: those of this process, booked while the line is updated.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        chronicle: Chronicle,
        clock: Callable[[], float],
        status: JobStatus,
        health: Health,
        standstills: DriverStandstills,
    ) -> None:
        self._stepper = stepper
        self._chronicle = chronicle
        self._clock = clock
        self._status = status
        self._health = health
        self._standstills = standstills
        self._phase = stepper.state.phase  # as of the last step

    async def run(self) -> None:
        """Update the clock and the countdowns of the line; without a line, report long waits."""
        while not self._stepper.is_over:
            now = self._clock()
            self._note_wait(now)
            self._standstills.book(at_once=False)
            due = self._chronicle.look(now)
            if due or self._chronicle.live:
                text = self._status.explained()
                if due:
                    self._chronicle.still_waiting(text, now)
                else:
                    self._chronicle.status(text, self._figures())
            await asyncio.sleep(_TICK_S)

    def after_step(self, now: float, *, has_commands: bool) -> None:
        """Update the line. To be called after each step, when its commands have been carried out."""
        self._note_wait(now)
        before, self._phase = self._phase, self._stepper.state.phase
        if self._chronicle.live and (before is not self._phase or has_commands):
            self._chronicle.status(self._status.explained(), self._figures())

    def _note_wait(self, now: float) -> None:
        """Note whether there is a wait that should be reported repeatedly to users without a status line."""
        state = self._stepper.state
        what, patience = "", 1.0
        match state.phase:
            case JobPhase.WAITING | JobPhase.RESETTING:
                what = state.phase.value
            case JobPhase.STARTING:
                what, patience = state.phase.value, _START_PATIENCE
            case JobPhase.RUNNING if self._health.stall:
                what = "stall"
            case JobPhase.RUNNING if state.discovery.outage is not None:
                what = "discovery"
            case JobPhase.RUNNING if state.notice_kind is NoticeKind.HOSTS_UPDATED:
                what, patience = "commit", _COMMIT_PATIENCE
        self._chronicle.waits(now, what, patience=patience)

    def _figures(self) -> tuple[str, ...]:
        """Return the figures after the line's sentence."""
        if self._stepper.state.phase is not JobPhase.RUNNING:
            return ()
        return figures(
            steps_per_s=self._health.table.steps_per_s(self._clock()),
            steps=self._health.table.steps,
            commits=self._status.newest_commit(),
            suspected=self._health.suspected,
        )
