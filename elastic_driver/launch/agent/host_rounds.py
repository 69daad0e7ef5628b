"""The rounds on one host: answers the requests of its workers as the driver decides.

Owns the pending requests for a round or a notice, the last answer to each, and the heartbeats not yet reported to the
driver. Decides nothing: what workers report is forwarded to the driver, and its messages become their answers; state
that has not changed is not sent again. :mod:`elastic_driver.driver.rounds` does the same for the whole job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError, StaleRoundError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Answer,
    Ask,
    Heard,
    Levels,
    NoticeSet,
    OnDisk,
    Put,
    Ready,
    Reply,
    RoundRefused,
    Running,
    Value,
    Values,
    Want,
    WorkerLevel,
    worker_named,
)
from elastic_driver.rendezvous.entries import unpack_entries
from elastic_driver.rendezvous.messages import (
    DiskReport,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RoundAssignment,
    RunningReport,
    WatchRequest,
)
from elastic_driver.rendezvous.routes import ANY_PATH, WORKER, Route, RouteRequest, Routes, routes_of_rounds
from elastic_driver.words import NoticeKind

_HEARD_S = 0.5
_BREAKS = (NoticeKind.ABORT, NoticeKind.JOB_OVER)
# Statuses that the server can answer with; any other becomes 500.
_STATUSES = (200, 204, 400, 403, 404, 408, 409, 410, 413, 429, 500, 503)


class Processes(Protocol):
    """What the rounds need to know about the workers' processes."""

    def runs(self, worker: WorkerId) -> bool:
        """Return whether the worker's process exists."""

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        """Record which of its threads a worker reports to live as long as it does."""


class Store(Protocol):
    """The server's keys of the present round."""

    def begin_round(self, round_id: int) -> None:
        """Drop the keys of earlier rounds and reject requests for them."""

    def take(self, round_id: int, scope: str, entries: Iterable[tuple[str, bytes]]) -> None:
        """Store keys that workers of other hosts have set."""


class HostRounds:
    """Answers this host's workers about rounds; also the Upstream of the host's keys. Used on the event loop only.

    Args:
        send: sends the driver a message.
        processes: the workers' processes.
        is_heard: returns whether the driver keeps up; while it does not, messages of which only the latest counts wait.
        is_alone: returns whether there is no driver now, and another may take over.
        on_notice: receives each notice, for workers that do not watch.

    Attributes:
        poll_s: the longest interval between heartbeats of a worker, seconds; 0 if only their long polls count.
    """

    def __init__(
        self,
        send: Callable[[AgentMessage], None],
        processes: Processes,
        *,
        is_heard: Callable[[], bool],
        is_alone: Callable[[], bool] = lambda: False,
        on_notice: Callable[[Notice], None] = lambda notice: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._processes = processes
        self._is_heard = is_heard
        self._is_alone = is_alone
        self._on_notice = on_notice
        self.poll_s = 0.0
        self._store: Store | None = None
        self._round_id = 0
        self._parked: dict[WorkerId, asyncio.Future[NextRoundReply]] = {}
        self._asked: dict[WorkerId, NextRoundRequest] = {}  # each worker's unanswered request
        self._placed: dict[WorkerId, RoundAssignment] = {}
        self._running: dict[WorkerId, RunningReport] = {}  # each worker's last report in the present round
        self._breaks = ""  # how the first member here that failed in the present round ended; "" if none failed
        self._watching: dict[WorkerId, asyncio.Future[Notice]] = {}
        self._notice = Notice(0, 0, NoticeKind.NONE, "")
        self._version = 0  # version of a driver's last notice, the one of the job's end excepted
        self._wanted: dict[tuple[str, str, int], bool] = {}  # of the present round: whether the key is still missing
        self._put: dict[tuple[str, str], bytes] = {}  # keys of the present round that workers here have set
        self._asks: dict[int, tuple[Ask, asyncio.Future[tuple[int, bytes]]]] = {}
        self._number = 0
        self._heard: dict[str, tuple[int, bool]] = {}
        self._disk: dict[WorkerId, DiskReport] = {}  # as last reported to the driver
        self._new_disk: dict[WorkerId, DiskReport] = {}
        self._leaving: set[str] = set()
        self._exiting: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def serve(self, store: Store) -> None:
        """Set the store of the keys. To be called once, before the first request."""
        self._store = store

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def routes(self) -> Routes:
        """The workers' routes: those of rounds are answered here, and all others are passed on to the driver."""
        return (
            *routes_of_rounds(self),
            *(Route(method, ANY_PATH, WORKER, self._ask_driver) for method in ("GET", "POST")),
        )

    # --- requests of workers ---------------------------------------------------------------------------------------

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """Mark a worker as READY, and park its request until the driver has answered.

        Raises:
            RendezvousClosedError: the worker no longer runs.
        """
        worker = request.worker
        self._check(worker)
        future: asyncio.Future[NextRoundReply] = self._loop.create_future()
        assignment = self._placed.get(worker)
        if assignment is not None and request.after_round < assignment.round_id:
            # The answer was lost on the way: repeat it.
            future.set_result(assignment)
            return future
        older = self._parked.get(worker)
        if older is not None and not older.done():
            older.cancel()
        self._parked[worker] = future
        self._processes.watch_threads(worker, request.pid, request.thread)
        if self._asked.get(worker) != request:
            self._asked[worker] = request
            self._placed.pop(worker, None)
            self._send(Ready(request))
        else:
            self.hear(worker, 0, waiting=True)
        return future

    def watch(self, request: WatchRequest) -> Awaitable[Notice]:
        """Return the next notice of a member's round, once there is one.

        Raises:
            StaleRoundError: the round has passed.
            RendezvousClosedError: the worker no longer runs.
        """
        worker = request.worker
        if request.round_id != self._round_id:
            raise StaleRoundError(request.round_id, self._round_id)
        self._check(worker)
        self.hear(worker, request.progress, waiting=request.waiting)
        if request.disk is not None and request.disk != self._disk.get(worker):
            self._new_disk[worker] = self._disk[worker] = request.disk
        future: asyncio.Future[Notice] = self._loop.create_future()
        if request.leaving or request.exiting:
            leaving, exiting = ([worker.key] if said else [] for said in (request.leaving, request.exiting))
            self._leaving.update(leaving)
            self._exiting.update(exiting)
            self._tell_heard(leaving=leaving, exiting=exiting)
            future.set_result(self._notice)
            return future
        if self._notice.round_id == request.round_id and self._notice.version > request.version:
            future.set_result(self._notice)
            return future
        older = self._watching.get(worker)
        if older is not None and not older.done():
            older.cancel()
        self._watching[worker] = future
        return future

    def running(self, report: RunningReport) -> None:
        """Record that a member is training, and report it to the driver."""
        if report.round_id == self._round_id:
            self._running[report.worker] = report
        self._send(Running(report))

    def _check(self, worker: WorkerId) -> None:
        if not self._processes.runs(worker):
            raise RendezvousClosedError(f"worker {worker} is not a running worker of this host")

    def _ask_driver(self, request: RouteRequest) -> Awaitable[tuple[int, bytes]]:
        worker, (what, *path) = request.identity.worker, request.path
        assert worker is not None  # only workers may use this route
        self._number += 1
        number = self._number
        question = Ask(number, worker.key, what, path, request.body)
        answer: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()
        self._asks[number] = question, answer
        answer.add_done_callback(lambda _: self._asks.pop(number, None))
        self._send(question)
        return answer

    # --- keys (Upstream) -------------------------------------------------------------------------------------------

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Forward a key that a worker here has set."""
        if round_id == self._round_id:
            self._put[scope, key] = value
        self._send(Put(round_id, scope, key, value))

    def want(self, round_id: int, scope: str, key: str, count: int) -> None:
        """Ask the driver for a key, or for count keys, once for all workers here that wait for it."""
        if (scope, key, count) not in self._wanted:
            self._wanted[scope, key, count] = True
            self._send(Want(round_id, scope, key, count))

    # --- messages of the driver ------------------------------------------------------------------------------------

    def take(self, message: AgentMessage) -> bool:
        """Handle a message of the driver for workers. Returns whether it was one.

        Raises:
            RendezvousProtocolError: it cannot be read.
        """
        assert self._store is not None
        match message:
            case Reply(key, reply):
                self._replied(worker_named(key), reply)
            case RoundRefused(key, why):
                self._refused(worker_named(key), why)
            case NoticeSet(notice):
                self._told(notice)
            case Answer(number, status, body):
                _, answer = self._asks.get(number, (None, None))
                if answer is not None and not answer.done():
                    answer.set_result((status if status in _STATUSES else 500, body))
            case Value(round_id, scope, key, body):
                self._is_there(round_id, scope, [(key, body)])
            case Values(round_id, scope, body):
                self._is_there(round_id, scope, unpack_entries(body))
            case _:
                return False
        return True

    def begin_round(self, round_id: int) -> None:
        """Begin a round, whether or not it has members on this host. A known round changes nothing."""
        assert self._store is not None
        if round_id > self._round_id:
            self._round_id = round_id
            self._placed.clear()
            self._running.clear()
            self._breaks = ""
            self._wanted.clear()
            self._put.clear()
            self._store.begin_round(round_id)

    def gone(self, worker: WorkerId) -> None:
        """Forget a worker that has ended: cancel its requests, and drop its unsent reports."""
        for waiting in (self._parked.pop(worker, None), self._watching.pop(worker, None)):
            if waiting is not None and not waiting.done():
                waiting.cancel()
        for known in (self._asked, self._placed, self._running, self._disk, self._new_disk):
            known.pop(worker, None)
        self._heard.pop(worker.key, None)
        self._leaving.discard(worker.key)
        self._exiting.discard(worker.key)

    def _replied(self, worker: WorkerId, reply: NextRoundReply) -> None:
        if isinstance(reply, RoundAssignment):
            self._placed[worker] = reply
        future = self._answered(worker)
        if future is not None:
            future.set_result(reply)

    def _refused(self, worker: WorkerId, why: str) -> None:
        future = self._answered(worker)
        if future is not None:
            future.set_exception(RendezvousProtocolError(why))

    def _answered(self, worker: WorkerId) -> asyncio.Future[NextRoundReply] | None:
        """Remove a worker's request, and return the future that waits for its answer; None if nothing waits."""
        self._asked.pop(worker, None)
        future = self._parked.pop(worker, None)
        return None if future is None or future.done() else future

    def _is_there(self, round_id: int, scope: str, entries: list[tuple[str, bytes]]) -> None:
        assert self._store is not None
        self._store.take(round_id, scope, entries)
        if round_id == self._round_id:
            for key, _ in entries:
                if (scope, key, 0) in self._wanted:
                    self._wanted[scope, key, 0] = False
            for of, _, count in self._wanted:
                if of == scope and 0 < count <= len(entries):
                    self._wanted[of, "", count] = False

    def _told(self, notice: Notice) -> None:
        if notice.kind is not NoticeKind.JOB_OVER:
            self._version = notice.version
        own = self._notice
        if (notice.round_id, notice.version) < (own.round_id, own.version):
            return  # from a new driver, which does not know yet what was announced here meanwhile
        self._notified(notice)

    def _notified(self, notice: Notice) -> None:
        self._notice = notice
        watching, self._watching = self._watching, {}
        for future in watching.values():
            if not future.done():
                future.set_result(notice)
        self._on_notice(notice)

    # --- while there is no driver, and when another has taken over -------------------------------------------------

    def fails(self, worker: WorkerId, how: str) -> None:
        """Record that a worker has failed: its round is broken.

        A driver would notify all workers. Without one, this host's workers are notified here, so that they ask for
        their next round: otherwise one that waits in a collective operation might do so until there is a driver again.
        A worker that announced its exit is no reason to: it had closed its connections before, and those that needed it
        have noticed.
        """
        if worker in self._placed and worker.key not in self._exiting and not self._breaks:
            self._breaks = f"worker {worker} {how}"
            self.alone()

    def alone(self) -> None:
        """Act on the connection to the driver being lost, perhaps for good: announce a broken round here."""
        is_told = self._notice.round_id == self._round_id and self._notice.kind in _BREAKS
        if self._breaks and self._is_alone() and not is_told:
            self._notified(Notice(self._version + 1, self._round_id, NoticeKind.ABORT, self._breaks))

    def levels(self, workers: list[WorkerLevel], alone_s: float = 0.0) -> Levels:
        """Return the state that another driver needs first.

        Args:
            workers: what is known of their processes.
            alone_s: how long there was no driver, seconds.
        """
        known = [
            replace(level, leaving=level.worker in self._leaving, exiting=level.worker in self._exiting)
            for level in workers
        ]
        return Levels(known, self._round_id, self._version, alone_s)

    def reports(self) -> Iterator[AgentMessage]:
        """Yield the workers' last reports for another driver, in the order in which it must receive them."""
        yield from map(Running, self._running.values())
        yield from map(Ready, self._asked.values())
        self._new_disk.clear()
        for worker, disk in self._disk.items():
            yield OnDisk(worker.key, disk)

    def questions(self) -> Iterator[AgentMessage]:
        """Yield the keys that workers here have set, then their pending requests, for another driver."""
        for (scope, key), value in self._put.items():
            yield Put(self._round_id, scope, key, value)
        for (scope, key, count), is_open in self._wanted.items():
            if is_open:
                yield Want(self._round_id, scope, key, count)
        yield from (question for question, answer in self._asks.values() if not answer.done())

    # --- heartbeats ------------------------------------------------------------------------------------------------

    def hear(self, worker: WorkerId, progress: int, *, waiting: bool) -> None:
        """Record a heartbeat of a worker; the driver is notified soon."""
        self._heard[worker.key] = progress, waiting
        if self._timer is None:
            self._tell_later()

    def _tell_later(self) -> None:
        delay_s = min(_HEARD_S, self.poll_s / 2) if self.poll_s > 0 else _HEARD_S
        self._timer = self._loop.call_later(delay_s, self._tell_on_time)

    def _tell_on_time(self) -> None:
        self._timer = None
        if self._is_heard():
            self._tell_heard()
        elif self._heard:
            self._tell_later()

    def _tell_heard(self, *, leaving: list[str] | None = None, exiting: list[str] | None = None) -> None:
        disk, self._new_disk = self._new_disk, {}
        for worker, report in disk.items():
            self._send(OnDisk(worker.key, report))
        heard, self._heard = self._heard, {}
        if heard or leaving or exiting:
            self._send(Heard(heard, leaving or [], exiting or []))
