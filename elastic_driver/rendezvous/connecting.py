"""How a blocking process connects to a driver or an agent, with both ends authenticated.

Owns the way from an address to a socket that is ready for HTTP. Over a Unix socket the kernel tells each end the
other's user, and the client names its identity; over TCP come TLS 1.3 and the exchange
(:mod:`~elastic_driver.rendezvous.authentication`). Knows nothing of the traffic after that. Imports no asyncio.

A server reached over TCP may be anybody until it proves that it holds the key. Until then it is sent only a name and a
nonce, no more than the length of an answer is read from it, and it gets no more time than the caller allows.
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

from elastic_driver.errors import RendezvousProtocolError, UnverifiedDriverError
from elastic_driver.rendezvous.authentication import NONCE_BYTES, Proof, opening
from elastic_driver.rendezvous.certificate import client_context, fingerprint_of, has_fingerprint
from elastic_driver.rendezvous.credentials import Credential
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.strangers import NO_PROOF, no_proof, no_tls, other_certificate
from elastic_driver.system import local_socket

_CONNECT_S = 10.0
# The socket's own timeout ends a wait; the timer is for a peer that keeps OpenSSL busy.
_TIMER_SLACK_S = 0.5


def connect(
    url: DriverUrl,
    credential: Credential,
    *,
    timeout_s: float,
    on_socket: Callable[[socket.socket], None] = lambda _: None,
) -> socket.socket:
    """Connect to the driver and authenticate as this identity.

    Blocks for ``timeout_s`` at most, plus the time of the name lookup.

    Args:
        url: the address.
        credential: the identity, and its key, which is used over TCP only.
        timeout_s: limit for everything; the TCP or Unix connection alone has at most 10 s.
        on_socket: called with each socket before it is waited for, so that another thread can shut it down
            (:func:`shut_down`). An exception that it raises ends the attempt.

    Raises:
        OSError: nothing listens there, or the connection broke or timed out.
        UnverifiedDriverError: the server there is not the driver, or refuses; the next try may reach the driver.
        WrongTokenError: it is the driver, but has another key.
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
    """End all waits on a connection, in any thread. TLS sends nothing more on it."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # it was never connected, or the peer was faster


def _connect_tcp(host: str, port: int, until: float, on_socket: Callable[[socket.socket], None]) -> socket.socket:
    """Try the host's addresses one after the other, within one time limit for all."""
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
    raise error or OSError("the host name has no address")


def _shake_hands(encrypted: ssl.SSLSocket, fingerprint: str, until: float) -> None:
    encrypted.settimeout(_left(until))
    try:
        encrypted.do_handshake()
    except ssl.SSLEOFError as error:
        raise ConnectionResetError("the connection was closed during the TLS handshake") from error
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
                raise UnverifiedDriverError(f"{NO_PROOF}: it closed the connection")
            answer += piece
        response = proof.response(answer)
    except RendezvousProtocolError as error:
        raise no_proof(error, credential, is_driver=is_driver) from error
    encrypted.sendall(response)


@functools.cache
def _context() -> ssl.SSLContext:
    return client_context()


def _left(until: float) -> float:
    """Return how long a socket may still wait. Not 0.0, which means not to wait at all."""
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
    """Cut a connection whose other end never stops sending.

    OpenSSL reads as long as more data is there, and checks no clock: a peer that sends one KeyUpdate after another
    would block the thread.
    """
    timer = threading.Timer(_left(at), shut_down, (connection,))
    timer.daemon = True  # it uses nothing but this socket
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
