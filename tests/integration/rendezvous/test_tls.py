"""The server over TLS, and a client that says nothing to anybody with another certificate."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_driver.errors import RendezvousClosedError
from elastic_driver.rendezvous.certificate import Certificate, client_context, has_fingerprint, server_context
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import join_key
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.server.connection import Connection
from elastic_driver.rendezvous.server.peer_connection import ServerLimits
from elastic_driver.rendezvous.server.unauthenticated import UnauthenticatedConnection
from elastic_driver.rendezvous.tls import TlsLayer, TlsTransport
from tests.support.fakes.rendezvous_service import (
    CERTIFICATE,
    IDENTITY,
    OPERATOR,
    PATIENCE_S,
    READY,
    Peer,
    Service,
    credential,
    descriptors,
    request,
    serving,
)
from tests.support.network.tls_client import TlsClient

pytestmark = pytest.mark.integration


def test_a_certificate_is_the_job_s_alone_and_its_key_is_not_printed() -> None:
    assert Certificate.new().fingerprint != CERTIFICATE.fingerprint
    assert "PRIVATE" not in repr(CERTIFICATE)
    pem, _, _ = CERTIFICATE.pem.decode().partition("-----BEGIN PRIVATE KEY")
    assert sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() == CERTIFICATE.fingerprint


def test_making_a_context_leaves_no_descriptor() -> None:
    server_context(CERTIFICATE)
    before = descriptors()
    server_context(CERTIFICATE)
    assert descriptors() == before


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_requests_and_long_polls_go_through_it(loop: str) -> None:
    with serving(certificate=CERTIFICATE, loop=loop) as service:
        operator, worker = service.client(OPERATOR), service.client()
        assert operator.status()["round_id"] == 1
        worker.put(1, "scope", "key", b"v" * 1_000_000)
        assert worker.get(1, "scope", "key") == b"v" * 1_000_000
        assert worker.get(1, "scope", "absent", wait_s=0.05) is None
        caught: list[Exception] = []

        def ask() -> None:
            try:
                worker.next_round(READY)
            except RendezvousClosedError as error:
                caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        service.until_parked(1)
        worker.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert len(caught) == 1, "close() ends a call that waits in another thread"
        operator.close()


def test_nothing_can_be_read_on_the_way() -> None:
    with serving(certificate=CERTIFICATE) as service, eavesdropping(service) as (port, seen):
        url = str(DriverUrl(f"https://127.0.0.1:{port}", CERTIFICATE.fingerprint))
        client = RendezvousClient(url, credential(OPERATOR), patience_s=PATIENCE_S)
        assert client.status()["explain"] == "waiting"
        client.close()
    assert seen
    for word in (b"HTTP", b"status", b"waiting", b"operator"):
        assert word not in b"".join(seen)


def test_the_fingerprint_decides() -> None:
    with serving(certificate=CERTIFICATE) as service, closing(connected(service)) as connection:
        assert has_fingerprint(connection, CERTIFICATE.fingerprint)
        assert has_fingerprint(connection, CERTIFICATE.fingerprint.upper())
        for wrong in ("", CERTIFICATE.fingerprint[:-1], "0" * 64):
            assert not has_fingerprint(connection, wrong)


def test_old_versions_of_tls_are_refused() -> None:
    old = client_context()
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        serving(certificate=CERTIFICATE) as service,
        socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as plain,
        pytest.raises(OSError),  # noqa: PT011 - an alert, or a reset
    ):
        old.wrap_socket(plain)


def test_who_does_not_finish_its_handshake_is_cut() -> None:
    with serving(certificate=CERTIFICATE, limits=ServerLimits(request_s=1.5)) as service:
        with closing(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)) as silent:
            assert silent.recv(1) == b""
        client = service.client(OPERATOR)
        assert client.status()["round_id"] == 1
        client.close()


@pytest.mark.parametrize("says_hello", [False, True])
def test_who_is_silent_in_its_handshake_is_a_stranger_like_others(says_hello: bool) -> None:
    """Else they would be counted nowhere, and could take all descriptors."""
    limits = ServerLimits(strangers=4, stranger_s=0.1, connections=20)
    with serving(certificate=CERTIFICATE, limits=limits) as service, ExitStack() as stack:
        before = descriptors()
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)) for _ in range(60)
        ]
        for each in silent if says_hello else ():
            with suppress(OSError):
                each.sendall(TlsClient().take())
        for each in silent[:-4]:  # the oldest are cut
            with suppress(ConnectionResetError):
                while each.recv(65536):
                    pass
        assert descriptors() - before <= 60 + 4 + 1
        client = service.client(OPERATOR)
        assert client.status()["round_id"] == 1
        client.close()


def test_many_who_come_and_go_in_their_handshake_make_no_noise() -> None:
    limits = ServerLimits(strangers=2, stranger_s=0.01, connections=4, request_s=1.0)
    with serving(certificate=CERTIFICATE, limits=limits) as service:
        for index in range(300):
            with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as plain, suppress(OSError):
                plain.sendall((b"", b"\x16\x03\x01rubbish", b"GET / HTTP/1.1\r\n\r\n")[index % 3])
        client = service.client(OPERATOR)
        assert client.status()["round_id"] == 1
        client.close()
    assert service.noise == []  # as serving() asks for, too


def test_of_many_who_come_at_once_few_are_taken_in_one_turn_of_the_loop() -> None:
    """asyncio would take as many as the system keeps, and none of them would be heard before all are taken."""
    with serving(certificate=CERTIFICATE, loop="asyncio") as service, ExitStack() as stack:
        counts = [0]

        def watch() -> None:
            counts.append(len(service.connections))
            if counts[-1] < 200:
                service.loop.call_soon(watch)

        def come() -> None:
            for _ in range(200):  # the system keeps all of them, though the loop takes none
                stack.enter_context(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S))
            watch()

        service.call(come)
        service.until(lambda: counts[-1] == 200, "all are taken")
    assert max(after - before for before, after in pairwise(counts)) == 64


def test_strangers_inside_are_cut_like_others() -> None:
    limits = ServerLimits(idle_s=1.5)
    with serving(certificate=CERTIFICATE, limits=limits) as service, closing(connected(service)) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_flood_of_key_updates_takes_one_small_piece_in_a_turn_of_the_loop(loop: str, tmp_path: Path) -> None:
    """OpenSSL answers each of them: taken all at once, a stranger's few megabytes would stop the driver for seconds."""
    with (
        serving(certificate=CERTIFICATE, loop=loop) as service,
        socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as sock,
    ):
        client = TlsClient(tmp_path / "keys")
        sock.sendall(client.take())
        while not client.is_shaken:
            sock.sendall(client.take(sock.recv(65536)))
        service.until(lambda: bool(layers(service)), "its handshake is done")
        (layer,) = service.call(lambda: layers(service))
        flood = client.key_updates(2000) + client.forged(request("GET", "/v1/status"))
        pieces: list[int] = []

        def watch() -> None:
            pieces.append(layer._pieces)
            if layer._error is None:
                service.loop.call_soon(watch)

        service.call(watch)
        sock.sendall(flood)
        operator = service.client(OPERATOR)
        assert operator.status()["round_id"] == 1, "others are served"
        operator.close()
        while b"HTTP/1.1 401" not in client.got:
            client.take(sock.recv(65536))
        sock.close()
        service.until(lambda: layer._error is not None, "the cut is noticed")
    assert max(after - before for before, after in pairwise(pieces)) == 1
    assert pieces[-1] - pieces[0] >= len(flood) // 4096


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_slow_reader_gets_a_large_answer_whole_and_holds_nobody_up(loop: str) -> None:
    value = bytes(range(256)) * 40_000
    with serving(certificate=CERTIFICATE, loop=loop) as service, ExitStack() as stack:
        worker, other = (stack.enter_context(closing(service.client(who))) for who in (IDENTITY, OPERATOR))
        worker.put(1, "s", "k", value)
        peer = stack.enter_context(Peer(service))
        peer.send(peer.request("GET", "/v1/rounds/1/kv/s/k"))
        service.until(lambda: any(layer.unsent_bytes for layer in layers(service)), "it does not read")
        assert other.status()["round_id"] == 1
        assert peer.read().body == value


def test_who_asks_and_never_reads_is_cut() -> None:
    limits = ServerLimits(unread_bytes=1 << 20)
    with serving(certificate=CERTIFICATE, limits=limits) as service, closing(service.client()) as worker:
        worker.put(1, "s", "k", bytes(1 << 18))
        with Peer(service) as peer:
            peer.meet()
            with suppress(OSError):  # a reset, or a broken pipe
                while True:
                    peer.send(peer.request("GET", "/v1/rounds/1/kv/s/k"))
        assert worker.get(1, "s", "k") == bytes(1 << 18)


def test_a_join_key_is_its_token_s_alone() -> None:
    keys = {join_key(token) for token in ("0123456789abcdef", "0123456789abcdeg", "\u00e4" * 16)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {32}
    assert join_key("0123456789abcdef") in keys


def layers(service: Service) -> list[TlsLayer]:
    """Of those who have shaken hands. In the server's loop."""
    transports = (
        connection._transport
        for connection in service.connections
        if isinstance(connection, Connection | UnauthenticatedConnection)
    )
    found = (transport._layer for transport in transports if isinstance(transport, TlsTransport))
    return [layer for layer in found if layer.is_shaken]


def connected(service: Service) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)
    return client_context().wrap_socket(plain)


@contextmanager
def impostor(got: list[bytes]) -> Iterator[int]:
    """Somebody with a certificate of his own. Keeps what each connection says to him."""
    context = server_context(Certificate.new())
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                plain, _ = listener.accept()
                if closing_down.is_set():
                    plain.close()
                    return
                plain.settimeout(PATIENCE_S)
                try:
                    with context.wrap_socket(plain, server_side=True) as connection:
                        got.append(connection.recv(4096))
                except OSError:
                    got.append(b"")  # it hung up

        closing_down = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        port: int = listener.getsockname()[1]
        try:
            yield port
        finally:
            closing_down.set()
            socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
            thread.join(PATIENCE_S)


@contextmanager
def eavesdropping(service: Service) -> Iterator[tuple[int, list[bytes]]]:
    """Hands on one connection, and keeps what goes either way."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hand_on(source: socket.socket, sink: socket.socket) -> None:
            try:
                while piece := source.recv(65536):
                    seen.append(piece)
                    sink.sendall(piece)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        def serve() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as far:
                back = threading.Thread(target=hand_on, args=(far, near))
                back.start()
                hand_on(near, far)
                back.join(PATIENCE_S)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], seen
        thread.join(PATIENCE_S)
