"""What is driver enough to authenticate, one connection after the other, and then says what a test has written down."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from elastic_driver.rendezvous.authentication import MAC_BYTES, NONCE_BYTES, Challenge, read_request
from elastic_driver.rendezvous.certificate import Certificate, server_context
from elastic_driver.rendezvous.driver_url import DriverUrl
from tests.support.fakes.rendezvous_service import CERTIFICATE, PATIENCE_S, credential


def authenticate(connection: ssl.SSLSocket, *, key: bytes | None = None, fingerprint: str = "") -> str:
    """The driver's part of the exchange. Returns who has come.

    Args:
        connection: after TLS's handshake.
        key: which it holds; the tests' worker's by default.
        fingerprint: of the certificate that it takes for its own.
    """
    received = b""
    while (request := read_request(received)) is None:
        piece = connection.recv(1024)
        assert piece
        received += piece
    own = bytes.fromhex(fingerprint or CERTIFICATE.fingerprint)
    challenge = Challenge(request, credential().key if key is None else key, own, os.urandom(NONCE_BYTES))
    connection.sendall(challenge.message)
    response = received[request.size :]
    while len(response) < MAC_BYTES:
        piece = connection.recv(MAC_BYTES - len(response))
        if not piece:
            raise EOFError("the client has ended the connection")
        response += piece
    assert challenge.accepts(response)
    return request.name


@contextmanager
def listening(*scripts: Callable[[socket.socket], None]) -> Iterator[DriverUrl]:
    """Somebody who takes as many connections as there are scripts, each with its own. Yields where, and as whom."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        problems: list[BaseException] = []

        def serve() -> None:
            for script in scripts:
                try:
                    connection, _ = listener.accept()
                except OSError:  # nobody comes any more
                    return
                try:
                    connection.settimeout(PATIENCE_S)
                    with connection:
                        script(connection)
                except BaseException as error:
                    problems.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        url = DriverUrl(f"https://127.0.0.1:{listener.getsockname()[1]}", CERTIFICATE.fingerprint)
        try:
            yield url
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert not problems, problems


def over_tls(
    script: Callable[[ssl.SSLSocket], None], certificate: Certificate = CERTIFICATE
) -> Callable[[socket.socket], None]:
    """A script for who speaks TLS."""

    def serve(connection: socket.socket) -> None:
        with server_context(certificate).wrap_socket(connection, server_side=True) as encrypted:
            script(encrypted)

    return serve


@contextmanager
def scripted(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A driver that sends one of the answers to the first request of each connection, and ends it then.

    Yields its URL, and the requests.
    """
    got: list[bytes] = []

    def script(answer: bytes) -> Callable[[socket.socket], None]:
        def serve(encrypted: ssl.SSLSocket) -> None:
            authenticate(encrypted)
            got.append(encrypted.recv(65536))
            encrypted.sendall(answer)

        return over_tls(serve)

    with listening(*map(script, answers)) as url:
        yield str(url), got
