"""One step of the membership core in progress: its state, its commands, and the moves that all decisions use.

Owns what a move does to the state and which command goes with it. :mod:`elastic_driver.core.intake` (what an event
means) and :mod:`elastic_driver.core.membership` (what follows from the levels) decide which move is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic_driver.core.events import Command, DismissWorker, EndJob, Fault, KillWorker, Report, SetNotice, StopWorker
from elastic_driver.core.past import forget_worker
from elastic_driver.core.placement import all_offered
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.setbacks import Failure
from elastic_driver.core.state import Kill, Leaving, Reset, State, WorkerRecord, leaving, told_to_end
from elastic_driver.hosts import WorkerId
from elastic_driver.words import Ending, NoticeKind


class Transition:
    """The state and the commands of a step so far.

    Attributes:
        state: the job as the step has changed it; replaced, never mutated.
        now: the present, seconds.
        commands: the commands so far, in order.
    """

    def __init__(self, state: State, now: float) -> None:
        blacklist = state.blacklist.expire(now)
        cuts = state.cuts.expire(now)
        is_same = blacklist is state.blacklist and cuts is state.cuts
        self.state = state if is_same else replace(state, blacklist=blacklist, cuts=cuts)
        if any(not preparing_host.late and now >= preparing_host.until for preparing_host in state.preparing):
            preparing = tuple(
                replace(preparing_host, late=now >= preparing_host.until) for preparing_host in state.preparing
            )
            self.state = replace(self.state, preparing=preparing)
        self.now = now
        self.commands: list[Command] = []
        self._by_host: dict[str, list[WorkerId]] | None = None

    def put(self, record: WorkerRecord) -> None:
        self.put_all((record,))

    def put_all(self, records: Iterable[WorkerRecord]) -> None:
        self.state = replace(self.state, workers=self.state.workers.put(*records))

    def on_host(self, hostname: str) -> list[WorkerRecord]:
        """Return the host's workers in order of start, without those added since the first call in this step."""
        if self._by_host is None:
            self._by_host = {}
            for record in self.state.workers:
                self._by_host.setdefault(record.worker.hostname, []).append(record.worker)
        records = (self.state.workers.find(worker) for worker in self._by_host.get(hostname, ()))
        return [record for record in records if record is not None]

    def forget(self, worker: WorkerId) -> None:
        self.state = forget_worker(self.state, worker)

    def register(self, worker: WorkerId, report: WorkerState) -> None:
        """Record a worker's report for its round."""
        self.state = replace(self.state, registry=self.state.registry.record(worker, report))

    def in_reset(self) -> Reset:
        """Return the reset under way; begin it if the round still runs, or no worker was started yet."""
        if self.state.reset is None:
            self.state = replace(self.state, reset=Reset(self.now, self.now + self.state.policy.start_timeout_s))
            assert self.state.reset is not None
        return self.state.reset

    def note_failure(self, failure: Failure, fault: Fault, text: str) -> None:
        """Add a failure to this reset.

        Args:
            failure: whose and how.
            fault: who caused it. A failure of a member whose place was taken away is not its own.
            text: its description for the user.
        """
        failure = failure if failure.at is not None else replace(failure, at=self.now)
        reset = self.in_reset().with_cause(text, failure)
        setbacks = self.state.setbacks
        # From the first round on, only failures of members are failures of a reset.
        if self.state.round is not None:
            own = fault is Fault.OWN and all_offered(self.state, (failure.worker,))
            setbacks = setbacks.failed(failure, Fault.OWN if own else Fault.OUTSIDE)
            reset = replace(reset, unplanned=True)
        self.state = replace(self.state, reset=reset, setbacks=setbacks)

    def note_earlier(self, failure: Failure) -> None:
        """Record as the cause a failure that preceded the one for which its worker was told to end.

        The decision on which hosts and places are to blame stands.
        """
        state = self.state
        first = state.first_failure
        if first is None or not state.is_member(failure.worker) or not failure.is_before(first):
            return
        reset, setbacks = replace(self.in_reset(), first_failure=failure), state.setbacks
        if setbacks.present.failure is not None:
            setbacks = setbacks.failed(failure, Fault.OWN)
        self.state = replace(state, reset=reset, setbacks=setbacks)

    def break_round(self, reason: str) -> None:
        if self.state.notice_kind is not NoticeKind.ABORT:
            self.notify(NoticeKind.ABORT, reason)

    def notify(self, kind: NoticeKind, reason: str) -> None:
        if not self.state.policy.on_change.asks_for_rounds:
            return  # nobody watches for notices
        current = self.state.round
        assert current is not None
        if kind is current.notice and kind is not NoticeKind.NONE:
            return
        version = self.state.notice_version + 1
        self.state = replace(self.state, round=replace(current, notice=kind), notice_version=version)
        self.commands.append(SetNotice(version, current.round_id, kind, reason))

    def retire(self, record: WorkerRecord, reason: str, ending: Ending = Ending.USUAL) -> None:
        """Stop a worker without counting a failure against it."""
        self.commands.append(StopWorker(record.worker, reason, ending))
        self.put(told_to_end(record, self.now, ending))

    def hurry(self, record: WorkerRecord, reason: str) -> None:
        """End a worker's time for a checkpoint: its peers are lost."""
        self.commands.append(StopWorker(record.worker, reason, Ending.BROKEN))
        self.put(replace(record, leaving=Leaving.BROKEN))

    def stop(self, record: WorkerRecord, reason: str) -> None:
        self.retire(record, reason)
        self.register(record.worker, WorkerState.FAILURE)

    def kill(self, record: WorkerRecord, command: KillWorker, kill: Kill) -> WorkerRecord:
        """Kill a worker, for a reason that is the cause of its failure; does nothing if it is being killed already."""
        if record.killed is None:
            self.commands.append(command)
            record = replace(record, killed=kill)
        self.put(record)
        return record

    def dismiss(self, record: WorkerRecord, reason: str) -> None:
        self.commands.append(DismissWorker(record.worker, reason))
        self.put(leaving(record, self.now, Leaving.DISMISSED))

    def report(self, text: str, *, warning: bool = False) -> None:
        self.commands.append(Report(text, warning))

    def end(self, exit_code: int, message: str) -> None:
        if self.state.ended:
            return
        end = EndJob(int(exit_code), message)
        self.state = replace(self.state, end=end)
        self.commands.append(end)
