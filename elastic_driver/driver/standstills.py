"""Standstills of the driver's own process, and how their time is booked.

Owns the standstills that are not booked yet. The limits of the job do not run meanwhile:
:mod:`elastic_driver.system.job_clock`.
"""

from __future__ import annotations

import time

from elastic_driver.core.standing import JobActivity, standing_of
from elastic_driver.driver.stepper import Stepper
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.system.job_clock import JobClock

# Workers are observed about once a second: when the first observations after a standstill have come, and when no more
# will come.
_FIRST_LOOKS_S, _NO_LOOKS_S = 1.5, 4.0


class DriverStandstills:
    """Books the standstills of one driver. Used on the event loop only.

    Args:
        stepper: has the state.
        chronicle: reports and books them.
        clock: the job's time.
        table: the last observations of the workers: what they did meanwhile.
    """

    def __init__(self, stepper: Stepper, *, chronicle: Chronicle, clock: JobClock, table: VitalsTable) -> None:
        self._stepper = stepper
        self._chronicle = chronicle
        self._clock = clock
        self._table = table
        # Not booked yet: the duration, when it ended, and the round that trained; 0 for none.
        self._standstills: list[tuple[float, float, int]] = []

    def stood_still(self, stood_s: float) -> None:
        """Record that this process stood still for this long, and continues."""
        self.book(at_once=True)
        self._standstills.append((stood_s, time.monotonic(), self._round_that_trains()))
        self._chronicle.warning(
            f"the driver was suspended for {stood_s:.0f} s: it was stopped, got no CPU time, or waited for a disk; "
            "this time does not count toward any time limit"
        )

    def book(self, *, at_once: bool) -> None:
        """Book the standstills for which the workers' activity is known; or all, at once."""
        while self._standstills:
            stood_s, went_on_at, round_id = self._standstills[0]
            ended_s = time.monotonic() - went_on_at
            trained = round_id > 0 and self._round_that_trains() == round_id and self._went_on(round_id)
            # Observations from meanwhile are read first, and may be old.
            if not at_once and ended_s < (_FIRST_LOOKS_S if trained else _NO_LOOKS_S):
                return
            del self._standstills[0]
            self._chronicle.stood_still(stood_s, ended_s=ended_s, trained=trained)

    def _went_on(self, round_id: int) -> bool:
        """Return whether the workers are known to have trained on in a round meanwhile."""
        return bool(self._table.went_on(round_id, lost_s=self._clock.lost_s))

    def _round_that_trains(self) -> int:
        """Return the number of the round that trains; 0 for none."""
        state = self._stepper.state
        return state.round_id if standing_of(state).doing is JobActivity.TRAINING else 0
