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

from elastic_driver.errors import RendezvousProtocolError, StrangerError
from elastic_driver.rendezvous.authentication import NONCE_BYTES, Proof, opening
from elastic_driver.rendezvous.certificate import client_context, fingerprint_of, has_fingerprint
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.strangers import NO_PROOF, no_proof, no_tls, other_certificate
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
        StrangerError: what listens there is not the driver, or refuses; it may be the driver the next time.
        WrongTokenError: it is the driver, and has another key.
    """
    until = time.monotonic() + timeout_s
    if url.socket is not None:
        connection = local_socket.connect(url.socket, min(timeout_s, _CONNECT_S))
        with _closed_on_error(connection):
            on_socket(connection)
            connection.sendall(opening(str(credential.identity)))
        return connection
    connection = _connect_tcp(*url.address, min(until, time.monotonic() + _CONNECT_S), on_socket)
    encrypted = _context().wrap_socket(connection, do_handshake_on_connect=False)
    with _closed_on_error(encrypted), _cut_off(encrypted, until + _TIMER_SLACK_S):
        on_socket(encrypted)
        _shake_hands(encrypted, url.fingerprint, until)
        _authenticate(encrypted, credential, until, is_driver=bool(url.fingerprint))
    return encrypted


def shut_down(connection: socket.socket) -> None:
    """Ends what is waited for on a connection, in whatever thread. Of TLS nothing more is said."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # it was never connected, or the peer was quicker


def _connect_tcp(host: str, port: int, until: float, on_socket: Callable[[socket.socket], None]) -> socket.socket:
    """Tries one address of the host after the other; what one has taken, the others have no more."""
    error: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_left(until))
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
        raise no_tls() from error
    if fingerprint and not has_fingerprint(encrypted, fingerprint):
        raise other_certificate()


def _authenticate(encrypted: ssl.SSLSocket, credential: Credential, until: float, *, is_driver: bool) -> None:
    certificate = bytes.fromhex(fingerprint_of(encrypted))
    proof = Proof(str(credential.identity), credential.key, certificate, os.urandom(NONCE_BYTES))
    encrypted.settimeout(_left(until))
    encrypted.sendall(proof.request)
    answer = bytearray()
    try:
        while missing := proof.missing(answer):
            encrypted.settimeout(_left(until))
            piece = encrypted.recv(missing)
            if not piece:
                raise StrangerError(f"{NO_PROOF}: it has ended the connection")
            answer += piece
        response = proof.response(answer)
    except RendezvousProtocolError as error:
        raise no_proof(error, credential, is_driver=is_driver) from error
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
