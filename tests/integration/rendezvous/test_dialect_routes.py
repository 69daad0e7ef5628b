"""Another dialect on the driver's server: its workers have a route of their own, and none of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.rendezvous.routes import WORKER as WORKERS
from elastic_driver.rendezvous.routes import Route, RouteRequest
from tests.support.fakes.rendezvous_service import OPERATOR, WORKER, Peer, Service, serving

pytestmark = pytest.mark.integration


def place(request: RouteRequest) -> tuple[int, bytes]:
    if request.path == ("rubbish",):
        raise RendezvousProtocolError("cannot read the place")
    said = [str(request.identity.worker), *request.path, request.query.get("a", "")]
    return 200, json.dumps(said).encode() + request.body


ROUTES = {"place": Route({b"GET": WORKERS, b"POST": WORKERS}, place), "key": Route({b"GET": WORKERS})}


@pytest.fixture
def service() -> Iterator[Service]:
    with serving(routes=ROUTES) as running:
        yield running


def test_a_route_that_the_dialect_answers(service: Service) -> None:
    with Peer(service) as peer:
        answer = peer.ask("GET", "/v1/place/a%20b/c?a=1")
        assert (answer.status, answer.body) == (200, f'["{WORKER}", "a b", "c", "1"]'.encode())
        answer = peer.ask("POST", "/v1/place", b"body")
        assert (answer.status, answer.body) == (200, f'["{WORKER}", ""]body'.encode())
        assert peer.ask("GET", "/v1/place/rubbish").status == 400
        assert peer.ask("PUT", "/v1/place", b"body").status == 405


def test_it_is_the_workers_alone(service: Service) -> None:
    with Peer(service, OPERATOR) as operator:
        answer = operator.ask("GET", "/v1/place")
    assert (answer.status, answer.error) == (403, "an operator may not do this; a worker may")


@pytest.mark.parametrize("path", ["next-round", "watch", "running", "leave", "rounds/1/exchange/s?key=0&count=1"])
def test_what_it_does_not_have_is_not_there(service: Service, path: str) -> None:
    with Peer(service) as peer:
        assert peer.ask("POST", f"/v1/{path}", b"value").status == 404
    handler = service.handler
    assert [*handler.next_rounds, *handler.watches, *handler.reports, *handler.left] == []


def test_of_what_the_server_answers_it_has_what_it_names(service: Service) -> None:
    with Peer(service) as peer:
        assert peer.ask("GET", "/v1/rounds/1/kv/s/k").status == 404
        assert peer.ask("PUT", "/v1/rounds/1/kv/s/k", b"value").status == 405
        assert peer.ask("GET", "/v1/status").status == 200
        assert peer.ask("GET", "/v1/key").status == 404
