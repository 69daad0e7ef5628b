"""The rendezvous server: finds the route of each request and sends its answer.

Owns permissions and pending answers. Routes define what a request means; the connection limits a peer's cost and parses
its bytes.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import parse_qsl, unquote

from elastic_driver.errors import RendezvousError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.credentials import Identity
from elastic_driver.rendezvous.messages import API
from elastic_driver.rendezvous.routes import (
    AGENT,
    Answer,
    Deferred,
    RawAnswer,
    Route,
    RouteRequest,
    Routes,
    RouteTable,
    error_body,
    peer_name,
    refusal,
    role_name,
    written,
)
from elastic_driver.rendezvous.server.connection import Connection
from elastic_driver.rendezvous.server.listeners import Listeners
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.rendezvous.server.parked import PendingAnswer
from elastic_driver.rendezvous.server.peer_connection import ServerLimits
from elastic_driver.rendezvous.server.peer_connections import CONNECTIONS_EACH, PeerConnections
from elastic_driver.rendezvous.server.web import Web, WebAnswer, WebRequest, WebStreaming

__all__ = ["CONNECTIONS_EACH", "RendezvousServer", "ServerLimits"]

_API = f"{API}/"


def _has_no_key(identity: Identity) -> None:
    """Reject everybody over TLS."""


def _is_not_admitted(identity: Identity) -> bool:
    """Reject everybody on a Unix socket."""
    return False


class RendezvousServer:
    """Serves one job. Runs in one event loop; call its methods there.

    By default it admits no peers. ``web`` authenticates each request of a browser, and ``reader`` each of a reader.

    Args:
        routes: all requests that can be made here.
        key_of: returns the key with which an identity authenticates over TLS; None to reject it.
        admits: returns whether an identity is accepted on a Unix socket, where the kernel has named the user.
        agents: makes the protocol that takes over an admitted agent's connection; required if any agent is admitted.
        limits: the limits on one peer.
        on_error: called with an exception that a route should not have raised. Its request is answered with 500.
        on_full, on_worker_gone: passed to :class:`PeerConnections`.
        web: answers browsers and scrapers outside /v1; None to serve none.
        reader: the ``Authorization`` header of readers; empty where there are none.
        certificate: an existing certificate; None to make one when it is first needed.

    Attributes:
        key_of, admits: as given.
        certificate: the certificate that it shows over TLS.
        connections: all connections.
        listeners: the listening sockets.
        reader_header: the readers' header; where there are none, random bytes that cannot be guessed.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        key_of: Callable[[Identity], bytes | None] = _has_no_key,
        admits: Callable[[Identity], bool] = _is_not_admitted,
        agents: Callable[[Identity], asyncio.Protocol] | None = None,
        limits: ServerLimits | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        on_full: Callable[[str], None] | None = None,
        on_worker_gone: Callable[[WorkerId], None] | None = None,
        web: Web | None = None,
        reader: bytes = b"",
        certificate: OwnCertificate | None = None,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.web = web
        self.reader_header = reader or secrets.token_bytes()
        self.connections = PeerConnections(self.limits, on_full=on_full, on_worker_gone=on_worker_gone)
        self.listeners = Listeners(self)
        self.certificate = certificate or OwnCertificate()
        self.key_of, self.admits = key_of, admits
        self._agents = agents
        self._table = RouteTable(routes)
        self._on_error = on_error
        self._pending: set[PendingAnswer] = set()

    # --- for its owner ---------------------------------------------------------------------------------------------

    async def start(
        self,
        host: str,
        ports: int | Sequence[int],
        *,
        workers: int = 0,
        at_most: int = 0,
        connections_each: int = CONNECTIONS_EACH,
        descriptors_each: int = 0,
    ) -> int:
        """Open the ports and start to serve.

        Args:
            host, ports: passed to :meth:`Listeners.open`.
            workers, at_most, connections_each, descriptors_each: passed to :meth:`PeerConnections.make_room`.

        Returns:
            The port.

        Raises:
            SettingsError: the address or port is not available, or the limit of open files is too low for the workers.
        """
        self.connections.make_room(
            workers, at_most, connections_each=connections_each, descriptors_each=descriptors_each
        )
        port = await self.listeners.open(host, ports)
        self.connections.begin()
        return port

    async def start_local(self, listening: socket.socket, *, workers: int = 0) -> None:
        """Serve processes of this machine.

        Args:
            listening: passed to :meth:`Listeners.open_local`.
            workers: how many workers to make room for; 0 if there is room already.
        """
        if workers:
            self.connections.make_local_room(workers)
        await self.listeners.open_local(listening)
        self.connections.begin()

    def descriptors(self) -> list[int]:
        """Return the descriptors of all sockets, for a forked child to close."""
        return [*self.listeners.descriptors(), *self.connections.descriptors()]

    async def close(self) -> None:
        """Stop listening, answer 410 to parked requests, and drop every connection. Idempotent."""
        self.listeners.close()
        answers = [pending.future for pending in self._pending]
        self.connections.begin_to_close()
        await asyncio.gather(*answers, return_exceptions=True)
        await self.connections.closed()
        await self.listeners.closed()

    # --- for connections (Service) ---------------------------------------------------------------------------------

    def successor(self, identity: Identity) -> asyncio.Protocol:
        """Return the protocol that takes over the connection of an admitted peer (Service)."""
        if identity.role not in AGENT:
            return Connection(self, identity)
        assert self._agents is not None, "only a server with a protocol for agents admits them"
        return self._agents(identity)

    def serve(self, connection: Connection, method: bytes, url: bytes, body: bytes) -> None:
        """Answer or park a request (Service); an unexpected exception is answered with 500."""
        try:
            self._serve(connection, method, url, body)
        except Exception as error:
            connection.reply(*self._failure(error))

    def serve_web(
        self, connection: Connection, method: bytes, url: bytes, headers: dict[str, str], body: bytes
    ) -> None:
        """Answer a request outside /v1 (Service)."""
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

    def _serve(self, connection: Connection, method: bytes, url: bytes, body: bytes) -> None:
        path, _, raw_query = url.decode("ascii", "replace").partition("?")
        routes: Mapping[bytes, Route] = {}
        words: tuple[str, ...] = ()
        if path.startswith(_API):
            parts = path[len(_API) :].split("/")
            routes, words = self._table.find([*map(unquote, parts)] if "%" in path else parts)
        route = routes.get(method)
        if route is None or connection.identity.role not in route.roles:
            connection.reply(*_refused(connection.identity, method, path, [*routes.values()]))
            return
        query = dict(parse_qsl(raw_query)) if raw_query else {}
        request = RouteRequest(connection.identity, words, query, body, connection.has_hung_up)
        wait_s = min(request.wait_s(self.limits.poll_s), self.limits.poll_s) if route.is_polled else None
        self._reply(connection, route.answer(request), wait_s)

    def _reply(
        self, connection: Connection, answer: Answer | Awaitable[Answer] | Deferred, wait_s: float | None
    ) -> None:
        if isinstance(answer, tuple):
            connection.reply(*answer)
        elif isinstance(answer, Deferred):
            answer.begin(connection)
        elif isinstance(answer, Awaitable):
            PendingAnswer(asyncio.ensure_future(answer), self._pending, self._failure, wait_s).begin(connection)
        else:
            connection.reply(*written(answer), is_json=True)

    def _failure(self, error: BaseException) -> RawAnswer:
        """Return status and body for an exception. An unexpected one is a bug, and is reported."""
        if isinstance(error, RendezvousError):
            return refusal(error)
        if self._on_error is not None:
            self._on_error(error)
        return 500, error_body(f"{type(error).__name__}: {error}")


def _refused(identity: Identity, method: bytes, path: str, routes: Sequence[Route]) -> RawAnswer:
    """Return status and body for a request that this peer may not make, or that no route serves."""
    if not routes:
        return 404, error_body(f"no such path: {path}")
    name = method.decode("ascii", "replace")
    roles = [role for route in routes if route.method == name for role in route.roles]
    if roles:
        allowed = " or ".join(role_name(role) for role in sorted(roles))
        return 403, error_body(f"{peer_name(identity)} may not do this; only {allowed} may")
    supported = ", ".join(route.method for route in routes)
    return 405, error_body(f"method {name} is not supported here; {supported} is")
