"""The listening sockets of a server.

Owns how they are opened, configured and closed.
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
from elastic_driver.rendezvous.server.unauthenticated import UnauthenticatedConnection
from elastic_driver.rendezvous.tls import Turns

# Receive buffer of a connection. It must hold what agents send to a stopped process (CREDIT_BYTES, in small pieces,
# each with overhead): to them a full buffer looks like a dead machine. Linux starts with less, and grows the buffer
# only while it is read.
_RECEIVE_BYTES = 512 << 10
# Connections that the loop has not accepted yet.
_BACKLOG = 4096
# asyncio accepts as many connections in one turn of the loop as its backlog; so the backlog is raised afterwards.
# Earlier connections get their turns in between, and a stranger cut for a newcomer is gone before the next arrives.
_AT_ONCE = 64


class Listeners:
    """All listening sockets of a server.

    Args:
        service: the server.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._servers: list[asyncio.Server] = []
        self._is_closed = False
        self._local: asyncio.Server | None = None  # of _servers, the one on a Unix socket
        self._turns: Turns | None = None

    async def open(self, host: str, ports: int | Sequence[int]) -> int:
        """Listen on an address.

        Args:
            host: local address.
            ports: one port, or several to try in order; 0 for any free one.

        Returns:
            The port.

        Raises:
            SettingsError: the address or port is not available.
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
        """Accept connections on a socket that already listens, and close it with the others. Returns its port."""
        return await self._listen("", 0, listener)

    async def listen_at(self, host: str, port: int) -> int:
        """Listen on a further address, on exactly this port; 0 for any.

        Raises:
            SettingsError: the address or port is not available.
        """
        try:
            return await self._listen(host, port)
        except (OSError, UnicodeError) as error:
            reason = in_words(error)
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                reason = "the port is in use"
            raise SettingsError(f"cannot listen on {host} port {port}: {reason}") from error

    async def open_local(self, listening: socket.socket) -> None:
        """Accept connections on a Unix socket that already listens, from processes of this user and of root.

        It is closed with the others, or when another replaces it.

        Raises:
            SettingsError: the server was closed meanwhile.
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

    def _newcomer(self) -> UnauthenticatedConnection:
        self._turns = self._turns or Turns()
        return UnauthenticatedConnection(self._service, self._turns)

    async def _listen(self, host: str, port: int, listener: socket.socket | None = None) -> int:
        where: dict[str, Any] = {"sock": listener}
        if listener is None:
            where = {"host": host, "port": port, "reuse_address": True}
        server = await asyncio.get_running_loop().create_server(self._newcomer, backlog=_AT_ONCE, **where)
        self._add(server)
        for sock in server.sockets:  # accepted connections inherit it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            with socket.socket(fileno=os.dup(sock.fileno())) as same:
                same.listen(_BACKLOG)
        return _port_of(server)

    def descriptors(self) -> list[int]:
        """Return the descriptors of all sockets."""
        return [number for number in (s.fileno() for server in self._servers for s in server.sockets) if number >= 0]

    def close(self) -> None:
        """Stop listening, even on sockets that are only being opened. Idempotent."""
        self._is_closed = True
        for server in self._servers:
            server.close()

    async def closed(self) -> None:
        """Block until all sockets are closed."""
        for server in self._servers:
            await server.wait_closed()


def _port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port
