"""The rounds of a job: the requests of workers and operators to the driver, and the answers.

Owns the workers that wait for a round, and the last answer to each. Knows nothing of HTTP and of processes; decides
nothing: reports of workers become events of the core, and its commands become their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from elastic_driver.core.assignment import Placed
from elastic_driver.core.draining import describe_drain, ends_at_once, why_refused
from elastic_driver.core.events import DrainRequested, WorkerExiting, WorkerReady, WorkerRunning
from elastic_driver.core.past import is_known, why_impossible
from elastic_driver.core.permits import why_no_rounds, why_unpublished
from elastic_driver.core.state import Round, WorkerPhase, record_of
from elastic_driver.driver.progress import Progress
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.messages import (
    DiskReport,
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
    """Receives the workers' heartbeats."""

    def heard(self, worker: WorkerId, progress: int = 0, *, waiting: bool = True, leaving: bool = False) -> None:
        """Record that a worker lives, its finished operations, and whether it waits or sends nothing more."""

    def seen(self, worker: WorkerId, vitals: Vitals) -> None:
        """Record an agent's observation of a worker."""


class Rounds:
    """Answers the workers and the operators of one job. Used on the event loop only.

    Args:
        stepper: takes the events, and has the state.
        heartbeats: are notified of signs of life.
        progress: records the workers' progress.
        clock: the job's time, seconds.
        on_disk: takes a worker's report on its commits on disk.
        end: ends the job for an operator, and returns the action taken.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        heartbeats: Heartbeats,
        progress: Progress,
        clock: Callable[[], float],
        on_disk: Callable[[DiskReport], None],
        end: Callable[[], str],
    ) -> None:
        self._stepper = stepper
        self._heartbeats = heartbeats
        self._progress = progress
        self._clock = clock
        self.on_disk = on_disk
        self._end = end
        self._parked: dict[WorkerId, asyncio.Future[NextRoundReply]] = {}
        self._placed: dict[WorkerId, RoundAssignment] = {}
        self._notice = Notice(0, 0, NoticeKind.NONE, "")

    @property
    def routes(self) -> Routes:
        """The routes of the driver itself. Agents report their workers' rounds (:mod:`.agent_requests`)."""
        return (
            Route("POST", "leave", WORKER, read_own(LeaveRequest.from_json, self.leave)),
            Route("POST", "publish", WORKER, self._may_publish),
            Route("POST", "drain", OPERATOR, read(DrainHostRequest.from_json, self.drain)),
            Route("POST", "end", OPERATOR, lambda _: self.end()),
        )

    # --- requests of workers ---------------------------------------------------------------------------------------

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """Handle a READY worker: park its request until its round is formed, or answer at once with what is known.

        Raises:
            RendezvousProtocolError: it refers to a round that it cannot know, or is restarted at each change.
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
            # Its answer was lost on the way: send the same again.
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
        # It repeats this request as often as a member watches.
        self._heartbeats.heard(worker)
        self._stepper.report(event)
        return future

    def heard(self, worker: WorkerId, progress: int, *, waiting: bool, leaving: bool, exiting: bool) -> None:
        """Record that a member lives.

        Args:
            worker: the worker; an unknown one is ignored.
            progress, waiting: as in WatchRequest.
            leaving: whether its silence is no news from here on.
            exiting: whether it is about to end.
        """
        if record_of(self._stepper.state, worker) is None:
            return
        self._heartbeats.heard(worker, progress, waiting=waiting, leaving=leaving)
        if exiting:
            self._stepper.report(WorkerExiting(worker))

    def seen(self, worker: WorkerId, vitals: Vitals) -> None:
        """Record an agent's observation of a worker; an unknown one is ignored."""
        if record_of(self._stepper.state, worker) is None:
            return
        self._heartbeats.seen(worker, vitals)
        self._progress.reached(vitals.commits)

    def running(self, report: RunningReport) -> None:
        """Report that a member trains.

        Raises:
            RendezvousProtocolError: it was never started, or refers to a round that it cannot know.
        """
        event = WorkerRunning(report.worker, report.round_id, report.commits, report.another, report.synced)
        self._check(event)
        self._progress.told(report.worker, report.round_id, report.commits, max(0, report.total), self._clock())
        # All members repeat this to a driver that has taken over the job. A repeated report of visible facts is
        # dropped.
        if not is_known(self._stepper.state, event):
            self._stepper.report(event)

    def _check(self, event: WorkerReady | WorkerRunning) -> None:
        """Reject what the core would not accept: a peer must not be able to end the job."""
        why = "" if self._stepper.is_over else why_impossible(self._stepper.state, event)
        if why:
            raise RendezvousProtocolError(f"cannot accept this report: {why}")

    async def leave(self, request: LeaveRequest) -> None:
        """Drain the place of a worker that got a signal to leave; done when this returns.

        Raises:
            RendezvousClosedError: it is being stopped, or there was no round yet: it must end at once.
        """
        await self._stepper.settled()
        worker = request.worker
        if ends_at_once(self._stepper.state, worker):
            raise RendezvousClosedError(f"worker {worker} must exit at once")
        self._stepper.post(DrainRequested(worker.hostname, worker.slot, f"it received {request.signal}"))
        await self._stepper.settled()

    async def _may_publish(self, request: RouteRequest) -> PublishReply:
        wanted = PublishRequest.from_json(request.body)
        await self._stepper.fenced()
        assert request.identity.worker is not None  # the route is the workers'
        why = why_unpublished(self._stepper.state, request.identity.worker, wanted.round_id)
        return PublishReply(granted=not why, reason=why)

    async def drain(self, request: DrainHostRequest) -> DrainReply:
        """Drain a host, whose workers leave at their next commit, or undo that; done when this returns."""
        await self._stepper.settled()
        name, undo = request.hostname, request.undo
        before = self._stepper.coming
        refusal = why_refused(before, name)
        if refusal:
            return DrainReply(done=False, text=refusal)
        why = "by elasticrun drain --undo" if undo else "by elasticrun drain"
        self._stepper.post(DrainRequested(name, None, why, undo, request.within_s))
        done = describe_drain(before, self._stepper.coming, name, undo=undo)
        await self._stepper.settled()
        return DrainReply(done=True, text=done)

    async def end(self) -> EndReply:
        """End the job. When this returns the end is certain, whichever driver has the job then."""
        self._stepper.catch_up()  # not settled(): an end does not wait for a disk that hangs
        text = self._end()
        await self._stepper.settled()
        return EndReply(text)

    # --- answers ---------------------------------------------------------------------------------------------------

    def publish(self, formed: Round, placed: Sequence[Placed], addresses: Mapping[str, str]) -> None:
        """Answer the members of a new round that have asked for it.

        Args:
            formed: the round.
            placed: the places of its members, as :func:`~elastic_driver.core.assignment.places_of` returns them.
            addresses: the listening addresses of its members, by host.
        """
        self.resume(formed, placed, addresses)
        for worker, assignment in self._placed.items():
            # From now on: a worker that has frozen since it was READY never watches its round.
            self._heartbeats.heard(worker)
            self._reply(worker, assignment)

    def resume(self, formed: Round, placed: Sequence[Placed], addresses: Mapping[str, str]) -> None:
        """Set the current round, whichever driver has formed it, for answers to its members, as publish does."""
        self._progress.begin_round(formed.commits)
        backend = formed.backend
        if backend is None:
            return  # they know their places, and are watched only for their ends
        self._placed = {
            member.worker: RoundAssignment(
                round_id=formed.round_id,
                slot=member.slot,
                sync=formed.sync,
                commits=formed.commits,
                backend=backend,
                address=addresses[member.worker.hostname],
            )
            for member in placed
        }

    def dismiss(self, worker: WorkerId, reason: str) -> None:
        """Answer a worker that it no longer has a place."""
        self._reply(worker, Removed(reason))

    def notify(self, notice: Notice) -> None:
        """Set the notice for members of the round from now on."""
        self._notice = notice

    def job_over(self, message: str) -> Notice:
        """Answer all waiting workers that the job has ended. Return the notice, for those that watch elsewhere."""
        notice = Notice(self._notice.version + 1, self._stepper.state.round_id, NoticeKind.JOB_OVER, message)
        self.notify(notice)
        for future in self._parked.values():
            if not future.done():
                future.set_result(JobOver(message))
        return notice

    def gone(self, worker: WorkerId) -> None:
        """Drop the waits of a worker that has ended."""
        for kept in (self._parked, self._placed):
            kept.pop(worker, None)

    def _reply(self, worker: WorkerId, reply: NextRoundReply) -> None:
        future = self._parked.pop(worker, None)
        if future is not None and not future.done():
            future.set_result(reply)
