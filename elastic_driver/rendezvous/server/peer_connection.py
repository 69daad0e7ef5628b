"""A connection as the server sees it: what one peer may cost, and what all connections share.

Owns the common part of a stranger's connection (:mod:`~elastic_driver.rendezvous.server.unauthenticated`) and one that
carries HTTP (:mod:`~elastic_driver.rendezvous.server.connection`).
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import select
import termios
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.tls import TlsTransport

# After a refusal the peer may still be sending. Closing at once would reset the connection, and the peer would see the
# reset instead of the answer; so its bytes are read and dropped for this long.
LINGER_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits on one peer.

    Attributes:
        body_bytes: limit of a request's body; the addresses of a worker among 4,096 take about 25 KB.
        header_bytes: limit of a request's first line and headers; a worker's are below 1 KB.
        request_s: from the first byte of a request to its last; a worker sends it in one piece.
        idle_s: how long an unauthenticated connection may wait for its next request.
        strangers: limit of connections that have stayed unauthenticated for stranger_s, and of readers; beyond it the
            oldest is cut, so that rubbish cannot shut workers out.
        stranger_s: how long a connection does not count as a stranger's; restarted at its handshake and at its request.
            Workers authenticate within two round trips, but thousands may connect before the first is read.
        connections: limit of all connections; more are answered 503. None: what the limit of open files leaves.
        poll_s: how long a request is parked before it is answered 204; below the idle timeouts of middleboxes.
        unread_bytes: how much a peer may leave unread before its connection is cut.
        pipelined_bytes: how much a peer may send behind a parked request before its connection is cut.
    """

    body_bytes: int = 16 << 20
    header_bytes: int = 16 << 10
    request_s: float = 10.0
    idle_s: float = 10.0
    strangers: int = 1000
    stranger_s: float = 2.0
    connections: int | None = None
    poll_s: float = 30.0
    unread_bytes: int = 64 << 20
    pipelined_bytes: int = 1 << 20


class PeerConnection(ABC, asyncio.BaseProtocol):
    """One connection.

    Args:
        connections: all connections.
    """

    def __init__(self, connections: Register) -> None:
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._since = self._loop.time()  # start of the current wait (for a request, the rest of one, or to close)
        self._deaf = False  # incoming data is dropped

    @abstractmethod
    def refuse(self, status: int, text: str) -> None:
        """Answer with an error, where possible, and ignore everything else from this peer."""

    @abstractmethod
    def say_goodbye(self, text: str) -> None:
        """Close the connection: the server ends."""

    @abstractmethod
    def check_time(self, now: float) -> None:
        """Cut the connection if it has stalled."""

    def abort(self) -> None:
        """Cut the connection."""
        self._deaf = True
        self._connections.left(self)
        if self._transport is not None:
            self._transport.abort()

    @property
    def descriptor(self) -> int:
        """The descriptor of its socket; negative if there is none."""
        return _descriptor_of(self._transport)

    @property
    def has_unread(self) -> bool:
        """Whether the peer has sent data that the loop has not read yet."""
        return has_unread(self._transport)

    def has_hung_up(self) -> bool:
        """Return whether the peer has closed the connection."""
        return has_hung_up(self._transport)

    @property
    def waits_for_its_turn(self) -> bool:
        """Whether the server, and not the peer, causes the delay."""
        return isinstance(self._transport, TlsTransport) and self._transport.is_new and self._transport.waits

    def eof_received(self) -> bool:
        """Close the connection when the peer does."""
        return False


class Register(Protocol):
    """All connections."""

    def arrived(self, connection: PeerConnection) -> None:
        """Add a connection."""

    def met(self, connection: PeerConnection) -> None:
        """Restart the time limit of a peer that has begun to authenticate."""

    def trusted(self, connection: PeerConnection, worker: WorkerId | None = None) -> None:
        """Record that the peer is known: this worker, or no worker."""

    def left(self, connection: PeerConnection) -> None:
        """Record that the connection is closing or gone. May be called more than once."""

    def lost(self, connection: PeerConnection) -> None:
        """Remove a connection that is gone."""


def has_unread(transport: asyncio.BaseTransport | None) -> bool:
    """Return whether the peer has sent data that the loop has not read yet.

    A peer that keeps sending over TLS always has data waiting; that does not protect it.
    """
    descriptor = _descriptor_of(transport)
    if descriptor < 0:
        return False
    if isinstance(transport, TlsTransport):
        if not transport.is_new:
            return False
        if transport.waits:
            return True
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0] > 0


def has_hung_up(transport: asyncio.BaseTransport | None) -> bool:
    """Return whether the peer has closed the connection, even if the loop has not read that yet."""
    descriptor = _descriptor_of(transport)
    if descriptor < 0 or transport is None or transport.is_closing():
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))


def _descriptor_of(transport: asyncio.BaseTransport | None) -> int:
    sock = None if transport is None else transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
