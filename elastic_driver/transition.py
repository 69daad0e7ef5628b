"""One step of the membership core under way: the state so far, the commands so far, and the moves every decision uses.

Owns what a move does to the state and which command goes with it. Which move is due is decided in
:mod:`elastic_driver.intake` (what an event means) and :mod:`elastic_driver.membership` (what follows from the levels).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic_driver.events import Command, DismissWorker, EndJob, Report, SetNotice, StopWorker
from elastic_driver.hosts import WorkerId
from elastic_driver.job_state import DISMISSED_GRACE_S, Failure, JobPhase, State, WorkerPhase, WorkerRecord
from elastic_driver.registry import WorkerState
from elastic_driver.rendezvous.messages import NoticeKind


class Transition:
    """The state so far and the commands so far.

    Attributes:
        state: what the job has become; replaced, never changed.
        now: the present, seconds.
        commands: what is to be done, in order.
    """

    def __init__(self, state: State, now: float) -> None:
        self.state = replace(state, blacklist=state.blacklist.expire(now))
        self.now = now
        self.commands: list[Command] = []

    def put(self, record: WorkerRecord) -> None:
        self.put_all((record,))

    def put_all(self, records: Iterable[WorkerRecord]) -> None:
        self.state = replace(self.state, workers=self.state.workers.put(*records))

    def forget(self, worker: WorkerId) -> None:
        self.state = replace(self.state, workers=self.state.workers.without(worker))

    def note_failure(self, worker: WorkerId, record: WorkerRecord | None, how: str) -> None:
        if self.state.first_failure is None:
            rank = record.rank if record is not None and record.round_id else None
            self.state = replace(self.state, first_failure=Failure(worker, rank, how))

    def open_reset(self) -> None:
        if self.state.phase is JobPhase.RUNNING:
            deadline = self.now + self.state.policy.start_timeout_s
            registry = replace(self.state.registry, deadline=deadline)
            self.state = replace(self.state, phase=JobPhase.RESETTING, reset_began=self.now, registry=registry)

    def break_round(self, reason: str) -> None:
        if self.state.notice_kind is not NoticeKind.ABORT:
            self.notify(NoticeKind.ABORT, reason)

    def notify(self, kind: NoticeKind, reason: str) -> None:
        if kind is self.state.notice_kind and kind is not NoticeKind.NONE:
            return
        self.state = replace(self.state, notice_kind=kind, notice_version=self.state.notice_version + 1)
        self.commands.append(SetNotice(self.state.notice_version, self.state.round_id, kind, reason))

    def stop(self, record: WorkerRecord, reason: str) -> None:
        self.commands.append(StopWorker(record.worker, reason))
        self.put(replace(record, phase=WorkerPhase.LEAVING, since=self.now, deadline=None, stopped=True))
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
