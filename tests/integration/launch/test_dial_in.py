"""How an agent connects to its driver: whom it takes for it, and what it says to others."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from elastic_driver.errors import OtherCertificateError, UnverifiedDriverError, WrongTokenError
from elastic_driver.launch.agent import dial_in as module
from elastic_driver.launch.agent.dial_in import AuthenticatedConnection, dial_in
from elastic_driver.rendezvous.authentication import MAGIC, NONCE_BYTES, Challenge, opening, read_request, refusal
from elastic_driver.rendezvous.certificate import Certificate, client_context
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.frames import Frame, Message, pack_frame
from elastic_driver.rendezvous.tls import TlsLayer
from elastic_driver.system.local_socket import SocketFolder, url_of
from tests.support.fakes.rendezvous_service import CERTIFICATE, PATIENCE_S
from tests.support.fakes.scripted_driver import authenticate, listening, over_tls

pytestmark = pytest.mark.integration

AGENT = Identity(Role.AGENT, number="ab" * 16)
KEY = b"an agent's key of thirty-two byte"[:32]
CREDENTIAL = Credential(AGENT, KEY)
PROVES_NOTHING = "did not prove to be this job's driver"
OTHER = Certificate.new()


class Agent:
    """What is told of one connection."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def dial(
        self, url: str, fingerprint: str = "", credential: Credential = CREDENTIAL
    ) -> AuthenticatedConnection:
        async with asyncio.timeout(PATIENCE_S):
            return await dial_in(
                url,
                credential,
                fingerprint=fingerprint,
                on_frame=self.frames.append,
                on_lost=self.lost.set_result,
            )


def act(main: Callable[[Agent], Awaitable[Any]], loop: str = "uvloop") -> Any:
    """Runs this, and makes sure that nothing was said behind its back."""
    noise: list[Any] = []

    async def inside() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        return await main(Agent())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop) as runner:
        found = runner.run(inside())
        gc.collect()
    assert noise == []
    return found


def refused(
    url: str,
    fingerprint: str = "",
    credential: Credential = CREDENTIAL,
    kind: type[UnverifiedDriverError | WrongTokenError] = UnverifiedDriverError,
) -> str:
    """Why this is not taken for the driver."""

    async def main(agent: Agent) -> str:
        with pytest.raises(kind) as caught:
            await agent.dial(url, fingerprint, credential)
        assert not agent.lost.done(), "it never was a connection"
        return str(caught.value)

    return str(act(main))


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("knows_fingerprint", [True, False])
def test_frames_begin_once_both_have_proven_themselves(loop: str, knows_fingerprint: bool) -> None:
    names: list[str] = []
    big = Message("m", {}, bytes(300_000))

    def script(encrypted: ssl.SSLSocket) -> None:
        names.append(authenticate(encrypted, key=KEY))
        encrypted.sendall(pack_frame(0, 0, 0, [big.pack()]))
        names.append(encrypted.recv(100).decode("latin-1"))

    async def main(agent: Agent) -> None:
        met = await agent.dial(url.url, url.fingerprint if knows_fingerprint else "")
        assert met.fingerprint == CERTIFICATE.fingerprint
        met.connection.write(0, 0, 0, [])
        await agent.lost
        assert agent.frames == [Frame(0, 0, 0, (big,))]

    with listening(over_tls(script)) as url:
        act(main, loop)
    assert names == [str(AGENT), pack_frame(0, 0, 0, []).decode("latin-1")]


def test_to_another_certificate_nothing_is_said() -> None:
    got: list[bytes] = []

    def script(encrypted: ssl.SSLSocket) -> None:
        with suppress(OSError):  # it was cut off
            got.append(encrypted.recv(100))

    def connection(plain: socket.socket) -> None:
        with suppress(OSError):  # it was cut off, perhaps in its handshake
            over_tls(script, OTHER)(plain)

    with listening(connection) as url:
        said = refused(url.url, url.fingerprint, kind=OtherCertificateError)
    assert "the certificate there does not match the fingerprint in the URL" in said
    assert "token" not in said
    assert b"".join(got) == b""


def test_a_relay_with_a_certificate_of_its_own_gets_no_proof() -> None:
    """The agent knows a token only. The relay passes its request on to the driver, and the driver's challenge back."""
    heard: list[bytes] = []

    def driver(encrypted: ssl.SSLSocket) -> None:
        with pytest.raises(EOFError):
            authenticate(encrypted, key=KEY)

    with listening(over_tls(driver)) as url:

        def relay(encrypted: ssl.SSLSocket) -> None:
            with socket.create_connection(url.address) as plain, client_context().wrap_socket(plain) as onward:
                onward.sendall(encrypted.recv(1024))
                encrypted.sendall(onward.recv(1024))
                with suppress(OSError):
                    heard.append(encrypted.recv(1024))

        with listening(over_tls(relay, OTHER)) as between:
            assert PROVES_NOTHING in refused(between.url)
    assert b"".join(heard) == b""


@pytest.mark.parametrize("knows_fingerprint", [True, False])
def test_another_token_is_told_with_its_source(knows_fingerprint: bool) -> None:
    """Where the certificate is the driver's, there is nothing else that can be wrong."""
    joiner = Credential(Identity(Role.JOINER), KEY, "the file t (--join-token-file)")
    with listening(over_tls(another_key)) as url:
        if knows_fingerprint:
            why = refused(url.url, url.fingerprint, joiner, WrongTokenError)
            assert why == "this job's join token is not the one from the file t (--join-token-file)"
        else:
            assert refused(url.url, "", joiner) == (
                "either another job's driver answers there, or this job's join token is not the one from the file t "
                "(--join-token-file)"
            )


def say(data: bytes) -> Callable[[ssl.SSLSocket], None]:
    """Answers whatever comes; the agent has said no more than who it is."""

    def script(encrypted: ssl.SSLSocket) -> None:
        asked = encrypted.recv(1024)
        request = read_request(asked)
        assert request is not None
        assert (request.name, request.size) == (str(AGENT), len(asked))
        with suppress(OSError):  # the agent does not stay to read all of it
            encrypted.sendall(data)
            assert encrypted.recv(1024) == b""

    return script


def another_key(encrypted: ssl.SSLSocket) -> None:
    with pytest.raises((EOFError, OSError)):
        authenticate(encrypted, key=bytes(32))


def another_certificate(encrypted: ssl.SSLSocket) -> None:
    with pytest.raises((EOFError, OSError)):
        authenticate(encrypted, key=KEY, fingerprint="ab" * 32)


def more_than_a_challenge(encrypted: ssl.SSLSocket) -> None:
    request = read_request(encrypted.recv(1024))
    assert request is not None
    challenge = Challenge(request, KEY, bytes.fromhex(CERTIFICATE.fingerprint), bytes(NONCE_BYTES))
    encrypted.sendall(challenge.message + pack_frame(0, 0, 0, []))
    with suppress(OSError):
        assert encrypted.recv(1024) == b""


def plain(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


STRANGERS = {
    "another key": (over_tls(another_key), PROVES_NOTHING),
    "another certificate's": (over_tls(another_certificate), PROVES_NOTHING),
    "more than a challenge": (over_tls(more_than_a_challenge), PROVES_NOTHING),
    "refusal": (
        over_tls(say(refusal("nobody has this name\n\x1b"))),
        "the server there rejected the connection: nobody has this name??",
    ),
    "endless refusal": (over_tls(say(b"\x01\xff\xff" + bytes(100_000))), PROVES_NOTHING),
    "http": (over_tls(say(b"HTTP/1.1 400 Bad Request\r\n\r\n")), PROVES_NOTHING),
    "an old driver": (plain, "does not speak TLS 1.3"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_who_is_not_the_driver_is_told_a_name_and_a_nonce(stranger: str) -> None:
    script, why = STRANGERS[stranger]
    with listening(script) as url:
        assert why in refused(url.url)


@pytest.mark.parametrize("answer", [b"", b"\0" * 40], ids=["nothing", "half a challenge"])
def test_who_ends_it_is_tried_again(answer: bytes) -> None:
    def script(encrypted: ssl.SSLSocket) -> None:
        encrypted.recv(1024)
        encrypted.sendall(answer)

    async def main(agent: Agent) -> None:
        with pytest.raises(OSError, match=r"the connection was closed|cut off"):
            await agent.dial(url.url)

    with listening(over_tls(script)) as url:
        act(main)


def test_who_does_not_shake_hands_is_waited_for_no_longer_than_the_caller_likes() -> None:
    async def main(agent: Agent) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await agent.dial(f"https://127.0.0.1:{silent.getsockname()[1]}")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        act(main)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_one_that_is_cancelled_when_it_has_just_connected_leaves_nothing_behind(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(agent: Agent) -> None:
        dialling = asyncio.ensure_future(agent.dial(f"https://127.0.0.1:{silent.getsockname()[1]}"))

        class Cut(TlsLayer):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                dialling.cancel()

        monkeypatch.setattr(module, "TlsLayer", Cut)
        with pytest.raises(asyncio.CancelledError):
            await dialling
        silent.setblocking(True)
        other, _ = silent.accept()
        with other:
            await asyncio.to_thread(lambda: list(iter(lambda: other.recv(1024), b"")))

    with socket.create_server(("127.0.0.1", 0)) as silent:
        act(main, loop)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (pack_frame(0, 0, 0, [Message("m", {}).pack()]), ""),
        (refusal("nobody has this name\n\x1b"), "the driver rejected this agent: nobody has this name??"),
        (b"", "closed"),
    ],
    ids=["frame", "refusal", "nothing"],
)
def test_on_one_machine_a_name_is_enough(loop: str, answer: bytes, why: str) -> None:
    async def main(agent: Agent) -> None:
        folder = SocketFolder.new()
        with folder.listen("driver.sock") as listener:
            met = await agent.dial(url_of(folder.path / "driver.sock"))
            assert (met.fingerprint, met.connection.ends) == ("", ("127.0.0.1", "127.0.0.1"))
            met.connection.write(0, 0, 0, [])
            other, _ = listener.accept()
        with other:
            expected = opening(str(AGENT)) + pack_frame(0, 0, 0, [])
            assert other.recv(len(expected) + 1, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == expected
            assert expected.startswith(MAGIC)
            other.sendall(answer[:1])
            await asyncio.sleep(0)
            other.sendall(answer[1:])
        said = await agent.lost
        assert why in said
        assert len(agent.frames) == (not why)
        folder.close()

    act(main, loop)


def test_whoever_is_not_there_is_an_error_of_the_system() -> None:
    async def main(agent: Agent) -> None:
        for url in ("unix:/no/such/driver.sock", f"https://127.0.0.1:{port}"):
            with pytest.raises(OSError):  # noqa: PT011 - any
                await agent.dial(url)

    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    act(main)
