"""How clients connect: whom they take for the driver, what they say to others, and how long they bear with them."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from elastic_driver.errors import (
    OtherCertificateError,
    RendezvousError,
    RendezvousProtocolError,
    UnverifiedDriverError,
    WrongTokenError,
)
from elastic_driver.rendezvous import connecting
from elastic_driver.rendezvous.authentication import NONCE_BYTES, opening, read_request, refusal
from elastic_driver.rendezvous.certificate import Certificate, client_context, server_context
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.connecting import connect
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.system.local_socket import SocketFolder, url_of
from tests.support.fakes.rendezvous_service import CERTIFICATE, IDENTITY, PATIENCE_S, credential
from tests.support.fakes.scripted_driver import authenticate, listening, over_tls

pytestmark = pytest.mark.integration

STRANGER = "the server there did not prove to be this job's driver"
OK = b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"explain": "x"}'


def unknown(url: DriverUrl) -> DriverUrl:
    """The same, where nobody has told the fingerprint."""
    return DriverUrl(url.url)


@pytest.mark.parametrize("knows_fingerprint", [True, False])
def test_both_ends_know_each_other(knows_fingerprint: bool) -> None:
    names: list[str] = []

    def script(encrypted: ssl.SSLSocket) -> None:
        assert encrypted.version() == "TLSv1.3"
        names.append(authenticate(encrypted))
        encrypted.sendall(encrypted.recv(100).upper())

    with (
        listening(over_tls(script)) as url,
        connect(url if knows_fingerprint else unknown(url), credential(), timeout_s=PATIENCE_S) as connection,
    ):
        connection.sendall(b"hello")
        assert connection.recv(100) == b"HELLO"
    assert names == [str(IDENTITY)]


def test_on_one_machine_a_name_is_all_that_is_said() -> None:
    folder = SocketFolder.new()
    try:
        with folder.listen("s.sock") as listener:
            with connect(
                DriverUrl(url_of(folder.path / "s.sock")), Credential(IDENTITY), timeout_s=PATIENCE_S
            ) as connection:
                connection.sendall(b"GET")
                other, _ = listener.accept()
            with other:
                expected = opening(str(IDENTITY)) + b"GET"
                assert other.recv(len(expected) + 1, socket.MSG_WAITALL) == expected
    finally:
        folder.close()


def test_to_another_certificate_nothing_is_said() -> None:
    got: list[bytes] = []
    other = Certificate.new()

    def script(encrypted: ssl.SSLSocket) -> None:
        got.append(encrypted.recv(100))

    with (
        listening(over_tls(script, other)) as url,
        pytest.raises(OtherCertificateError, match="the certificate there does not match the fingerprint in the URL"),
    ):
        connect(url, credential(), timeout_s=PATIENCE_S)
    assert got == [b""]


def test_a_relay_with_a_certificate_of_its_own_gets_no_proof() -> None:
    """It has a TLS connection to each end, and passes the exchange on."""
    heard: list[bytes] = []
    own = Certificate.new()

    def driver(encrypted: ssl.SSLSocket) -> None:
        with pytest.raises(EOFError):
            authenticate(encrypted)

    with listening(over_tls(driver)) as url:

        def relay(encrypted: ssl.SSLSocket) -> None:
            with socket.create_connection(url.address) as plain, client_context().wrap_socket(plain) as onward:
                onward.sendall(encrypted.recv(1024))
                encrypted.sendall(onward.recv(1024))
                heard.append(encrypted.recv(1024))

        with (
            listening(over_tls(relay, own)) as between,
            pytest.raises(UnverifiedDriverError, match=STRANGER),
        ):
            connect(unknown(between), credential(), timeout_s=PATIENCE_S)
    assert heard == [b""]


def say(data: bytes) -> Callable[[ssl.SSLSocket], None]:
    """Answers whatever comes; whoever connects has said no more than who he is."""

    def script(encrypted: ssl.SSLSocket) -> None:
        asked = encrypted.recv(1024)
        request = read_request(asked)
        assert request is not None
        assert (request.name, request.size) == (str(IDENTITY), len(asked))
        with suppress(ConnectionError, ssl.SSLEOFError):  # the client does not stay to read all of it
            encrypted.sendall(data)
            assert encrypted.recv(1024) == b""

    return script


STRANGERS = {
    "another key": over_tls(lambda encrypted: _refused(encrypted, key=bytes(32))),
    "another certificate's": over_tls(lambda encrypted: _refused(encrypted, fingerprint="ab" * 32)),
    "refusal": over_tls(say(refusal("nobody has this name\n\x1b"))),
    "endless refusal": over_tls(say(b"\x01\xff\xff" + bytes(100_000))),
    "http": over_tls(say(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
    "mirror": over_tls(lambda encrypted: encrypted.sendall(b"\0" + encrypted.recv(1024)[-NONCE_BYTES:] + bytes(32))),
    "nothing": over_tls(lambda encrypted: ignore(encrypted.recv(1024))),
    "half a challenge": over_tls(lambda encrypted: encrypted.sendall(bytes(40))),
    "an old driver": lambda connection: _plain(connection, b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "ssh": lambda connection: _plain(connection, b"SSH-2.0-OpenSSH_9.2\r\n"),
    "silence and the end": lambda connection: _plain(connection, b""),
    "old TLS": lambda connection: _old_tls(connection),
}
WORDS = {
    "refusal": r"the server there rejected the connection: nobody has this name\?\?",
    "nothing": "it closed the connection",
    "half a challenge": "it closed the connection",
    "an old driver": "does not speak TLS 1.3: it is another program",
    "ssh": "does not speak TLS 1.3",
    "silence and the end": "was closed during the TLS handshake",
    "old TLS": "does not speak TLS 1.3",
}


def _refused(encrypted: ssl.SSLSocket, *, key: bytes | None = None, fingerprint: str = "") -> None:
    with pytest.raises(EOFError):
        authenticate(encrypted, key=key, fingerprint=fingerprint)


def _plain(connection: socket.socket, answer: bytes) -> None:
    connection.recv(4096)
    connection.sendall(answer)


def _old_tls(connection: socket.socket) -> None:
    context = server_context(CERTIFICATE)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        context.wrap_socket(connection, server_side=True)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_who_is_not_the_driver_is_told_nothing_and_tried_again(stranger: str) -> None:
    """It may have taken the port of a driver that is dead, or be on its way out of it."""
    with listening(STRANGERS[stranger], STRANGERS[stranger], over_tls(_answer)) as url:
        with pytest.raises((UnverifiedDriverError, OSError), match=WORDS.get(stranger, STRANGER)):
            connect(unknown(url), credential(), timeout_s=PATIENCE_S)
        client = RendezvousClient(url.url, credential(), patience_s=PATIENCE_S)
        assert client.status() == {"explain": "x"}
        client.close()


SOURCE = "the file t (--token-file)"
TOLD = {
    Role.OPERATOR: ("this job's operator's key", "either another job's driver answers there, or "),
    Role.MEMBER: ("its token", "either another rendezvous answers there, or "),
}


@pytest.mark.parametrize("role", TOLD)
def test_another_token_is_told_with_its_source(role: Role) -> None:
    """At once, where the certificate is the driver's: there is nothing else that can be wrong."""
    asks, (differs, either) = Credential(Identity(role), credential().key, SOURCE), TOLD[role]
    with listening(STRANGERS["another key"]) as url:
        client = RendezvousClient(str(url), asks, patience_s=PATIENCE_S)
        where = f"cannot contact the driver at 127.0.0.1 port {url.address[1]}: "
        with pytest.raises(WrongTokenError, match=f"^{re.escape(f'{where}{differs} is not the one from {SOURCE}')}$"):
            client.status()
        client.close()
    with listening(STRANGERS["another key"]) as url:
        client = RendezvousClient(url.url, asks, patience_s=PATIENCE_S, stranger_s=0.0)
        where = f"cannot contact the driver at 127.0.0.1 port {url.address[1]}: "
        with pytest.raises(
            UnverifiedDriverError, match=f"^{re.escape(f'{where}{either}{differs} is not the one from {SOURCE}')}$"
        ):
            client.status()
        client.close()


def test_another_certificate_from_the_beginning_is_told_at_once() -> None:
    def other(connection: socket.socket) -> None:
        with suppress(OSError):  # it was cut off, perhaps in its handshake
            over_tls(lambda encrypted: ignore(encrypted.recv(1)), Certificate.new())(connection)

    with listening(other) as url:
        client = RendezvousClient(str(url), credential(), patience_s=PATIENCE_S)
        with pytest.raises(
            OtherCertificateError, match="the certificate there does not match the fingerprint in the URL"
        ):
            client.status()
        client.close()


def test_all_addresses_of_a_name_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [100.0], []

    def late(connection: socket.socket) -> None:
        limits.append(connection.gettimeout())
        now[0] += 4.0
        raise TimeoutError

    def three(*_: object) -> object:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))] * 3

    monkeypatch.setattr(connecting.socket, "getaddrinfo", three)
    monkeypatch.setattr(connecting.time, "monotonic", lambda: now[0])
    with pytest.raises(TimeoutError):
        connect(DriverUrl("https://a:1"), credential(), timeout_s=9.0, on_socket=late)
    assert limits == [9.0, 5.0, 1.0]


def ignore(_: object) -> None:
    """Nothing is done about it."""


def _answer(encrypted: ssl.SSLSocket) -> None:
    authenticate(encrypted)
    encrypted.recv(65536)
    encrypted.sendall(OK)


def test_what_is_given_up_in_the_end_says_why() -> None:
    def refuse(connection: socket.socket) -> None:
        _plain(connection, b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listening(*[refuse] * 100) as url:
        client = RendezvousClient(url.url, credential(), patience_s=0.3)
        with pytest.raises(RendezvousError, match=r"cannot contact the driver at 127\.0\.0\.1 port \d+: .* TLS 1\.3"):
            client.status()
        client.close()


@pytest.mark.parametrize(
    "script",
    [
        lambda connection: connection.recv(1),
        over_tls(lambda encrypted: encrypted.recv(1)),
        over_tls(lambda encrypted: encrypted.sendall(b"\0" * 20)),
    ],
    ids=["no TLS", "no answer", "half an answer"],
)
def test_who_is_silent_is_not_waited_for(script: Callable[[socket.socket], None]) -> None:
    over = threading.Event()

    def silent(connection: socket.socket) -> None:
        script(connection)
        over.wait(PATIENCE_S)

    with listening(lambda connection: silent(connection)) as url:
        with pytest.raises((TimeoutError, UnverifiedDriverError)):
            connect(unknown(url), credential(), timeout_s=0.3)
        over.set()


def test_who_trickles_is_not_waited_for() -> None:
    """Each byte comes well within the time limit, and all of them long after it."""

    def trickle(encrypted: ssl.SSLSocket) -> None:
        encrypted.recv(1024)
        with suppress(OSError):  # until the client has had enough
            for byte in bytes(60):
                encrypted.sendall(bytes([byte]))
                time.sleep(0.05)

    with listening(over_tls(trickle)) as url, pytest.raises(TimeoutError):
        connect(unknown(url), credential(), timeout_s=0.5)


def test_who_keeps_openssl_busy_is_cut_off() -> None:
    """As with KeyUpdates without end: inside of OpenSSL nothing looks at a time limit. Here it looks at none either."""
    over = threading.Event()

    def silent(encrypted: ssl.SSLSocket) -> None:
        encrypted.recv(1)
        over.wait(PATIENCE_S)

    def unlimited(connection: socket.socket) -> None:
        if isinstance(connection, ssl.SSLSocket):
            connection.settimeout(None)
            connection.settimeout = ignore  # type: ignore[method-assign]

    with listening(over_tls(silent)) as url:
        with pytest.raises(UnverifiedDriverError, match="it closed the connection"):
            connect(url, credential(), timeout_s=0.1, on_socket=unlimited)
        over.set()


def test_a_worker_without_a_key_asks_its_own_machine_only() -> None:
    with pytest.raises(RendezvousProtocolError, match=r"as worker a\[0\]#0: no key was given"):
        RendezvousClient("https://127.0.0.1:1", Credential(IDENTITY))
