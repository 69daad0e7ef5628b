"""The HTTP of Horovod's clients: one request per connection, which may be held open for as long as it takes.

Owns parsing, the limits of what a stranger may cost, and the form of an answer. What requests mean is up to the port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import httptools

from elastic_driver.launch.agent.horovod.owner import owner_of
from elastic_driver.system.tasks import Tasks

# The addresses of a context of 30,000 workers.
MOST_BYTES = 4 << 20
# How long a request may take to arrive; its answer may take longer.
REQUEST_S = 10.0
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        method: in capitals.
        url: as received.
        headers: with names in lower case.
        body: at most MOST_BYTES.
    """

    method: bytes
    url: bytes
    headers: Mapping[bytes, bytes]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer.

    Attributes:
        status: see ``_REASONS``; 0 to close the connection without an answer, which the client treats as a failure.
        body: bytes.
        headers: further ones.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Answerer = Callable[[Request], Awaitable[Answer]]


class OneRequest(asyncio.Protocol):
    """A connection, for one request.

    Args:
        answer: answers it; canceled when the connection is lost.
        uid: of the user who may ask. Others are cut off without an answer.
        tasks: runs the answer. An error in it ends the agent.
        connections: the open ones; it adds and removes itself.
    """

    def __init__(self, answer: Answerer, uid: int, tasks: Tasks, connections: set[OneRequest]) -> None:
        self._answer = answer
        self._uid = uid
        self._tasks = tasks
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answering: asyncio.Task[None] | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._bytes = 0

    # --- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Reject the connection unless the user at its other end may ask; start the time limit."""
        self._transport = transport = cast("asyncio.Transport", transport)
        near, far = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        if near is None or far is None or owner_of(near[:2], far[:2]) not in (self._uid, 0):
            transport.abort()
            return
        self._connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(REQUEST_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Parse a part of the request."""
        if self._answering is not None:
            return  # nothing may follow the request
        self._bytes += len(data)
        if self._bytes > MOST_BYTES + (64 << 10):
            self._reply(Answer(413))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._reply(Answer(400))
        except httptools.HttpParserError:
            self._reply(Answer(400))

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the answer: the client no longer waits for it."""
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._answering is not None:
            self._answering.cancel()

    # --- httptools -------------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """Append a part of the path."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record a header."""
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        """Append a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Start to answer the complete request."""
        if self._answering is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        request = Request(self._parser.get_method(), self._url, self._headers, b"".join(self._body))
        self._answering = self._tasks.start(self._serve(request))

    # --- the answer ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort the connection."""
        if self._transport is not None:
            self._transport.abort()

    async def _serve(self, request: Request) -> None:
        self._reply(await self._answer(request))

    def _reply(self, answer: Answer) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not answer.status:
            transport.abort()
            return
        # Horovod's client looks for exactly this spelling, and without it does not read a body to its end.
        headers = {"Content-Length": str(len(answer.body)), **answer.headers, "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        start = f"HTTP/1.0 {answer.status} {_REASONS.get(answer.status, 'Error')}\r\n{head}\r\n".encode("latin-1")
        transport.write(start + answer.body)
        transport.close()
