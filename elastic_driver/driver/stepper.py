"""The state of the job, and the one way to change it: events in, commands out.

Owns the state, the queue of workers' reports, the timer of the next deadline, and the last events for the report of an
internal error. What commands mean is its owner's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic_driver.core.events import (
    Command,
    DriverFailed,
    EndJob,
    Event,
    HostLost,
    HostReport,
    HostsReported,
    TimerExpired,
    WorkerReport,
    WorkersReported,
)
from elastic_driver.core.membership import Policy, new_state, next_deadline, step
from elastic_driver.core.state import JobPhase, State
from elastic_driver.words import ExitCode

# How many events are kept for the report of an internal error.
_HISTORY = 1000


class Stepper:
    """Feeds events to the core, one after the other. Used on the event loop only.

    Args:
        policy: the limits of the job.
        clock: the job's time, seconds.
        carry_out: does what the commands of a step say, as of the time of the step.
        on_error: told of what a step or its commands raise.

    Attributes:
        state: the job as it is now.
        history: the last events, and when they came.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        clock: Callable[[], float],
        carry_out: Callable[[Sequence[Command], float], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._clock = clock
        self._carry_out = carry_out
        self._on_error = on_error
        self.state: State = new_state(policy, clock())
        self.history: deque[tuple[float, Event]] = deque(maxlen=_HISTORY)
        self._reports: list[WorkerReport | HostLost] = []
        self._host_reports: list[HostReport] = []
        self._reporting: asyncio.Handle | None = None
        self._busy_until = 0.0
        self._steps = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is decided any more."""
        return self.state.phase is JobPhase.ENDED

    def report(self, report: WorkerReport | HostLost) -> None:
        """Feeds a worker's report, its end, or its host's loss to the core, with others that come at about that time.

        A step costs about as much as the job has workers. When thousands report at once, a step for each would be what
        they wait for; so after a step the loop has as much time for other things as the step took.
        """
        self._reports.append(report)
        self._catch_up_soon()

    def report_host(self, report: HostReport) -> None:
        """Likewise of a host: a network that is cut silences many."""
        self._host_reports.append(report)
        self._catch_up_soon()

    def _catch_up_soon(self) -> None:
        if self._reporting is None:
            loop = asyncio.get_running_loop()
            rest_s = self._busy_until - time.perf_counter()
            take = self.catch_up
            self._reporting = loop.call_later(rest_s, take) if rest_s > 0 else loop.call_soon(take)

    def catch_up(self) -> None:
        """Feeds the reports that have come so far, those of workers first."""
        if self._steps:
            return
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        reports, self._reports = tuple(self._reports), []
        of_hosts, self._host_reports = tuple(self._host_reports), []
        if reports or of_hosts:
            began = time.perf_counter()
            if reports:
                self._step(reports[0] if len(reports) == 1 else WorkersReported(reports))
            if of_hosts:
                self._step(of_hosts[0] if len(of_hosts) == 1 else HostsReported(of_hosts))
            now = time.perf_counter()
            self._busy_until = now + (now - began)

    def post(self, event: Event) -> None:
        """Feeds one event to the core, after the reports before it. Never blocks.

        What comes of a step's commands is fed after all of them: a host that is given up is lost at once.
        """
        if self._steps:
            asyncio.get_running_loop().call_soon(self.post, event)
            return
        self.catch_up()
        self._step(event)

    def set_timer(self) -> None:
        """Has TimerExpired fed at the next deadline. To be called once at the start; each step does so itself."""
        self._cancel_timer()
        deadline = next_deadline(self.state)
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.post, TimerExpired())

    def fail(self, error: BaseException) -> EndJob | None:
        """Feeds an error of the driver's own: of what comes from now on nothing follows.

        Returns:
            The end of the job, which is not carried out; None when the core had ended it before.
        """
        if self.is_over:
            return None
        failed = DriverFailed(repr(error))
        try:
            self.state, _ = step(self.state, failed, self._clock())
        except Exception:  # it may be the core that fails
            self.state = replace(self.state, end=EndJob(ExitCode.INTERNAL_ERROR, failed.message))
        return self.state.end

    def close(self) -> None:
        """Feeds nothing more by itself."""
        self._cancel_timer()
        if self._reporting is not None:
            self._reporting.cancel()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self, event: Event) -> None:
        self._steps = True
        try:
            now = self._clock()
            self.history.append((now, event))
            self.state, commands = step(self.state, event, now)
            self._carry_out(commands, now)
            self.set_timer()
        except Exception as error:
            self._on_error(error)
        finally:
            self._steps = False
