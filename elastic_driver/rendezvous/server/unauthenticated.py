"""A connection whose peer is not identified yet; it is identified once, at the beginning.

Owns the server's part of the exchange (:mod:`~elastic_driver.rendezvous.authentication`), after which the connection is
handed over to a :class:`Connection` or to an agent's protocol. The first bytes decide:

    unix socket      the kernel names the peer's user, which has to be this process's or root
                     magic and name: HTTP or, from an agent, frames follow at once
                     anything else: refused
    TCP, byte 0x16   TLS; inside it
                     magic: the exchange, and then HTTP or frames
                     anything else: HTTP of a browser, a scraper or a reader
    TCP, other byte  HTTP; from another machine only probes are answered

Until the handover the peer is a stranger like others, and nothing but the name in its request is parsed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from ssl import SSLContext
from typing import cast

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.authentication import (
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    Challenge,
    Request,
    read_request,
    refusal,
)
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.server.connection import Connection, Service
from elastic_driver.rendezvous.server.peer_connection import LINGER_S, PeerConnection
from elastic_driver.rendezvous.tls import TlsLayer, TlsTransport, Turns
from elastic_driver.system.local_socket import is_ours

_TLS = 0x16  # first byte of a TLS handshake record, and of no HTTP request
# How much is read from a stranger at once: four times the longest request.
_PIECE = 2 << 10
# OpenSSL takes 42 KB once it has one byte of a ClientHello. It gets none before the whole has arrived, or this much.
_MOST_HELLO = 16 << 10
_NOBODY = "this name cannot authenticate here"


class UnauthenticatedConnection(PeerConnection, asyncio.BufferedProtocol):
    """A peer that is not identified yet. Over TLS it is first the protocol below the TLS layer, then the one above.

    Args:
        service: the server.
        turns: shared by all connections of the loop.
    """

    def __init__(self, service: Service, turns: Turns) -> None:
        super().__init__(service.connections)
        self._service = service
        self._turns = turns
        self._transport: asyncio.Transport  # from connection_made() on
        self._received = b""
        self._hello = _ClientHello()
        self._is_local = self._is_plain_tcp = False
        self._shakes_hands = False
        self._identity: Identity | None = None
        self._challenge: Challenge | None = None
        self._no_room = ""

    # --- asyncio.BufferedProtocol; asyncio.Protocol above TLS ------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport, plain or above TLS."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._since = self._loop.time()
        if self._shakes_hands:
            self._shakes_hands = self._is_plain_tcp = False
            self._connections.met(self)
            return
        sock = transport.get_extra_info("socket")
        family = None if sock is None else sock.family
        self._is_local, self._is_plain_tcp = family == socket.AF_UNIX, family in (socket.AF_INET, socket.AF_INET6)
        if self._is_local and not is_ours(sock):
            self._deaf = True
            self._transport.abort()
            return
        self._connections.arrived(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the shared buffer, cut to what a stranger may send at once."""
        return self._turns.read[:_PIECE]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the bytes in the shared buffer."""
        self.data_received(bytes(self._turns.read[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Identify the peer's protocol by the bytes so far."""
        if self._deaf:
            return
        self._received += data
        if self._challenge is not None:
            self._check_response()
        elif self._is_plain_tcp and self._received[0] == _TLS:
            if self._hello.is_whole(self._received) or len(self._received) > _MOST_HELLO:
                self._encrypt()
        elif not self._is_plain_tcp and self._received[0] == MAGIC[0]:
            self._read_request()
        elif self._is_local:
            self._refuse("cannot read request: it does not start like one")
        else:
            self._hand_over(Connection(self._service, is_for_probes=self._is_plain_tcp and not self._is_loopback()))

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._deaf = True
        self._connections.lost(self)

    # --- TLS -------------------------------------------------------------------------------------------------------

    def _encrypt(self) -> None:
        context = self._service.certificate.context
        if context is None:
            self._transport.pause_reading()
            self._service.certificate.begin().add_done_callback(self._certificate_made)
            return
        data, self._received = self._received, b""
        plain = self._transport
        self._shakes_hands = True
        layer = TlsLayer(
            context,
            lambda: cast("asyncio.Protocol", self),
            self._turns,
            handshake_s=max(0.0, self._since + self._service.limits.request_s - self._loop.time()),
            server_side=True,
            on_shaken=self._shaken,
        )
        self._transport = layer.transport
        plain.set_protocol(layer)
        layer.connection_made(plain)
        self._turns.read[: len(data)] = data
        layer.buffer_updated(len(data))

    def _certificate_made(self, making: asyncio.Future[SSLContext]) -> None:
        if making.cancelled() or making.exception() is not None:
            self.abort()
        elif not (self._deaf or self._transport.is_closing()):
            self._transport.resume_reading()
            self._encrypt()

    def _shaken(self, error: Exception | None) -> None:
        if error is not None:
            self.connection_lost(error)

    # --- the exchange ----------------------------------------------------------------------------------------------

    def _read_request(self) -> None:
        try:
            request = read_request(self._received, has_nonce=not self._is_local)
            if request is None:
                return
            identity = Identity.parse(request.name)
        except RendezvousProtocolError as error:
            self._refuse(str(error))
            return
        except ValueError:
            self._refuse(_NOBODY)
            return
        self._received = self._received[request.size :]
        if self._no_room:
            self._refuse(self._no_room)
        elif self._is_local and self._service.admits(identity):
            self._authenticated(identity)
        elif not self._is_local and (key := self._service.key_of(identity)) is not None:
            self._identity = identity
            self._send_challenge(request, key)
        else:
            self._refuse(_nobody_as(identity.role))

    def _send_challenge(self, request: Request, key: bytes) -> None:
        self._connections.met(self)
        certificate = bytes.fromhex(self._service.certificate.fingerprint)
        self._challenge = Challenge(request, key, certificate, os.urandom(NONCE_BYTES))
        self._transport.write(self._challenge.message)
        if self._received:
            self._check_response()

    def _check_response(self) -> None:
        if len(self._received) < MAC_BYTES:
            return
        response, self._received = self._received[:MAC_BYTES], self._received[MAC_BYTES:]
        assert self._challenge is not None
        assert self._identity is not None
        if not self._challenge.accepts(response):
            self.abort()
            return
        self._authenticated(self._identity)

    def _authenticated(self, identity: Identity) -> None:
        if isinstance(self._transport, TlsTransport):
            self._transport.trust()
        self._hand_over(self._service.successor(identity))

    def _hand_over(self, protocol: asyncio.Protocol) -> None:
        """Hand the connection, with the bytes read so far, over to another protocol."""
        transport, data = self._transport, self._received
        self._deaf, self._received = True, b""
        self._connections.lost(self)
        transport.set_protocol(protocol)
        if not isinstance(transport, TlsTransport):
            # uvloop keeps reading into the buffer of a BufferedProtocol until it starts reading again.
            transport.pause_reading()
            transport.resume_reading()
        protocol.connection_made(transport)
        if data and not transport.is_closing():
            protocol.data_received(data)

    def _refuse(self, text: str) -> None:
        self._deaf = True
        self._since = self._loop.time()
        self._transport.write(refusal(text))
        self._transport.write_eof()  # closing would make the peer see a reset instead

    # --- Guest -----------------------------------------------------------------------------------------------------

    def refuse(self, status: int, text: str) -> None:
        """Refuse the peer once its request shows which form of refusal it understands."""
        self._no_room = text

    def say_goodbye(self, text: str) -> None:
        """Cut the connection: the server ends."""
        self.abort()

    def check_time(self, now: float) -> None:
        """Cut the connection if it has stalled."""
        limits, waited_s = self._service.limits, now - self._since
        if self._shakes_hands:
            return  # the layer has a time limit of its own
        if self._deaf or self._no_room:
            limit_s = LINGER_S
        else:
            limit_s = limits.request_s if self._received or self._challenge is not None else limits.idle_s
        if waited_s > limit_s and not self.waits_for_its_turn:
            self.abort()

    def _is_loopback(self) -> bool:
        """Return whether the peer is on this machine, or connects through it (ssh -L)."""
        name = self._transport.get_extra_info("sockname")
        try:
            address = ipaddress.ip_address(str(name[0]).partition("%")[0])
        except (TypeError, ValueError, IndexError):
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)


def _nobody_as(role: Role) -> str:
    if role is Role.JOINER:
        return "hosts cannot join here: this is not a job that was started with --accept-agents"
    return f"unknown {role}; does it belong to another job, or to one that is over?"


class _ClientHello:
    """Finds the end of the first message of a TLS handshake; it may span several records (RFC 8446, 4 and 5.1).

    Looks at each record once: otherwise many small records, sent byte by byte, would cost a stranger little and the
    loop much.
    """

    __slots__ = ("_at", "_message", "_size")

    def __init__(self) -> None:
        self._at = 0  # where the next record begins
        self._message = b""  # its first bytes, which hold its length
        self._size = 0  # bytes of it that have arrived

    def is_whole(self, received: bytes) -> bool:
        """Return whether the message is complete in all bytes received so far."""
        while len(received) >= self._at + 5:
            start = self._at + 5
            end = start + int.from_bytes(received[self._at + 3 : start], "big")
            if len(received) < end:
                break
            self._message += received[start : min(end, start + 4 - len(self._message))]
            self._size += end - start
            self._at = end
        return self._size >= 4 and self._size >= 4 + int.from_bytes(self._message[1:4], "big")
