"""What is not under /v1: requests of browsers, and streams, on the port that workers and operators use."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import requests

from elastic_driver.rendezvous.server.connection import Connection
from elastic_driver.rendezvous.server.server import ServerLimits
from elastic_driver.rendezvous.server.web import (
    BODY_BYTES,
    Probed,
    WebAnswer,
    WebRequest,
    WebStream,
    WebStreaming,
)
from tests.support.fakes.rendezvous_service import PATIENCE_S, READER, Peer, Service, serving

pytestmark = pytest.mark.integration

QUICK = ServerLimits(request_s=1.5, idle_s=1.5)


class Site:
    """Notes what it is asked; streams at /stream."""

    def __init__(self) -> None:
        self.asked: list[WebRequest] = []
        self.streams: list[WebStream] = []
        self.ended: list[WebStream] = []

    def answer(self, request: WebRequest) -> WebAnswer | WebStreaming:
        self.asked.append(request)
        match request.path:
            case "/stream":
                return WebStreaming(self.streams.append, self.ended.append, headers=(("X-A", "b"),))
            case "/wrong":
                raise ZeroDivisionError
            case "/metrics":
                return WebAnswer(501, b"not here")
            case "/teapot":
                return WebAnswer(418, b"no name of ours")
            case "/login":
                return WebAnswer(303, headers=(("Location", "/"), ("Set-Cookie", "a=b; HttpOnly")))
        return WebAnswer(200, b"<p>hello", "text/html; charset=utf-8")


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def service(site: Site) -> Iterator[Service]:
    with serving(web=site, limits=QUICK) as running:
        yield running


def test_a_request_comes_whole_and_is_answered(service: Service, site: Site) -> None:
    with requests.Session() as session:
        headers = {"Cookie": "x=1; y=2", "X-More": "z"}
        answer = session.post(f"{service.plain_url}/a%20b?k=v%26w", data=b"text", headers=headers, timeout=PATIENCE_S)
        again = session.head(f"{service.plain_url}/", timeout=PATIENCE_S)
    assert (answer.status_code, answer.content) == (200, b"<p>hello")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert (again.status_code, again.content, again.headers["Content-Length"]) == (200, b"", "8")
    first = site.asked[0]
    assert (first.method, first.path, first.query, first.body) == ("POST", "/a b", {"k": "v&w"}, b"text")
    assert (first.headers["cookie"], first.headers["x-more"], first.encrypted) == ("x=1; y=2", "z", False)
    moved = requests.get(f"{service.plain_url}/login", allow_redirects=False, timeout=PATIENCE_S)
    assert (moved.status_code, moved.headers["Location"], moved.headers["Set-Cookie"]) == (303, "/", "a=b; HttpOnly")


def test_any_status_can_be_answered(service: Service) -> None:
    for path, status, body in (("/metrics", 501, b"not here"), ("/teapot", 418, b"no name of ours")):
        answer = requests.get(f"{service.plain_url}{path}", timeout=PATIENCE_S)
        assert (answer.status_code, answer.content) == (status, body)
    assert requests.get(f"{service.plain_url}/metrics", timeout=PATIENCE_S).reason == "Not Implemented"


@pytest.mark.parametrize("web", [None, Site()], ids=["nobody", "a site"])
def test_a_probe_is_answered_without_a_credential(web: Site | None) -> None:
    with serving(web=Probed(web)) as service:
        for method in ("GET", "HEAD"):
            answer = requests.request(method, f"{service.plain_url}/healthz", timeout=PATIENCE_S)
            assert (answer.status_code, answer.content) == (200, b"ok\n" if method == "GET" else b"")
        assert requests.post(f"{service.plain_url}/healthz", timeout=PATIENCE_S).status_code == 405
        assert requests.get(f"{service.plain_url}/", timeout=PATIENCE_S).status_code == (404 if web is None else 200)
        assert requests.get(f"{service.plain_url}/v1/status", timeout=PATIENCE_S).status_code == 401


def test_what_is_under_v1_is_for_readers_and_whoever_has_authenticated(service: Service, site: Site) -> None:
    with requests.get(f"{service.plain_url}/v1/status", timeout=PATIENCE_S) as refused:
        assert refused.status_code == 401
    with requests.get(f"{service.plain_url}/v1/status", headers={"Authorization": READER}, timeout=PATIENCE_S) as got:
        assert got.status_code == 200
    with Peer(service) as worker:
        worker.meet()
        worker.send(b"GET / HTTP/1.1\r\n\r\n")
        assert worker.read().status == 404
    assert site.asked == []


def test_without_anybody_who_answers_there_is_nothing() -> None:
    with serving() as service:
        assert requests.get(f"{service.plain_url}/", timeout=PATIENCE_S).status_code == 401


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(service: Service, site: Site, chunked: bool) -> None:
    data = b"x" * (BODY_BYTES + 1)
    body = iter([data[:10], data[10:]]) if chunked else data
    assert requests.post(f"{service.plain_url}/", data=body, timeout=PATIENCE_S).status_code == 413
    assert site.asked == []


def test_one_that_fails_is_told_and_others_go_on(service: Service, site: Site) -> None:
    assert requests.get(f"{service.plain_url}/wrong", timeout=PATIENCE_S).status_code == 500
    assert [type(error) for error in service.errors] == [ZeroDivisionError]
    assert requests.get(f"{service.plain_url}/", timeout=PATIENCE_S).status_code == 200


def test_a_stream_goes_on_until_either_side_ends_it(service: Service, site: Site) -> None:
    with requests.get(f"{service.plain_url}/stream", stream=True, timeout=PATIENCE_S) as answer:
        assert (answer.headers["Content-Type"], answer.headers["X-A"]) == ("text/event-stream", "b")
        lines = answer.iter_lines(chunk_size=1)
        time.sleep(2 * QUICK.idle_s)  # longer than a connection may wait that is no stream
        assert service.call(lambda: site.streams[0].write(b"data: 1\n\n"))
        assert next(lines) == b"data: 1"
    service.until(lambda: len(site.ended) == 1, "the reader has gone")
    assert not service.call(lambda: site.streams[0].write(b"more"))
    with requests.get(f"{service.plain_url}/stream", stream=True, timeout=PATIENCE_S) as answer:
        service.call(lambda: (site.streams[1].write(b"last"), site.streams[1].close()))
        assert answer.content == b"last"
    service.until(lambda: site.ended == site.streams, "it is told of both")


def test_a_reader_that_does_not_read_is_cut(service: Service, site: Site) -> None:
    with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as peer:
        peer.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        service.until(lambda: len(site.streams) == 1, "the stream")
        service.until(lambda: not site.streams[0].write(b"x" * 100_000), "too much is unread")
        service.until(lambda: site.ended == site.streams, "it is told")


def test_who_asks_and_never_reads_is_cut(service: Service, site: Site) -> None:
    """A stranger is answered that he is one: as often as he asks, and no more than he reads."""
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"

    def unread() -> int:
        connections = [each for each in service.connections if isinstance(each, Connection)]
        return sum(each._transport.get_write_buffer_size() for each in connections if each._transport is not None)

    with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as peer:
        service.until(lambda: len(service.connections) == 1, "it is there")
        most = asked = 0
        with contextlib.suppress(ConnectionError):
            while service.call(lambda: service.connections) and most <= 1 << 20:
                peer.sendall(request * 50)  # few enough at once to be no long head
                asked += 50
                most = max(most, service.call(unread))
        service.until(lambda: not service.connections, "it is cut")
    assert asked > 1000, "it was cut for what it has not read"
    assert most < 256 << 10
    assert requests.get(f"{service.plain_url}/", timeout=PATIENCE_S).status_code == 200


def test_what_it_sends_meanwhile_is_dropped(service: Service, site: Site) -> None:
    with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as peer:
        peer.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        service.until(lambda: len(site.streams) == 1, "the stream")
        peer.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        assert service.call(lambda: site.streams[0].write(b"still here"))
    assert len(site.asked) == 1


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 3, b"POST /x HTTP/1.1\r\nContent-Length: 9\r\n"]
)
def test_rubbish_and_pipelines_harm_nobody(service: Service, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as peer:
        peer.sendall(data)
        while peer.recv(65536):
            pass
    assert requests.get(f"{service.plain_url}/", timeout=PATIENCE_S).status_code == 200
