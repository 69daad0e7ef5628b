"""The rounds on one host: what its workers ask their agent's server, and what they are answered.

Owns who waits for a round or for a notice, what each was answered last, and what has been heard of workers since the
driver was told. Decides nothing: what workers say goes to the driver, and its words become their answers; a level that
has not changed is not said again. :mod:`elastic_driver.driver.rounds` is the same for the whole job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from elastic_driver.errors import RendezvousClosedError, RendezvousProtocolError, StaleRoundError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.agent_messages import (
    Answer,
    Ask,
    Heard,
    Levels,
    NoticeSet,
    OnDisc,
    Put,
    Ready,
    Reply,
    RoundRefused,
    Running,
    Said,
    Value,
    Values,
    Want,
    WorkerLevel,
    worker_named,
)
from elastic_driver.rendezvous.entries import unpack_entries
from elastic_driver.rendezvous.messages import (
    DiscReport,
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
# Statuses that the server can answer with; an answer of another one is none.
_STATUSES = (200, 204, 400, 403, 404, 408, 409, 410, 413, 429, 500, 503)


class Processes(Protocol):
    """What is to be known of the workers' processes."""

    def runs(self, worker: WorkerId) -> bool:
        """Whether the worker's process is there."""

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        """A worker has told which of its threads live as long as it does."""


class Store(Protocol):
    """The server's keys of the present round."""

    def begin_round(self, round_id: int) -> None:
        """Fences the past."""

    def take(self, round_id: int, scope: str, entries: Iterable[tuple[str, bytes]]) -> None:
        """Takes keys that workers of other hosts have set."""


class HostRounds:
    """See above. The Upstream of the host's keys, too. Used on the event loop only.

    Args:
        send: tells the driver something.
        processes: of the workers.
        is_heard: whether the driver takes what it is told. Where it does not, what only counts as its latest waits.
        is_alone: whether there is no driver now, and another may come in its place.
        on_notice: takes each notice, for workers that do not watch.

    Attributes:
        poll_s: how often workers are heard at least, seconds; 0 for their long polls only.
    """

    def __init__(
        self,
        send: Callable[[Said], None],
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
        self._asked: dict[WorkerId, NextRoundRequest] = {}  # what each has asked that is not answered
        self._placed: dict[WorkerId, RoundAssignment] = {}
        self._running: dict[WorkerId, RunningReport] = {}  # the last one of each in the present round
        self._breaks = ""  # how the first member here that has failed in the present round ends; "" for none
        self._watching: dict[WorkerId, asyncio.Future[Notice]] = {}
        self._notice = Notice(0, 0, NoticeKind.NONE, "")
        self._version = 0  # of the last one that a driver has given, but for that of the job's end
        self._wanted: dict[tuple[str, str, int], bool] = {}  # of the present round: whether it is not there yet
        self._put: dict[tuple[str, str], bytes] = {}  # keys of the present round that workers here have set
        self._asks: dict[int, tuple[Ask, asyncio.Future[tuple[int, bytes]]]] = {}
        self._number = 0
        self._heard: dict[str, tuple[int, bool]] = {}
        self._disc: dict[WorkerId, DiscReport] = {}  # as the driver was told last
        self._new_disc: dict[WorkerId, DiscReport] = {}
        self._leaving: set[str] = set()
        self._exiting: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def serve(self, store: Store) -> None:
        """Says where the keys are. To be called once, before anybody asks."""
        self._store = store

    def close(self) -> None:
        """Ends its timer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def routes(self) -> Routes:
        """What workers ask: this answers for their rounds, and passes everything else on to the driver."""
        return (
            *routes_of_rounds(self),
            *(Route(method, ANY_PATH, WORKER, self._ask_driver) for method in ("GET", "POST")),
        )

    # --- what workers ask ------------------------------------------------------------------------------------------

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """A worker is READY: parks it until the driver has answered.

        Raises:
            RendezvousClosedError: there is no such worker any more.
        """
        worker = request.worker
        self._check(worker)
        future: asyncio.Future[NextRoundReply] = self._loop.create_future()
        assignment = self._placed.get(worker)
        if assignment is not None and request.after_round < assignment.round_id:
            # Its answer was lost on the way: the same again.
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
        """A member asks for the next notice of its round.

        Raises:
            StaleRoundError: the round has passed.
            RendezvousClosedError: there is no such worker any more.
        """
        worker = request.worker
        if request.round_id != self._round_id:
            raise StaleRoundError(request.round_id, self._round_id)
        self._check(worker)
        self.hear(worker, request.progress, waiting=request.waiting)
        if request.disc is not None and request.disc != self._disc.get(worker):
            self._new_disc[worker] = self._disc[worker] = request.disc
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
        """A member trains."""
        if report.round_id == self._round_id:
            self._running[report.worker] = report
        self._send(Running(report))

    def _check(self, worker: WorkerId) -> None:
        if not self._processes.runs(worker):
            raise RendezvousClosedError(f"worker {worker} is none of this host's living workers")

    def _ask_driver(self, request: RouteRequest) -> Awaitable[tuple[int, bytes]]:
        worker, (what, *path) = request.identity.worker, request.path
        assert worker is not None  # the route is the workers'
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
        """A worker here has set a key."""
        if round_id == self._round_id:
            self._put[scope, key] = value
        self._send(Put(round_id, scope, key, value))

    def want(self, round_id: int, scope: str, key: str, count: int) -> None:
        """A worker here waits for a key, or for as many. Said once for all of them."""
        if (scope, key, count) not in self._wanted:
            self._wanted[scope, key, count] = True
            self._send(Want(round_id, scope, key, count))

    # --- what the driver says --------------------------------------------------------------------------------------

    def take(self, message: Said) -> bool:
        """What the driver says to workers. Returns whether it was that.

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
        """A round has begun, with members on this host or without. One that is known changes nothing."""
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
        """A worker has ended: it waits for nothing any more, and was not heard."""
        for waiting in (self._parked.pop(worker, None), self._watching.pop(worker, None)):
            if waiting is not None and not waiting.done():
                waiting.cancel()
        for known in (self._asked, self._placed, self._running, self._disc, self._new_disc):
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
        """Where its answer is waited for."""
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
            return  # another driver has come, which does not know yet what was said here meanwhile
        self._notified(notice)

    def _notified(self, notice: Notice) -> None:
        self._notice = notice
        watching, self._watching = self._watching, {}
        for future in watching.values():
            if not future.done():
                future.set_result(notice)
        self._on_notice(notice)

    # --- while there is no driver, and when another has come -------------------------------------------------------

    def fails(self, worker: WorkerId, how: str) -> None:
        """A worker ends, and not well: its round is broken.

        A driver says so to all. Where there is none, this host's workers are told here, so that they wait for their
        next round: else one that waits in a collective operation might do so until there is a driver again. Nobody does
        for one that exits: it has closed its connections before it said so, and whoever needed it has seen that.
        """
        if worker in self._placed and worker.key not in self._exiting and not self._breaks:
            self._breaks = f"worker {worker} {how}"
            self.alone()

    def alone(self) -> None:
        """Perhaps there is no driver any more."""
        is_told = self._notice.round_id == self._round_id and self._notice.kind in _BREAKS
        if self._breaks and self._is_alone() and not is_told:
            self._notified(Notice(self._version + 1, self._round_id, NoticeKind.ABORT, self._breaks))

    def levels(self, workers: list[WorkerLevel], alone_s: float = 0.0) -> Levels:
        """What another driver has to know first.

        Args:
            workers: what is known of their processes.
            alone_s: for how long there was no driver.
        """
        known = [
            replace(each, leaving=each.worker in self._leaving, exiting=each.worker in self._exiting)
            for each in workers
        ]
        return Levels(known, self._round_id, self._version, alone_s)

    def reports(self) -> Iterator[Said]:
        """What workers have said last, for another driver, in the order in which that has to hear it."""
        yield from map(Running, self._running.values())
        yield from map(Ready, self._asked.values())
        self._new_disc.clear()
        for worker, disc in self._disc.items():
            yield OnDisc(worker.key, disc)

    def questions(self) -> Iterator[Said]:
        """The keys that workers here have set, and what they wait for, likewise."""
        for (scope, key), value in self._put.items():
            yield Put(self._round_id, scope, key, value)
        for (scope, key, count), is_open in self._wanted.items():
            if is_open:
                yield Want(self._round_id, scope, key, count)
        yield from (question for question, answer in self._asks.values() if not answer.done())

    # --- heartbeats ------------------------------------------------------------------------------------------------

    def hear(self, worker: WorkerId, progress: int, *, waiting: bool) -> None:
        """A worker lives. The driver is told, soon."""
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
        disc, self._new_disc = self._new_disc, {}
        for worker, report in disc.items():
            self._send(OnDisc(worker.key, report))
        heard, self._heard = self._heard, {}
        if heard or leaving or exiting:
            self._send(Heard(heard, leaving or [], exiting or []))
