"""Dialling in: one connection of an agent to its driver, from the connect to where it carries frames.

Owns the proofs of both ends and the upgrade. What the frames say is the link's
(:mod:`elastic_driver.launch.agent.link`). Nothing is said before the other end has proven that it is the driver.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from elastic_driver.errors import ElasticError, RendezvousProtocolError
from elastic_driver.rendezvous.certificate import check_fingerprint, client_context
from elastic_driver.rendezvous.channel import FrameConnection
from elastic_driver.rendezvous.frames import Frame, FrameReader, FrameWriter
from elastic_driver.rendezvous.messages import API, parse_json
from elastic_driver.rendezvous.proof import HELLO, NONCE_BYTES, PROOF, REPLY_HEADER, UPGRADE, Session, is_same
from elastic_driver.rendezvous.tls import TlsLayer, TlsTransport, Turns
from elastic_driver.system import local_socket

# What answers is not proven to be the driver: of it no more than this is read.
_UNPROVEN_BYTES = 8192
# asyncio's own limit.
_HANDSHAKE_S = 60.0
_LENGTH = re.compile(rb"\r\nContent-Length: (\d{1,4})(?:\r\n|\Z)", re.I)
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_PATH = f"{API}/agent"


class StrangerError(ElasticError):
    """What answers there is not the driver, or takes us for a stranger."""


class TurnedAwayError(ElasticError):
    """The driver, and nobody else, has refused this agent; why, in its words."""


@dataclass(frozen=True, slots=True)
class Pass:
    """As whom an agent proves itself.

    Attributes:
        identity: its name.
        key: which only it and the driver know.
        fingerprint: SHA-256 of the driver's certificate, in hexadecimal digits; "" where the connection has none.
    """

    identity: str
    key: bytes = field(repr=False)
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Met:
    """A connection on which both ends have proven themselves."""

    connection: FrameConnection
    session: Session


async def dial_in(
    url: str, credential: Pass, *, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]
) -> Met:
    """Connects to the driver, until the connection carries frames. Blocks until then; has no time limit of its own.

    Args:
        url: ``http://host:port`` of the driver, or https, or ``unix:/PATH`` of its socket on this machine.
        credential: whose it is.
        on_frame, on_lost: see FrameConnection.

    Raises:
        OSError: no connection, or it broke.
        StrangerError: that is not the driver.
        TurnedAwayError: it is, and it does not take us.
    """
    loop = asyncio.get_running_loop()
    socket = local_socket.path_of(url)
    host, port, secure = _place(url) if socket is None else ("localhost", 0, False)
    met: asyncio.Future[Met] = loop.create_future()

    def knock() -> _Knock:
        return _Knock(f"{host}:{port}", credential, met, on_frame=on_frame, on_lost=on_lost)

    def knock_encrypted() -> TlsLayer:
        return TlsLayer(
            client_context(),
            knock,
            Turns(),
            handshake_s=_HANDSHAKE_S,
            server_side=False,
            server_hostname=host,
            on_shaken=failed,
        )

    def failed(error: Exception | None) -> None:
        if error is not None and not met.done():
            met.set_exception(error if isinstance(error, OSError) else ConnectionAbortedError(str(error)))

    transport: asyncio.BaseTransport | None = None
    try:
        if socket is not None:
            connection = local_socket.connect(socket, 0.0)  # this takes no time
            transport, _ = await loop.create_unix_connection(knock, sock=connection)
        else:
            transport, _ = await loop.create_connection(knock_encrypted if secure else knock, host, port)
        return await met
    except BaseException:
        if transport is not None:
            cast("asyncio.Transport", transport).abort()
        raise


def _place(url: str) -> tuple[str, int, bool]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme not in ("http", "https"):
        raise RendezvousProtocolError(
            f"cannot read {url!r} as the driver's address: expected http(s)://host:port or unix:/path"
        )
    return host, port, parts.scheme == "https"


class _Knock(asyncio.Protocol):
    """Hello, proof, upgrade; then a FrameConnection takes over."""

    def __init__(
        self,
        place: str,
        credential: Pass,
        met: asyncio.Future[Met],
        *,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._place = place
        self._pass = credential
        self._met = met
        self._on_frame, self._on_lost = on_frame, on_lost
        self._nonce = os.urandom(NONCE_BYTES).hex()
        self._transport: asyncio.Transport | None = None
        self._answer = b""
        self._session: Session | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            try:
                check_fingerprint(tls, self._pass.fingerprint)
            except RendezvousProtocolError:
                self._fail(StrangerError("the certificate there is not the one whose fingerprint this agent was given"))
                return
            if isinstance(transport, TlsTransport):
                transport.trust()
        self._say(f"Authorization: {HELLO} {self._pass.identity} {self._nonce}", f"{API}/hello")

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._met.done():
            return
        self._answer += data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        status, length = _STATUS.match(head), _LENGTH.search(head)
        size = int(length[1]) if length is not None else 0
        if end and status is not None and len(body) >= size:
            try:
                self._answered(int(status[1]), head, body[:size], body[size:])
            except (StrangerError, TurnedAwayError) as error:
                self._fail(error)
        elif len(self._answer) > _UNPROVEN_BYTES or (end and status is None):
            self._fail(StrangerError("what answers there does not speak this job's protocol"))

    def eof_received(self) -> bool:
        """See asyncio.Protocol."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if not self._met.done():
            closed = ConnectionResetError("the connection was closed")
            self._met.set_exception(exc if isinstance(exc, OSError) else closed)

    def _say(self, authorization: str, path: str, more: str = "") -> None:
        assert self._transport is not None
        head = f"GET {path} HTTP/1.1\r\nHost: {self._place}\r\n{authorization}\r\n{more}\r\n"
        self._transport.write(head.encode())

    def _answered(self, status: int, head: bytes, body: bytes, rest: bytes) -> None:
        session = self._session
        if session is None:
            if rest or status != 200:
                raise StrangerError(f"what answers there does not take this agent in: {_reason(body) or status}")
            self._session = self._meet(body)
            self._answer = b""
            proof = self._session.of_request(1, b"GET", _PATH.encode(), b"").decode()
            self._say(f"Authorization: {PROOF} {proof}", _PATH, f"Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\n")
            return
        given = re.search(rf"\r\n{REPLY_HEADER}: (\w+)".encode(), head)
        if given is None or not is_same(given[1], session.of_reply(1, status, body)):
            raise StrangerError("the answer there is not the driver's")
        if status != 101:
            raise TurnedAwayError(_reason(body) or f"the driver answers {status}")
        self._hand_over(session, rest)

    def _meet(self, body: bytes) -> Session:
        session = Session.met(self._pass.key, self._pass.identity, self._nonce, body)
        if session is not None:
            return session
        raise StrangerError("what answers there does not prove to be this job's driver")

    def _hand_over(self, session: Session, rest: bytes) -> None:
        assert self._transport is not None
        connection = FrameConnection(
            FrameReader(session.frames(up=False)),
            FrameWriter(session.frames(up=True)),
            on_frame=self._on_frame,
            on_lost=self._on_lost,
        )
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        self._met.set_result(Met(connection, session))
        if rest:
            connection.data_received(rest)

    def _fail(self, error: Exception) -> None:
        if not self._met.done():
            self._met.set_exception(error)
        if self._transport is not None:
            self._transport.abort()


def _reason(body: bytes) -> str:
    """What an answer says of itself; printable, since it may be a stranger's."""
    try:
        text = str(parse_json(body)["error"])
    except (RendezvousProtocolError, KeyError):
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:500])
