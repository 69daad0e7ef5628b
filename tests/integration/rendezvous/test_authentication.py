"""Who may say what to the server, and how it finds out who speaks: once, at a connection's beginning."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import cast

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.authentication import MAC_BYTES, MAGIC, RefusedAuthenticationError, opening
from elastic_driver.rendezvous.certificate import fingerprint_of
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import DrainHostRequest, LeaveRequest, RunningReport, WatchRequest
from elastic_driver.rendezvous.routes import AGENT, Route
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.rendezvous.server.server import ServerLimits
from elastic_driver.rendezvous.server.web import Probed
from elastic_driver.system.local_socket import SocketFolder
from elastic_driver.version import __version__
from tests.support.fakes.memory_service import MemoryPeer, MemoryService, serving_in_memory
from tests.support.fakes.rendezvous_service import (
    IDENTITY,
    OPERATOR,
    PATIENCE_S,
    READER,
    READY,
    WORKER,
    Handler,
    Peer,
    Service,
    request,
    serving,
)

pytestmark = pytest.mark.integration

PATH = "/v1/rounds/1/kv/s/k"
WATCH = WatchRequest(WORKER, 1, 0)


@pytest.fixture
def service() -> Iterator[MemoryService]:
    with serving_in_memory() as running:
        yield running


@pytest.fixture
def peer(service: MemoryService) -> Iterator[MemoryPeer]:
    with MemoryPeer(service) as connected:
        yield connected


@pytest.fixture
def listening() -> Iterator[Service]:
    with serving(web=Probed(None)) as running:
        yield running


def keys(service: MemoryService) -> int:
    return int(service.call(lambda: service.keys.store.count(1, "s")))


def refused(peer: MemoryPeer | Peer) -> str:
    """In which words."""
    proof = peer.prove()
    with pytest.raises(RefusedAuthenticationError) as caught:
        proof.response(peer.begin(proof))
    assert peer.is_closed()
    return str(caught.value)


# --- the exchange ----------------------------------------------------------------------------------


def test_both_prove_themselves_once_and_requests_follow(service: MemoryService, peer: MemoryPeer) -> None:
    """The first of them in the same piece as the response; a head alone is enough for each."""
    proof = peer.prove()
    peer.send(proof.response(peer.begin(proof)) + request("PUT", PATH, b"1") + request("GET", PATH))
    assert (peer.read().status, peer.read().body) == (204, b"1")
    peer.send(request("GET", PATH, headers=("Authorization: whatever",)))
    assert peer.read().body == b"1"


def test_the_exchange_in_pieces_of_a_byte(service: MemoryService, peer: MemoryPeer) -> None:
    proof = peer.prove()
    for byte in proof.request[:-1]:
        peer.send(bytes([byte]))
    answer = peer.begin(_Last(proof, proof.request[-1:]))  # type: ignore[arg-type]
    for byte in proof.response(answer) + request("GET", "/v1/status"):
        peer.send(bytes([byte]))
    assert peer.read().status == 200


class _Last:
    """The end of a request."""

    def __init__(self, proof: object, request: bytes) -> None:
        self.request = request
        self.missing = proof.missing  # type: ignore[attr-defined]


def test_what_was_said_once_is_worth_nothing_again(service: MemoryService, peer: MemoryPeer) -> None:
    nonce = os.urandom(32)
    proof = peer.prove(nonce=nonce)
    response = proof.response(peer.begin(proof))
    peer.send(response + request("PUT", PATH, b"old"))
    assert peer.read().status == 204
    with MemoryPeer(service) as thief:
        thief.begin(thief.prove(nonce=nonce))
        thief.send(response + request("PUT", PATH, b"new"))
        assert thief.is_closed()
    assert service.call(lambda: service.keys.store.get(1, "s", "k")) == b"old"


def test_the_driver_s_own_proof_is_nobody_s_response(service: MemoryService, peer: MemoryPeer) -> None:
    answer = peer.begin(peer.prove())
    peer.send(answer[-MAC_BYTES:] + request("PUT", PATH, b"x"))
    assert peer.is_closed()
    assert keys(service) == 0


@pytest.mark.parametrize("at", [0, 15, 31])
def test_a_response_with_a_wrong_byte_ends_it(service: MemoryService, peer: MemoryPeer, at: int) -> None:
    proof = peer.prove()
    response = bytearray(proof.response(peer.begin(proof)))
    response[at] ^= 1
    peer.send(bytes(response) + request("PUT", PATH, b"x"))
    assert peer.is_closed()
    assert keys(service) == 0


def test_nothing_is_done_before_the_response(service: MemoryService, peer: MemoryPeer) -> None:
    """What comes in its place is not looked at."""
    peer.begin(peer.prove())
    peer.send(request("PUT", PATH, b"x"))
    assert peer.is_closed()
    assert keys(service) == 0
    with MemoryPeer(service) as other:
        other.send(other.prove().request + request("PUT", PATH, b"x", READER))
        other._bytes(65)
        assert other.is_closed()
    assert keys(service) == 0


def test_a_driver_of_another_job_does_not_prove_itself(service: MemoryService, peer: MemoryPeer) -> None:
    proof = peer.prove(key=bytes(32))
    with pytest.raises(RendezvousProtocolError, match="did not prove to be this job's driver"):
        proof.response(peer.begin(proof))


@pytest.mark.parametrize(
    "name",
    [
        "reader",
        "ranks",
        "worker",
        "worker a[0]#00",
        "worker a[0]",
        "operator a[0]#0",
        "chief",
        "Operator",
        " ",
        "ticket",
    ],
)
def test_names_that_nobody_has(service: MemoryService, peer: MemoryPeer, name: str) -> None:
    peer._identity = name  # type: ignore[assignment]
    proof = peer.prove(key=bytes(32))
    with pytest.raises(RefusedAuthenticationError, match="this name cannot authenticate here"):
        proof.response(peer.begin(proof))
    assert peer.is_closed()


@pytest.mark.parametrize(
    "data",
    [
        *(MAGIC[:3] + b"\x02" + bytes(40), b"\0" * 50, b"\0GET / HTTP/1.1\r\n\r\n"),
        *(MAGIC + b"\0\0" + bytes(40), MAGIC + b"\xff\xff" + bytes(40), MAGIC + b"\0\2\xc3\xa4" + bytes(32)),
    ],
    ids=["version", "zeros", "http", "nobody", "long", "letters"],
)
def test_what_is_no_request_is_refused_in_words(service: MemoryService, peer: MemoryPeer, data: bytes) -> None:
    peer.send(data)
    answer = peer._bytes(400)
    assert answer.startswith(b"\1\0")
    assert answer[3:].startswith(b"cannot read request: ")
    assert peer.is_closed()


@pytest.mark.parametrize("known", [b"", b"\0", opening("operator"), opening("operator") + bytes(32)])
def test_who_does_not_go_on_is_cut(known: bytes) -> None:
    limits = ServerLimits(request_s=1.5, idle_s=1.5)
    with serving_in_memory(limits=limits) as service, MemoryPeer(service) as peer:
        peer.send(known)
        peer._bytes(65 if len(known) > 32 else 0)
        assert peer.is_closed()
        assert service.call(lambda: len(service.connections)) == 0


def test_who_trickles_gets_no_more_time() -> None:
    with serving_in_memory(limits=ServerLimits(request_s=1.5)) as service, MemoryPeer(service) as peer:
        sent, began = 0, service.loop.time()
        data = opening("operator" + "x" * 500)
        while service.connections:
            peer.send(data[sent : sent + 1])
            sent += 1
            service.wait(asyncio.sleep(0.1))
        assert service.loop.time() - began < 5.0


def test_no_room_is_told_in_a_refusal() -> None:
    with serving_in_memory(limits=ServerLimits(connections=1)) as service, MemoryPeer(service) as worker:
        assert worker.ask("GET", "/v1/status").status == 200
        with MemoryPeer(service) as late:
            assert refused(late) == "the driver already has 1 connections; try again"


def test_agents_speak_frames_at_once_and_all_others_http(service: MemoryService) -> None:
    for role in AGENT:
        with MemoryPeer(service, Identity(role, number="" if role is Role.JOINER else "ab")) as agent:
            proof = agent.prove()
            agent.send(proof.response(agent.begin(proof)))
            assert agent.is_closed(), "what agents speak to hangs up here"


# --- who may do what -------------------------------------------------------------------------------

ROUTES = (*Handler().routes, *KeyRoutes().routes)
BODIES = {
    "next-round": READY.to_json(),
    "watch": WATCH.to_json(),
    "running": RunningReport(WORKER, 1, 0).to_json(),
    "leave": LeaveRequest(WORKER, "SIGTERM").to_json(),
    "drain": DrainHostRequest("a", undo=False).to_json(),
}


@pytest.mark.parametrize("role", [role for role in Role if role not in AGENT])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_each_role_may_what_the_routes_say(service: MemoryService, role: Role, route: Route) -> None:
    method = route.method
    target, body = f"/v1/{route.path.replace('*', '1')}", b"" if method == "GET" else BODIES.get(route.path, b"value")
    if method == "POST":
        target += "?key=0&count=1&wait_s=0.001"
    if role is Role.READER:
        with MemoryPeer(service) as reader:
            reader.send(request(method, target, b"", READER))
            status = reader.read().status
    else:
        number = "1" if role is Role.CHIEF else ""
        with MemoryPeer(service, Identity(role, WORKER if role is Role.WORKER else None, number)) as peer:
            status = peer.ask(method, target, body).status
    allowed = role in route.roles
    assert (status == 403) is not allowed
    assert status in (403, 200, 204, 400, 404)  # 404: the key is not there; 400: nor such a token
    done = (*service.handler.next_rounds, *service.handler.watches, *service.handler.reports)
    assert allowed or not (done or service.handler.left or service.handler.drained or keys(service))
    assert service.handler.ends == (allowed and route.path == "end")


@pytest.mark.parametrize("route", ["next-round", "watch", "running", "leave"])
def test_a_worker_speaks_for_itself_only(service: MemoryService, route: str) -> None:
    with MemoryPeer(service, Identity(Role.WORKER, WorkerId("a", 0, 1))) as peer:
        answer = peer.ask("POST", f"/v1/{route}", BODIES[route])
    assert (answer.status, answer.error) == (403, "worker a[0]#1 may not act for worker a[0]")
    handler = service.handler
    assert [*handler.next_rounds, *handler.watches, *handler.reports, *handler.left] == []


def test_a_page_reads_the_status_with_a_reader_s_token(listening: Service) -> None:
    url = f"http://127.0.0.1:{listening.port}"
    asked = urllib.request.Request(f"{url}/v1/status", headers={"Authorization": READER})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["explain"] == "waiting"
    drain = urllib.request.Request(f"{url}/v1/drain", headers={"Authorization": READER}, method="POST")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(drain, timeout=PATIENCE_S)


def test_readers_count_for_strangers() -> None:
    """What travels may have been read by anybody, who must not be able to take the workers' places with it."""
    with (
        serving_in_memory(limits=ServerLimits(connections=2)) as service,
        MemoryPeer(service) as reader,
        MemoryPeer(service) as worker,
    ):
        reader.send(request("GET", "/v1/status", b"", READER))
        assert reader.read().status == 200
        assert worker.ask("GET", "/v1/status").status == 200
        with MemoryPeer(service) as newcomer:
            assert newcomer.ask("GET", "/v1/status").status == 200
            assert reader.is_closed()


def test_no_room_is_told_once_with_what_to_do() -> None:
    with serving_in_memory(limits=ServerLimits(connections=2)) as service:
        peers = [MemoryPeer(service) for _ in range(2)]
        for one in peers:
            assert one.ask("GET", "/v1/status").status == 200
        for _ in range(3):
            with MemoryPeer(service) as late:
                late.send(request("GET", "/v1/status", b"", READER))
                assert late.read().status == 503
            service.until(lambda: len(service.connections) == 2, "who was refused has gone")
        for one in peers:
            one.close()
    assert len(service.full) == 1
    assert "the limit of 2 connections is reached" in service.full[0]
    assert "ulimit -Hn" in service.full[0]


# --- over sockets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_plain_text_is_answered_to_readers_on_loopback(loop: str) -> None:
    with serving(web=Probed(None), loop=loop) as service, Peer(service) as reader:
        for _ in range(2):
            reader.send(request("GET", "/v1/status", b"", READER))
            assert reader.read().status == 200
    with serving(web=Probed(None), loop=loop) as service, Peer(service, OPERATOR) as operator:
        operator.send(operator.prove().request)
        assert operator.read().status == 400, "it is no HTTP, and nothing else is spoken here"


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_from_other_machines_plain_text_is_answered_to_probes_only(loop: str) -> None:
    address = _address_of_this_machine()
    with serving(web=Probed(None), loop=loop) as service:
        port = service.wait(service.server.listeners.listen_at(address, 0))
        for target, authorization, status in (
            ("/healthz", None, 200),
            ("/v1/status", READER, 426),
            ("/login", None, 426),
            ("/healthzz", None, 426),
            ("/v1/hello", None, 426),
        ):
            with Peer(service, address=(address, port)) as peer:
                peer.send(request("GET", target, b"", authorization))
                answer = peer.read()
                assert answer.status == status
                if status == 426:
                    assert "use https" in answer.error
                    assert peer.is_closed()
        with Peer(service, OPERATOR, address=(address, port)) as operator:
            assert operator.ask("GET", "/v1/status").status == 200
        with Peer(service, address=(address, port)) as reader:
            reader.encrypt()
            reader.send(request("GET", "/v1/status", b"", READER))
            assert reader.read().status == 200


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_client_of_an_older_version_is_told_so(is_encrypted: bool) -> None:
    with serving(web=Probed(None)) as service, Peer(service) as peer:
        if is_encrypted:
            peer.encrypt()
        peer.send(request("GET", "/v1/hello", b"", "Elastic-Hello operator 0123456789abcdef0123456789abcdef"))
        answer = peer.read()
        assert answer.status == 426
        assert f"must have the driver's version, {__version__}" in answer.error


def _address_of_this_machine() -> str:
    """One that is not loopback. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_on_a_local_socket_a_name_is_enough(loop: str) -> None:
    """The kernel has named the user. What follows may come in the same piece, or much later."""
    with serving(loop=loop) as service:
        folder = SocketFolder.new()
        service.wait(service.server.start_local(folder.listen("here.sock"), workers=4))

        def connected() -> socket.socket:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.settimeout(PATIENCE_S)
            local.connect(str(folder.path / "here.sock"))
            return local

        status = request("GET", "/v1/status", headers=("Connection: close",))
        for pieces in (
            [opening(str(IDENTITY)) + status],
            [opening("operator"), status],
            [b"\0", opening("operator")[1:] + status],
        ):
            with connected() as local:
                for piece in pieces:
                    local.sendall(piece)
                assert local.makefile("rb").read().startswith(b"HTTP/1.1 200 OK")
        with connected() as local:
            local.sendall(opening("reader") + status)
            assert local.makefile("rb").read()[3:].startswith(b"this name cannot authenticate here")
        service.until(lambda: not service.connections, "all have gone")
        folder.close()


def test_the_certificate_is_made_when_somebody_needs_it() -> None:
    with serving() as service:
        service.server.certificate._certificate = None
        assert service.server.certificate.context is None
        peers = [Peer(service) for _ in range(3)]
        for one in peers:
            one.encrypt()
        fingerprint = service.wait(service.server.certificate.make())
        shown = {fingerprint_of(cast("ssl.SSLSocket", one.socket)) for one in peers}
        assert shown == {fingerprint}
        for one in peers:
            one.close()


def test_a_certificate_that_could_not_be_made_is_made_for_the_next_who_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with serving() as service:
        with monkeypatch.context() as broken, Peer(service) as early:
            broken.setattr(os, "memfd_create", fail)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                early.encrypt()
            service.until(lambda: not service.connections, "whoever waited for it is cut")
        with Peer(service) as late:
            late.encrypt()
            assert fingerprint_of(cast("ssl.SSLSocket", late.socket)) == service.server.certificate.fingerprint
