"""The schedule of samples: at intervals for the event log, and every few seconds for the curves of the page.

Owns these times. :mod:`elastic_driver.health.sampler` takes the samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from elastic_driver.core.state import WorkerPhase, in_phase
from elastic_driver.driver.health import Health
from elastic_driver.driver.stepper import Stepper
from elastic_driver.health.figures import FigureBook
from elastic_driver.health.sampler import Sampled, Sampler
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.page.curves import Curves

LOGGED_S = 10.0
"""Seconds between samples in the event log in a job's first minutes."""
LOGGED_LATER_S = 60.0
"""Seconds between them later."""
_FIRST_S = 600.0
# Seconds between samples for the curves. Each costs some microseconds a worker: with thousands there are fewer.
_DRAWN_S = 2.0
_WORKERS_EACH_S = 400.0


class Samples:
    """Takes the samples of one job. Used on the event loop only.

    Args:
        stepper: has the state.
        health: has the last observations of the workers.
        figures: the training's reported figures.
        chronicle: logs the samples.
        clock: the job's time, seconds.
        curves: the page's curves; None if there is no page.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        health: Health,
        figures: FigureBook,
        chronicle: Chronicle,
        clock: Callable[[], float],
        curves: Curves | None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._stepper = stepper
        self._chronicle = chronicle
        self._clock = clock
        self._figures = figures
        self._wall_clock = wall_clock
        self._logged, self._drawn = Sampler(health.table, clock()), Sampler(health.table, clock())
        self._curves = curves
        self._log_at = self._draw_at = 0.0
        self._plan(clock())

    async def run(self) -> None:
        """Take samples until the job is over."""
        while True:
            await asyncio.sleep(max(0.0, min(self._log_at, self._draw_at) - self._clock()))
            if self._stepper.is_over:
                return
            self.look()

    def look(self) -> None:
        """Take the samples that are due."""
        now = self._clock()
        if self._curves is not None and now >= self._draw_at:
            self._draw(self._curves, now)
        if now >= self._log_at:
            self._chronicle.found(self._take(self._logged, now))
            self._plan(now)

    def last(self) -> None:
        """Take the last samples, as the job ends."""
        now = self._clock()
        if self._curves is not None:
            self._draw(self._curves, now)
        self._chronicle.found(self._take(self._logged, now))

    def _plan(self, now: float) -> None:
        is_new = now - self._stepper.state.began < _FIRST_S
        self._log_at = now + (LOGGED_S if is_new else LOGGED_LATER_S)
        if self._curves is None:
            self._draw_at = float("inf")

    def _draw(self, curves: Curves, now: float) -> None:
        curves.add(self._wall_clock(), self._take(self._drawn, now))
        self._draw_at = now + max(_DRAWN_S, len(self._stepper.state.workers) / _WORKERS_EACH_S)

    def _take(self, sampler: Sampler, now: float) -> Sampled:
        state = self._stepper.state
        members = [record.worker for record in in_phase(state, WorkerPhase.MEMBER)]
        return sampler.take(
            now,
            members,
            workers=len(state.workers),
            figures=self._figures.figures,
            gpu=self._figures.gpu,
            gpu_memory_bytes=self._figures.gpu_memory_bytes,
        )
