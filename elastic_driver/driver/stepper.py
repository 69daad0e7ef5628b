"""The state of the job, and the one way to change it: events in, commands out.

Owns the state, the queue of workers' reports, the timer of the next deadline, and the last events for the report of an
internal error. Its owner carries out commands.

With a journal a step is on disk before it is visible, and before its commands are carried out:

    event ─► step() ─► journal ──disk──► state, commands carried out ─► next event

Reports and events that arrive during a write (:mod:`elastic_driver.driver.write_ahead`) wait, and go into the next one
together. A caller that needs the outcome of an event awaits :meth:`Stepper.settled`. An end needs no journal: if the
disk does not respond the job can be ended all the same, and nothing is written for a job that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from elastic_driver.core.events import (
    Command,
    DriverFailed,
    EndJob,
    Event,
    HostLost,
    HostReport,
    HostsReported,
    StopRequested,
    TimerExpired,
    WorkerReport,
    WorkersReported,
)
from elastic_driver.core.membership import Policy, new_state, next_deadline, step
from elastic_driver.core.state import JobPhase, State
from elastic_driver.driver.write_ahead import WriteAhead
from elastic_driver.journal.journal import Step
from elastic_driver.words import ExitCode

# How many events are kept for the report of an internal error.
_HISTORY = 1000


class Stepper:
    """Feeds events to the core, one after the other. Used on the event loop only.

    Args:
        policy: the limits of the job.
        clock: the job's time, seconds.
        carry_out: carries out the commands of a step, as of the time of the step.
        on_error: called with an error that a step or its commands raise.
        ahead: writes steps to disk; None for jobs without a journal.
        state: the initial state, including the policy; None for a new job.

    Attributes:
        state: the current state of the job.
        history: the last events, with their times.
        made_at: the time of the last visible step; None before the first.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        clock: Callable[[], float],
        carry_out: Callable[[Sequence[Command], float], None],
        on_error: Callable[[Exception], None],
        ahead: WriteAhead | None = None,
        state: State | None = None,
    ) -> None:
        self._clock = clock
        self._carry_out = carry_out
        self._on_error = on_error
        self._ahead = ahead  # also None as soon as the job has ended
        self._journal = ahead
        if ahead is not None:
            ahead.serve(self)
        self.state: State = state or new_state(policy, clock())
        self.history: deque[tuple[float, Event]] = deque(maxlen=_HISTORY)
        self.made_at: float | None = None
        self._reports: list[WorkerReport | HostLost] = []
        self._host_reports: list[HostReport] = []
        self._reporting: asyncio.Handle | None = None
        self._busy_until = 0.0  # by the job's clock
        self._steps = False
        self._timer: asyncio.TimerHandle | None = None
        # Events that wait for the next write.
        self._posted: list[Event] = []
        self._timer_expired = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is decided any more."""
        return self.state.phase is JobPhase.ENDED

    @property
    def coming(self) -> State:
        """The state of the job once the current write is on disk."""
        steps = None if self._ahead is None else self._ahead.under_way
        return steps[-1].state if steps else self.state

    @property
    def trouble(self) -> str:
        """What prevents the journal from being written, in words; "" for nothing."""
        return "" if self._ahead is None else self._ahead.trouble

    @property
    def _writes(self) -> bool:
        return self._ahead is not None and self._ahead.under_way is not None

    def report(self, report: WorkerReport | HostLost) -> None:
        """Feed a worker's report, its end, or its host's loss to the core, together with others at about that time.

        The cost of a step grows with the number of workers. If thousands report at once, a step for each would
        dominate; so after a step the loop has as much time for other work as the step took.
        """
        self._reports.append(report)
        self._has_come()

    def report_host(self, report: HostReport) -> None:
        """Feed a host's report, together with others: a network cut silences many hosts."""
        self._host_reports.append(report)
        self._has_come()

    def _has_come(self) -> None:
        if self._ahead is not None:
            self._ahead.keeping.comes()
        self._catch_up_soon()

    def _catch_up_soon(self) -> None:
        if self._reporting is None and not self._writes:
            loop = asyncio.get_running_loop()
            rest_s = self._busy_until - self._clock()
            take = self.catch_up
            self._reporting = loop.call_later(rest_s, take) if rest_s > 0 else loop.call_soon(take)

    def catch_up(self) -> None:
        """Feed the reports that have arrived so far, those of workers first."""
        if self._writes:
            self._cancel_reporting()  # they are fed when the write ends
        elif not self._steps:
            self._feed()

    def post(self, event: Event) -> None:
        """Feed one event to the core, after the reports before it. Never blocks.

        Events that follow from a step's commands are fed after all of the commands: a host that is given up is lost at
        once.
        """
        if self._steps:
            asyncio.get_running_loop().call_soon(self.post, event)
            return
        if self._ahead is None:
            self.catch_up()
            self._step(event)
            return
        if isinstance(event, TimerExpired):
            self._timer_expired = True
        else:
            self._ahead.keeping.comes()
            self._gather()
            self._posted.append(event)
        if not self._writes:
            self._feed()
        elif self._ahead.trouble:
            self.late()

    def begin(self) -> None:
        """Begin the journal, if there is one: nothing is carried out before that. To be called once."""
        if self._ahead is not None:
            self._write(self._ahead, self._gathered())

    async def settled(self) -> None:
        """Block until all arrived events are fed and visible: then the state includes everything known.

        Without a journal that is immediate.
        """
        self.catch_up()
        while self._ahead is not None and self._writes:
            await self._ahead.wait()
            self.catch_up()

    async def fenced(self) -> None:
        """Block as settled() does, until it is certain that no other driver has had the job; if one has, it has ended.

        For actions that outlast the job's processes, and must not be done by two drivers.
        """
        await self.settled()
        if self._ahead is not None:
            await self._ahead.look()

    def set_timer(self) -> None:
        """Set the timer for TimerExpired at the next deadline. To be called at the start; each step does it itself."""
        self._cancel_timer()
        deadline = next_deadline(self.state)
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.post, TimerExpired())

    def fail(self, error: BaseException) -> EndJob | None:
        """Feed an error of the driver's own: later events have no effect.

        Returns:
            The end of the job, which is not carried out; None if the core had ended it before.
        """
        if self.is_over:
            return None
        failed = DriverFailed(repr(error))
        if self._ahead is not None:
            # Whatever led to the error is to be sent again.
            self._ahead.drop()
            self._ahead = None
        try:
            self.state, _ = step(self.state, failed, self._clock())
        except Exception:  # it may be the core that fails
            self._end(failed.message)
        return self.state.end

    def abandon(self, end: EndJob) -> None:
        """Stop, since another driver has the job: later events have no effect, and nothing is written."""
        if self._journal is not None:
            # Even if the job is ending already: what happens to agents meanwhile is for the next driver to write.
            self._journal.abandon()
        self._ahead = None
        self.state = replace(self.state, end=end)
        self.close()

    def close(self) -> None:
        """Feed nothing more automatically, and make nothing more visible."""
        self._cancel_timer()
        if self._ahead is not None:
            self._ahead.drop()
        self._cancel_reporting()

    def _cancel_reporting(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, why: str) -> EndJob:
        end = EndJob(ExitCode.INTERNAL_ERROR, why)
        self.state = replace(self.state, end=end)
        return end

    # --- steps -----------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Feed what has arrived."""
        self._cancel_reporting()
        events = self._gathered()
        if not events:
            return
        if self._ahead is not None:
            self._write(self._ahead, events)
            return
        began = self._clock()
        for event in events:
            self._step(event)
        self._rest(began)

    def _gathered(self) -> list[Event]:
        """Return the arrived events, in order; of simultaneous ones the workers' reports first, and the timer last.

        So a worker that has reported in time is not late, however long the disk has delayed its report.
        """
        self._gather()
        events, self._posted = self._posted, []
        if self._timer_expired:
            self._timer_expired = False
            events.append(TimerExpired())
        return events

    def _gather(self) -> None:
        reports, self._reports = tuple(self._reports), []
        of_hosts, self._host_reports = tuple(self._host_reports), []
        if reports:
            self._posted.append(reports[0] if len(reports) == 1 else WorkersReported(reports))
        if of_hosts:
            self._posted.append(of_hosts[0] if len(of_hosts) == 1 else HostsReported(of_hosts))

    def _step(self, event: Event) -> None:
        with self._stepping():
            now = self._clock()
            self.history.append((now, event))
            self.state, commands = step(self.state, event, now)
            self.made_at = now
            self._carry_out(commands, now)
            self.set_timer()

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Defer events that are posted meanwhile; report errors."""
        self._steps = True
        try:
            yield
        except Exception as error:
            self._on_error(error)
        finally:
            self._steps = False

    def _rest(self, began: float) -> None:
        """Leave as much time to other work as this has taken."""
        now = self._clock()
        self._busy_until = max(self._busy_until, now + (now - began))

    # --- with a journal (Maker) ------------------------------------------------------------------------------------

    def _write(self, ahead: WriteAhead, events: Sequence[Event]) -> None:
        """Make a step of each event, and write all steps. A step that raises is not in the journal."""
        steps: list[Step] = []
        state, failed = self.state, None
        all_began = self._clock()
        for event in events:
            now, began = self._clock(), time.perf_counter()
            self.history.append((now, event))
            try:
                state, commands = step(state, event, now)
            except Exception as error:
                failed = error
                break
            steps.append(Step(now, event, state, commands, time.perf_counter() - began))
        self._rest(all_began)
        ahead.write(self._clock(), state, steps)
        if failed is not None:
            self._on_error(failed)

    def make(self, steps: Sequence[Step]) -> None:
        """Make steps visible, and carry out their commands; errors of these end the job. See Maker.

        The time that the disk took was available for other work.
        """
        began = self._clock()
        with self._stepping():
            for each in steps:
                self.state, self.made_at = each.state, each.clock
                self._carry_out(each.commands, each.clock)
                if self.state is not each.state:
                    return  # an error has ended the job, and it stays ended
            self.set_timer()
        self._rest(began)
        if self.is_over and self._ahead is not None:
            self._ahead.end()
            self._ahead = None

    def go_on(self) -> None:
        """Feed what has arrived during the write."""
        if self._posted or self._timer_expired:
            self._feed()
        elif self._reports or self._host_reports:
            self._catch_up_soon()

    def late(self) -> None:
        """Carry out an end that waits for the disk, if there is one; it may be behind other events."""
        assert self._ahead is not None
        steps = self._ahead.under_way
        stop = next((event for event in self._posted if isinstance(event, StopRequested)), None)
        if steps and steps[-1].state.ended:
            self._end_without_journal()
            self.make(steps)
        elif stop is not None:
            self._posted.remove(stop)
            self._end_without_journal()
            self._step(stop)
        else:
            return
        self._feed()

    def lost(self, why: str) -> None:
        """End the job, since the journal cannot be written."""
        self._end_without_journal()
        with self._stepping():
            self._carry_out((self._end(why),), self._clock())
        self._feed()

    def failed(self, error: Exception) -> None:
        """Report an error of the journal."""
        self._on_error(error)

    def _end_without_journal(self) -> None:
        """Drop steps that are not on disk."""
        assert self._ahead is not None
        self._ahead.give_up()
        self._ahead = None
