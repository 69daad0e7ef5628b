"""The state of the job, and the one way to change it: events in, commands out.

Owns the state, the queue of workers' reports, the timer of the next deadline, and the last events for the report of an
internal error. What commands mean is its owner's.

With a journal a step is on disc before it is visible, and before its commands are carried out:

    event ─► step() ─► journal ──disc──► state, commands carried out ─► next event

One write is under way. Reports and events that come meanwhile wait, and go into the next one together. Whoever has to
know what has become of an event awaits :meth:`Stepper.settled`. An end needs no journal: where the disc does not answer
the job can be ended all the same, and of a job that has ended nothing is written.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from elastic_driver.journal.folder import JournalHeldError
from elastic_driver.journal.journal import Journal, Step
from elastic_driver.system.job_clock import CallLater, Timer
from elastic_driver.words import ExitCode, in_seconds

# How many events are kept for the report of an internal error.
_HISTORY = 1000
# A write that takes longer is told of, and an end waits for it no longer. A busy disc takes a hundredth of that.
_LATE_S = 2.0


@dataclass(frozen=True, slots=True)
class WriteAhead:
    """That steps are on disc before they are visible.

    Attributes:
        journal: where they are written.
        limit_s: the job ends when an event has waited for so long.
        call_later: measures that, on the job's clock.
        tell: is told when the disc does not answer, and when it does again.
    """

    journal: Journal
    limit_s: float
    call_later: CallLater
    tell: Callable[[str], object]


class Stepper:
    """Feeds events to the core, one after the other. Used on the event loop only.

    Args:
        policy: the limits of the job.
        clock: the job's time, seconds.
        carry_out: does what the commands of a step say, as of the time of the step.
        on_error: told of what a step or its commands raise.
        ahead: how steps get on disc; None for jobs without a journal.
        state: what to begin with, policy and all; None for a new job.

    Attributes:
        state: the job as it is now.
        history: the last events, and when they came.
        trouble: what keeps the journal from being written, in words; "" for nothing.
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
        self._ahead = ahead
        self.state: State = state or new_state(policy, clock())
        self.history: deque[tuple[float, Event]] = deque(maxlen=_HISTORY)
        self._reports: list[WorkerReport | HostLost] = []
        self._host_reports: list[HostReport] = []
        self._reporting: asyncio.Handle | None = None
        self._busy_until = 0.0
        self._steps = False
        self._timer: asyncio.TimerHandle | None = None
        # Of what is not visible yet.
        self._posted: list[Event] = []
        self._timer_expired = False
        self._under_way: Sequence[Step] | None = None
        self._settled: list[asyncio.Future[None]] = []
        self._limits: list[Timer] = []
        self.trouble = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing is decided any more."""
        return self.state.phase is JobPhase.ENDED

    @property
    def coming(self) -> State:
        """The job as it is when what is under way is on disc."""
        return self._under_way[-1].state if self._under_way else self.state

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
        if self._reporting is None and self._under_way is None:
            loop = asyncio.get_running_loop()
            rest_s = self._busy_until - time.perf_counter()
            take = self.catch_up
            self._reporting = loop.call_later(rest_s, take) if rest_s > 0 else loop.call_soon(take)

    def catch_up(self) -> None:
        """Feeds the reports that have come so far, those of workers first."""
        if self._under_way is not None:
            self._cancel_reporting()  # they are looked for when it is written
        elif not self._steps:
            self._go_on()

    def post(self, event: Event) -> None:
        """Feeds one event to the core, after the reports before it. Never blocks.

        What comes of a step's commands is fed after all of them: a host that is given up is lost at once.
        """
        if self._steps:
            asyncio.get_running_loop().call_soon(self.post, event)
            return
        if self._ahead is None or self.is_over:
            self.catch_up()
            self._step(event)
        else:
            self._wait(event)
            if self._under_way is None:
                self._go_on()

    def begin(self) -> None:
        """Has the journal begun, if there is one: nothing is carried out before that. To be called once."""
        if self._ahead is not None:
            self._ahead.journal.on_error = self._facts_failed
            self._write_ahead(self._ahead, ())

    async def settled(self) -> None:
        """Blocks until all that has come is fed, and visible: whoever looks at the state then sees all that there is.

        Without a journal that is so at once.
        """
        self.catch_up()
        while self._under_way is not None:
            future = asyncio.get_running_loop().create_future()
            self._settled.append(future)
            await future
            self.catch_up()

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
        self._wait_no_more()
        return self.state.end

    def close(self) -> None:
        """Feeds nothing more by itself, and makes nothing more visible."""
        self._cancel_timer()
        self._wait_no_more()
        self._cancel_reporting()

    def _cancel_reporting(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_on(self) -> None:
        """Feeds what has come."""
        self._cancel_reporting()
        events = self._gathered()
        if not events:
            return
        if self._ahead is not None and not self.is_over:
            self._write_ahead(self._ahead, events)
            return
        began = time.perf_counter()
        for event in events:
            self._step(event)
        now = time.perf_counter()
        self._busy_until = now + (now - began)

    def _gathered(self) -> list[Event]:
        """What has come, in its order; of what has come together the reports of workers are first, and the timer is
        last: who has reported in time is not late, however long the disc has kept that waiting.
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

    # --- with a journal --------------------------------------------------------------------------------------------

    def _wait(self, event: Event) -> None:
        """Has an event wait for the next write, behind the reports before it."""
        if isinstance(event, TimerExpired):
            self._timer_expired = True
            return
        self._gather()
        self._posted.append(event)
        if self.trouble and isinstance(event, StopRequested):
            self._end_without_journal()

    def _write_ahead(self, ahead: WriteAhead, events: Sequence[Event]) -> None:
        """Makes a step of each, and has all of them written. One that raises is not in the journal."""
        steps: list[Step] = []
        state, failed = self.state, None
        for event in events:
            now, began = self._clock(), time.perf_counter()
            self.history.append((now, event))
            try:
                state, commands = step(state, event, now)
            except Exception as error:
                failed = error
                break
            steps.append(Step(now, event, state, commands, time.perf_counter() - began))
        self._busy_until = time.perf_counter() + sum(each.took_s for each in steps)
        self._under_way = steps
        self._limits = [
            ahead.call_later(min(_LATE_S, ahead.limit_s / 2), self._is_late),
            ahead.call_later(ahead.limit_s, self._is_too_late),
        ]
        ahead.journal.write(self._clock(), state, steps, partial(self._written, steps))
        if failed is not None:
            self._on_error(failed)

    def _written(self, steps: Sequence[Step], error: Exception | None) -> None:
        """They are on disc: now they are made."""
        if self._under_way is not steps:
            return  # the job has ended without them
        self._cancel_limits()
        if isinstance(error, JournalHeldError):
            self._end_without_journal(str(error))
            return
        if error is not None:
            self._on_error(error)
            return
        if self.trouble:
            self.trouble = ""
            assert self._ahead is not None
            self._ahead.tell("the journal is written again")
        began = time.perf_counter()
        self._make(steps)
        if self._under_way is not steps:
            return
        self._under_way = None
        now = time.perf_counter()
        # The time that the disc took was one for other things.
        self._busy_until = max(self._busy_until, now + (now - began))
        self._release()
        if self._posted or self._timer_expired:
            self._go_on()
        elif self._reports or self._host_reports:
            self._catch_up_soon()

    def _facts_failed(self, error: Exception) -> None:
        """What is kept beside the state can never be on disc."""
        if self._ahead is None:
            return
        if isinstance(error, JournalHeldError):
            self._end_without_journal(str(error))
        else:
            self._on_error(error)

    def _make(self, steps: Sequence[Step]) -> None:
        """Makes steps visible, and carries their commands out. What these raise ends the job, and it stays ended."""
        self._steps = True
        try:
            for each in steps:
                self.state = each.state
                self._carry_out(each.commands, each.clock)
                if self._under_way is not steps:
                    return
            self.set_timer()
        except Exception as error:
            self._on_error(error)
        finally:
            self._steps = False

    def _is_late(self) -> None:
        """Says so, and ends the job if that is what waits."""
        assert self._ahead is not None
        journal = self._ahead.journal
        self.trouble = f"cannot write the journal {journal.path}: {journal.trouble or 'the disc does not answer'}"
        self._ahead.tell(
            f"{self.trouble}; training goes on, what happens waits, and after {in_seconds(self._ahead.limit_s)} "
            "(--driver-timeout) the job ends"
        )
        steps = self._under_way
        if steps and steps[-1].state.ended:
            self._stop_writing()
            self._make(steps)
            self._wait_no_more()
            self._go_on()
        elif any(isinstance(event, StopRequested) for event in self._posted):
            self._end_without_journal()

    def _is_too_late(self) -> None:
        assert self._ahead is not None
        journal = self._ahead.journal
        self._end_without_journal(
            f"cannot write the journal {journal.path} for {in_seconds(self._ahead.limit_s)} (--driver-timeout): "
            f"{journal.trouble or 'the disc does not answer'}"
        )

    def _end_without_journal(self, why: str = "") -> None:
        """Ends the job, by the StopRequested that waits, or for this reason. What is not on disc is not made."""
        self._stop_writing()
        self._wait_no_more()
        if why:
            end = EndJob(ExitCode.INTERNAL_ERROR, why)
            self.state = replace(self.state, end=end)
            self._steps = True
            try:
                self._carry_out((end,), self._clock())
            except Exception as error:
                self._on_error(error)
            finally:
                self._steps = False
        else:
            # It may stand behind others, of which nothing is to follow any more.
            stop = next(event for event in self._posted if isinstance(event, StopRequested))
            self._posted.remove(stop)
            self._step(stop)
        self._go_on()

    def _stop_writing(self) -> None:
        assert self._ahead is not None
        self._ahead.journal.give_up()
        self._ahead = None

    def _wait_no_more(self) -> None:
        """What is under way is not made any more."""
        self._under_way = None
        self._cancel_limits()
        self._release()

    def _release(self) -> None:
        settled, self._settled = self._settled, []
        for future in settled:
            if not future.done():
                future.set_result(None)

    def _cancel_limits(self) -> None:
        for timer in self._limits:
            timer.cancel()
        self._limits = []
