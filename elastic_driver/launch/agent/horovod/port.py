"""The port of one worker that runs Horovod's own library: translates its requests into ours.

Owns the translation, and facts about the worker that it does not report: in which round it is, whether it has met the
others there, and why it asks for another. The port is its identity: nothing in its requests names a round or a worker,
and whatever they do name is not trusted.

    GET  rank_and_size/...     it is READY, and is held until its round is formed
    PUT  SCOPE/KEY             a key of its round; of a first ``init()`` that has not asked: it is READY, and is held
    GET  SCOPE/KEY             held until another has put it; cut off when the round is broken, which ends the process
    DELETE SCOPE/KEY           it has met the others of this context
    PUT  worker_addresses/...  where it receives notifications
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.dialects.horovod import (
    ENV_PORT,
    INTERFACE_HEADER,
    PLACE_HEADER,
    RANK_AND_SIZE,
    REMOVED,
    WORKER_ADDRESSES,
    ends_init,
    place_variables,
    placed,
    scope_and_key,
)
from elastic_driver.errors import RendezvousError, RendezvousProtocolError, StaleRoundError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.agent.horovod.connections import endpoints_of
from elastic_driver.launch.agent.horovod.http import Answer, OneRequest, Request
from elastic_driver.launch.agent.horovod.notification import Registration, parse_registration
from elastic_driver.rendezvous.messages import (
    JobOver,
    NextRoundReply,
    NextRoundRequest,
    Removed,
    RoundAssignment,
    RunningReport,
)
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Backend, ReadyCause

# Prefix of Horovod's scopes among those of our own workers.
_SCOPE = "horovod "
# A library without process sets makes three contexts: if nothing follows the third for so long, it was the last.
_QUIET_S = 1.0
# When a worker that is new to the others has their state: it gets it in the first collectives after its start.
_SYNCED_S = 30.0


class Rounds(Protocol):
    """Answers requests of this host's workers. See HostRounds."""

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """Mark a worker as READY, and return its place once there is one."""

    def running(self, report: RunningReport) -> None:
        """Report that a member is training."""


class Store(Protocol):
    """The keys of the present round. See KeyRoutes."""

    def set_key(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Set a key."""

    def key_when_there(self, round_id: int, scope: str, key: str) -> asyncio.Future[bytes]:
        """Return a future for a key that may not be set yet."""


@dataclass(frozen=True, slots=True)
class PortContext:
    """The parts of its agent that a port uses.

    Attributes:
        rounds, store: see there.
        tasks: runs background tasks.
        interface: returns the name of this machine's interface that has an address; "" if there is none.
        start_again: has a worker's process started again, with these variables: it was started for another place than
            it has, and cannot be notified.
        warn: called with warnings for the user.
    """

    rounds: Rounds
    store: Store
    tasks: Tasks
    interface: Callable[[str], str]
    start_again: Callable[[WorkerId, Mapping[str, str]], None]
    warn: Callable[[str], None]


class HorovodPort:
    """The port of one worker, and the worker's state in its round. Used on the event loop only.

    Args:
        worker: its worker.
        plan: the place that it was started for; None if it has none.
        around: the parts of its agent.

    Attributes:
        pid: of the process that asks; 0 while not known.
        assignment: its place; None before its first round, and again once it asks for another.
        met: whether it has met all others of its round.
        registration: where it receives notifications; None until it has registered.
        endpoints: where it and the other workers of its round listen.
    """

    def __init__(self, worker: WorkerId, plan: SlotInfo | None, around: PortContext) -> None:
        self.worker = worker
        self.pid = 0
        self.assignment: RoundAssignment | None = None
        self.met = False
        self.registration: Registration | None = None
        self.endpoints: set[tuple[str, int]] = set()
        self._plan = plan
        self._around = around
        self._last_round = 0
        self._thread = 0
        self._begun = False  # whether it has used its place
        self._planned = False  # whether its round was to be left at a commit
        self._broken = asyncio.Event()  # set when its round is broken, or it has none
        self._broken.set()
        self._asking: asyncio.Task[NextRoundReply] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._server: asyncio.Server | None = None
        self._connections: set[OneRequest] = set()

    @property
    def is_known(self) -> bool:
        """Whether it has asked for a place, or has one: heartbeats are sent for it from then on."""
        return self.assignment is not None or self._asking is not None

    @property
    def is_meeting(self) -> bool:
        """Whether it is in its ``init()``: it has used its place, and has not met all others."""
        return self.assignment is not None and self._begun and not self.met

    async def open(self, uid: int) -> Mapping[str, str]:
        """Listen on loopback, for processes of one user. Returns the variables that lead there.

        Raises:
            OSError: it cannot listen.
        """
        loop = asyncio.get_running_loop()
        tasks = self._around.tasks
        self._server = await loop.create_server(
            lambda: OneRequest(self._answer, uid, tasks, self._connections), "127.0.0.1", 0, backlog=1024
        )
        return {ENV_PORT: str(self._server.sockets[0].getsockname()[1])}

    def close(self) -> None:
        """Close the port, since the worker is gone."""
        self._forget_timers()
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.abort()
        if self._asking is not None:
            self._asking.cancel()

    # --- notices of the driver -------------------------------------------------------------------------------------

    def planned(self) -> None:
        """Note that its round is to be left at a commit."""
        self._planned = True

    def broken(self) -> None:
        """Note that its round is broken, which ends its waits for others there."""
        self._broken.set()
        self._forget_timers()

    # --- requests of the worker ------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Answer:
        try:
            scope, key = scope_and_key(request.url)
            match request.method:
                case b"GET" if scope == RANK_AND_SIZE:
                    return await self._place(request)
                case b"GET":
                    return await self._get(scope, key)
                case b"PUT" if scope == WORKER_ADDRESSES:
                    self.registration = parse_registration(request.body)
                    return Answer(200)
                case b"PUT":
                    return await self._put(scope, key, request.body)
                case b"DELETE":
                    self._delete(scope)
                    return Answer(200)
                case _:
                    return Answer(405)
        except RendezvousError as error:
            return Answer(400, str(error).encode())

    async def _place(self, request: Request) -> Answer:
        """Answer a request for its place: at a process's first ``init()`` if the hook asks, and at each reset."""
        is_hook = PLACE_HEADER in request.headers
        if is_hook:
            with contextlib.suppress(ValueError):
                pid, thread = map(int, request.headers[PLACE_HEADER].split())
                self.pid, self._thread = max(0, pid), max(0, thread)
        reply = await asyncio.shield(self._ask())
        if isinstance(reply, RoundAssignment):
            interface = self._around.interface(reply.address)
            return Answer(200, placed(reply.slot), {INTERFACE_HEADER: interface} if interface else {})
        if isinstance(reply, JobOver) and not is_hook:
            await asyncio.Future()  # any answer would make it abort; it is stopped in a moment
        return Answer(200, REMOVED)

    def _ask(self) -> asyncio.Task[NextRoundReply]:
        """Return the pending answer to its request for a place: one for all its requests until it has used it."""
        asking = self._asking
        if asking is not None and not asking.cancelled():
            is_open = not asking.done() or not isinstance(asking.result(), RoundAssignment)
            if is_open or not (self._begun or self._broken.is_set()):
                return asking  # a repeated request: the answer was lost, or the hook has asked before
        cause = ReadyCause.START if not self._last_round else ReadyCause.INTERNAL_ERROR
        if self._last_round and self._planned and not self._broken.is_set():
            cause = ReadyCause.HOSTS_UPDATED
        request = NextRoundRequest(
            self.worker,
            self._last_round,
            0,
            cause,
            "",
            (Backend.HOROVOD,),
            self.pid,
            self._thread,
        )
        self._leave()
        asking = self._asking = asyncio.get_running_loop().create_task(self._next_round(request))
        return asking

    async def _next_round(self, request: NextRoundRequest) -> NextRoundReply:
        try:
            reply = await self._around.rounds.next_round(request)
        except RendezvousError as error:
            return Removed(str(error))
        if isinstance(reply, RoundAssignment):
            self.assignment, self._last_round = reply, reply.round_id
            self._begun = self._planned = False
            self._broken.clear()
        return reply

    def _leave(self) -> None:
        """Forget its round, which is over for it."""
        self._forget_timers()
        self.assignment, self.met = None, False
        self.endpoints = set()
        self._broken.set()

    async def _put(self, scope: str, key: str, value: bytes) -> Answer:
        if self.assignment is None and not self._last_round:
            # A first init() that trusts its environment: it is held until its round is formed.
            reply = await asyncio.shield(self._ask())
            if isinstance(reply, RoundAssignment) and reply.slot != self._plan:
                self._around.start_again(self.worker, place_variables(reply.slot))
                return Answer(0)
            if isinstance(reply, Removed | JobOver):
                return Answer(0)
        assignment = self.assignment
        if assignment is None:
            return Answer(200)  # late, of a round that is over for it: ignored
        self._begun = True
        if not self.met:
            self._forget_timers()  # another context follows
        self.endpoints |= endpoints_of(value)
        with contextlib.suppress(StaleRoundError):
            self._around.store.set_key(assignment.round_id, f"{_SCOPE}{scope}", key, value)
        return Answer(200)

    async def _get(self, scope: str, key: str) -> Answer:
        assignment = self.assignment
        if assignment is None:
            return Answer(404)
        self._begun = True
        try:
            waiting = self._around.store.key_when_there(assignment.round_id, f"{_SCOPE}{scope}", key)
        except StaleRoundError:
            return Answer(0)
        broken = asyncio.ensure_future(self._broken.wait())
        try:
            await asyncio.wait((waiting, broken), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() or waiting.exception() is not None:
                return Answer(0)
            value = waiting.result()
            self.endpoints |= endpoints_of(value)
            return Answer(200, value)
        finally:
            waiting.cancel()
            broken.cancel()

    def _delete(self, scope: str) -> None:
        is_last = ends_init(scope)
        if self.assignment is None or self.met or is_last is False:
            return
        if is_last:
            self._has_met()
        elif not self._broken.is_set():
            self._later(_QUIET_S, self._has_met)

    def _has_met(self) -> None:
        if self.assignment is None or self.met:
            return
        self.met = True
        self._tell_running(synced=False)
        self._later(_SYNCED_S, lambda: self._tell_running(synced=True))

    def _tell_running(self, *, synced: bool) -> None:
        """Report that it is training once it has met the others, and again when it must have their state."""
        if self.assignment is not None:
            report = RunningReport(self.worker, self.assignment.round_id, 0, synced=synced)
            with contextlib.suppress(RendezvousProtocolError):
                self._around.rounds.running(report)

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, do))

    def _forget_timers(self) -> None:
        timers, self._timers = self._timers, []
        for timer in timers:
            timer.cancel()
