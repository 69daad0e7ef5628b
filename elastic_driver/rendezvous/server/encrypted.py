"""An encrypted port of the driver's server: takes in whoever comes, who is a connection once hands are shaken.

Owns the accepting and the handshakes. The loop could do both by itself, but nobody would count such peers then: they
would be no connections yet, and whoever is silent on thousands of them would take all descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from ssl import SSLContext

from elastic_driver.rendezvous.server.connection import Connection, Service, has_unread

# Accepted before others have their turn: whom they push out has to be gone before more come.
_AT_ONCE = 64
# Until there may be descriptors again.
_PAUSE_S = 0.5
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# How long a peer has to answer that its TLS ends.
_SHUTDOWN_S = 1.0


class Handshake:
    """A peer that shakes hands: a stranger like others. Implements :class:`Guest`.

    Args:
        service: of the server.
        sock: to the peer; closed in the end.
        context: of the server's certificate.
    """

    def __init__(self, service: Service, sock: socket.socket, context: SSLContext) -> None:
        self._service = service
        self._sock = sock
        self._context = context
        self._task = asyncio.get_running_loop().create_task(self._shake())
        self._task.add_done_callback(self._done)
        service.guests.arrived(self)

    async def _shake(self) -> bool:
        """Whether there is a connection now, which has the socket."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._service),
                self._sock,
                ssl=self._context,
                ssl_handshake_timeout=self._service.limits.request_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:  # it speaks no TLS, or has hung up
            return False
        return True

    def _done(self, task: asyncio.Task[bool]) -> None:
        if task.cancelled() or not task.result():
            self._sock.close()
        self._service.guests.lost(self)

    @property
    def descriptor(self) -> int:
        """See Guest."""
        return self._sock.fileno()

    @property
    def has_unread(self) -> bool:
        """See Guest."""
        return has_unread(self.descriptor)

    def refuse(self, status: int, text: str) -> None:
        """See Guest. There is no way yet to say anything."""
        self.abort()

    def say_goodbye(self, text: str) -> None:
        """See Guest."""
        self.abort()

    def abort(self) -> None:
        """See Guest."""
        self._service.guests.left(self)
        self._task.cancel()

    def check_time(self, now: float) -> None:
        """See Guest: TLS has a time of its own."""


class EncryptedListener:
    """Takes in whoever comes. Used as an :class:`asyncio.Server` is.

    Args:
        service: of the server.
        sockets: bound already; closed with this.
        context: of the server's certificate.
        backlog: how many may wait in the system.
    """

    def __init__(self, service: Service, sockets: Sequence[socket.socket], context: SSLContext, backlog: int) -> None:
        self.sockets = tuple(sockets)
        self._service = service
        self._context = context
        self._timers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._is_closed = False
        for sock in self.sockets:
            sock.setblocking(False)
            sock.listen(backlog)
            self._watch(sock)

    def _watch(self, sock: socket.socket) -> None:
        self._timers.pop(sock, None)
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                peer, _ = sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    loop = asyncio.get_running_loop()
                    loop.remove_reader(sock)
                    self._timers[sock] = loop.call_later(_PAUSE_S, self._watch, sock)
                    return
                continue  # it has hung up again
            peer.setblocking(False)
            Handshake(self._service, peer, self._context)

    def close(self) -> None:
        """Takes nobody in any more. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        loop = asyncio.get_running_loop()
        for timer in self._timers.values():
            timer.cancel()
        for sock in self.sockets:
            loop.remove_reader(sock)
            sock.close()

    async def wait_closed(self) -> None:
        """It is closed at once; its peers are the server's to end."""


async def listen_encrypted(
    service: Service,
    host: str,
    port: int,
    listener: socket.socket | None,
    *,
    context: SSLContext,
    backlog: int,
) -> EncryptedListener:
    """Listens at an address, or on a socket that is bound already.

    Raises:
        OSError: that address cannot be had.
    """
    if listener is not None:
        return EncryptedListener(service, [listener], context, backlog)
    # The loop knows how to find and bind the addresses of a name.
    bound = await asyncio.get_running_loop().create_server(
        asyncio.Protocol, host, port, reuse_address=True, start_serving=False
    )
    sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in bound.sockets]
    bound.close()
    return EncryptedListener(service, sockets, context, backlog)
