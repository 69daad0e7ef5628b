"""One step of the membership core under way: the state so far, the commands so far, and the moves every decision uses.

Owns what a move does to the state and which command goes with it. Which move is due is decided in
:mod:`elastic_driver.core.intake` (what an event means) and :mod:`elastic_driver.core.membership` (what follows from
the levels).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic_driver.core.events import Command, DismissWorker, EndJob, Fault, Report, SetNotice, StopWorker
from elastic_driver.core.placement import all_offered
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.setbacks import Failure
from elastic_driver.core.state import DISMISSED_GRACE_S, JobPhase, State, WorkerPhase, WorkerRecord, with_cause
from elastic_driver.hosts import WorkerId
from elastic_driver.words import NoticeKind, OnChange


class Transition:
    """The state so far and the commands so far.

    Attributes:
        state: what the job has become; replaced, never changed.
        now: the present, seconds.
        commands: what is to be done, in order.
    """

    def __init__(self, state: State, now: float) -> None:
        blacklist = state.blacklist.expire(now)
        self.state = state if blacklist is state.blacklist else replace(state, blacklist=blacklist)
        self.now = now
        self.commands: list[Command] = []

    def put(self, record: WorkerRecord) -> None:
        self.put_all((record,))

    def put_all(self, records: Iterable[WorkerRecord]) -> None:
        self.state = replace(self.state, workers=self.state.workers.put(*records))

    def forget(self, worker: WorkerId) -> None:
        self.state = replace(self.state, workers=self.state.workers.without(worker))

    def note_failure(self, failure: Failure, fault: Fault, text: str) -> None:
        """One more failure of this reset.

        Args:
            failure: whose and how.
            fault: whose doing it is. What befalls a member whose place was taken away is not its own.
            text: what is told of it.
        """
        state, setbacks = self.state, self.state.setbacks
        # From the first round on, only failures of members are failures of a reset.
        if state.round_id:
            own = fault is Fault.OWN and all_offered(state, (failure.worker,))
            setbacks = setbacks.failed(failure, Fault.OWN if own else Fault.OUTSIDE)
        self.state = replace(with_cause(state, text), first_failure=state.first_failure or failure, setbacks=setbacks)

    def open_reset(self) -> None:
        if self.state.phase is JobPhase.RUNNING:
            deadline = self.now + self.state.policy.start_timeout_s
            registry = replace(self.state.registry, deadline=deadline)
            self.state = replace(self.state, phase=JobPhase.RESETTING, reset_began=self.now, registry=registry)

    def break_round(self, reason: str) -> None:
        if self.state.notice_kind is not NoticeKind.ABORT:
            self.notify(NoticeKind.ABORT, reason)

    def notify(self, kind: NoticeKind, reason: str) -> None:
        if self.state.policy.on_change is not OnChange.IN_PLACE:
            return  # there is nobody who watches
        if kind is self.state.notice_kind and kind is not NoticeKind.NONE:
            return
        self.state = replace(self.state, notice_kind=kind, notice_version=self.state.notice_version + 1)
        self.commands.append(SetNotice(self.state.notice_version, self.state.round_id, kind, reason))

    def retire(self, record: WorkerRecord, reason: str) -> None:
        """Has its process ended, which is no failure of its."""
        self.commands.append(StopWorker(record.worker, reason))
        self.put(replace(record, phase=WorkerPhase.LEAVING, since=self.now, deadline=None, stopped=True))

    def stop(self, record: WorkerRecord, reason: str) -> None:
        self.retire(record, reason)
        self.state = replace(self.state, registry=self.state.registry.record(record.worker, WorkerState.FAILURE))

    def dismiss(self, record: WorkerRecord, reason: str) -> None:
        self.commands.append(DismissWorker(record.worker, reason))
        deadline = self.now + DISMISSED_GRACE_S
        self.put(replace(record, phase=WorkerPhase.LEAVING, since=self.now, deadline=deadline))

    def report(self, text: str, *, warning: bool = False) -> None:
        self.commands.append(Report(text, warning))

    def end(self, exit_code: int, message: str) -> None:
        if self.state.phase is JobPhase.ENDED:
            return
        self.state = replace(self.state, phase=JobPhase.ENDED)
        self.commands.append(EndJob(int(exit_code), message))
