"""The sockets on which a server listens.

Owns their making, their options and their end.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.rendezvous.server.connection import Service
from elastic_driver.rendezvous.server.newcomer import Newcomer
from elastic_driver.rendezvous.tls import Turns

# Of one connection. What agents send a process that is stopped has to fit in (CREDIT_BYTES, in small pieces, of which
# each takes some room of its own): a full buffer is as good as a dead machine to them. Linux begins with less, and
# has the buffer grow only while it is read from.
_RECEIVE_BYTES = 512 << 10
# Of connections that the loop has not come to take yet.
_BACKLOG = 4096
# asyncio takes as many connections in one turn of the loop as the system was told to keep; so it is told of more later.
# Those who came first have their turns meanwhile, and whom a newcomer pushes out is gone before the next comes.
_AT_ONCE = 64


class Listeners:
    """All sockets of a server that connections come to.

    Args:
        service: of the server.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._servers: list[asyncio.Server] = []
        self._is_closed = False
        self._local: asyncio.Server | None = None  # of these, that of a unix socket
        self._turns: Turns | None = None

    async def open(self, host: str, ports: int | Sequence[int]) -> int:
        """Listens on an address.

        Args:
            host: local address.
            ports: one, or several that are tried in order; 0 for any that is free.

        Returns:
            The port.

        Raises:
            SettingsError: the address or port cannot be had.
        """
        tried = [ports] if isinstance(ports, int) else [*dict.fromkeys(ports)]
        for port in tried:
            try:
                return await self._listen(host, port)
            except (OSError, OverflowError) as error:
                in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
                if in_use and len(tried) > 1:
                    continue
                hint = in_words(error)
                if in_use:
                    hint = "the port is in use; choose another with --rendezvous-port, or 0 for any"
                raise SettingsError(f"cannot listen on {host} port {port} for the rendezvous: {hint}") from error
        range_ = f"ports {min(tried)} to {max(tried)}"
        raise SettingsError(f"cannot listen on {host} for the rendezvous: {range_} are all in use (--port-range)")

    async def adopt(self, listener: socket.socket) -> int:
        """Takes a socket that listens already; it is closed with the others. Returns its port."""
        return await self._listen("", 0, listener)

    async def listen_at(self, host: str, port: int) -> int:
        """Listens on another address as well, on this port and no other; 0 for any.

        Raises:
            SettingsError: it cannot be had.
        """
        try:
            return await self._listen(host, port)
        except (OSError, UnicodeError) as error:
            reason = in_words(error)
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                reason = "the port is in use"
            raise SettingsError(f"cannot listen on {host} port {port}: {reason}") from error

    async def open_local(self, listening: socket.socket) -> None:
        """Takes a unix socket that listens already, for processes of this user and of root's.

        It is closed with the others, or when another takes its place.

        Raises:
            SettingsError: they were closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        before, self._local = self._local, None
        if before is not None:
            before.close()
            self._servers.remove(before)
        self._local = await loop.create_unix_server(self._newcomer, sock=listening, backlog=_BACKLOG)
        self._add(self._local)

    def _add(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        if self._is_closed:
            server.close()
            raise SettingsError("cannot listen: this server is closed")

    def _newcomer(self) -> Newcomer:
        self._turns = self._turns or Turns()
        return Newcomer(self._service, self._turns)

    async def _listen(self, host: str, port: int, listener: socket.socket | None = None) -> int:
        where: dict[str, Any] = {"sock": listener}
        if listener is None:
            where = {"host": host, "port": port, "reuse_address": True}
        server = await asyncio.get_running_loop().create_server(self._newcomer, backlog=_AT_ONCE, **where)
        self._add(server)
        for sock in server.sockets:  # whose connections have it as well
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            with socket.socket(fileno=os.dup(sock.fileno())) as same:
                same.listen(_BACKLOG)
        return _port_of(server)

    def descriptors(self) -> list[int]:
        """Of all sockets."""
        return [number for number in (s.fileno() for each in self._servers for s in each.sockets) if number >= 0]

    def close(self) -> None:
        """Listens no more, also where that only begins. Idempotent."""
        self._is_closed = True
        for server in self._servers:
            server.close()

    async def closed(self) -> None:
        """Blocks until nothing of it is left."""
        for server in self._servers:
            await server.wait_closed()


def _port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port
