"""Dialling in: one connection of an agent to its driver, from the connect until it carries frames.

Owns TLS and the agent's part of the exchange (:mod:`~elastic_driver.rendezvous.authentication`). What the frames mean
is up to the link (:mod:`elastic_driver.launch.agent.link`). Only a name and a nonce are sent before the other end has
proven that it is the driver; on one machine the kernel identifies the other process.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.authentication import NONCE_BYTES, Proof, is_refusal, opening, read_refusal
from elastic_driver.rendezvous.certificate import client_context, fingerprint_of, has_fingerprint
from elastic_driver.rendezvous.channel import FrameConnection
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.frames import Frame
from elastic_driver.rendezvous.strangers import NO_PROOF, no_proof, no_tls, other_certificate
from elastic_driver.rendezvous.tls import TlsLayer, TlsTransport, Turns
from elastic_driver.system import local_socket
from elastic_driver.system.loops import unix_connection

_HANDSHAKE_S = 10.0
# Before a connect is retried because the driver's socket has too many pending connections.
_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class AuthenticatedConnection:
    """A connection on which both ends have authenticated.

    Attributes:
        connection: the connection.
        fingerprint: of the driver's certificate, in hexadecimal digits; "" on one machine, where there is none.
    """

    connection: FrameConnection
    fingerprint: str


async def dial_in(
    url: str,
    credential: Credential,
    *,
    fingerprint: str = "",
    on_frame: Callable[[Frame], None],
    on_lost: Callable[[str], None],
) -> AuthenticatedConnection:
    """Connect to the driver and authenticate. Blocks until the connection carries frames; has no time limit of its own.

    Args:
        url: ``https://host:port`` of the driver, or ``unix:/path``.
        credential: this agent's identity and key.
        fingerprint: of the driver's certificate, in hexadecimal digits; "" if not known: then its proof of the key must
            do.
        on_frame, on_lost: see FrameConnection.

    Raises:
        OSError: there is no connection, or it broke.
        UnverifiedDriverError: the peer is not the driver, or does not recognize this agent.
        WrongTokenError: it is the driver, and has another key.
    """
    loop = asyncio.get_running_loop()
    met: asyncio.Future[AuthenticatedConnection] = loop.create_future()
    layer: TlsLayer | None = None

    def dialler() -> _Dialler:
        return _Dialler(credential, fingerprint, met, on_frame=on_frame, on_lost=on_lost)

    def shaken(error: Exception | None) -> None:
        if error is None or met.done():
            return
        if isinstance(error, ssl.SSLError):
            met.set_exception(no_tls())
        else:
            met.set_exception(error if isinstance(error, OSError) else ConnectionAbortedError(str(error)))

    def encrypted() -> TlsLayer:
        nonlocal layer
        layer = TlsLayer(
            _context(),
            dialler,
            Turns(),
            handshake_s=_HANDSHAKE_S,
            server_side=False,
            server_hostname=host,
            on_shaken=shaken,
        )
        return layer

    transport: asyncio.BaseTransport | None = None
    try:
        if (path := local_socket.path_of(url)) is not None:
            sock = await _connect(path)
            transport = await unix_connection(dialler, sock)
        else:
            host, port = _place(url)
            transport, _ = await loop.create_connection(encrypted, host, port)
        return await met
    except BaseException:
        if not met.cancel() and not met.cancelled():
            met.exception()  # it is no longer awaited
        if layer is not None and layer.is_connected:
            layer.abort()  # uvloop does not notify it if the connect is canceled once made
        elif transport is not None:
            cast("asyncio.Transport", transport).abort()
        raise


@functools.cache
def _context() -> ssl.SSLContext:
    return client_context()


async def _connect(path: Path) -> socket.socket:
    while True:
        try:
            return local_socket.connect_at_once(path)
        except BlockingIOError:
            await asyncio.sleep(_AGAIN_S)


def _place(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme not in ("http", "https"):
        raise RendezvousProtocolError(f"cannot read {url!r} as the driver's address: expected https://host:port")
    return host, port


class _Dialler(asyncio.Protocol):
    """The exchange over TLS, or on one machine the name alone; then a FrameConnection takes over."""

    def __init__(
        self,
        credential: Credential,
        fingerprint: str,
        met: asyncio.Future[AuthenticatedConnection],
        *,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._credential = credential
        self._fingerprint = fingerprint
        self._met = met
        self._on_frame, self._on_lost = on_frame, on_lost
        self._transport: asyncio.Transport | None = None
        self._proof: Proof | None = None
        self._answer = b""
        self._connection: FrameConnection | None = None  # on one machine, until the driver has sent something

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request, or on one machine the name."""
        self._transport = cast("asyncio.Transport", transport)
        if self._met.done():  # it is no longer awaited
            self._transport.abort()
            return
        name = str(self._credential.identity)
        if not isinstance(transport, TlsTransport):
            self._transport.write(opening(name))
            self._connection = self._begin("")
            return
        tls = transport.get_extra_info("ssl_object")
        if self._fingerprint and not has_fingerprint(tls, self._fingerprint):
            self._fail(other_certificate())
            return
        certificate = bytes.fromhex(fingerprint_of(tls))
        self._proof = Proof(name, self._credential.key, certificate, os.urandom(NONCE_BYTES))
        self._transport.write(self._proof.request)

    def data_received(self, data: bytes) -> None:
        """Read the driver's part of the exchange, then hand over to the FrameConnection."""
        proof, transport = self._proof, self._transport
        if self._connection is not None:
            self._answer += data
            if not is_refusal(self._answer):
                self._hand_over(self._connection, self._answer)
            return
        if self._met.done() or proof is None or transport is None:
            return
        try:
            while (missing := proof.missing(self._answer)) and data:
                self._answer, data = self._answer + data[:missing], data[missing:]
            if missing:
                return
            if data:  # the driver waits for the response first
                raise RendezvousProtocolError(NO_PROOF)
            transport.write(proof.response(self._answer))
        except RendezvousProtocolError as error:
            self._fail(no_proof(error, self._credential, is_driver=bool(self._fingerprint)))
        else:
            cast("TlsTransport", transport).trust()
            self._hand_over(self._begin(proof.certificate.hex()))

    def eof_received(self) -> bool:
        """Return False: the transport closes itself."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the connection was closed, and the driver's reason if it has sent one."""
        if self._connection is not None:
            self._connection.abort(
                f"the driver rejected this agent: {read_refusal(self._answer)}"
                if self._answer
                else "the connection was closed"
            )
        elif not self._met.done():
            closed = ConnectionResetError("the connection was closed")
            self._met.set_exception(exc if isinstance(exc, OSError) else closed)

    def _begin(self, fingerprint: str) -> FrameConnection:
        """Make the FrameConnection, on which frames may be sent from now on."""
        assert self._transport is not None
        connection = FrameConnection(on_frame=self._on_frame, on_lost=self._on_lost)
        connection.connection_made(self._transport)
        self._met.set_result(AuthenticatedConnection(connection, fingerprint))
        return connection

    def _hand_over(self, connection: FrameConnection, data: bytes = b"") -> None:
        """Hand everything that arrives to the FrameConnection from now on."""
        assert self._transport is not None
        self._transport.set_protocol(connection)
        if data:
            connection.data_received(data)

    def _fail(self, error: Exception) -> None:
        if not self._met.done():
            self._met.set_exception(error)
        if self._transport is not None:
            self._transport.abort()
