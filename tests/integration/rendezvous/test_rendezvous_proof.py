"""Who may say what to the driver, and whom its workers believe: replayed, changed, spliced and made-up words."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elastic_driver.errors import RendezvousClosedError, RendezvousError, StaleRoundError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Identity, JobKey, Role
from elastic_driver.rendezvous.environment import ENV_RENDEZVOUS
from elastic_driver.rendezvous.messages import (
    DrainHostRequest,
    JobOver,
    LeaveRequest,
    Notice,
    Removed,
    RunningReport,
    WatchRequest,
)
from elastic_driver.rendezvous.proof import REPLY_HEADER, Session, digest_of
from elastic_driver.rendezvous.routes import Route
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.rendezvous.server.server import ServerLimits
from elastic_driver.words import NoticeKind
from elastic_driver.worker.engine.choice import usable_backends
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.fakes.memory_service import MemoryPeer, MemoryService, serving_in_memory
from tests.support.fakes.rendezvous_service import (
    IDENTITY,
    KEY,
    NONCE,
    PATIENCE_S,
    READER,
    READY,
    WORKER,
    Calls,
    Handler,
    Peer,
    Service,
    credential,
    hello,
    request,
    scripted,
    serving,
)

pytestmark = pytest.mark.integration

PATH = "/v1/rounds/1/kv/s/k"
WATCH = WatchRequest(WORKER, 1, 0)


@pytest.fixture
def listening() -> Iterator[Service]:
    with serving() as running:
        yield running


@pytest.fixture
def service() -> Iterator[MemoryService]:
    with serving_in_memory() as running:
        yield running


@pytest.fixture
def peer(service: MemoryService) -> Iterator[MemoryPeer]:
    with MemoryPeer(service) as connected:
        yield connected


def keys(service: MemoryService) -> int:
    return int(service.call(lambda: service.keys.store.count(1, "s")))


# --- what was said once ----------------------------------------------------------------------------


def test_a_captured_request_is_worth_nothing_again(service: MemoryService, peer: MemoryPeer) -> None:
    """On its own connection, on a new one, and on one that was begun with the same words."""
    captured = peer.request("PUT", PATH, b"old")
    for data in (captured, peer.request("PUT", PATH, b"new")):
        peer.send(data)
        assert peer.read().status == 204
    peer.send(captured)
    assert (peer.read().status, peer.is_closed()) == (401, True)
    for nonce in (NONCE, "f" * 32):
        with MemoryPeer(service) as other:
            other.meet(nonce)
            other.send(captured)
            assert (other.read().status, other.is_closed()) == (401, True)
    with MemoryPeer(service) as stranger:
        stranger.send(captured)
        assert (stranger.read().status, stranger.is_closed()) == (401, True)
    assert service.call(lambda: service.keys.store.get(1, "s", "k")) == b"new"


def test_requests_cannot_be_left_out_or_change_places(service: MemoryService, peer: MemoryPeer) -> None:
    first, second = peer.request("PUT", PATH, b"1"), peer.request("PUT", PATH, b"2")
    peer.send(second + first)
    assert (peer.read().status, peer.is_closed()) == (401, True)
    assert keys(service) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"PUT ", b"GET "),
        (b"PUT ", b"DELETE "),
        (b"/kv/s/k", b"/kv/s/j"),
        (b"/rounds/1/", b"/rounds/2/"),
        (b"?a=1", b"?a=2"),
        (b"?a=1", b""),
        (b"\r\n\r\nvalue", b"\r\n\r\nVALUE"),
        (b"Content-Length: 5\r\n\r\nvalue", b"Content-Length: 6\r\n\r\nvalue!"),
        (b"Content-Length: 5\r\n\r\nvalue", b"\r\n"),
        (b"Content-Length: 5\r\n\r\nvalue", b"Transfer-Encoding: chunked\r\n\r\n1\r\nv\r\n0\r\n\r\n"),
        (digest_of(b"value"), digest_of(b"VALUE")),
        (b" " + digest_of(b"value"), b""),
    ],
)
def test_a_request_that_is_changed_on_the_way(service: MemoryService, peer: MemoryPeer, old: bytes, new: bytes) -> None:
    """The refusal has no proof, so that who has really asked asks again."""
    data = peer.request("PUT", f"{PATH}?a=1", b"value")
    assert data.count(old) == 1
    peer.send(data.replace(old, new))
    answer = peer.read()
    assert answer.status == 401
    assert REPLY_HEADER not in answer.headers
    assert peer.is_closed()
    assert keys(service) == 0


def test_a_body_of_another_is_not_taken_behind_a_parked_request(service: MemoryService, peer: MemoryPeer) -> None:
    peer.send(peer.request("GET", f"{PATH}?wait_s=3600"))
    service.until_parked(1)
    peer.send(peer.request("PUT", PATH, b"other", covered=b"value"))
    assert peer.is_closed()
    assert keys(service) == 0


# --- who may do what -------------------------------------------------------------------------------

ROUTES = (*Handler().routes, *KeyRoutes().routes)
BODIES = {
    "next-round": READY.to_json(),
    "watch": WATCH.to_json(),
    "running": RunningReport(WORKER, 1, 0).to_json(),
    "leave": LeaveRequest(WORKER, "SIGTERM").to_json(),
    "drain": DrainHostRequest("a", undo=False).to_json(),
}


@pytest.mark.parametrize("role", Role)
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
        number = {Role.TICKET: "ab", Role.AGENT: "ab", Role.CHIEF: "1"}.get(role, "")
        with MemoryPeer(service, Identity(role, WORKER if role is Role.WORKER else None, number)) as peer:
            status = peer.ask(method, target, body).status
    allowed = role in route.roles
    assert (status == 403) is not allowed
    assert status in (403, 200, 204, 404, 101)  # 404: the key is not there; 101: agents speak on in frames
    done = (*service.handler.next_rounds, *service.handler.watches, *service.handler.reports)
    assert allowed or not (done or service.handler.left or service.handler.drained or keys(service))
    assert service.handler.ends == (allowed and route.path == "end")


@pytest.mark.parametrize("route", ["next-round", "watch", "running", "leave"])
def test_a_worker_speaks_for_itself_only(service: MemoryService, route: str) -> None:
    with MemoryPeer(service, Identity(Role.WORKER, WorkerId("a", 0, 1))) as peer:
        answer = peer.ask("POST", f"/v1/{route}", BODIES[route])
    assert (answer.status, answer.error) == (403, "worker a[0]#1 may not speak for worker a[0]")
    handler = service.handler
    assert [*handler.next_rounds, *handler.watches, *handler.reports, *handler.left] == []


def test_a_page_reads_the_status_with_what_is_in_the_job_s_file(listening: Service) -> None:
    asked = urllib.request.Request(f"{listening.url}/v1/status", headers={"Authorization": READER})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["explain"] == "waiting"
    drain = urllib.request.Request(f"{listening.url}/v1/drain", headers={"Authorization": READER}, method="POST")
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
                assert late.read().status == 503
            service.until(lambda: len(service.guests) == 2, "who was refused has gone")
        for one in peers:
            one.close()
    assert len(service.full) == 1
    assert "no room for more connections than 2" in service.full[0]
    assert "ulimit -Hn" in service.full[0]


# --- who is not the driver -------------------------------------------------------------------------


@contextmanager
def squatter(port: int, answer: Callable[[bytes], bytes]) -> Iterator[list[bytes]]:
    """Somebody without a key on the driver's port, who answers everything. Yields what he gets."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", port), reuse_port=False) as listener:

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(PATIENCE_S)
                    try:
                        while data := connection.recv(65536):
                            if data == b"end":
                                return
                            got.append(data)
                            connection.sendall(answer(data))
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield got
        finally:
            with socket.create_connection(listener.getsockname()) as end:
                end.sendall(b"end")
                thread.join(PATIENCE_S)
            assert not thread.is_alive()


def http(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def mirror(data: bytes) -> bytes:
    """The nonce that it was given, and a proof with a key that it has guessed."""
    name, nonce = re.findall(rb"Elastic-Hello (.*) (\w+)\r\n", data)[0]
    session = Session(bytes(32), name.decode(), nonce.decode(), nonce.decode())
    return http("200 OK", json.dumps({"nonce": nonce.decode(), "proof": session.greeting.decode()}).encode())


MADE_UP = {
    "mirror": mirror,
    "round": lambda _: http("200 OK", JobOver("made up").to_json()),
    "removed": lambda _: http("200 OK", Removed("made up").to_json()),
    "abort": lambda _: http("200 OK", Notice(9, 1, NoticeKind.ABORT, "made up").to_json()),
    "stale": lambda _: http("409 Conflict", b'{"error": "", "round_id": 1, "current_round_id": 2}'),
    "gone": lambda _: http("410 Gone", b'{"error": "made up"}'),
    "forbidden": lambda _: http("403 Forbidden", b'{"error": "made up"}'),
    "empty": lambda _: http("204 No Content", b""),
    "full": lambda _: http("503 X", b'{"error": "\x9b31m full"}'),
    "numbers": lambda _: http("200 OK", b'{"nonce": 1, "proof": 2}'),
    "halves": lambda _: http("200 OK", b'{"nonce": "\\ud800", "proof": "\\ud800"}'),
    "letters": lambda _: http("200 OK", b'{"nonce": "x", "proof": "\xc3\xa4"}'),
    "array": lambda _: http("200 OK", b"[]"),
    "deep": lambda _: http("200 OK", b"[" * 3000),
    "deep refusal": lambda _: http("503 X", b"[" * 3000),
    "endless": lambda _: b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 2000,
    "long": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + bytes(5000),
    "noise": lambda _: b"\xff\r\n\r\n" * 2000,
}


@pytest.mark.parametrize("made_up", MADE_UP)
def test_nobody_takes_the_place_of_a_driver_that_was_killed(listening: Service, calls: Calls, made_up: str) -> None:
    """Its workers obey nothing, tell nothing, and go on to ask as long as their patience lasts."""
    killed = Service()
    client = killed.client(patience_s=0.3)
    client.put(1, "s", "k", b"secret")
    calls.start(lambda: client.watch(WATCH))
    killed.until_parked(1)
    port = killed.port
    killed.die()
    with squatter(port, MADE_UP[made_up]) as got:
        calls.start(lambda: client.next_round(READY))
        calls.start(lambda: client.leave(LeaveRequest(WORKER, "SIGTERM")))
        calls.start(lambda: client.put(1, "s", "k", b"secret"))
        calls.start(client.status)
        errors = calls.join()
    client.close()
    assert {type(error) for error in errors} == {RendezvousError}, "neither closed nor stale nor refused"
    for error in errors:
        assert "does not prove to be this job's driver" in str(error)
        assert "\x9b" not in str(error)
    assert len(got) > len(errors), "each has asked again"
    for data in got:
        assert re.fullmatch(
            rb"GET /v1/hello HTTP/1\.1\r\nHost: 127\.0\.0\.1\r\n"
            rb"Authorization: Elastic-Hello worker a\[0\]#0 [0-9a-f]{32}\r\n\r\n",
            data,
        ), "no more than who asks"
    assert len(set(got)) == len(got)


@pytest.fixture
def calls() -> Iterator[Calls]:
    started = Calls()
    yield started
    started.join()


@pytest.mark.parametrize("authorization", ["", READER, f"Elastic-Proof {'0' * 32}", f"Elastic-Hello operator {NONCE}"])
def test_who_passes_a_hello_on_gets_no_further(listening: Service, authorization: str) -> None:
    """He has a proof of the driver to show; without a key he is a relay that can change nothing."""
    with Peer(listening) as relay:
        relay.send(hello(str(IDENTITY), NONCE))
        assert relay.read().status == 200
        relay.send(request("GET", "/v1/status", b"", authorization))
        assert (relay.read().status, relay.is_closed()) == (401, True)


def test_a_driver_of_another_job_is_not_obeyed(listening: Service) -> None:
    client = listening.client(key=JobKey.new(), patience_s=0.1)
    with pytest.raises(RendezvousError, match="does not prove to be this job's driver"):
        client.next_round(READY)
    client.close()
    assert listening.handler.next_rounds == []


def answers(*tampered: Callable[[Session], bytes]) -> dict[str, Callable[[Session], bytes]]:
    return {one.__name__: one for one in tampered}


def _with(proof: bytes, status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{REPLY_HEADER}: {proof.decode()}\r\n\r\n"
    return head.encode() + body


def no_proof(session: Session) -> bytes:
    return http("410 Gone", b'{"error": "made up"}')


def another_status(session: Session) -> bytes:
    return _with(session.of_reply(1, 200, b"{}"), "410 Gone", b"{}")


def another_body(session: Session) -> bytes:
    return _with(session.of_reply(1, 200, b"{}"), "200 OK", Removed("made up").to_json())


def a_body_cut(session: Session) -> bytes:
    whole = Removed("made up").to_json()
    return _with(session.of_reply(1, 200, whole), "200 OK", whole[:-1])


def another_number(session: Session) -> bytes:
    return _with(session.of_reply(2, 410, b"{}"), "410 Gone", b"{}")


def another_connection(session: Session) -> bytes:
    other = Session(KEY.of(IDENTITY), str(IDENTITY), NONCE, NONCE)
    return _with(other.of_reply(1, 410, b"{}"), "410 Gone", b"{}")


def no_ascii(session: Session) -> bytes:
    return _with(b"0" * 31, "410 Gone", b"{}").replace(b"0" * 31, b"\xe4" * 32)


TAMPERED = answers(no_proof, another_status, another_body, a_body_cut, another_number, another_connection, no_ascii)


@pytest.mark.parametrize("tampered", TAMPERED)
def test_an_answer_that_is_changed_on_the_way_is_asked_for_again(tampered: str) -> None:
    def right(session: Session) -> bytes:
        body = Removed("really").to_json()
        return _with(session.of_reply(1, 200, body), "200 OK", body)

    with scripted(TAMPERED[tampered], right) as (url, got):
        client = RendezvousClient(url, credential(), patience_s=PATIENCE_S)
        assert client.next_round(READY) == Removed("really")
        client.close()
    assert len(got) == 2


@pytest.mark.parametrize("error", [StaleRoundError(1, 2), RendezvousClosedError("really")])
def test_what_the_driver_proves_is_obeyed(listening: Service, calls: Calls, error: Exception) -> None:
    """The same answers that are not believed above."""
    client = listening.client()
    calls.start(lambda: client.watch(WATCH))
    listening.until_parked(1)
    listening.call(lambda: listening.handler.watches[0].set_exception(error))
    assert [type(one) for one in calls.join()] == [type(error)]
    client.close()


# --- what is to be read on the way -----------------------------------------------------------------


class Wire:
    """A relay that keeps a copy of everything."""

    def __init__(self, port: int) -> None:
        self._driver = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pieces: list[bytes] = []
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._run(self._accept)

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            theirs = socket.create_connection(self._driver)
            self._sockets += (ours, theirs)
            self._run(self._copy, ours, theirs)
            self._run(self._copy, theirs, ours)

    def _copy(self, source: socket.socket, to: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._pieces.append(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> bytes:
        """All that has passed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for one in (self._listener, *self._sockets):
            one.close()
        return b"\n".join(self._pieces)


def test_no_key_is_seen_on_the_wire_of_a_whole_job() -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=usable_backends()[0]) as job:
        wire = Wire(job.port)
        for worker in workers:
            job.spawn(worker, "rebuild", "4", env={ENV_RENDEZVOUS: f"http://127.0.0.1:{wire.port}"})
        for round_id in range(1, 6):
            job.plan(workers)
            job.wait_for(lambda round_id=round_id: len(job.rounds) == round_id, f"round {round_id}")
        for worker in workers:
            job.wait_end(worker)
    seen = wire.close()
    assert b"/v1/next-round" in seen
    assert seen.count(b"Elastic-Proof") > 8
    for secret in (job.key.secret, job.key.of_ranks(), *map(job.key.of_worker, workers)):
        assert secret not in seen
        assert secret.hex().encode() not in seen.lower()
        assert secret[:8].hex().encode() not in seen.lower()
