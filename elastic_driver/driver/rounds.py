"""The rounds of a job: what workers and operators ask the driver, and what they are answered.

Owns who waits for a round, and what each was answered last. Knows nothing of HTTP, and of processes only their ids;
decides nothing: what workers say becomes events of the core, and its commands become their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Protocol

from elastic_driver.core.draining import ends_at_once, what_was_done, why_refused
from elastic_driver.core.events import DrainRequested, PublishRound, WorkerExiting, WorkerReady, WorkerRunning
from elastic_driver.core.explain import explain, unused_slots
from elastic_driver.core.past import why_impossible
from elastic_driver.core.permits import why_no_rounds, why_unpublished
from elastic_driver.core.state import State, WorkerPhase, WorkerRecord, in_phase, record_of
from elastic_driver.driver.progress import Progress
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.messages import (
    DiscReport,
    DrainHostRequest,
    DrainReply,
    EndReply,
    JobOver,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    PublishReply,
    PublishRequest,
    Removed,
    RoundAssignment,
    RunningReport,
)
from elastic_driver.rendezvous.routes import ALL, OPERATOR, WORKER, Route, RouteRequest, Routes, read, read_own
from elastic_driver.vitals import Vitals
from elastic_driver.words import Backend, NoticeKind


class Processes(Protocol):
    """What is to be known of the workers' processes."""

    def pid(self, worker: WorkerId) -> int | None:
        """Of the worker's process; None when none runs."""


class Heartbeats(Protocol):
    """Is told who has spoken."""

    def heard(self, worker: WorkerId, progress: int = 0, *, waiting: bool = True, leaving: bool = False) -> None:
        """A worker lives, has finished so many operations, waits for others or not, and says nothing more or does."""

    def seen(self, worker: WorkerId, vitals: Vitals) -> None:
        """A worker's agent has looked at it."""


class Rounds:
    """Answers the workers of one job, and who looks after it. Used on the event loop only.

    Args:
        stepper: takes the events, and has the state.
        processes: of the workers.
        heartbeats: are told who was heard.
        clock: the job's time, seconds.
        on_disc: takes what a worker says of its commits on disc.
        end: ends the job for an operator, and says what is being done.
        about: gives what the status says of the job beside its state.
        booked: gives what a worker's time has gone into, seconds by category; None when that is not known.
        remark: what only discovery knows of why the job stands where it stands; "" for nothing.
        stall: for how long no worker has stepped, and why, in words; "" while they step.
        table: the last looks at the workers, which ``heartbeats`` keeps.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        processes: Processes,
        heartbeats: Heartbeats,
        clock: Callable[[], float],
        on_disc: Callable[[DiscReport], None],
        end: Callable[[], str],
        about: Callable[[], Mapping[str, object]],
        booked: Callable[[WorkerId], Mapping[str, float] | None] = lambda worker: None,
        remark: Callable[[], str] = lambda: "",
        stall: Callable[[], str] = lambda: "",
        table: VitalsTable | None = None,
    ) -> None:
        self._stepper = stepper
        self._processes = processes
        self._heartbeats = heartbeats
        self._clock = clock
        self.on_disc = on_disc
        self._end = end
        self._about = about
        self._booked = booked
        self._remark = remark
        self._stall = stall
        self._table = table or VitalsTable()
        self.progress = Progress()
        self._parked: dict[WorkerId, asyncio.Future[NextRoundReply]] = {}
        self._placed: dict[WorkerId, RoundAssignment] = {}
        self._notice = Notice(0, 0, NoticeKind.NONE, "")
        self._newest_commit = 0  # of the present round, as far as was heard

    @property
    def routes(self) -> Routes:
        """What is asked of the driver itself. Agents report their workers' rounds (:mod:`.agent_requests`)."""
        return (
            Route("POST", "leave", WORKER, read_own(LeaveRequest.from_json, self.leave)),
            Route("POST", "publish", WORKER, self._may_publish),
            Route("POST", "drain", OPERATOR, read(DrainHostRequest.from_json, self.drain)),
            Route("POST", "end", OPERATOR, lambda _: self.end()),
            Route("GET", "status", ALL, lambda _: self.status()),
        )

    # --- what workers ask ------------------------------------------------------------------------------------------

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """A worker is READY: parks it until its round is formed, or answers at once what is known.

        Raises:
            RendezvousProtocolError: it speaks of a round that it cannot know, or is restarted at each change.
        """
        future: asyncio.Future[NextRoundReply] = asyncio.get_running_loop().create_future()
        worker = request.worker
        if self._stepper.is_over:
            future.set_result(JobOver("the job has ended"))
            return future
        record = record_of(self._stepper.state, worker)
        if record is None or record.phase is WorkerPhase.LEAVING:
            future.set_result(Removed("it is being stopped" if record else "the job does not know it"))
            return future
        refusal = why_no_rounds(self._stepper.state)
        if refusal:
            raise RendezvousProtocolError(refusal)
        assignment = self._placed.get(worker)
        if record.phase is WorkerPhase.MEMBER and assignment is not None and request.after_round < record.round_id:
            # Its answer was lost on the way: the same again.
            future.set_result(assignment)
            return future
        event = WorkerReady(
            worker,
            request.after_round,
            request.commits,
            request.cause,
            request.detail,
            request.backends,
            request.steps,
            request.where,
            request.raised,
            request.unreachable,
            request.uncommitted_s,
        )
        self._check(event)
        older = self._parked.get(worker)
        if older is not None and not older.done():
            older.cancel()
        self._parked[worker] = future
        # It asks again as often as a member watches.
        self._heartbeats.heard(worker)
        self._stepper.report(event)
        return future

    def heard(self, worker: WorkerId, progress: int, *, waiting: bool, leaving: bool, exiting: bool) -> None:
        """A member lives.

        Args:
            worker: which; one that is none of this job's is not heard.
            progress, waiting: see WatchRequest.
            leaving: whether its silence is no news from here on.
            exiting: whether it is about to end.
        """
        if record_of(self._stepper.state, worker) is None:
            return
        self._heartbeats.heard(worker, progress, waiting=waiting, leaving=leaving)
        if exiting:
            self._stepper.report(WorkerExiting(worker))

    def seen(self, worker: WorkerId, vitals: Vitals) -> None:
        """Its agent has looked at a worker; at one that is none of this job's for nothing."""
        if record_of(self._stepper.state, worker) is None:
            return
        self._heartbeats.seen(worker, vitals)
        self._newest_commit = max(self._newest_commit, vitals.commits)

    def running(self, report: RunningReport) -> None:
        """A member trains.

        Raises:
            RendezvousProtocolError: nobody started it, or it speaks of a round that it cannot know.
        """
        event = WorkerRunning(report.worker, report.round_id, report.commits, report.another, report.synced)
        self._check(event)
        self.progress.told(report.worker, report.round_id, report.commits, max(0, report.total), self._clock())
        self._stepper.report(event)

    def _check(self, event: WorkerReady | WorkerRunning) -> None:
        """Refuses what the core would not take: a peer must not be able to end the job."""
        why = "" if self._stepper.is_over else why_impossible(self._stepper.state, event)
        if why:
            raise RendezvousProtocolError(f"cannot take this report: {why}")

    def leave(self, request: LeaveRequest) -> None:
        """A worker was told by a signal to leave: its place is drained.

        Raises:
            RendezvousClosedError: it is being stopped, or there was no round yet: it is to end at once.
        """
        self._stepper.catch_up()
        worker = request.worker
        if ends_at_once(self._stepper.state, worker):
            raise RendezvousClosedError(f"worker {worker} is to end at once")
        self._stepper.post(DrainRequested(worker.hostname, worker.slot, f"it was sent {request.signal}"))

    def _may_publish(self, request: RouteRequest) -> PublishReply:
        wanted = PublishRequest.from_json(request.body)
        self._stepper.catch_up()
        assert request.identity.worker is not None  # the route is the workers'
        why = why_unpublished(self._stepper.state, request.identity.worker, wanted.round_id)
        return PublishReply(granted=not why, reason=why)

    def drain(self, request: DrainHostRequest) -> DrainReply:
        """A host's workers are to leave at their next commit; or the host may be used again."""
        name, undo = request.hostname, request.undo
        self._stepper.catch_up()
        before = self._stepper.state
        refusal = why_refused(before, name)
        if refusal:
            return DrainReply(done=False, text=refusal)
        why = "by elasticrun drain --undo" if undo else "by elasticrun drain"
        self._stepper.post(DrainRequested(name, None, why, undo, request.within_s))
        return DrainReply(done=True, text=what_was_done(before, self._stepper.state, name, undo=undo))

    def end(self) -> EndReply:
        """The job is to end."""
        self._stepper.catch_up()
        return EndReply(self._end())

    def explained(self) -> str:
        """Why the job stands where it stands, and what discovery does, and which hosts are not ready."""
        sentence = explain(self._stepper.state, self._clock(), stall=self._stall())
        return "; ".join(filter(None, (sentence, self._remark())))

    def newest_commit(self) -> int:
        """The furthest worker's, by its number, also when that has ended since; those that a loss took back are not."""
        state = self._stepper.state
        told = (vitals.commits for _, vitals in self._table)
        self._newest_commit = max(self._newest_commit, state.commits, *(r.commits for r in state.workers), *told, 0)
        return self._newest_commit

    def status(self) -> dict[str, object]:
        """The job as JSON, for ``GET /v1/status``."""
        self._stepper.catch_up()
        state, now = self._stepper.state, self._clock()
        return {
            **self._about(),
            "explain": self.explained(),
            "age_s": round(now - state.began, 3),
            "phase": state.phase,
            "on_change": state.policy.on_change,
            "round_id": state.round_id,
            "commits": state.commits,
            "newest_commit": self.newest_commit(),
            "tells_commits": not any(Backend.HOROVOD in record.backends for record in state.workers),
            "resets": state.resets,
            "progress": asdict(self.progress.estimate(now)),
            **self._table.summary([record.worker for record in in_phase(state, WorkerPhase.MEMBER)], now),
            "hosts": [{"name": host.name, "slots": host.slots, "labels": list(host.labels)} for host in state.hosts],
            "unused": unused_slots(state),
            "blacklisted": [h.name for h in state.hosts if state.blacklist.is_blacklisted(h.name)],
            "silent": [one.hostname for one in state.silent if one.sure],
            "left_out": sorted(state.cuts.out),
            **_drained(state),
            "workers": [
                {
                    "worker": record.worker.key,
                    "host": record.worker.hostname,
                    "slot": record.worker.slot,
                    "phase": record.phase,
                    "since_s": round(now - record.since, 3),
                    "rank": record.rank if record.round_id else None,
                    "round_id": record.round_id,
                    "running": record.running,
                    "commits": max(record.commits, self._table.commits(record.worker)),
                    "pid": self._processes.pid(record.worker),
                    "booked": self._booked(record.worker),
                    "vitals": self._table.entry(record.worker, now),
                    **_server_of(record),
                }
                for record in state.workers
            ],
            **_chief_of(state, now),
        }

    # --- what they are answered ------------------------------------------------------------------------------------

    def publish(self, command: PublishRound, addresses: Mapping[str, str]) -> None:
        """Answers the members of a new round, if they ask for it.

        Args:
            command: the round.
            addresses: where its members listen, by host.
        """
        self._newest_commit = command.commits
        if command.backend is None:
            return  # they know their places, and are watched by nothing but their ends
        self._placed = {
            one.worker: RoundAssignment(
                round_id=command.round_id,
                slot=one.slot,
                sync=command.sync,
                commits=command.commits,
                backend=command.backend,
                address=addresses[one.worker.hostname],
            )
            for one in command.placed
        }
        for worker, assignment in self._placed.items():
            # From now on: who is frozen since it was READY never watches its round.
            self._heartbeats.heard(worker)
            self._reply(worker, assignment)

    def dismiss(self, worker: WorkerId, reason: str) -> None:
        """Answers a worker that it has no place any more."""
        self._reply(worker, Removed(reason))

    def notify(self, notice: Notice) -> None:
        """Sets the notice that members of the round have from now on."""
        self._notice = notice

    def job_over(self, message: str) -> Notice:
        """Answers all who wait that the job has ended. Returns the notice, for those who watch elsewhere."""
        notice = Notice(self._notice.version + 1, self._stepper.state.round_id, NoticeKind.JOB_OVER, message)
        self.notify(notice)
        for future in self._parked.values():
            if not future.done():
                future.set_result(JobOver(message))
        return notice

    def gone(self, worker: WorkerId) -> None:
        """A worker has ended: it waits for nothing any more."""
        for kept in (self._parked, self._placed):
            kept.pop(worker, None)

    def _reply(self, worker: WorkerId, reply: NextRoundReply) -> None:
        future = self._parked.pop(worker, None)
        if future is not None and not future.done():
            future.set_result(reply)


def _drained(state: State) -> dict[str, object]:
    """Hosts that get no workers any more, and of others the slots that get none, by host."""
    slots = {host.name: host.slots for host in state.hosts}
    whole = {name for name, slot in state.drained if slot is None}
    some: dict[str, list[int]] = {}
    for name, slot in sorted((name, slot) for name, slot in state.drained if slot is not None and name not in whole):
        some.setdefault(name, []).append(slot)
    whole |= {name for name, those in some.items() if len(those) >= slots.get(name, 1)}
    return {
        "drained": sorted(whole),
        "drained_slots": {name: those for name, those in some.items() if name not in whole},
    }


def _server_of(record: WorkerRecord) -> dict[str, object]:
    """What is told of a server beside what is told of all workers."""
    if record.parameter_server is None and not record.address:
        return {}
    return {"parameter_server": record.parameter_server, "address": record.address}


def _chief_of(state: State, now: float) -> dict[str, object]:
    """What is told of a job that has a chief."""
    chief = state.chief
    if not state.policy.num_parameter_servers:
        return {}
    if chief is None:
        return {"chief": None}
    return {"chief": {"number": chief.number, "phase": chief.phase, "since_s": round(now - chief.since, 3)}}
