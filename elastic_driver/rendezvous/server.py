"""The driver's HTTP server: key-value store, long polls, and the requests that go to the round handler.

Owns connections, parsing, limits, the token and parked requests. Knows nothing of membership: that is the handler's.
asyncio.Protocol under httptools, because that serves several times what a framework does, and a request that need
not wait is answered inside ``data_received`` without a task.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import resource
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, unquote

import httptools

from elastic_driver.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousProtocolError,
    SettingsError,
    StaleRoundError,
)
from elastic_driver.rendezvous.messages import (
    API,
    NextRoundReply,
    NextRoundRequest,
    Notice,
    RunningReport,
    WatchRequest,
    pack_entries,
)
from elastic_driver.rendezvous.store import RoundStore

_REASONS = {
    200: "OK",
    204: "No Content",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    410: "Gone",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_METHODS = ("GET", "PUT", "POST", "DELETE")


class RoundHandler(Protocol):
    """What the driver answers. The awaitables are cancelled when the connection goes or the poll time is over."""

    def next_round(self, request: NextRoundRequest) -> Awaitable[NextRoundReply]:
        """A worker is READY; the answer comes when its round is formed."""

    def watch(self, request: WatchRequest) -> Awaitable[Notice]:
        """The next notice of the round. May raise StaleRoundError or RendezvousClosedError."""

    def running(self, report: RunningReport) -> None:
        """A member trains."""

    def status(self) -> dict[str, object]:
        """The job, as JSON."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one peer may cost.

    Attributes:
        body_bytes: of one request; the addresses of a worker among 4,096 are some 25 KB.
        header_bytes: of one request, together with its first line.
        request_s: from the first byte of a request to its last.
        idle_s: how long a connection that has never shown the token may wait between requests.
        strangers: connections that have not shown the token; the oldest goes when there are more.
        poll_s: how long a request is parked before 204 (or 404, 408) is answered.
        unread_bytes: answers a peer may leave unread before its connection is cut.
    """

    body_bytes: int = 16 << 20
    header_bytes: int = 16 << 10
    request_s: float = 10.0
    idle_s: float = 10.0
    strangers: int = 1000
    poll_s: float = 30.0
    unread_bytes: int = 64 << 20


class RendezvousServer:
    """Serves one job.

    Args:
        handler: answers what is not key-value.
        token: each request has to carry it.
        limits: see :class:`ServerLimits`.
        on_error: told of an exception that the handler should not have raised.
    """

    def __init__(
        self,
        handler: RoundHandler,
        *,
        token: str,
        limits: ServerLimits | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.handler = handler
        self.limits = limits or ServerLimits()
        self.store = RoundStore()
        self.expected_header = f"Bearer {token}".encode()
        self.on_error = on_error
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()
        self.strangers: dict[_Connection, None] = {}
        # Parked key-value requests: (scope, key) -> waiters; key "" waits for a number of keys in the scope.
        self.waiting: dict[tuple[str, str], dict[_Parked, None]] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens.

        Args:
            host: local address.
            port: 0 for any that is free.

        Returns:
            The port.

        Raises:
            SettingsError: the address or port cannot be had.
        """
        _raise_descriptor_limit()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self), host, port, backlog=4096, reuse_address=True
            )
        except OSError as error:
            hint = (
                "it is in use; choose another with --rendezvous-port, or 0 for any" if error.errno == 98 else str(error)
            )
            raise SettingsError(f"cannot listen on {host} port {port} for the rendezvous: {hint}") from error
        self._sweep()
        actual: int = self._server.sockets[0].getsockname()[1]
        return actual

    async def close(self) -> None:
        """Stops listening and drops every connection."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.finish()
        if self._server is not None:
            await self._server.wait_closed()

    def begin_round(self, round_id: int) -> None:
        """Fences the past: its keys are dropped, and whoever waits for one is answered 409 at once."""
        self.store.begin_round(round_id)
        waiting, self.waiting = self.waiting, {}
        for group in waiting.values():
            for parked in tuple(group):
                parked.answer(409, _error(StaleRoundError(parked.round_id, round_id)))

    def changed(self, round_id: int, scope: str, key: str) -> None:
        """Answers who waited for this key, or for that many keys in its scope."""
        for name in (key, ""):
            for parked in tuple(self.waiting.get((scope, name), ())):
                parked.try_answer()

    def _sweep(self) -> None:
        """Cuts connections that stall, in one pass: a timer for each would cost more than what it guards."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self.connections):
            connection.check_time(now)
        interval = min(1.0, self.limits.request_s / 4, self.limits.idle_s / 4)
        self._sweeper = loop.call_later(interval, self._sweep)


def _raise_descriptor_limit() -> None:
    """A parked request is an open socket: take as many descriptors as the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            return


def _error(error: Exception | str) -> bytes:
    data: dict[str, object] = {"error": str(error)}
    if isinstance(error, StaleRoundError):
        data |= {"round_id": error.round_id, "current_round_id": error.current_round_id}
    return json.dumps(data).encode()


class _Parked:
    """A key-value request that waits: for one key, or for ``count`` keys of the scope."""

    __slots__ = ("_connection", "_server", "_timer", "count", "exchange", "key", "round_id", "scope")

    def __init__(
        self, connection: _Connection, round_id: int, scope: str, key: str, count: int, *, exchange: bool
    ) -> None:
        self._connection = connection
        self._server = connection.server
        self.round_id, self.scope, self.key, self.count, self.exchange = round_id, scope, key, count, exchange
        self._timer: asyncio.TimerHandle | None = None

    def park(self, seconds: float) -> None:
        self._server.waiting.setdefault((self.scope, self.key), {})[self] = None
        self._timer = asyncio.get_running_loop().call_later(seconds, self._too_late)

    def try_answer(self) -> bool:
        """Answers when what it waits for is there."""
        store = self._server.store
        if self.key:
            value = store.get(self.round_id, self.scope, self.key)
            if value is None:
                return False
            self.answer(200, value)
        else:
            if store.count(self.round_id, self.scope) < self.count:
                return False
            self.answer(200, pack_entries(store.entries(self.round_id, self.scope)))
        return True

    def _too_late(self) -> None:
        if self.exchange:
            there = self._server.store.entries(self.round_id, self.scope)
            names = ", ".join(key for key, _ in there[:20])
            text = f"{self.count - len(there)} of {self.count} are missing in scope {self.scope!r} (there: {names})"
            self.answer(408, _error(text))
        else:
            self.answer(404, _error(f"{self.scope}/{self.key} is not there"))

    def answer(self, status: int, body: bytes) -> None:
        self.forget()
        self._connection.answer_parked(self, status, body)

    def forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        group = self._server.waiting.get((self.scope, self.key))
        if group is not None:
            group.pop(self, None)
            if not group:
                del self._server.waiting[(self.scope, self.key)]


class _Connection(asyncio.Protocol):
    """One peer. Requests are answered in order: while one is parked, the following ones wait unparsed."""

    def __init__(self, server: RendezvousServer) -> None:
        self.server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._trusted = False
        self._since = 0.0  # when the present wait (for a request, or for the rest of one) began
        self._in_request = False
        self._headers_left = 0
        self._rejected: tuple[int, str] | None = None
        self._url = b""
        self._body = bytearray()
        self._authorized = False
        self._parked: _Parked | asyncio.Future[Any] | None = None
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._closing = False

    # --- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._since = asyncio.get_running_loop().time()
        self.server.connections.add(self)
        self.server.strangers[self] = None
        if len(self.server.strangers) > self.server.limits.strangers:
            next(iter(self.server.strangers)).finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self.server.strangers.pop(self, None)
        self._closing = True
        parked, self._parked = self._parked, None
        if isinstance(parked, _Parked):
            parked.forget()
        elif parked is not None:
            parked.cancel()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._parked is not None:
            # A pipelined request behind a parked one. Bounded like a body; a peer that sends more is cut.
            self._backlog.append(data)
            self._backlog_bytes += len(data)
            if self._backlog_bytes > self.server.limits.body_bytes:
                self.finish()
            return
        self._feed(data)

    def check_time(self, now: float) -> None:
        """Cuts the connection if it has stalled."""
        limits = self.server.limits
        if self._parked is not None:
            return
        if self._in_request and now - self._since > limits.request_s:
            self._refuse(408, f"the request did not arrive whole within {limits.request_s:g} s")
        elif not self._in_request and not self._trusted and now - self._since > limits.idle_s:
            self.finish()

    def finish(self) -> None:
        """Closes the connection after what is written already."""
        if not self._closing:
            self._closing = True
            if self._transport is not None:
                self._transport.close()

    # --- httptools -------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        if not self._in_request:
            self._in_request = True
            self._since = asyncio.get_running_loop().time()
            self._headers_left = self.server.limits.header_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "this server speaks HTTP/1.1 only")
        except httptools.HttpParserError as error:
            if not self._closing:
                self._refuse(*(self._rejected or (400, f"not HTTP: {error}")))

    def on_message_begin(self) -> None:
        self._url = b""
        self._body.clear()
        self._authorized = False
        self._rejected = None
        self._in_request = True
        self._headers_left = self.server.limits.header_bytes

    def _count_headers(self, size: int) -> None:
        self._headers_left -= size
        if self._headers_left < 0:
            self._reject(431, f"headers are above {self.server.limits.header_bytes} bytes")

    def _reject(self, status: int, text: str) -> None:
        """Ends the parsing at once: nothing more of this peer is read."""
        self._rejected = (status, text)
        raise ValueError(text)

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_headers(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_headers(len(name) + len(value))
        lower = name.lower()
        if lower == b"authorization":
            self._authorized = hmac.compare_digest(value, self.server.expected_header)
        elif lower == b"content-length":
            if value.isdigit() and (len(value) > 12 or int(value) > self.server.limits.body_bytes):
                self._reject(413, f"the body is above {self.server.limits.body_bytes} bytes")
        elif lower == b"expect" and self._transport is not None and value.lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_headers_complete(self) -> None:
        if not self._authorized:
            self._reject(401, "the token is missing or wrong")
        if not self._trusted:
            self._trusted = True
            self.server.strangers.pop(self, None)

    def on_body(self, body: bytes) -> None:
        if len(self._body) + len(body) > self.server.limits.body_bytes:
            self._reject(413, f"the body is above {self.server.limits.body_bytes} bytes")
        self._body += body

    def on_message_complete(self) -> None:
        self._in_request = False
        if self._parked is not None or self._closing:
            # Pipelined in one packet behind a request that is parked: kept for later as what it was.
            self._reject(400, "pipelining behind a long poll is not supported")
        try:
            self._route(self._parser.get_method().decode(), self._url, bytes(self._body))
        except StaleRoundError as error:
            self._write(409, _error(error))
        except RendezvousClosedError as error:
            self._write(410, _error(error))
        except (RendezvousError, ValueError) as error:
            self._write(400, _error(error))
        except Exception as error:
            self._write(500, _error(repr(error)))
            if self.server.on_error is not None:
                self.server.on_error(error)

    # --- answers ---------------------------------------------------------------------------------------------------

    def _write(self, status: int, body: bytes = b"", *, close: bool = False) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {len(body)}\r\n"
        if close or not self._parser.should_keep_alive():
            head += "Connection: close\r\n"
            close = True
        if status >= 400 and status != 404:
            head += "Content-Type: application/json\r\n"
        transport.write(head.encode() + b"\r\n" + body)
        self._since = asyncio.get_running_loop().time()
        if transport.get_write_buffer_size() > self.server.limits.unread_bytes:
            transport.abort()
        elif close:
            self.finish()

    def _refuse(self, status: int, text: str) -> None:
        self._write(status, _error(text), close=True)
        self.finish()

    def answer_parked(self, parked: object, status: int, body: bytes) -> None:
        """The parked request is answered; what waited behind it is read now."""
        if self._parked is not parked:
            return
        self._parked = None
        self._write(status, body)
        backlog, self._backlog, self._backlog_bytes = self._backlog, [], 0
        for index, data in enumerate(backlog):
            if self._parked is not None:
                self._backlog = backlog[index:]
                self._backlog_bytes = sum(map(len, self._backlog))
                break
            if not self._closing:
                self._feed(data)

    # --- routes ----------------------------------------------------------------------------------------------------

    def _route(self, method: str, url: bytes, body: bytes) -> None:
        raw_path, _, raw_query = url.decode("ascii").partition("?")
        query = dict(parse_qsl(raw_query)) if raw_query else {}
        if not raw_path.startswith(API + "/"):
            self._write(404, _error(f"no such path: {raw_path}"))
            return
        parts = raw_path[len(API) + 1 :].split("/")
        match (method, parts):
            case ("GET", ["rounds", round_id, "kv", scope, key]):
                self._wait(round_id, unquote(scope), unquote(key), 1, query)
            case ("PUT", ["rounds", round_id, "kv", scope, key]):
                self._put(_integer(round_id, "round"), unquote(scope), unquote(key), body)
                self._write(204)
            case ("GET", ["rounds", round_id, "kv", scope]):
                self._wait(round_id, unquote(scope), "", _integer(query.get("count", "0"), "count"), query)
            case ("DELETE", ["rounds", round_id, "kv", scope, key]):
                self.server.store.delete(_integer(round_id, "round"), unquote(scope), unquote(key))
                self._write(204)
            case ("POST", ["rounds", round_id, "exchange", scope]):
                count = _integer(query.get("count", ""), "count")
                self._put(_integer(round_id, "round"), unquote(scope), query.get("key", ""), body)
                self._wait(round_id, unquote(scope), "", count, query, exchange=True)
            case ("POST", ["next-round"]):
                self._park_on(self.server.handler.next_round(NextRoundRequest.from_json(body)), query)
            case ("POST", ["watch"]):
                self._park_on(self.server.handler.watch(WatchRequest.from_json(body)), query)
            case ("POST", ["running"]):
                self.server.handler.running(RunningReport.from_json(body))
                self._write(204)
            case ("GET", ["status"]):
                self._write(200, json.dumps(self.server.handler.status()).encode())
            case _ if method not in _METHODS:
                self._write(405, _error(f"method {method} is not supported"))
            case _:
                self._write(404, _error(f"no such path: {method} {raw_path}"))

    def _put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        if not key or not scope:
            raise RendezvousProtocolError("a scope and a key are needed")
        self.server.store.put(round_id, scope, key, value)
        if self.server.waiting:
            self.server.changed(round_id, scope, key)

    def _wait(
        self, round_text: str, scope: str, key: str, count: int, query: dict[str, str], *, exchange: bool = False
    ) -> None:
        parked = _Parked(self, _integer(round_text, "round"), scope, key, count, exchange=exchange)
        self._parked = parked
        if parked.try_answer():
            return
        wait_s = self._wait_s(query, 0.0)
        if wait_s > 0 or exchange:
            parked.park(wait_s)
        else:
            self._parked = None
            self._write(404, _error(f"{scope}/{key} is not there"))

    def _wait_s(self, query: dict[str, str], default: float) -> float:
        text = query.get("wait_s")
        if text is None:
            return default
        seconds = float(text)
        if not 0 <= seconds <= 86400:
            raise RendezvousProtocolError(f"wait_s is out of range: {text}")
        return seconds

    def _park_on(self, answer: Awaitable[NextRoundReply] | Awaitable[Notice], query: dict[str, str]) -> None:
        wait_s = min(self._wait_s(query, self.server.limits.poll_s), self.server.limits.poll_s)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = asyncio.ensure_future(answer)
        self._parked = future
        timer = loop.call_later(wait_s, future.cancel)

        def done(_: object) -> None:
            timer.cancel()
            if future.cancelled():
                self.answer_parked(future, 204, b"")
            elif (error := future.exception()) is None:
                self.answer_parked(future, 200, future.result().to_json())
            elif isinstance(error, RendezvousClosedError):
                self.answer_parked(future, 410, _error(error))
            else:
                self.answer_parked(future, 500, _error(repr(error)))
                if self.server.on_error is not None:
                    self.server.on_error(error)

        if future.done():
            done(future)
        else:
            future.add_done_callback(done)


def _integer(text: str, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise RendezvousProtocolError(f"{what} {text!r} is not a number")
    return int(text)
