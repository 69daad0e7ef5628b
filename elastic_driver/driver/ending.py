"""The end of the job: whether it is known, and what it is; and the handler of unexpected errors.

Owns the first end, which the core decides or an error of the driver causes. :mod:`elastic_driver.driver.loop` stops the
running parts.

An unexpected error ends the job, wherever on the loop it occurs: in a task, a timer, a callback. After it nothing is
decided any more.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from typing import Any

from elastic_driver.core.events import DriverFailed, EndJob
from elastic_driver.driver.stepper import Stepper
from elastic_driver.launch.fleet.workers import Workers
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.words import ExitCode


class JobEnd:
    """The end of one job. Used on the event loop only.

    Args:
        stepper: decides nothing any more after an error.
        chronicle: reports errors.
        workers: start no worker any more once the end is known.
        leave: called after an internal error; returns whether another driver is started and takes over the job.

    Attributes:
        is_abandoned: whether the job continues without this driver, and its processes are to be left alone.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        chronicle: Chronicle,
        workers: Workers,
        leave: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stepper = stepper
        self._chronicle = chronicle
        self._workers = workers
        self._leave = leave
        self._end: EndJob | None = None
        self.is_abandoned = False
        self._known = asyncio.Event()

    @property
    def is_known(self) -> bool:
        """Whether the job is over, or about to end."""
        return self._end is not None

    async def wait(self) -> EndJob:
        """Block until the end is known."""
        await self._known.wait()
        assert self._end is not None
        return self._end

    def decided(self, end: EndJob) -> None:
        """Record the end of the job. To be called once, and not after :meth:`crash`."""
        assert self._end is None
        self._stop()
        self._end = end
        self._known.set()

    def crash(self, error: BaseException) -> None:
        """Handle an internal error: report the events that led to it, and end the job or leave it to another driver.

        For the core the job is over at once: no later event has any effect. An error during the end of the job is only
        reported.
        """
        end = self._stepper.fail(error)
        is_first = not self.is_known
        if is_first:
            # The core may have ended the job in the step that failed: that end does not count.
            self.decided(end or EndJob(ExitCode.INTERNAL_ERROR, DriverFailed(repr(error)).message))
        try:
            if is_first:
                self.is_abandoned = self._leave()
                self._chronicle.internal_error(error, list(self._stepper.history))
            else:
                self._chronicle.warning(f"internal error of the driver while the job was ending: {error!r}")
        except Exception:  # it may be the chronicle that fails
            traceback.print_exception(error, file=sys.stderr)

    def abandon(self, why: str, *, is_sure: bool = True) -> None:
        """Decide nothing more: another driver has the job, or may have it, even if it is ending already."""
        has = "has" if is_sure else "may have"
        self._leave_to_another(f"another driver {has} this job: {why}")

    def hand_over(self, why: str) -> None:
        """Decide nothing more: another driver is to take over the job."""
        self._leave_to_another(f"this driver exits and leaves the job to another driver: {why}")

    def _leave_to_another(self, message: str) -> None:
        if self.is_abandoned:
            return
        self.is_abandoned = True
        self._end = EndJob(ExitCode.OTHER_DRIVER, message)
        self._stepper.abandon(self._end)
        self._stop()
        self._known.set()

    def failed_on_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle errors of timers, callbacks and tasks that nothing else has caught: the loop's exception handler."""
        error = context.get("exception")
        if error is None or "transport" in context or "protocol" in context or "socket" in context:
            # Of one connection or pipe, which the loop closes: a peer must not be able to end the job.
            try:
                self._chronicle.warning(f"{context.get('message', 'error')}: {error!r}")
                return
            except Exception as failed:
                error = failed
        self.crash(error)

    def _stop(self) -> None:
        self._workers.job_ends()
