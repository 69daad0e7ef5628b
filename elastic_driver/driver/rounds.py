"""The rounds of a job: what workers and operators ask the driver, and what they are answered.

Owns who waits for a round, and what each was answered last. Knows nothing of HTTP and of processes; decides nothing:
what workers say becomes events of the core, and its commands become their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from elastic_driver.core.assignment import Placed
from elastic_driver.core.draining import ends_at_once, what_was_done, why_refused
from elastic_driver.core.events import DrainRequested, WorkerExiting, WorkerReady, WorkerRunning
from elastic_driver.core.past import is_known, why_impossible
from elastic_driver.core.permits import why_no_rounds, why_unpublished
from elastic_driver.core.state import Round, WorkerPhase, record_of
from elastic_driver.driver.progress import Progress
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError
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
from elastic_driver.rendezvous.routes import OPERATOR, WORKER, Route, RouteRequest, Routes, read, read_own
from elastic_driver.vitals import Vitals
from elastic_driver.words import NoticeKind


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
        heartbeats: are told who was heard.
        progress: is told how far workers have come.
        clock: the job's time, seconds.
        on_disc: takes what a worker says of its commits on disc.
        end: ends the job for an operator, and says what is being done.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        heartbeats: Heartbeats,
        progress: Progress,
        clock: Callable[[], float],
        on_disc: Callable[[DiscReport], None],
        end: Callable[[], str],
    ) -> None:
        self._stepper = stepper
        self._heartbeats = heartbeats
        self._progress = progress
        self._clock = clock
        self.on_disc = on_disc
        self._end = end
        self._parked: dict[WorkerId, asyncio.Future[NextRoundReply]] = {}
        self._placed: dict[WorkerId, RoundAssignment] = {}
        self._notice = Notice(0, 0, NoticeKind.NONE, "")

    @property
    def routes(self) -> Routes:
        """What is asked of the driver itself. Agents report their workers' rounds (:mod:`.agent_requests`)."""
        return (
            Route("POST", "leave", WORKER, read_own(LeaveRequest.from_json, self.leave)),
            Route("POST", "publish", WORKER, self._may_publish),
            Route("POST", "drain", OPERATOR, read(DrainHostRequest.from_json, self.drain)),
            Route("POST", "end", OPERATOR, lambda _: self.end()),
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
        self._progress.reached(vitals.commits)

    def running(self, report: RunningReport) -> None:
        """A member trains.

        Raises:
            RendezvousProtocolError: nobody started it, or it speaks of a round that it cannot know.
        """
        event = WorkerRunning(report.worker, report.round_id, report.commits, report.another, report.synced)
        self._check(event)
        self._progress.told(report.worker, report.round_id, report.commits, max(0, report.total), self._clock())
        # To a driver that has taken the job over all members say so again. What is visible already stays so.
        if not is_known(self._stepper.state, event):
            self._stepper.report(event)

    def _check(self, event: WorkerReady | WorkerRunning) -> None:
        """Refuses what the core would not take: a peer must not be able to end the job."""
        why = "" if self._stepper.is_over else why_impossible(self._stepper.state, event)
        if why:
            raise RendezvousProtocolError(f"cannot take this report: {why}")

    async def leave(self, request: LeaveRequest) -> None:
        """A worker was told by a signal to leave: its place is drained when this returns.

        Raises:
            RendezvousClosedError: it is being stopped, or there was no round yet: it is to end at once.
        """
        await self._stepper.settled()
        worker = request.worker
        if ends_at_once(self._stepper.state, worker):
            raise RendezvousClosedError(f"worker {worker} is to end at once")
        self._stepper.post(DrainRequested(worker.hostname, worker.slot, f"it was sent {request.signal}"))
        await self._stepper.settled()

    async def _may_publish(self, request: RouteRequest) -> PublishReply:
        wanted = PublishRequest.from_json(request.body)
        await self._stepper.fenced()
        assert request.identity.worker is not None  # the route is the workers'
        why = why_unpublished(self._stepper.state, request.identity.worker, wanted.round_id)
        return PublishReply(granted=not why, reason=why)

    async def drain(self, request: DrainHostRequest) -> DrainReply:
        """A host's workers are to leave at their next commit, or the host may be used again, when this returns."""
        await self._stepper.settled()
        name, undo = request.hostname, request.undo
        before = self._stepper.coming
        refusal = why_refused(before, name)
        if refusal:
            return DrainReply(done=False, text=refusal)
        why = "by elasticrun drain --undo" if undo else "by elasticrun drain"
        self._stepper.post(DrainRequested(name, None, why, undo, request.within_s))
        done = what_was_done(before, self._stepper.coming, name, undo=undo)
        await self._stepper.settled()
        return DrainReply(done=True, text=done)

    async def end(self) -> EndReply:
        """The job is about to end when this returns, whoever drives it then."""
        self._stepper.catch_up()  # not settled(): an end does not wait for a disc that hangs
        text = self._end()
        await self._stepper.settled()
        return EndReply(text)

    # --- what they are answered ------------------------------------------------------------------------------------

    def publish(self, formed: Round, placed: Sequence[Placed], addresses: Mapping[str, str]) -> None:
        """Answers the members of a new round, if they ask for it.

        Args:
            formed: the round.
            placed: the places of its members, as :func:`~elastic_driver.core.assignment.places_of` has them.
            addresses: where its members listen, by host.
        """
        self.resume(formed, placed, addresses)
        for worker, assignment in self._placed.items():
            # From now on: who is frozen since it was READY never watches its round.
            self._heartbeats.heard(worker)
            self._reply(worker, assignment)

    def resume(self, formed: Round, placed: Sequence[Placed], addresses: Mapping[str, str]) -> None:
        """This is the present round, whoever has formed it: members that ask for it are answered so. See publish."""
        self._progress.begin_round(formed.commits)
        backend = formed.backend
        if backend is None:
            return  # they know their places, and are watched by nothing but their ends
        self._placed = {
            one.worker: RoundAssignment(
                round_id=formed.round_id,
                slot=one.slot,
                sync=formed.sync,
                commits=formed.commits,
                backend=backend,
                address=addresses[one.worker.hostname],
            )
            for one in placed
        }

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
