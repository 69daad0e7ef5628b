"""The rendezvous server: what each request answers, who waits for what. Without sockets; see test_sockets.py."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from elastic_driver.errors import RendezvousClosedError, StaleRoundError
from elastic_driver.rendezvous.messages import Notice, RunningReport, WatchRequest
from elastic_driver.rendezvous.server.server import ServerLimits
from elastic_driver.words import NoticeKind
from tests.support.fakes.memory_service import MemoryPeer as Peer
from tests.support.fakes.memory_service import MemoryService as Service
from tests.support.fakes.memory_service import serving_in_memory as serving
from tests.support.fakes.rendezvous_service import (
    READY,
    WORKER,
    request,
)

pytestmark = pytest.mark.integration

NOTICE = Notice(1, 1, NoticeKind.HOSTS_UPDATED, "host b added")
WATCH = WatchRequest(WORKER, 1, 0)


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as running:
        yield running


@pytest.fixture
def peer(service: Service) -> Iterator[Peer]:
    with Peer(service) as connected:
        yield connected


# --- key-value ----------------------------------------------------------------------------------------------


def test_old_workers_find_the_length_of_a_body(peer: Peer) -> None:
    peer.ask("PUT", "/v1/rounds/1/kv/a/b", b"value")
    assert peer.ask("GET", "/v1/rounds/1/kv/a/b").headers["Content-Length"] == "5"


def test_a_wait_ends_in_its_time(service: Service, peer: Peer) -> None:
    answer = peer.ask("GET", "/v1/rounds/1/kv/s/k?wait_s=0.02")
    assert (answer.status, answer.error) == (404, "scope 's' has no key 'k'")
    assert service.call(lambda: service.parked) == 0
    assert peer.ask("GET", "/v1/status").status == 200  # the connection goes on


# --- exchange -----------------------------------------------------------------------------------------------


def test_an_exchange_that_is_not_complete_in_time_says_what_is_missing(peer: Peer) -> None:
    answer = peer.ask("POST", "/v1/rounds/1/exchange/s?key=1&count=3&wait_s=0.02", b"1")
    assert (answer.status, answer.error) == (408, "2 of 3 are missing in scope 's' (present: 1)")
    for key in range(30):
        peer.ask("PUT", f"/v1/rounds/1/kv/many/{key}")
    answer = peer.ask("POST", "/v1/rounds/1/exchange/many?key=31&count=33&wait_s=0", b"")
    assert answer.error == "2 of 33 are missing in scope 'many' (missing: 30, 32)"


# --- rounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "kv/s/k"),
        ("PUT", "kv/s/k"),
        ("POST", "exchange/s?key=0&count=1"),
    ],
)
def test_another_round_is_refused(service: Service, peer: Peer, method: str, path: str) -> None:
    service.call(lambda: service.keys.begin_round(2))
    answer = peer.ask(method, f"/v1/rounds/1/{path}")
    assert answer.status == 409
    assert json.loads(answer.body) == {
        "error": "round 1 is not the current round 2",
        "round_id": 1,
        "current_round_id": 2,
    }


# --- the driver's requests ----------------------------------------------------------------------------------


def test_a_poll_without_news_is_answered_204_and_cancelled(service: Service, peer: Peer) -> None:
    assert peer.ask("POST", "/v1/next-round?wait_s=0.01", READY.to_json()).status == 204
    assert peer.ask("POST", "/v1/watch?wait_s=0.01", WATCH.to_json()).status == 204
    assert service.call(lambda: service.handler.next_rounds[0].cancelled()) is True
    assert service.call(lambda: service.handler.watches[0].cancelled()) is True


def test_the_poll_time_is_the_servers_at_most() -> None:
    with serving(limits=ServerLimits(poll_s=0.02)) as service, Peer(service) as peer:
        assert peer.ask("POST", "/v1/watch?wait_s=1000", WATCH.to_json()).status == 204


@pytest.mark.parametrize(
    ("error", "status"), [(StaleRoundError(1, 2), 409), (RendezvousClosedError("over"), 410), (KeyError("bug"), 500)]
)
def test_a_watch_that_fails_while_parked(service: Service, peer: Peer, error: Exception, status: int) -> None:
    peer.send(peer.request("POST", "/v1/watch", WATCH.to_json()))
    service.until_parked(1)
    service.call(lambda: service.handler.watches[0].set_exception(error))
    answer = peer.read()
    assert answer.status == status
    assert str(error) in answer.error
    assert service.errors == ([error] if status == 500 else [])
    assert peer.ask("GET", "/v1/status").status == 200


def test_running_and_status(service: Service, peer: Peer) -> None:
    report = RunningReport(WORKER, 1, 5)
    assert peer.ask("POST", "/v1/running", report.to_json()).status == 204
    assert service.handler.reports == [report]
    answer = peer.ask("GET", "/v1/status")
    assert (answer.headers["Content-Type"], json.loads(answer.body)["explain"]) == ("application/json", "waiting")


def test_a_bug_of_the_handler_is_answered_and_reported(service: Service, peer: Peer) -> None:
    service.handler.error = ValueError("what")
    answer = peer.ask("POST", "/v1/running", RunningReport(WORKER, 1, 5).to_json())
    assert (answer.status, answer.error) == (500, "ValueError: what")
    assert service.errors == [service.handler.error]
    assert peer.ask("GET", "/v1/status").status == 200


def test_a_worker_is_gone_with_its_last_connection(service: Service) -> None:
    first, second, stranger = (Peer(service) for _ in range(3))
    for one in (first, second):
        assert one.ask("GET", "/v1/status").status == 200
    for one in (stranger, first):
        one.close()
    assert service.gone == []
    second.close()
    assert service.gone == [WORKER]
    with Peer(service) as again:
        assert again.ask("GET", "/v1/status").status == 200
    assert service.gone == [WORKER, WORKER]


# --- HTTP ---------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(service: Service, peer: Peer) -> None:
    puts = b"".join(peer.request("PUT", f"/v1/rounds/1/kv/s/{key}", str(key).encode()) for key in range(300))
    gets = b"".join(peer.request("GET", f"/v1/rounds/1/kv/s/{key}") for key in range(300))
    peer.send(puts + gets)
    assert {peer.read().status for _ in range(300)} == {204}
    assert [peer.read().body for _ in range(300)] == [str(key).encode() for key in range(300)]


def test_a_chain_of_releases_as_long_as_there_are_peers(service: Service, peer: Peer) -> None:
    """Each waits for its predecessor's key, with the PUT of its own key queued behind: no recursion."""
    chain = [Peer(service) for _ in range(300)]
    for index, one in enumerate(chain):
        one.send(
            one.request("GET", f"/v1/rounds/1/kv/s/{index}?wait_s=3600")
            + one.request("PUT", f"/v1/rounds/1/kv/s/{index + 1}")
        )
    service.until_parked(300)
    peer.ask("PUT", "/v1/rounds/1/kv/s/0")
    for one in chain:
        assert [one.read().status, one.read().status] == [200, 204]
        one.close()


def test_a_request_in_single_bytes(peer: Peer) -> None:
    for byte in peer.request("PUT", "/v1/rounds/1/kv/s/k", b"value"):
        peer.send(bytes([byte]))
    assert peer.read().status == 204
    assert peer.ask("GET", "/v1/rounds/1/kv/s/k").body == b"value"


def test_a_chunked_body(peer: Peer) -> None:
    chunked = ("Transfer-Encoding: chunked",)
    head = peer.request("PUT", "/v1/rounds/1/kv/s/k", headers=chunked)
    peer.send(head + b"3\r\nabc\r\n2;x=y\r\nde\r\n")
    peer.send(b"1\r\nf\r\n0\r\n\r\n")
    assert peer.read().status == 204
    assert peer.ask("GET", "/v1/rounds/1/kv/s/k").body == b"abcdef"


EXPECT = ("Expect: 100-continue", "Content-Length: 5")


def test_100_continue_is_not_said_to_strangers(peer: Peer) -> None:
    peer.send(request("PUT", "/v1/x", b"", "Bearer no", headers=EXPECT))
    assert peer.read().status == 401
    assert peer.is_closed()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PATCH", "/v1/rounds/1/kv/s/k", 405),
        ("PUT", "/v1/status", 405),
        ("GET", "/v1/next-round", 405),
        ("DELETE", "/v1/rounds/1/kv/s/k", 405),
        ("GET", "/v1/rounds/1/kv/s", 404),
        ("GET", "/v1/rounds/1/exchange/s?key=0&count=1", 405),
        ("OPTIONS", "/v1/watch", 405),
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v2/status", 404),
        ("GET", "/v1/rounds/1/kv/s/k/more", 404),
        ("GET", "/v1/rounds/x/kv/s/k", 400),
        ("GET", "/v1/rounds/-1/kv/s/k", 400),
        ("GET", "/v1/rounds/99999999999999999999/kv/s/k", 400),
        ("PUT", "/v1/rounds/1/kv/s/", 400),
        ("PUT", "/v1/rounds/1/kv//k", 400),
        ("GET", "/v1/rounds/1/kv/s/k?wait_s=nan", 400),
        ("GET", "/v1/rounds/1/kv/s/k?wait_s=-1", 400),
        ("GET", "/v1/rounds/1/kv/s/k?wait_s=1e9", 400),
        ("GET", "/v1/rounds/1/kv/s/k?wait_s=soon", 400),
        ("POST", "/v1/rounds/1/exchange/s?key=0", 400),
        ("POST", "/v1/rounds/1/exchange/s?count=1", 400),
        ("POST", "/v1/next-round", 400),
        ("POST", "/v1/watch", 400),
        ("POST", "/v1/running", 400),
    ],
)
def test_what_is_refused(service: Service, peer: Peer, method: str, path: str, status: int) -> None:
    answer = peer.ask(method, path)
    assert (answer.status, bool(answer.error)) == (status, True)
    assert answer.headers["Content-Type"] == "application/json"
    assert peer.ask("GET", "/v1/status").status == 200
    assert service.errors == []


def test_head_is_refused_without_a_body(peer: Peer) -> None:
    peer.send(peer.request("HEAD", "/v1/status") + peer.request("GET", "/v1/status"))
    assert [peer.read(head_only=True).status, peer.read().status] == [405, 200]


@pytest.mark.parametrize(("version", "headers"), [("1.0", ()), ("1.1", ("Connection: close",))])
def test_a_connection_that_is_not_kept(peer: Peer, version: str, headers: tuple[str, ...]) -> None:
    answer = peer.ask("GET", "/v1/status", v=version, headers=headers)
    assert (answer.status, answer.headers["Connection"]) == (200, "close")
    assert peer.is_closed()


# --- begin and end ------------------------------------------------------------------------------------------
