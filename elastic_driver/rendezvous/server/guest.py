"""A connection to the server, as the server sees it: what one peer may cost, and what all connections have in common.

Owns what a connection of a stranger (:mod:`~elastic_driver.rendezvous.server.newcomer`) and one that carries HTTP
(:mod:`~elastic_driver.rendezvous.server.connection`) share.
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

# After a refusal the peer may still be sending. Closing at once would reset the connection, and the peer would see
# the reset instead of the answer; so what it sends is read and dropped for this long.
LINGER_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one peer may cost.

    Attributes:
        body_bytes: of one request; the addresses of a worker among 4,096 are some 25 KB.
        header_bytes: of one request, together with its first line; a worker's are below 1 KB.
        request_s: from the first byte of a request to its last; a worker sends it in one piece.
        idle_s: how long a connection that is not authenticated may wait for its next request.
        strangers: connections that are not authenticated for stranger_s, and readers; the oldest goes when there are
            more, so that rubbish cannot shut workers out.
        stranger_s: how long a connection counts for no stranger, and once more from its handshake and its request on.
            Workers authenticate within two round trips, but thousands may connect before the first of them is read.
        connections: all of them; 503 for more. None: what the limit of open files leaves.
        poll_s: how long a request is parked before 204 is answered; below what middleboxes let a connection idle.
        unread_bytes: answers a peer may leave unread before its connection is cut.
        pipelined_bytes: requests a peer may send behind one that is parked before its connection is cut.
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


class Guest(ABC, asyncio.BaseProtocol):
    """One connection.

    Args:
        guests: all who are connected.
    """

    def __init__(self, guests: Register) -> None:
        self._guests = guests
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._since = self._loop.time()  # when the present wait (for a request, for the rest of one, to close) began
        self._deaf = False  # what comes in is dropped

    @abstractmethod
    def refuse(self, status: int, text: str) -> None:
        """Answers an error, where that can be, and takes nothing more from this peer."""

    @abstractmethod
    def say_goodbye(self, text: str) -> None:
        """The server ends."""

    @abstractmethod
    def check_time(self, now: float) -> None:
        """Cuts the connection if it has stalled."""

    def abort(self) -> None:
        """Cuts the connection."""
        self._deaf = True
        self._guests.left(self)
        if self._transport is not None:
            self._transport.abort()

    @property
    def descriptor(self) -> int:
        """Of its socket; below 0 when there is none."""
        return _descriptor_of(self._transport)

    @property
    def has_unread(self) -> bool:
        """See :func:`has_unread`."""
        return has_unread(self._transport)

    def has_hung_up(self) -> bool:
        """See :func:`has_hung_up`."""
        return has_hung_up(self._transport)

    @property
    def waits_for_its_turn(self) -> bool:
        """Whether it is not the peer that is slow."""
        return isinstance(self._transport, TlsTransport) and self._transport.is_new and self._transport.waits

    def eof_received(self) -> bool:
        """See asyncio.Protocol."""
        return False


class Register(Protocol):
    """All who are connected."""

    def arrived(self, guest: Guest) -> None:
        """A peer connected."""

    def met(self, guest: Guest) -> None:
        """The peer is on its way to be authenticated, and is given time anew."""

    def trusted(self, guest: Guest, worker: WorkerId | None = None) -> None:
        """It is known who the peer is: this worker, or no worker."""

    def left(self, guest: Guest) -> None:
        """The connection is closing or gone. May be called more than once."""

    def lost(self, guest: Guest) -> None:
        """The connection is gone."""


def has_unread(transport: asyncio.BaseTransport | None) -> bool:
    """Whether the peer has sent what the loop has not come to read yet.

    Whoever goes on sending over TLS has always something that waits for its turn, and is not shielded by it.
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
    """Whether the peer has closed the connection, even if the loop has not come to read that yet."""
    descriptor = _descriptor_of(transport)
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))


def _descriptor_of(transport: asyncio.BaseTransport | None) -> int:
    sock = None if transport is None else transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
