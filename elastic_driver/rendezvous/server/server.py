"""The driver's rendezvous server: key-value store, long polls, and the requests that go to the round handler.

Owns what requests mean, and who waits for what. What a peer may cost and how bytes become requests is the
connection's; membership is the handler's.
"""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from ssl import SSLContext
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote

from elastic_driver.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousProtocolError,
    SettingsError,
    StaleRoundError,
)
from elastic_driver.rendezvous.credentials import Identity, Role, reader_header
from elastic_driver.rendezvous.messages import (
    API,
    DrainHostRequest,
    DrainReply,
    EndReply,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RunningReport,
    WatchRequest,
)
from elastic_driver.rendezvous.proof import Session
from elastic_driver.rendezvous.routes import AGENT, DRIVER_ROUTES, RouteRequest, Routes, table_of
from elastic_driver.rendezvous.server.connection import Connection, Guest, ServerLimits, error_body
from elastic_driver.rendezvous.server.encrypted import EncryptedListener, listen_encrypted
from elastic_driver.rendezvous.server.parked import KeyWaiter, PendingAnswer, Waiter, Waiters
from elastic_driver.rendezvous.server.store import RoundStore
from elastic_driver.rendezvous.server.web import Web, WebAnswer, WebRequest, WebStreaming
from elastic_driver.system.job_clock import CallLater

__all__ = ["CONNECTIONS_EACH", "RendezvousServer", "RoundHandler", "ServerLimits"]

# Three connections for each of 4,096 workers, and a third as much again. Not more than that unless it is needed,
# although the system may allow it: workers inherit the limit, and some programs walk through all of it.
_DESCRIPTORS = 16384
# Of one connection. What agents send a process that is stopped has to fit in (CREDIT_BYTES, in small pieces, of which
# each takes some room of its own): a full buffer is as good as a dead machine to them. Linux begins with less, and
# has the buffer grow only while it is read from.
_RECEIVE_BYTES = 512 << 10
CONNECTIONS_EACH = 3
"""Of a worker: for its main thread, for its watch, and for what its engine asks when it connects."""
# Descriptors that no worker takes: of the discovery script, logs, libraries.
_OTHER_DESCRIPTORS = 256
# Of connections that the loop has not come to take yet.
_BACKLOG = 4096
# How long close() waits for peers to take their last answers.
_FLUSH_S = 1.0
# A build or a wait that takes longer than a day is no wait any more.
_MAX_WAIT_S = 86400.0


_Answer = TypeVar("_Answer")
_Request = TypeVar("_Request", NextRoundRequest, WatchRequest, RunningReport, LeaveRequest)


class _NotAllowedError(RendezvousError):
    """Somebody speaks for somebody else."""


class RoundHandler(Protocol):
    """What the driver answers. The awaitables are cancelled when the connection goes or the poll time is over."""

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """A worker is READY; the answer comes when its round is formed."""

    def watch(self, request: WatchRequest) -> Awaitable[Notice]:
        """The next notice of the round. May raise StaleRoundError or RendezvousClosedError, at once or later."""

    def running(self, report: RunningReport) -> None:
        """A member trains."""

    def leave(self, request: LeaveRequest) -> None:
        """A worker wants to leave. Raises RendezvousClosedError when it is to end at once."""

    def drain(self, request: DrainHostRequest) -> DrainReply:
        """A host's workers are to leave, or not any more."""

    def end(self) -> EndReply:
        """The job is to end."""

    def status(self) -> dict[str, object]:
        """The job, as JSON."""


class Keys(Protocol):
    """With what those who ask prove themselves; a JobKey is one."""

    def of(self, identity: Identity) -> bytes | None:
        """Somebody's; None for nobody."""


class Upstream(Protocol):
    """Where the keys of all hosts are, of which this server has those of one."""

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """A worker here has set a key."""

    def want(self, round_id: int, scope: str, key: str, count: int) -> None:
        """A worker here waits for a key, or for this many keys (then ``key`` is ""): see :meth:`RendezvousServer.take`.

        Called again for each worker that waits.
        """


class RendezvousServer:
    """Serves one job. Runs in one event loop; its methods are called there.

    Args:
        handler: answers what is not key-value.
        routes: what workers may ask; the driver's own routes come to these.
        key: what whoever asks proves himself with.
        limits: see :class:`ServerLimits`.
        on_error: told of an exception that the handler should not have raised. Its request is answered with 500.
        call_later: measures how long requests wait for keys. The loop's, when not given; but that fires at once when
            the process goes on after it was stopped, before it has read the keys that have come meanwhile.
        keys: of those who are no workers, operators or readers: agents; None where there are none.
        on_agent: takes over the connection of an agent that has proven itself: gives the protocol that it gets.
        on_full: told, at the start, that there will not be room for all workers, and the first time that there is none.
        own: the driver's own routes.
        upstream: has the keys of all hosts, when this is the server of one host's workers.
        web: answers what is not under /v1, to browsers and scrapers; None for nobody.

    Attributes:
        store: the keys of the current round.
    """

    def __init__(
        self,
        handler: RoundHandler,
        *,
        routes: Routes,
        key: Keys,
        limits: ServerLimits | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        call_later: CallLater | None = None,
        on_full: Callable[[str], None] | None = None,
        keys: Callable[[Identity], bytes | None] | None = None,
        on_agent: Callable[[Identity, Session], asyncio.Protocol] | None = None,
        own: Routes = DRIVER_ROUTES,
        upstream: Upstream | None = None,
        web: Web | None = None,
    ) -> None:
        self.store = RoundStore()
        self.limits = limits or ServerLimits()
        self._key_of_job = key
        self._keys = keys
        self._on_agent = on_agent
        # Where nobody may look, it is what nobody can guess.
        reader = key.of(Identity(Role.READER)) or secrets.token_bytes()
        self.reader_header = reader_header(reader)
        self._handler = handler
        self._routes = table_of(routes, own)
        self._upstream = upstream
        self.web = web
        self._on_error = on_error
        self._call_later = call_later
        self._on_full = on_full
        self._servers: list[asyncio.Server | EncryptedListener] = []
        self._closing = False
        self._all_lost = asyncio.Event()  # set when closing and the last connection is lost
        self._sweeper: asyncio.TimerHandle | None = None
        self._max_connections = 0
        self._connections: set[Guest] = set()
        self._strangers: dict[Guest, float] = {}  # and when they came, oldest first
        self._waiters = Waiters()
        self._pending: set[PendingAnswer] = set()

    # --- for the driver --------------------------------------------------------------------------------------------

    async def start(
        self,
        host: str,
        ports: int | Sequence[int],
        *,
        workers: int = 0,
        at_most: int = 0,
        connections_each: int = CONNECTIONS_EACH,
        descriptors_each: int = 0,
        ssl: SSLContext | None = None,
        listener: socket.socket | None = None,
    ) -> int:
        """Listens.

        Args:
            host: local address.
            ports: one, or several that are tried in order; 0 for any that is free.
            workers: how many there has to be room for.
            at_most: how many there may come to be, as far as that is known.
            connections_each: that a worker keeps here.
            descriptors_each: of this process, that a worker takes besides its connections.
            ssl: encrypts all connections; see :mod:`elastic_driver.rendezvous.certificate`. None for none.
            listener: a socket that listens there already, and is closed with the server; None to make one.

        Returns:
            The port.

        Raises:
            SettingsError: the address or port cannot be had, or not as many files be open as the workers need.
        """
        per_worker = connections_each + descriptors_each
        needed, wanted = (per_worker * number + _OTHER_DESCRIPTORS for number in (workers, max(workers, at_most)))
        allowed = _descriptors(max(_DESCRIPTORS, wanted))
        if allowed < needed:
            raise SettingsError(
                f"cannot serve {workers} workers: that takes {needed} open files, and {allowed} are allowed; raise the "
                "hard limit (ulimit -Hn) for this user"
            )
        room = (allowed - _OTHER_DESCRIPTORS) // per_worker
        if allowed < wanted and self._on_full is not None:
            self._on_full(
                f"there is room for {room} workers, and the job may come to have {at_most}: that takes {wanted} "
                f"open files, and {allowed} are allowed; raise the hard limit (ulimit -Hn) for this user before the "
                "next start"
            )
        most = allowed - _OTHER_DESCRIPTORS - room * descriptors_each
        self._max_connections = self.limits.connections or max(16, most)
        strangers = max(1, min(self.limits.strangers, self._max_connections // 2))
        self.limits = replace(self.limits, strangers=strangers)
        if listener is not None:
            server = await self._listen("", 0, ssl, listener)
        else:
            server = await self._listen_on_one(host, [ports] if isinstance(ports, int) else ports, ssl)
        self._servers.append(server)
        self._sweep()
        actual: int = server.sockets[0].getsockname()[1]
        return actual

    async def _listen_on_one(
        self, host: str, ports: Sequence[int], ssl: SSLContext | None
    ) -> asyncio.Server | EncryptedListener:
        for port in ports:
            try:
                return await self._listen(host, port, ssl)
            except (OSError, OverflowError) as error:
                in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
                if in_use and len(ports) > 1:
                    continue
                hint = "the port is in use; choose another with --rendezvous-port, or 0 for any" if in_use else error
                raise SettingsError(f"cannot listen on {host} port {port} for the rendezvous: {hint}") from error
        range_ = f"ports {min(ports)} to {max(ports)}"
        raise SettingsError(f"cannot listen on {host} for the rendezvous: {range_} are all in use (--port-range)")

    async def _listen(
        self, host: str, port: int, ssl: SSLContext | None, listener: socket.socket | None = None
    ) -> asyncio.Server | EncryptedListener:
        server: asyncio.Server | EncryptedListener
        if ssl is not None:
            server = await listen_encrypted(self, host, port, listener, context=ssl, backlog=_BACKLOG)
        else:
            where: dict[str, Any] = {"sock": listener}
            if listener is None:
                where = {"host": host, "port": port, "reuse_address": True}
            server = await asyncio.get_running_loop().create_server(lambda: Connection(self), backlog=_BACKLOG, **where)
        for sock in server.sockets:  # whose connections have it as well
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        return server

    async def listen_too(self, host: str, *, ports: Iterable[int] = (0,), ssl: SSLContext | None = None) -> int:
        """Listens on another address as well, on the same port where that is free there.

        Args:
            host: local address.
            ports: tried otherwise, in order; 0 for any.
            ssl: see :meth:`start`.

        Returns:
            The port.

        Raises:
            SettingsError: the address cannot be had.
        """
        assert self._servers
        port = self._servers[0].sockets[0].getsockname()[1]
        why = ""
        for each in (port, *ports):
            try:
                server = await self._listen(host, each, ssl)
            except OSError as error:
                why = error.strerror or str(error)
                continue
            self._servers.append(server)
            actual: int = server.sockets[0].getsockname()[1]
            return actual
        raise SettingsError(f"cannot listen on {host} for agents: {why}")

    async def listen_at(self, host: str, port: int, *, ssl: SSLContext | None = None) -> int:
        """Listens on another address as well, on this port and no other; 0 for any.

        Raises:
            SettingsError: it cannot be had.
        """
        try:
            server = await self._listen(host, port, ssl)
        except (OSError, UnicodeError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                reason = "the port is in use"
            raise SettingsError(f"cannot listen on {host} port {port}: {reason}") from error
        self._servers.append(server)
        actual: int = server.sockets[0].getsockname()[1]
        return actual

    async def start_local(self, name: str, *, workers: int) -> None:
        """Listens to processes of this user on this machine, and of root's.

        Args:
            name: of an abstract socket, without the NUL byte.
            workers: for how many there is room.

        Raises:
            SettingsError: the name cannot be had.
        """
        self._max_connections = max(16, 2 * CONNECTIONS_EACH * workers)
        loop = asyncio.get_running_loop()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(f"\0{name}")
            server = await loop.create_unix_server(lambda: Connection(self), sock=listening, backlog=_BACKLOG)
        except OSError as error:
            listening.close()
            raise SettingsError(f"cannot listen for the workers of this machine: {error.strerror or error}") from error
        self._servers.append(server)
        self._sweep()

    def descriptors(self) -> list[int]:
        """Of all sockets, for a forked child, which has them too."""
        listening = [each.fileno() for server in self._servers for each in server.sockets]
        return [number for number in (*listening, *(each.descriptor for each in self._connections)) if number >= 0]

    async def close(self) -> None:
        """Stops listening, answers 410 to whoever is parked, and drops every connection. Idempotent."""
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for server in self._servers:
            server.close()
        answers = [pending.future for pending in self._pending]
        for connection in tuple(self._connections):
            connection.say_goodbye("the driver has ended")
        await asyncio.gather(*answers, return_exceptions=True)
        if self._connections:
            try:
                await asyncio.wait_for(self._all_lost.wait(), _FLUSH_S)
            except TimeoutError:
                for connection in tuple(self._connections):
                    connection.abort()
                await self._all_lost.wait()
        for server in self._servers:
            await server.wait_closed()

    def begin_round(self, round_id: int) -> None:
        """Fences the past: its keys are dropped, and whoever waits for one is answered 409 at once.

        Raises:
            ValueError: the round is not above the current one.
        """
        self.store.begin_round(round_id)
        for waiter in self._waiters.all():
            waiter.answer(409, error_body(StaleRoundError(waiter.round_id, round_id)))

    def take(self, round_id: int, scope: str, entries: Iterable[tuple[str, bytes]]) -> None:
        """Takes keys that workers of other hosts have set, and answers who waits for them. Those of the past it drops.

        Raises:
            RendezvousProtocolError: the store is full.
        """
        if round_id == self.store.round_id:
            for key, value in entries:
                self.store.put(round_id, scope, key, value)
                self._release_key(scope, key, value)
            self._release_count(round_id, scope)

    # --- for those who speak for a worker --------------------------------------------------------------------------

    def set_key(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Sets a key, as a worker would.

        Raises:
            StaleRoundError: the round is not the current one.
            RendezvousProtocolError: the store is full, or there is no key or no scope.
        """
        self._put(round_id, scope, key, value)

    def key_when_there(self, round_id: int, scope: str, key: str) -> asyncio.Future[bytes]:
        """A key's value as soon as it has one. Whoever waits no longer cancels the future.

        The future raises StaleRoundError when the round is over.

        Raises:
            StaleRoundError: the round is not the current one.
        """
        value = self.store.get(round_id, scope, key)
        waiter = KeyWaiter(round_id, scope, key, self._waiters)
        if value is not None:
            waiter.future.set_result(value)
            return waiter.future
        self._waiters.add(waiter)
        if self._upstream is not None:
            self._upstream.want(round_id, scope, key, 0)
        return waiter.future

    # --- for connections -------------------------------------------------------------------------------------------

    def key_of(self, identity: Identity) -> bytes | None:
        """See Service."""
        if identity.role in AGENT:
            return None if self._keys is None else self._keys(identity)
        return self._key_of_job.of(identity)

    def arrived(self, connection: Guest) -> None:
        """A peer connected."""
        self._connections.add(connection)
        if self._closing:
            connection.abort()
            return
        now = asyncio.get_running_loop().time()
        if len(self._connections) <= self._max_connections:
            self._cut_strangers(now, self.limits.strangers - 1)
        elif self._strangers:
            next(iter(self._strangers)).abort()  # at once: its descriptor is needed
        else:
            connection.refuse(503, f"the driver has {self._max_connections} connections already; try again")
            tell, self._on_full = self._on_full, None
            if tell is not None:
                tell(
                    f"there is no room for more connections than {self._max_connections}: workers that come now have "
                    "to wait until others go; raise the limit of open files (ulimit -Hn) before the next start"
                )
        self._strangers[connection] = now

    def _cut_strangers(self, now: float, most: int) -> None:
        """Cuts the oldest of those who have had their time, until no more than that are left."""
        while len(self._strangers) > most:
            oldest, since = next(iter(self._strangers.items()))
            if now - since < self.limits.stranger_s or oldest.has_unread:
                return
            oldest.abort()

    def met(self, connection: Connection) -> None:
        """The peer has said hello: it is given time anew, to prove who it is."""
        if self._strangers.pop(connection, None) is not None:
            self._strangers[connection] = asyncio.get_running_loop().time()

    def trusted(self, connection: Connection) -> None:
        """The peer has proven who it is."""
        self._strangers.pop(connection, None)

    def left(self, connection: Guest) -> None:
        """The connection is closing or gone. May be called more than once."""
        self._strangers.pop(connection, None)

    def lost(self, connection: Guest) -> None:
        """The connection is gone."""
        self._strangers.pop(connection, None)
        self._connections.discard(connection)
        if self._closing and not self._connections:
            self._all_lost.set()

    def serve(self, connection: Connection, method: bytes, url: bytes, body: bytes) -> None:
        """Answers a request, or parks it."""
        try:
            self._route(connection, method, url, body)
        except Exception as error:
            connection.reply(*self._failure(error))

    def serve_web(
        self, connection: Connection, method: bytes, url: bytes, headers: dict[str, str], body: bytes
    ) -> None:
        """Answers a request to what is not under /v1."""
        assert self.web is not None
        path, _, raw_query = url.decode("latin-1").partition("?")
        request = WebRequest(
            method.decode("ascii", "replace"),
            unquote(path),
            dict(parse_qsl(raw_query)),
            headers,
            body,
            connection.is_encrypted,
        )
        try:
            answer = self.web.answer(request)
        except Exception as error:
            status, text = self._failure(error)
            answer = WebAnswer(status, text, "application/json")
        if isinstance(answer, WebStreaming):
            connection.stream_web(answer)
        else:
            connection.reply_web(answer)

    def _failure(self, error: BaseException) -> tuple[int, bytes]:
        """Status and body for an exception. What nobody raises on purpose is a bug, and reported."""
        match error:
            case StaleRoundError():
                return 409, error_body(error)
            case _NotAllowedError():
                return 403, error_body(error)
            case RendezvousClosedError():
                return 410, error_body(error)
            case RendezvousError():
                return 400, error_body(error)
            case _:
                if self._on_error is not None:
                    self._on_error(error)
                return 500, error_body(f"{type(error).__name__}: {error}")

    # --- routes ----------------------------------------------------------------------------------------------------

    def _route(self, connection: Connection, method: bytes, url: bytes, body: bytes) -> None:
        path, _, raw_query = url.decode("ascii", "replace").partition("?")
        query = dict(parse_qsl(raw_query)) if raw_query else {}
        if not path.startswith(f"{API}/"):
            connection.reply(404, error_body(f"no such path: {path}"))
            return
        name, *rest = path[len(API) + 1 :].split("/")
        route = self._routes.get(name)
        if route is not None and route.answer is not None:
            if self._may(connection, method, name):
                request = RouteRequest(connection.identity, method, tuple(map(unquote, rest)), query, body)
                answer = route.answer(request)
                if isinstance(answer, tuple):
                    connection.reply(*answer)
                else:
                    self._await(connection, answer, None, lambda answered: answered)
            return
        match [name, *rest]:
            case ["rounds", round_text, "kv", scope, key]:
                if not self._may(connection, method, "key"):
                    return
                self._key(connection, method, _integer(round_text, "round"), unquote(scope), unquote(key), query, body)
            case ["rounds", round_text, "exchange", scope]:
                if self._may(connection, method, "exchange"):
                    self._exchange(connection, _integer(round_text, "round"), unquote(scope), query, body)
            case ["next-round"]:
                if self._may(connection, method, "next-round"):
                    ready = _checked(connection, NextRoundRequest.from_json(body))
                    self._ask(connection, self._handler.next_round(ready), query)
            case ["watch"]:
                if self._may(connection, method, "watch"):
                    self._ask(
                        connection, self._handler.watch(_checked(connection, WatchRequest.from_json(body))), query
                    )
            case ["running"]:
                if self._may(connection, method, "running"):
                    self._handler.running(_checked(connection, RunningReport.from_json(body)))
                    connection.reply(204)
            case ["leave"]:
                if self._may(connection, method, "leave"):
                    self._handler.leave(_checked(connection, LeaveRequest.from_json(body)))
                    connection.reply(204)
            case ["agent"]:
                if self._may(connection, method, "agent"):
                    identity, take = connection.identity, self._on_agent
                    assert take is not None  # who has keys for agents takes them
                    connection.upgrade(lambda session: take(identity, session))
            case ["drain"]:
                if self._may(connection, method, "drain"):
                    reply = self._handler.drain(DrainHostRequest.from_json(body))
                    connection.reply(200, reply.to_json(), is_json=True)
            case ["end"]:
                if self._may(connection, method, "end"):
                    connection.reply(200, self._handler.end().to_json(), is_json=True)
            case ["status"]:
                if self._may(connection, method, "status"):
                    connection.reply(200, json.dumps(self._handler.status()).encode(), is_json=True)
            case _:
                connection.reply(404, error_body(f"no such path: {path}"))

    def _may(self, connection: Connection, method: bytes, name: str) -> bool:
        """Whether whoever asks may do that. Answers 404 or 405 when nobody may, 403 when others may."""
        route = self._routes.get(name)
        if route is None:
            connection.reply(404, error_body(f"no such path: {API}/{name}"))
            return False
        roles = route.methods.get(method, ())
        if connection.identity.role in roles:
            return True
        if roles:
            allowed = " or ".join(_role_name(role) for role in sorted(roles))
            connection.reply(403, error_body(f"{_peer_name(connection)} may not do this; {allowed} may"))
        else:
            named, supported = method.decode("ascii", "replace"), b", ".join(route.methods).decode()
            connection.reply(405, error_body(f"method {named} is not supported here; {supported} is"))
        return False

    def _key(
        self,
        connection: Connection,
        method: bytes,
        round_id: int,
        scope: str,
        key: str,
        query: dict[str, str],
        body: bytes,
    ) -> None:
        match method:
            case b"GET":
                value = self.store.get(round_id, scope, key)
                if value is not None:
                    connection.reply(200, value)
                    return
                if self._upstream is not None:
                    self._upstream.want(round_id, scope, key, 0)
                waiter = Waiter(connection, round_id, scope, key=key)
                self._park(connection, waiter, _wait_s(query, 0.0))
            case b"PUT":
                self._put(round_id, scope, key, body)
                connection.reply(204)
            case _:
                raise AssertionError(f"{method!r} is in the table of permissions, and not here")

    def _exchange(self, connection: Connection, round_id: int, scope: str, query: dict[str, str], value: bytes) -> None:
        count, wait_s = _integer(query.get("count", ""), "count"), _wait_s(query, self.limits.poll_s)
        self._put(round_id, scope, query.get("key", ""), value)
        if self.store.count(round_id, scope) >= count:
            connection.reply(200, self.store.packed(round_id, scope))
            return
        if self._upstream is not None:
            self._upstream.want(round_id, scope, "", count)
        self._park(connection, Waiter(connection, round_id, scope, count=count), wait_s)

    def _park(self, connection: Connection, waiter: Waiter, wait_s: float) -> None:
        connection.park(waiter)
        if wait_s > 0:
            call_later = self._call_later or asyncio.get_running_loop().call_later
            waiter.park(self._waiters, self.store, wait_s, call_later)
        else:
            waiter.answer_too_late(self.store)

    def _put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """Sets a key and answers who waited for it, or for as many keys in its scope as there are now."""
        if not key or not scope:
            raise RendezvousProtocolError("cannot store a value without a scope and a key")
        self.store.put(round_id, scope, key, value)
        if self._upstream is not None:
            self._upstream.put(round_id, scope, key, value)
        self._release_key(scope, key, value)
        self._release_count(round_id, scope)

    def _release_key(self, scope: str, key: str, value: bytes) -> None:
        for waiter in self._waiters.of_key(scope, key):
            waiter.answer(200, value)

    def _release_count(self, round_id: int, scope: str) -> None:
        for waiter in self._waiters.of_count(scope, lambda: self.store.count(round_id, scope)):
            waiter.answer(200, self.store.packed(round_id, scope))

    def _ask(
        self, connection: Connection, answer: Awaitable[NextRoundReply] | Awaitable[Notice], query: dict[str, str]
    ) -> None:
        wait_s = min(_wait_s(query, self.limits.poll_s), self.limits.poll_s)
        self._await(connection, answer, wait_s, lambda reply: (200, reply.to_json()))

    def _await(
        self,
        connection: Connection,
        answer: Awaitable[_Answer],
        wait_s: float | None,
        render: Callable[[_Answer], tuple[int, bytes]],
    ) -> None:
        pending = PendingAnswer(connection, asyncio.ensure_future(answer), self._pending, self._failure, render)
        pending.park(wait_s)

    @property
    def parked(self) -> int:
        """How many requests are parked now."""
        return len(self._waiters) + len(self._pending)

    def _sweep(self) -> None:
        """Cuts connections that stall, in one pass: a timer for each would cost more than what it guards."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._cut_strangers(now, self.limits.strangers)
        for connection in tuple(self._connections):
            connection.check_time(now)
        interval_s = min(1.0, self.limits.request_s / 4, self.limits.idle_s / 4)
        self._sweeper = loop.call_later(interval_s, self._sweep)


def _descriptors(needed: int) -> int:
    """Raises the limit of open files as far as it is needed and allowed, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # forbidden by a sandbox: what there is has to do
            return soft
        return wanted
    return needed if soft == resource.RLIM_INFINITY else soft


def _checked(connection: Connection, request: _Request) -> _Request:
    """The request, if it is of the worker that has proven itself."""
    if request.worker != connection.identity.worker:
        raise _NotAllowedError(f"{_peer_name(connection)} may not speak for worker {request.worker}")
    return request


def _peer_name(connection: Connection) -> str:
    identity = connection.identity
    return _role_name(identity.role) if identity.worker is None else f"worker {identity.worker}"


def _role_name(role: Role) -> str:
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"


def _integer(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise RendezvousProtocolError(f"cannot read {name} {text!r}: not a number")
    return int(text)


def _wait_s(query: dict[str, str], default: float) -> float:
    text = query.get("wait_s")
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        raise RendezvousProtocolError(f"cannot read wait_s {text!r}: not a number") from None
    if not 0 <= seconds <= _MAX_WAIT_S:  # also false for nan
        raise RendezvousProtocolError(f"cannot wait for {text} s: 0 to {_MAX_WAIT_S:g} s are allowed")
    return seconds
