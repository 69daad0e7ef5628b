"""What strangers, broken peers and rubbish can do to the rendezvous server: be refused, and nothing more.

Without sockets; what only sockets can do is in test_sockets.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import pytest

from elastic_driver.rendezvous.authentication import opening
from elastic_driver.rendezvous.messages import RunningReport, WatchRequest
from elastic_driver.rendezvous.server.server import ServerLimits
from tests.support.fakes.memory_service import MemoryPeer as Peer
from tests.support.fakes.memory_service import MemoryService as Service
from tests.support.fakes.memory_service import serving_in_memory as serving
from tests.support.fakes.rendezvous_service import (
    READER,
    READY,
    WORKER,
    request,
)

pytestmark = pytest.mark.integration

SMALL = ServerLimits(body_bytes=1000, header_bytes=500, unread_bytes=1 << 20, pipelined_bytes=4000)
QUICK = ServerLimits(request_s=1.5, idle_s=1.5)
KEY = "/v1/rounds/1/kv/s/k"


@pytest.fixture
def service() -> Iterator[Service]:
    with serving(limits=SMALL) as running:
        yield running


@pytest.fixture
def peer(service: Service) -> Iterator[Peer]:
    with Peer(service) as connected:
        yield connected


def connections(service: Service) -> int:
    return int(service.call(lambda: len(service.connections)))


# --- strangers -------------------------------------------------------------------------------------

NOBODY = 'authentication required; see docs/design.md, "Wire"'


@pytest.mark.parametrize(
    "authorization",
    [
        *("", "Bearer", "Bearer \x00", "Bearer é", READER[:-1], f"{READER}0", READER.upper(), "Basic YTpi"),
    ],
)
@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/v1/status", b""),
        ("GET", f"{KEY}?wait_s=3600", b""),
        ("PUT", KEY, b"value"),
        ("POST", "/v1/next-round", READY.to_json()),
        ("POST", "/v1/drain", b'{"hostname": "a", "undo": false}'),
        ("GET", "/nowhere", b""),
    ],
)
def test_who_proves_nothing(
    service: Service, peer: Peer, method: str, target: str, body: bytes, authorization: str
) -> None:
    peer.send(request(method, target, body, authorization))
    answer = peer.read()
    assert answer.status in ((401, 400) if "\x00" in authorization else (401,))  # a zero byte is no HTTP
    assert answer.error == NOBODY or answer.status == 400
    assert peer.is_closed()
    assert service.call(lambda: (service.parked, service.keys.store.count(1, "s"))) == (0, 0)
    assert (service.handler.next_rounds, service.handler.drained) == ([], [])


def test_no_authorization_at_all(peer: Peer) -> None:
    peer.send(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = peer.read()
    assert (answer.status, answer.error) == (401, NOBODY)


def test_an_authorization_in_a_trailer_is_none(service: Service, peer: Peer) -> None:
    peer.send(
        f"PUT {KEY} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        f"1\r\nx\r\n0\r\nAuthorization: {READER}\r\n\r\n".encode()
    )
    assert peer.read().status == 401
    assert service.call(lambda: service.keys.store.count(1, "s")) == 0


def test_two_authorizations(peer: Peer) -> None:
    peer.send(request("GET", "/v1/status", b"", READER, headers=(f"Authorization: {READER}",)))
    assert peer.read().status == 400


@pytest.mark.parametrize("authorization", [READER, "Bearer no"])
@pytest.mark.parametrize("headers", [("Content-Length: 900",), ("Transfer-Encoding: chunked",)])
def test_nobody_s_and_a_reader_s_body_is_not_read(peer: Peer, authorization: str, headers: tuple[str, ...]) -> None:
    """Refused while nothing of it is there, or at its first bytes where nothing has said that it will come."""
    peer.send(request("GET", "/v1/status", b"", authorization, headers=headers))
    if "chunked" in headers[0]:
        peer.send(b"1\r\nx\r\n")
    assert peer.read().status == 401
    assert peer.is_closed()


# --- size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", ["1001", "99999999999", "999999999999999999"])
def test_a_declared_body_that_is_too_large(peer: Peer, length: str) -> None:
    """Refused before it is sent, and while it is being sent: the answer arrives all the same."""
    peer.send(peer.request("PUT", KEY, headers=(f"Content-Length: {length}",)) + bytes(10_000))
    answer = peer.read()
    assert (answer.status, answer.error) == (413, "the body exceeds 1000 bytes")
    assert answer.headers["Connection"] == "close"


def test_the_largest_body(peer: Peer) -> None:
    assert peer.ask("PUT", KEY, bytes(1000)).status == 204


@pytest.mark.parametrize("size", [1, 7, 600])
def test_a_chunked_body_that_is_too_large(service: Service, peer: Peer, size: int) -> None:
    chunk, chunked = f"{size:x}\r\n{'x' * size}\r\n".encode(), ("Transfer-Encoding: chunked",)
    peer.send(peer.request("PUT", KEY, headers=chunked) + chunk * (1001 // size + 1))
    assert peer.read().status == 413
    assert service.call(lambda: service.keys.store.count(1, "s")) == 0


@pytest.mark.parametrize("tail", [b"0" * 1000, b"1;" + b"e" * 1000], ids=["size", "extension"])
def test_endless_chunk_headers(peer: Peer, tail: bytes) -> None:
    peer.send(peer.request("PUT", KEY, headers=("Transfer-Encoding: chunked",)))
    with contextlib.suppress(ConnectionError):
        for _ in range(2000):
            peer.send(tail if tail[:1] == b"0" else tail + b"\r\nx\r\n")
    with contextlib.suppress(ConnectionError):
        assert peer.read().status in (400, 413)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 600 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 600 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
    ],
    ids=["url", "one", "many"],
)
def test_headers_that_are_too_large(peer: Peer, head: bytes) -> None:
    peer.send(head)
    assert peer.read().status == 431


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n", b"GET /"], ids=["value", "name", "url"]
)
def test_a_header_without_end(service: Service, peer: Peer, start: bytes) -> None:
    """The parser keeps an unfinished header; it may not keep much of it."""
    peer.send(start)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 64 << 20 and connections(service):
            peer.send(b"x" * 65536)
            sent += 65536
            if service.call(lambda: all(getattr(one, "_deaf", False) for one in service.connections)):
                break
    assert sent < 2 << 20
    assert peer.read().status == 431


# --- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "half",
    [b"G", b"GET /v1/status HTT", request("GET", "/v1/status")[:-2], b"\r\n\r\n", b""],
    ids=["byte", "line", "headers", "newlines", "body"],
)
def test_a_half_sent_request_is_cut(half: bytes) -> None:
    with serving(limits=QUICK) as service, Peer(service) as peer:
        peer.send(half or peer.request("PUT", KEY, b"value")[:-1])
        answer = peer.read()
        assert (answer.status, answer.error) == (408, "the request was not complete within 1.5 s")
        assert peer.is_closed()


def test_a_half_sent_second_request_is_cut_too() -> None:
    with serving(limits=QUICK) as service, Peer(service) as peer:
        peer.send(peer.request("GET", "/v1/status") + b"GET /")
        assert [peer.read().status, peer.read().status] == [200, 408]


def test_a_request_that_trickles_in_is_cut() -> None:
    with serving(limits=QUICK) as service, Peer(service) as peer:
        with contextlib.suppress(ConnectionError):
            while service.call(lambda: not any(getattr(one, "_deaf", False) for one in service.connections)):
                peer.send(b"\r\n")
                service.wait(asyncio.sleep(0.1))
        assert peer.read().status == 408


def test_strangers_may_not_idle_but_workers_may() -> None:
    with serving(limits=QUICK) as service, Peer(service) as stranger, Peer(service) as worker:
        assert worker.ask("GET", "/v1/status").status == 200
        assert stranger.is_closed()  # after idle_s
        with Peer(service) as another:
            assert another.is_closed()
        assert worker.ask("GET", "/v1/status").status == 200


def test_parked_requests_are_not_cut() -> None:
    with serving(limits=QUICK) as service, Peer(service) as parked, Peer(service) as other:
        parked.send(parked.request("GET", f"{KEY}?wait_s=3600"))
        service.until_parked(1)
        with Peer(service) as stranger:
            assert stranger.is_closed()
        assert other.is_closed()  # so was this one; each after idle_s
        with Peer(service) as third:
            third.ask("PUT", KEY, b"value")
        assert parked.read().body == b"value"


def test_who_is_refused_and_neither_reads_nor_goes_is_cut() -> None:
    with serving(limits=QUICK) as service, Peer(service) as peer:
        peer.send(b"rubbish\r\n\r\n")
        service.until(lambda: not service.connections, "the connection is gone")
        assert peer.read().status == 400


# --- memory ----------------------------------------------------------------------------------------


def test_who_pipelines_too_much_behind_a_parked_request_is_cut(service: Service, peer: Peer) -> None:
    peer.send(peer.request("GET", f"{KEY}?wait_s=3600"))
    service.until_parked(1)
    with contextlib.suppress(ConnectionError):
        peer.send(b"".join(peer.request("GET", KEY) for _ in range(100)))
    service.until(lambda: not service.connections, "the connection is gone")
    assert service.call(lambda: service.parked) == 0


def test_rubbish_behind_a_parked_request_cuts_it(service: Service, peer: Peer) -> None:
    """It is not taken for the answer to the parked request."""
    peer.send(peer.request("GET", f"{KEY}?wait_s=3600"))
    service.until_parked(1)
    peer.send(b"rubbish\r\n\r\n")
    assert peer.is_closed()
    assert service.call(lambda: service.parked) == 0


# --- numbers ---------------------------------------------------------------------------------------


def test_who_has_said_hello_is_given_time_to_prove_himself() -> None:
    """In a burst of workers some say hello long before they come to their first request."""
    with serving(limits=ServerLimits(strangers=2, stranger_s=0.3)) as service, Peer(service) as idle:
        service.until(lambda: len(service.connections) == 1, "the first is there")
        with Peer(service) as slow, Peer(service) as another:
            service.until(lambda: len(service.connections) == 2, "the oldest, who has not even said hello, is cut")
            assert idle.is_closed()
            proof = slow.prove()
            answer = slow.begin(proof)
            order = service.call(lambda: [one._challenge is not None for one in service.server.connections._strangers])
            assert order == [False, True], "who says who it is is the youngest again"
            slow.send(proof.response(answer))
            slow.has_met = True
            assert slow.ask("GET", "/v1/status").status == 200
            assert another.ask("GET", "/v1/status").status == 200


def test_more_connections_than_there_is_room_for() -> None:
    with serving(limits=ServerLimits(connections=4)) as service:
        workers = []
        for _ in range(3):
            # One after the other: of connections that have not asked yet, only two are let stay here.
            workers.append(Peer(service))
            assert workers[-1].ask("GET", "/v1/status").status == 200
        strangers = [Peer(service) for _ in range(2)]
        assert strangers[0].is_closed()  # the oldest stranger goes first
        assert strangers[1].ask("GET", "/v1/status").status == 200
        with Peer(service) as late:
            late.send(request("GET", "/v1/status", b"", READER))
            answer = late.read()
            assert (answer.status, answer.error) == (503, "the driver already has 4 connections; try again")
        workers[0].close()
        service.until(lambda: len(service.connections) == 3, "there is room again")
        with Peer(service) as late:
            assert late.ask("GET", "/v1/status").status == 200
        for one in (*workers, *strangers):
            one.close()


# --- rubbish ---------------------------------------------------------------------------------------

WORDS = [
    *(b"GET", b"PUT", b"POST", b"CONNECT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b" ", b"\r\n", b"\n", b"\0", b"\xff"),
    *(b"/v1/status", KEY.encode(), b"/v1/rounds/1/exchange/s?key=0&count=2&wait_s=0.01", b"%", b"?", b"&", b"="),
    *(b" HTTP/1.1", b" HTTP/1.0", b" HTTP/9.9", b"\r\n\r\n", f"Authorization: {READER}\r\n".encode()),
    *(b"Content-Length: 3\r\n", b"Content-Length: -3\r\n", b"Content-Length: 3\r\nContent-Length: 4\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"ffffffffffffffffff\r\n", b"0\r\n\r\n"),
    *(b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n"),
    *(request("GET", "/v1/status", b"", READER), request("PUT", KEY, b"x", READER), opening("worker a[0]#0")),
]


@pytest.mark.parametrize("seed", range(8))
def test_random_rubbish(service: Service, seed: int) -> None:
    """Bytes, words of HTTP in any order, and requests with a byte changed; cut and closed anywhere."""
    rng = random.Random(seed)
    for _ in range(150):
        kind = rng.randrange(3)
        if kind == 0:
            data = rng.randbytes(rng.randrange(300))
        elif kind == 1:
            data = b"".join(rng.choices(WORDS, k=rng.randrange(1, 12)))
        else:
            data = b""
        with Peer(service) as peer, contextlib.suppress(OSError):
            if kind == 2:
                changed = bytearray(peer.request("PUT", KEY, b"abc", headers=("Expect: 100-continue",)))
                changed[rng.randrange(len(changed))] = rng.randrange(256)
                data = bytes(changed)
            cut = rng.randrange(len(data) + 1)
            peer.send(data[:cut])
            if rng.randrange(2):
                service.call(lambda: None)  # so that it arrives in two pieces
            peer.send(data[cut:])
            if rng.randrange(2):
                peer.hang_up()
    with Peer(service) as peer:
        assert peer.ask("GET", "/v1/status").status == 200
    service.until(lambda: not service.connections, "all are gone")
    assert (service.parked, service.errors, service.noise) == (0, [], [])


def test_rubbish_in_json(service: Service, peer: Peer) -> None:
    rng = random.Random(0)
    for target, good in (
        ("/v1/next-round", READY.to_json()),
        ("/v1/watch", WatchRequest(WORKER, 1, 0).to_json()),
        ("/v1/running", RunningReport(WORKER, 1, 0).to_json()),
    ):
        for _ in range(200):
            body = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            answer = peer.ask("POST", f"{target}?wait_s=0.001", bytes(body))
            assert answer.status in (204, 400, 403, 409)  # 403: it names another worker
    assert service.errors == []
