"""One HTTP/1.1 connection of the driver's server: parsing, limits, the order of answers.

Owns the limits on a peer and the bytes it receives. The server defines what a request means; the peer was identified
before (:mod:`~elastic_driver.rendezvous.server.unauthenticated`). An asyncio.Protocol on httptools: it serves several
times as many requests as a framework, and answers a request that need not wait inside ``data_received``, without a
task.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable
from hmac import compare_digest
from typing import NoReturn, Protocol, cast

import httptools

from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import API
from elastic_driver.rendezvous.routes import error_body
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.rendezvous.server.peer_connection import LINGER_S, PeerConnection, Register, ServerLimits
from elastic_driver.rendezvous.server.web import BODY_BYTES, HEALTH_PATH, Web, WebAnswer, WebStreaming
from elastic_driver.version import __version__

_REASONS = {
    101: "Switching Protocols",
    200: "OK",
    204: "No Content",
    303: "See Other",
    304: "Not Modified",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    410: "Gone",
    413: "Content Too Large",
    421: "Misdirected Request",
    426: "Upgrade Required",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_READER = Identity(Role.READER)
_NOBODY = 'authentication required; see docs/design.md, "Wire"'
_NO_BODY = "a reader's request must not have a body"
# Clients of older versions authenticated each request with these headers.
_OLD = b"Elastic-"
# TLS notifies a new client of an old driver; this text notifies an old client of a new driver.
_USE_HTTPS = (
    "use https: the driver does not answer other machines in plain text; agents and tools must have the driver's "
    f"version, {__version__}"
)
# Old workers look for exactly this spelling of Content-Length.
_HEADS = {
    (status, is_json): f"HTTP/1.1 {status} {reason}\r\n"
    f"Content-Type: application/{'json' if is_json else 'octet-stream'}\r\nContent-Length: "
    for status, reason in _REASONS.items()
    for is_json in (False, True)
}
# The largest piece in which an event loop delivers data (256 KiB in uvloop and asyncio).
_PIECE = 256 << 10
# Below this size a body is copied behind its head (one buffer to send); above it answers share the bytes.
_COPY_BELOW = 16 << 10
# How much a reader of a stream may leave unread before it is cut: it reconnects, and is sent everything.
_UNREAD_STREAM = 1 << 20
# How much of the answers outside /v1 may be unread when another request arrives. Browsers and scrapers ask once they
# have read everything; a stranger that keeps asking and never reads must not fill the memory.
_UNREAD_WEB = 64 << 10
_API = f"{API}/".encode()
# A host that vanished silently is noticed after 60 + 6 * 10 s, so that its connections do not pile up.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))


class Parked(Protocol):
    """A request that is not answered yet."""

    def drop(self) -> None:
        """Drop the request: the peer no longer waits for its answer."""


class Service(Protocol):
    """The part of the server that a connection uses."""

    limits: ServerLimits
    certificate: OwnCertificate
    reader_header: bytes
    web: Web | None

    @property
    def connections(self) -> Register:
        """All connections."""

    @property
    def key_of(self) -> Callable[[Identity], bytes | None]:
        """Returns the key with which an identity authenticates over TLS; None to reject it."""

    @property
    def admits(self) -> Callable[[Identity], bool]:
        """Returns whether an identity is accepted on a Unix socket."""

    def successor(self, identity: Identity) -> asyncio.Protocol:
        """Return the protocol that takes over the connection of an admitted peer."""

    def serve(self, connection: Connection, method: bytes, url: bytes, body: bytes) -> None:
        """Answer a request (:meth:`Connection.reply`), or park it (:meth:`Connection.park`)."""

    def serve_web(
        self, connection: Connection, method: bytes, url: bytes, headers: dict[str, str], body: bytes
    ) -> None:
        """Answer a request outside /v1 (:meth:`Connection.reply_web`)."""


def _web_head(status: int, content_type: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the head of an answer, without the empty line that ends it."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}", f"Content-Type: {content_type}"]
    lines += [f"{name}: {value}" for name, value in headers]
    assert not any("\r" in line or "\n" in line for line in lines)
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


class _Stream:
    """An endless answer (a WebStream)."""

    def __init__(self, connection: Connection, transport: asyncio.Transport, answer: WebStreaming) -> None:
        self._connection = connection
        self._transport = transport
        self._answer = answer
        self._lost = False

    def write(self, data: bytes) -> bool:
        """Write data; return False if the peer does not read it. Cuts a peer that has left too much unread."""
        if self._lost or self._transport.is_closing():
            return False
        if self._transport.get_write_buffer_size() > _UNREAD_STREAM:
            self._connection.abort()
            return False
        self._transport.write(data)
        return True

    def close(self) -> None:
        """End the stream after what is already written."""
        if not self._lost:
            self._connection.finish()

    def lost(self) -> None:
        """Report to the stream's owner that the connection is gone."""
        if not self._lost:
            self._lost = True
            self._answer.ended(self)


class _Refusal(Exception):
    """Stops the parser at once: the rest of this peer's bytes is ignored."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Connection(PeerConnection, asyncio.Protocol):
    """One peer. Requests are answered in order: those behind a parked one are queued.

    Args:
        service: the server.
        identity: the identity that the peer has authenticated as; None for a browser, a scraper or a reader.
        is_for_probes: whether only health probes are answered.

    Attributes:
        identity: the author of the current request and of all queued ones.
    """

    def __init__(self, service: Service, identity: Identity | None = None, *, is_for_probes: bool = False) -> None:
        super().__init__(service.connections)
        self._service = service
        self._parser = httptools.HttpRequestParser(self)
        self.identity = identity or _READER
        self._is_authenticated = identity is not None
        self._is_for_probes = is_for_probes
        self._unsent = 0
        # The request that is being received.
        self._in_request = False
        self._in_headers = False
        self._received = 0  # bytes of its whole pieces
        self._header_bytes = 0
        self._url = b""
        self._body: bytes | bytearray = b""
        self._authorization = b""
        self._declared = 0
        self._expects = False
        self._refusal: _Refusal | None = None
        self._is_web = False  # whether its path is outside /v1
        self._headers: dict[str, str] = {}  # its headers
        self._stream: _Stream | None = None  # an answer still in progress
        # The request that is being answered, and those behind it: method, url, body, whether to keep the connection.
        self._keep_alive = True
        self._headless = False
        self._parked: Parked | None = None
        self._queue: deque[tuple[bytes, bytes, bytes, bool]] = deque()
        self._queue_bytes = 0

    # --- for the server --------------------------------------------------------------------------------------------

    def reply(self, status: int, body: bytes = b"", *, is_json: bool = False) -> None:
        """Answer the current request."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > self._service.limits.unread_bytes:
            self.abort()  # the peer sends requests but does not read the answers
            return
        head = f"{_HEADS[status, is_json or status >= 400]}{len(body)}\r\n"
        if status == 204:
            head = "HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n"
        head += "\r\n" if self._keep_alive else "Connection: close\r\n\r\n"
        if self._headless or not body:
            transport.write(head.encode())
        elif len(body) < _COPY_BELOW:
            transport.write(head.encode() + body)
        else:
            transport.writelines((head.encode(), body))
        self._since = self._loop.time()
        if not self._keep_alive:
            self._hang_up()

    def reply_web(self, answer: WebAnswer) -> None:
        """Answer the current request, whose path is outside /v1."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > _UNREAD_WEB:
            self.abort()  # the peer sends requests but does not read the answers
            return
        head = _web_head(
            answer.status, answer.content_type, (*answer.headers, ("Content-Length", str(len(answer.body))))
        )
        head += b"\r\n" if self._keep_alive else b"Connection: close\r\n\r\n"
        transport.write(head if self._headless else head + answer.body)
        self._since = self._loop.time()
        if not self._keep_alive:
            self._hang_up()

    def stream_web(self, answer: WebStreaming) -> None:
        """Answer the current request with a stream. Its reader no longer counts as a stranger."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(_web_head(200, answer.content_type, answer.headers) + b"Connection: close\r\n\r\n")
        self._connections.trusted(self)
        self._stream = _Stream(self, transport, answer)
        answer.began(self._stream)

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is not None

    def park(self, parked: Parked) -> None:
        """Park the current request until :meth:`answer`."""
        self._parked = parked

    def answer(self, parked: Parked, status: int, body: bytes = b"", *, is_json: bool = False) -> None:
        """Answer the parked request; do nothing if it is no longer parked."""
        if self._parked is not parked:
            return
        self._parked = None
        self.reply(status, body, is_json=is_json)
        if self._queue:
            # Not called from here: a queued PUT may release others, whose queued PUTs release others, and so on.
            self._loop.call_soon(self._serve_queue)

    def refuse(self, status: int, text: str) -> None:
        """Answer with an error and ignore everything else from this peer."""
        self._keep_alive = False
        self._drop_parked()
        self.reply(status, error_body(text))

    def say_goodbye(self, text: str) -> None:
        """Answer 410 if a request is parked, and close after what is already written."""
        if self._parked is not None:
            self.refuse(410, text)
        self.finish()

    def finish(self) -> None:
        """Close the connection after what is already written."""
        self._deaf = True
        self._since = self._loop.time()
        self._connections.left(self)
        if self._transport is not None:
            self._transport.close()

    def check_time(self, now: float) -> None:
        """Cut the connection if it has stalled."""
        limits, waited_s = self._service.limits, now - self._since
        if self._deaf:
            unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._since = now  # slow, but it reads
            elif waited_s > LINGER_S:
                self.abort()
            self._unsent = unsent
        elif self._parked is not None or self._queue or self._stream is not None or self.waits_for_its_turn:
            return
        elif self._in_request:
            if waited_s > limits.request_s:
                self.refuse(408, f"the request was not complete within {limits.request_s:g} s")
        elif not self._is_authenticated and waited_s > limits.idle_s:
            self.finish()

    # --- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connections.arrived(self)
        if self._is_authenticated:
            self._connections.trusted(self, self.identity.worker)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._drop_parked()
        self._connections.lost(self)
        if self._stream is not None:
            self._stream.lost()

    def data_received(self, data: bytes) -> None:
        if self._deaf or self._stream is not None:
            return
        limits = self._service.limits
        if not self._in_request:
            self._in_request = True
            self._since = self._loop.time()
            self._received = 0
        inside_headers = self._in_headers
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._last_request_was_read()
        except httptools.HttpParserError as error:
            refusal, self._refusal = self._refusal, None
            if refusal is None:
                refusal = _Refusal(400, f"not HTTP: {error}")
            self._cannot_read(refusal)
        if not self._in_request or self._deaf:
            return
        # Headers are counted when they are complete, chunk extensions and trailers never; so raw bytes are counted too.
        # A piece in which the headers began or ended is not counted here, but there are only two of those.
        self._received += len(data)
        if inside_headers and self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > limits.header_bytes:
                self._cannot_read(_Refusal(431, f"the headers exceed {limits.header_bytes} bytes"))
        elif self._received > 8 * limits.body_bytes + _PIECE:  # chunks of one byte are sent as six
            self._cannot_read(_Refusal(413, f"the request far exceeds {limits.body_bytes} bytes"))

    # --- httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_request = self._in_headers = True
        self._received = self._header_bytes = self._declared = 0
        self._url = self._body = self._authorization = b""
        self._expects = self._is_web = False
        self._headers = {}

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        lower = name.lower()
        if self._may_be_web:
            self._keep_header(lower.decode("latin-1"), value.decode("latin-1"))
        if lower == b"authorization":
            if self._authorization:
                self._stop(400, "there are two Authorization headers")
            self._authorization = value
        elif lower == b"content-length":
            self._declared = int(value) if value.isdigit() and len(value) < 19 else 0  # llhttp rejects other values
        elif lower == b"expect":
            self._expects = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._is_web = self._may_be_web and not self._url.startswith(_API)
        is_for_others = self._is_for_probes and self._url.partition(b"?")[0] != HEALTH_PATH.encode()
        if is_for_others or self._authorization.startswith(_OLD):
            self._stop(426, _USE_HTTPS)
        elif self._is_web:
            self._limit_web(self._declared)
        elif not self._is_authenticated:
            if not compare_digest(self._authorization, self._service.reader_header):
                self._stop(401, _NOBODY)
            if self._declared:
                self._stop(401, _NO_BODY)
        if self._declared > self._service.limits.body_bytes:
            self._stop(413, f"the body exceeds {self._service.limits.body_bytes} bytes")
        if self._expects and self._transport is not None and self._parked is None and not self._queue:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def _may_be_web(self) -> bool:
        """Whether this peer may send requests outside /v1: only one that has not authenticated may."""
        return self._service.web is not None and not self._is_authenticated

    def _keep_header(self, name: str, value: str) -> None:
        before = self._headers.get(name)
        joint = "; " if name == "cookie" else ", "
        self._headers[name] = value if before is None else f"{before}{joint}{value}"

    def _limit_web(self, size: int) -> None:
        if size > BODY_BYTES:
            self._stop(413, f"the body exceeds {BODY_BYTES} bytes")

    def on_body(self, body: bytes) -> None:
        if self._is_web:
            self._limit_web(len(self._body) + len(body))
        elif not self._is_authenticated:
            self._stop(401, _NO_BODY)
        if len(self._body) + len(body) > self._service.limits.body_bytes:
            self._stop(413, f"the body exceeds {self._service.limits.body_bytes} bytes")
        if not self._body:
            self._body = body
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += body

    def on_message_complete(self) -> None:
        self._in_request = False
        if self._deaf:
            return
        parser, body = self._parser, bytes(self._body)
        self._body = b""
        if self._is_web:
            self._serve_web(body)
            return
        request = (parser.get_method(), self._url, body, parser.should_keep_alive())
        if self._parked is None and not self._queue:
            self._serve(*request)
            return
        self._queue.append(request)
        self._queue_bytes += len(self._url) + len(body) + 256  # overhead of the objects
        if self._queue_bytes > self._service.limits.pipelined_bytes:
            self.abort()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._service.limits.header_bytes:
            self._stop(431, f"the headers exceed {self._service.limits.header_bytes} bytes")

    def _stop(self, status: int, text: str) -> NoReturn:
        self._refusal = _Refusal(status, text)
        raise self._refusal

    # --- order -----------------------------------------------------------------------------------------------------

    def _serve(self, method: bytes, url: bytes, body: bytes, keep_alive: bool) -> None:  # noqa: FBT001 (unpacked)
        self._keep_alive = keep_alive
        self._headless = method == b"HEAD"
        self._service.serve(self, method, url, body)

    def _serve_web(self, body: bytes) -> None:
        if self._parked is not None or self._queue or self._stream is not None:
            self.abort()  # browsers do not pipeline
            return
        self._keep_alive = self._parser.should_keep_alive()
        method = self._parser.get_method()
        self._headless = method == b"HEAD"
        self._service.serve_web(self, method, self._url, self._headers, body)

    def _serve_queue(self) -> None:
        while self._queue and self._parked is None and not self._deaf:
            request = self._queue.popleft()
            self._queue_bytes -= len(request[1]) + len(request[2]) + 256
            self._serve(*request)

    def _cannot_read(self, refusal: _Refusal) -> None:
        """Refuse the request. If requests are queued, cut the connection: the refusal would be read as the answer to
        those.
        """
        if self._deaf:
            return
        if self._parked is not None or self._queue:
            self.abort()
        else:
            self._headless = False
            self.refuse(refusal.status, str(refusal))

    def _last_request_was_read(self) -> None:
        """Stop reading: another protocol follows CONNECT or Upgrade, which this server does not support."""
        if self._parked is not None or self._queue:
            self._keep_alive = False
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close for writing; for reading once the peer has closed too, or soon."""
        transport = self._transport
        if self._deaf or transport is None or transport.is_closing():
            return
        self._deaf = True
        self._queue.clear()
        self._since = self._loop.time()
        transport.write_eof()

    def _drop_parked(self) -> None:
        parked, self._parked = self._parked, None
        self._queue.clear()
        if parked is not None:
            parked.drop()
