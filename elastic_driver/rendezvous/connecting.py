"""How a process that may block connects to a driver or an agent, so that each end knows who the other is.

Owns the way from an address to a socket on which HTTP may begin: over a unix socket the kernel tells both ends' user,
and the client says which worker or operator it is; over TCP comes TLS 1.3, then the exchange
(:mod:`~elastic_driver.rendezvous.authentication`). Knows nothing of what is said after that. Imports no asyncio.

Whoever answers over TCP may be anybody until he has proven that he holds the key. Until then he gets a name and a
nonce, no more of what he says is read than an answer has, and no more time is given to him than the caller gives.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.authentication import NONCE_BYTES, Proof, RefusedAuthenticationError, opening
from elastic_driver.rendezvous.certificate import check_fingerprint, client_context, fingerprint_of
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.system import local_socket

_CONNECT_S = 10.0
# The socket's own time limit is what ends a wait; the timer is for those who keep OpenSSL busy.
_TIMER_SLACK_S = 0.5


def connect(
    url: DriverUrl,
    credential: Credential,
    *,
    timeout_s: float,
    on_socket: Callable[[socket.socket], None] = lambda _: None,
) -> socket.socket:
    """A connection to the driver, on which it takes what follows as said by this identity.

    Blocks for ``timeout_s`` at most, beside what the system takes to look up a name.

    Args:
        url: where.
        credential: who asks. Its key is used over TCP only.
        timeout_s: for all of it; to connect no more than 10 s.
        on_socket: told of each socket before it is waited for, so that another thread can shut it down
            (:func:`shut_down`). What it raises ends the attempt.

    Raises:
        OSError: nothing listens there, or the connection broke, or it took too long.
        RendezvousProtocolError: what listens there is not the driver, or refuses; it may be the driver the next time.
    """
    until = time.monotonic() + timeout_s
    connect_s = min(_left(until), _CONNECT_S)
    if url.socket is not None:
        connection = local_socket.connect(url.socket, connect_s)
        with _closed_on_error(connection):
            on_socket(connection)
            connection.sendall(opening(str(credential.identity)))
        return connection
    connection = _connect_tcp(*url.address, connect_s, on_socket)
    encrypted = _context().wrap_socket(connection, do_handshake_on_connect=False)
    with _closed_on_error(encrypted), _cut_off(encrypted, until + _TIMER_SLACK_S):
        on_socket(encrypted)
        _shake_hands(encrypted, url.fingerprint, until)
        _authenticate(encrypted, credential, until)
    return encrypted


def shut_down(connection: socket.socket) -> None:
    """Ends what is waited for on a connection, in whatever thread. Of TLS nothing more is said."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # it was never connected, or the peer was quicker


def _connect_tcp(host: str, port: int, timeout_s: float, on_socket: Callable[[socket.socket], None]) -> socket.socket:
    error: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(timeout_s)
            on_socket(connection)
            connection.connect(address)
        except OSError as failed:
            error = failed
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise error or OSError("the name has no address")


def _shake_hands(encrypted: ssl.SSLSocket, fingerprint: str, until: float) -> None:
    encrypted.settimeout(_left(until))
    try:
        encrypted.do_handshake()
    except ssl.SSLEOFError as error:
        raise ConnectionResetError("the connection was ended during TLS's handshake") from error
    except ssl.SSLError as error:
        raise RendezvousProtocolError(
            "what answers there does not speak TLS 1.3, as drivers of this version do "
            f"({(error.reason or str(error)).replace('_', ' ').lower()})"
        ) from error
    if fingerprint:
        check_fingerprint(encrypted, fingerprint)


def _authenticate(encrypted: ssl.SSLSocket, credential: Credential, until: float) -> None:
    certificate = bytes.fromhex(fingerprint_of(encrypted))
    proof = Proof(str(credential.identity), credential.key, certificate, os.urandom(NONCE_BYTES))
    encrypted.settimeout(_left(until))
    encrypted.sendall(proof.request)
    answer = bytearray()
    while missing := proof.missing(answer):
        encrypted.settimeout(_left(until))
        piece = encrypted.recv(missing)
        if not piece:
            raise RendezvousProtocolError(
                "what answers there does not prove to be this job's driver: it has ended the connection"
            )
        answer += piece
    try:
        response = proof.response(answer)
    except RefusedAuthenticationError as error:
        raise RendezvousProtocolError(f"what answers there does not prove to be this job's driver ({error})") from error
    encrypted.sendall(response)


@functools.cache
def _context() -> ssl.SSLContext:
    return client_context()


def _left(until: float) -> float:
    """What a socket may wait still. Not 0.0, which means not to wait at all."""
    return max(0.001, until - time.monotonic())


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


@contextlib.contextmanager
def _cut_off(connection: socket.socket, at: float) -> Iterator[None]:
    """Cuts a connection whose other end never stops.

    OpenSSL takes what comes in for as long as more of it is there, and looks at no clock: whoever sends one KeyUpdate
    after the other holds a thread in it.
    """
    timer = threading.Timer(_left(at), shut_down, (connection,))
    timer.daemon = True  # it touches nothing but this socket
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
