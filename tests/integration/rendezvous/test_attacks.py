"""Whoever is between the driver and those who belong to its job, or wants in: over real sockets and real TLS.

What can be done without sockets is in test_authentication.py, what TLS alone has to bear in test_tls.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest

from elastic_driver.errors import RendezvousProtocolError, UnverifiedDriverError
from elastic_driver.launch.agent.dial_in import dial_in
from elastic_driver.rendezvous.authentication import (
    MAC_BYTES,
    MAGIC,
    NO_CERTIFICATE,
    NONCE_BYTES,
    Proof,
    opening,
    read_refusal,
    read_request,
)
from elastic_driver.rendezvous.certificate import Certificate, client_context, fingerprint_of, server_context
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.server.peer_connection import ServerLimits
from elastic_driver.rendezvous.server.unauthenticated import _ClientHello
from elastic_driver.rendezvous.server.web import Probed
from elastic_driver.system.local_socket import SocketFolder
from tests.support.fakes.rendezvous_service import (
    CERTIFICATE,
    IDENTITY,
    KEY,
    OPERATOR,
    PATIENCE_S,
    READER,
    Service,
    credential,
    descriptors,
    request,
    serving,
)
from tests.support.network.tls_client import TlsClient

pytestmark = pytest.mark.integration

LOOPS = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
STATUS = request("GET", "/v1/status")
JOINER = Identity(Role.JOINER)


class Caller:
    """One connection to the server, over TLS from the start."""

    def __init__(self, port: int, *, context: ssl.SSLContext | None = None) -> None:
        plain = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = (context or client_context()).wrap_socket(plain)
        self.certificate = bytes.fromhex(fingerprint_of(self.socket))

    def close(self) -> None:
        self.socket.close()

    def proof(self, identity: Identity | str = OPERATOR, *, key: bytes | None = None) -> Proof:
        key = key or (KEY.of(identity) if isinstance(identity, Identity) else bytes(32))
        return Proof(str(identity), key, self.certificate, os.urandom(NONCE_BYTES))

    def ask(self, proof: Proof) -> bytes:
        self.socket.sendall(proof.request)
        return self.answer(proof)

    def answer(self, proof: Proof) -> bytes:
        """The server's, as far as it goes."""
        answer = b""
        while missing := proof.missing(answer):
            piece = self.socket.recv(missing)
            if not piece:
                break
            answer += piece
        return answer

    def rest(self) -> bytes:
        """All that comes until the end."""
        got = b""
        with suppress(OSError):
            while piece := self.socket.recv(65536):
                got += piece
        return got


@contextmanager
def calling(service: Service) -> Iterator[Caller]:
    with closing(Caller(service.port)) as caller:
        yield caller


def is_served(service: Service) -> bool:
    """Whether somebody who belongs there is."""
    with calling(service) as caller:
        proof = caller.proof()
        caller.socket.sendall(
            proof.response(caller.ask(proof)) + request("GET", "/v1/status", headers=("Connection: close",))
        )
        return caller.rest().startswith(b"HTTP/1.1 200 ")


# --- in the middle ---------------------------------------------------------------------------------------------------


class Middle:
    """Ends TLS on both sides, with a certificate of its own, and passes on what is said inside.

    Args:
        port: of the server.

    Attributes:
        port: its own.
        said: by all clients, inside.
        answered: by the server.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._context = server_context(Certificate.new())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.said, self.answered = b"", b""
        self._threads: list[threading.Thread] = []
        self._start(self._serve)

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while self._threads:
            self._threads.pop(0).join(PATIENCE_S)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                plain.settimeout(PATIENCE_S)
                with suppress(OSError):
                    client = self._context.wrap_socket(plain, server_side=True)
                    there = Caller(self._to)
                    with closing(client), closing(there):
                        self._pass_on(client, there.socket)

    def _pass_on(self, client: ssl.SSLSocket, server: ssl.SSLSocket) -> None:
        """In turns, as the exchange has it."""
        while data := client.recv(4096):
            self.said += data
            server.sendall(data)
            if not (data := server.recv(4096)):
                return
            self.answered += data
            client.sendall(data)


def dialled(port: int, credential: Credential, *, fingerprint: str = "", limit_s: float = PATIENCE_S) -> object:
    """How an agent's dialling in ends."""
    noise: list[object] = []

    async def dial() -> object:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        try:
            dialling = dial_in(
                f"https://127.0.0.1:{port}",
                credential,
                fingerprint=fingerprint,
                on_frame=lambda frame: None,
                on_lost=lambda why: None,
            )
            return await asyncio.wait_for(dialling, limit_s)
        except (OSError, UnverifiedDriverError) as error:
            return error

    found = asyncio.run(dial())
    assert noise == []
    return found


def test_who_ends_tls_in_the_middle_gets_a_name_and_a_nonce() -> None:
    """An agent that knows only the job's token takes any certificate, and then finds that the driver has another."""
    with serving() as service, closing(Middle(service.port)) as middle:
        error = dialled(middle.port, credential(JOINER))
        assert isinstance(error, UnverifiedDriverError)
        assert "another job's driver answers there, or this job's join token is not the one that was given" in str(
            error
        )
        said = read_request(middle.said)
        assert said is not None
        assert (said.name, said.size) == ("joiner", len(middle.said)), "nothing follows the request"
        assert len(middle.answered) == 1 + NONCE_BYTES + MAC_BYTES
        # With the fingerprint it does not even get that.
        middle.said = b""
        error = dialled(middle.port, credential(JOINER), fingerprint=CERTIFICATE.fingerprint)
        assert isinstance(error, UnverifiedDriverError)
        assert middle.said == b""


def test_what_the_middle_has_recorded_does_not_let_it_in() -> None:
    with serving() as service, closing(Middle(service.port)) as middle:
        with closing(Caller(middle.port)) as victim:
            proof = victim.proof()
            answer = victim.ask(proof)
            with pytest.raises(RendezvousProtocolError):
                proof.response(answer)
            # And would a client take any certificate for the right one, its response would be for the wrong one.
            wrong = Proof(proof.name, proof.key, bytes.fromhex(CERTIFICATE.fingerprint), proof.nonce).response(answer)
            assert wrong
        for response in (answer[-MAC_BYTES:], bytes(MAC_BYTES)):
            with calling(service) as thief:
                thief.ask(thief.proof())
                thief.socket.sendall(response + STATUS)
                assert thief.rest() == b""


# --- other versions --------------------------------------------------------------------------------------------------


def test_neither_end_goes_down_to_tls_1_2() -> None:
    old = client_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving() as service:
        with pytest.raises(OSError):  # noqa: PT011 - an alert, or a reset
            Caller(service.port, context=old)
        assert is_served(service)
    context = server_context(CERTIFICATE)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    got = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            plain.settimeout(PATIENCE_S)
            with suppress(OSError), context.wrap_socket(plain, server_side=True) as connection:
                got.append(connection.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        error = dialled(listener.getsockname()[1], credential(JOINER))
        thread.join(PATIENCE_S)
    assert isinstance(error, OSError | UnverifiedDriverError)
    assert got == []


@LOOPS
def test_the_exchange_without_tls_is_answered_to_nobody(loop: str) -> None:
    proof = Proof("operator", KEY.of(OPERATOR), NO_CERTIFICATE, os.urandom(NONCE_BYTES))
    with serving(loop=loop) as service:
        for sent in (proof.request, proof.request[:1], MAGIC, opening("operator") + STATUS):
            with closing(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)) as plain:
                plain.sendall(sent)
                plain.shutdown(socket.SHUT_WR)
                got = plain.makefile("rb").read()
                assert got[:1] not in (b"\0", b"\1")
                assert b" 200 " not in got
        assert is_served(service)


# --- pieces ----------------------------------------------------------------------------------------------------------


@LOOPS
def test_all_in_pieces_of_a_byte(loop: str) -> None:
    """Handshake, exchange and request."""
    with (
        serving(loop=loop) as service,
        closing(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S)) as plain,
    ):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(data: bytes) -> None:
            for byte in data:
                plain.sendall(bytes([byte]))

        client = TlsClient()
        send(client.take())
        while not client.is_shaken:
            send(client.take(plain.recv(65536)))
        proof = Proof("operator", KEY.of(OPERATOR), bytes.fromhex(CERTIFICATE.fingerprint), os.urandom(NONCE_BYTES))
        for byte in proof.request:
            plain.sendall(client.say(bytes([byte])))
        while proof.missing(bytes(client.got)):
            client.take(plain.recv(65536))
        for byte in proof.response(bytes(client.got)) + STATUS:
            plain.sendall(client.say(bytes([byte])))
        client.got.clear()
        while b"waiting" not in client.got:
            client.take(plain.recv(65536))
        assert client.got.startswith(b"HTTP/1.1 200 ")


@LOOPS
def test_half_a_client_hello_costs_no_openssl(loop: str) -> None:
    """Which takes 42 KB at its first byte. It may come in several records."""
    hello = TlsClient().take()
    with serving(loop=loop) as service, ExitStack() as stack:
        for size in (1, 5, 9, len(hello) - 1):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S))
            plain.sendall(hello[:size])
        service.until(
            lambda: [each._received != b"" or each._shakes_hands for each in service.connections] == [True] * 4,
            "something of each is there",
        )
        assert not service.call(lambda: any(each._shakes_hands for each in service.connections))
        client = TlsClient()
        hello = client.take()
        plain = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S))
        for piece in (hello[5:7], hello[7:100], hello[100:]):
            plain.sendall(hello[:3] + len(piece).to_bytes(2, "big") + piece)
        while not client.is_shaken:
            client.take(plain.recv(65536))
        endless = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S))
        with suppress(OSError):
            endless.sendall(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(20_000))
            while endless.recv(65536):
                pass
        assert is_served(service)


@LOOPS
def test_requests_stand_behind_the_response_in_the_same_record(loop: str) -> None:
    with serving(loop=loop) as service, calling(service) as caller:
        proof = caller.proof(IDENTITY)
        body = b"x" * 100_000
        caller.socket.sendall(
            proof.response(caller.ask(proof))
            + request("PUT", "/v1/rounds/1/kv/s/k", body)
            + request("GET", "/v1/rounds/1/kv/s/k", headers=("Connection: close",))
        )
        got = caller.rest()
        assert got.startswith(b"HTTP/1.1 204 ")
        assert got.endswith(body)


@LOOPS
def test_nothing_behind_a_request_is_done_before_the_response(loop: str) -> None:
    """All in one record, as if the exchange were none."""
    put = request("PUT", "/v1/rounds/1/kv/s/k", b"x")
    with serving(loop=loop) as service:
        for behind in (put, bytes(MAC_BYTES) + put, request("PUT", "/v1/rounds/1/kv/s/k", b"x", READER)):
            with calling(service) as caller:
                caller.socket.sendall(caller.proof(IDENTITY).request + behind)
                assert len(caller.rest()) == 1 + NONCE_BYTES + MAC_BYTES
        assert service.call(lambda: service.keys.store.count(1, "s")) == 0


@LOOPS
def test_http_in_place_of_the_exchange_may_what_a_stranger_may(loop: str) -> None:
    with serving(loop=loop, web=Probed(None)) as service:
        for sent, status in (
            (request("GET", "/healthz"), b"200"),
            (STATUS, b"401"),
            (request("GET", "/v1/status", b"", READER), b"200"),
            (request("POST", "/v1/end", b"", READER), b"403"),
            (b"\x16\x03\x01" + bytes(30), b"400"),
            (b"\r\n" + opening("operator") + bytes(NONCE_BYTES), b"400"),
        ):
            with calling(service) as caller:
                caller.socket.sendall(sent)
                caller.socket.settimeout(PATIENCE_S)
                assert caller.socket.recv(65536)[9:12] == status, sent
        assert service.handler.ends == 0


# --- many ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a byte", "shaken", "half a request", "proof"])
def test_those_who_begin_and_do_not_go_on_are_strangers_like_others(how: str) -> None:
    """However far they go: the oldest are cut, and nothing of them is left."""
    limits = ServerLimits(strangers=4, stranger_s=0.1, connections=20)
    with serving(limits=limits) as service:
        assert is_served(service)
        service.until(lambda: not service.connections, "it has gone")
        before = descriptors()
        with ExitStack() as stack:
            for _ in range(40):
                with suppress(OSError):  # cut before it has come so far
                    if how == "a byte":
                        plain = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S))
                        plain.sendall(TlsClient().take()[:1])
                        continue
                    caller = stack.enter_context(calling(service))
                    if how == "proof":
                        caller.ask(caller.proof())
                    elif how == "half a request":
                        caller.socket.sendall(caller.proof().request[:20])
            service.until(lambda: 1 <= len(service.connections) <= 4, "the oldest are cut")
            assert is_served(service)
        service.until(lambda: not service.connections, "all are gone")
        assert descriptors() <= before


def test_who_is_refused_and_stays_makes_room_for_others() -> None:
    """A name that nobody has costs nothing to say: whoever lingers after it goes before anybody is shut out."""
    with serving(limits=ServerLimits(connections=6)) as service, ExitStack() as stack:
        for _ in range(7):
            caller = stack.enter_context(calling(service))
            assert read_refusal(caller.ask(caller.proof("nobody"))).startswith("this name cannot authenticate here")
        assert is_served(service)


class _Counted(bytes):
    looks = 0

    def __getitem__(self, key: Any) -> Any:
        type(self).looks += 1
        return super().__getitem__(key)


def test_a_client_hello_in_very_many_records_is_looked_at_once() -> None:
    """Byte by byte: else 16 KiB of one stranger's cost the loop 25 s."""
    sent = b"\x16\x03\x01\x00\x04\x01\xff\xff\xff" + b"\x16\x03\x01\x00\x00" * 1000
    hello, _Counted.looks = _ClientHello(), 0
    assert not any(hello.is_whole(_Counted(sent[:size])) for size in range(1, len(sent) + 1))
    assert _Counted.looks < 5 * len(sent)


# --- this machine's socket -------------------------------------------------------------------------------------------


@LOOPS
def test_a_browser_behind_a_forwarded_socket_neither_reads_nor_acts(loop: str) -> None:
    """``ssh -L PORT:driver.sock`` gives whoever reaches PORT the user's rights, unless he begins with HTTP or TLS."""
    with serving(loop=loop, web=Probed(None)) as service:
        folder = SocketFolder.new()
        service.wait(service.server.start_local(folder.listen("here.sock"), workers=4))
        for sent in (
            request("GET", "/healthz"),
            request("GET", "/v1/status", b"", READER),
            request("POST", "/v1/end"),
            b"POST /v1/end HTTP/1.1\r\nContent-Length: 600\r\n\r\n" + opening("operator") + request("POST", "/v1/end"),
            TlsClient().take(),
        ):
            with closing(socket.socket(socket.AF_UNIX)) as local:
                local.settimeout(PATIENCE_S)
                local.connect(str(folder.path / "here.sock"))
                local.sendall(sent)
                with suppress(ConnectionResetError):
                    assert read_refusal(local.recv(4096)).startswith("cannot read request: it does not start like one")
                    assert local.recv(4096) == b""
        assert service.handler.ends == 0
        service.until(lambda: not service.connections, "all have gone")
        folder.close()
