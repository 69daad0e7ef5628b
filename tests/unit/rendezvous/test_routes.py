"""What can be asked, by whom: how routes are found, and what their answers are on the wire."""

from __future__ import annotations

import json

import pytest

from elastic_driver.errors import RendezvousClosedError, RendezvousError, RendezvousProtocolError, StaleRoundError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.messages import EndReply, LeaveRequest
from elastic_driver.rendezvous.routes import (
    ANY_PATH,
    OPERATOR,
    WORKER,
    Answer,
    NotAllowedError,
    Route,
    RouteRequest,
    RouteTable,
    read_own,
    refusal,
    written,
)
from tests.support.fakes.asking import ask

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 0)


def said(request: RouteRequest) -> Answer:
    return 200, "/".join(request.path).encode()


ROUTES = (
    Route("GET", "rounds/*/kv/*/*", WORKER, said),
    Route("PUT", "rounds/*/kv/*/*", OPERATOR, said),
    Route("POST", "rounds/*/exchange/*", WORKER, said),
    Route("GET", "call", WORKER, said),
    Route("GET", "call/*", WORKER, said),
)


@pytest.mark.parametrize(
    ("path", "methods", "words"),
    [
        ("rounds/1/kv/s/k", [b"GET", b"PUT"], ("1", "s", "k")),
        ("rounds/1/exchange/s", [b"POST"], ("1", "s")),
        ("rounds/1/kv//", [b"GET", b"PUT"], ("1", "", "")),
        ("call", [b"GET"], ()),
        ("call/3", [b"GET"], ("3",)),
    ],
)
def test_a_route_is_found_by_its_path(path: str, methods: list[bytes], words: tuple[str, ...]) -> None:
    routes, found = RouteTable(ROUTES).find(path.split("/"))
    assert ([*routes], found) == (methods, words)


@pytest.mark.parametrize(
    "path", ["", "rounds", "rounds/1/kv/s", "rounds/1/kv/s/k/", "rounds/1/vk/s/k", "call/3/4", "*"]
)
def test_what_is_no_path(path: str) -> None:
    assert not RouteTable(ROUTES).find(path.split("/"))[0]


def test_a_route_for_all_other_paths() -> None:
    table = RouteTable((*ROUTES, Route("POST", ANY_PATH, WORKER, said)))
    routes, words = table.find(["rounds", "1", "kv"])
    assert ([*routes], words) == ([b"POST"], ("rounds", "1", "kv"))
    assert [*table.find(["call"])[0]] == [b"GET"]


def test_two_routes_for_one_thing_are_a_slip() -> None:
    with pytest.raises(ValueError, match="there are two routes GET call"):
        RouteTable((*ROUTES, Route("GET", "call", OPERATOR, said)))


def test_a_worker_speaks_for_itself_only() -> None:
    left: list[LeaveRequest] = []
    routes = [Route("POST", "leave", WORKER, read_own(LeaveRequest.from_json, left.append))]
    body = LeaveRequest(A, "SIGTERM").to_json()
    assert ask(routes, Identity(Role.WORKER, A), "POST", "leave", body) == (204, b"")
    with pytest.raises(NotAllowedError, match=r"worker b\[0\] may not act for worker a\[0\]"):
        ask(routes, Identity(Role.WORKER, B), "POST", "leave", body)
    assert left == [LeaveRequest(A, "SIGTERM")]


def test_what_answers_are_on_the_wire() -> None:
    assert written(None) == (204, b"")
    assert written((429, b"x")) == (429, b"x")
    assert written({"a": 1}) == (200, b'{"a": 1}')
    assert written(EndReply("it ends")) == (200, EndReply("it ends").to_json())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StaleRoundError(1, 2), 409),
        (NotAllowedError("no"), 403),
        (RendezvousClosedError("gone"), 410),
        (RendezvousProtocolError("rubbish"), 400),
    ],
)
def test_what_refusals_are_on_the_wire(error: RendezvousError, status: int) -> None:
    given, body = refusal(error)
    assert (given, json.loads(body)["error"]) == (status, str(error))
    assert json.loads(body).get("current_round_id") == (2 if status == 409 else None)
