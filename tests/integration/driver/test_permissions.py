"""Who may ask the driver for what, as it is built: a slip in any of its parts would open a route to others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_driver.driver.build import build
from elastic_driver.driver.chief import ChiefSide
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.driver.recording import job_of
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.launch.fleet.discovery import FleetDiscovery
from elastic_driver.launch.fleet.tickets import Tickets, User
from elastic_driver.launch.local.keeper import ProcessKeeper, ProcessListener
from elastic_driver.rendezvous import agent_messages as words
from elastic_driver.rendezvous.credentials import Identity, Role
from elastic_driver.rendezvous.routes import WORKER, Route
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.narrator import Narrator
from elastic_driver.reporting.tally import Tally
from elastic_driver.settings.settings import Settings
from tests.support.fakes.driver_fakes import OURS, FakeConsole, FakeSource, FakeWorld, Job
from tests.support.fakes.fleet_fakes import FakeFleet
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.integration

A = Host("a", 1)
ASKED_AT_THE_DRIVER = {
    ("GET", "stacks"): "only an operator may",
    ("GET", "status"): "only an operator or a reader or a worker may",
    ("POST", "drain"): "only an operator may",
    ("POST", "end"): "only an operator may",
    ("POST", "page"): "only an operator may",
    ("POST", "servers"): "only a chief may",
    ("POST", "token/operator"): "only an operator may",
}
WORKERS_ASK = {"call", "leave", "publish", "serving", "status", "store"}


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


class Peer:
    """A connection on which somebody has proven who he is."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.status, self.body = 0, b""

    def reply(self, status: int, body: bytes = b"", *, is_json: bool = False) -> None:
        self.status, self.body = status, body


# Under which names somebody may speak to the driver: over TLS, with a key; and at its socket, as this user.
EVERYBODY = (
    Identity(Role.OPERATOR),
    Identity(Role.JOINER),
    Identity(Role.AGENT, number="a1"),
    Identity(Role.AGENT, number="a2"),
    Identity(Role.CHIEF, number="1"),
    Identity(Role.WORKER, WorkerId("a", 0, 0)),
    Identity(Role.MEMBER),
    Identity(Role.READER),
)


def no_chief(listener: ProcessListener) -> ProcessKeeper:
    return None  # type: ignore[return-value] # nobody starts it


def a_driver(fleet: FakeFleet, *, has_chief: bool = True) -> ElasticDriver:
    settings = Settings(command=("true",), num_proc=1, min_num_proc=1, hosts=(A,), page=True)
    return build(
        settings,
        discovery=FleetDiscovery(FakeSource(A), fleet.fleet),
        chronicle=Chronicle(Narrator(FakeConsole())),  # type: ignore[arg-type]
        dialect=OURS,
        job=job_of(settings, "fake"),
        agents=fleet.side(),
        tally=Tally(),
        chief=ChiefSide(no_chief, None, ("true",), str) if has_chief else None,  # type: ignore[arg-type]
        routes=(Route("GET", "call", WORKER, lambda request: None),),
    )


@pytest.mark.parametrize("has_chief", [True, False])
@pytest.mark.parametrize("may_join", [True, False])
def test_whom_the_driver_admits(*, has_chief: bool, may_join: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        fleet = FakeWorld().fleet
        fleet.tickets = tickets = Tickets(loop.time, join_key=b"j" * 32 if may_join else None)
        server = a_driver(fleet, has_chief=has_chief).server
        used, unused = tickets.issue("a", 60.0), tickets.issue("b", 60.0)
        withdrawn, late = tickets.issue("c", 60.0), tickets.issue("d", -1.0)
        tickets.withdraw(withdrawn)
        assert tickets.take(used.identity, User("a1", b"", "", 1)) is used
        tickets.admit("a1", b"a" * 32)
        expected = {"operator", "agent a1", str(used.identity), str(unused.identity)} | (
            {"joiner"} if may_join else set()
        )
        everybody = (*EVERYBODY, *(each.identity for each in (used, unused, withdrawn, late)))
        assert {str(each) for each in everybody if server.key_of(each) is not None} == expected
        assert {str(each) for each in everybody if server.admits(each)} == expected | (
            {"chief 1"} if has_chief else set()
        )

    run_virtually(main)


def test_who_may_ask_the_driver_for_what() -> None:
    async def main(loop: VirtualLoop) -> None:
        driver = a_driver(FakeWorld().fleet)
        asked = {}
        for path in {path for _, path in ASKED_AT_THE_DRIVER} | WORKERS_ASK | {"next-round", "rounds/1/kv/s/k"}:
            for method in ("GET", "POST", "PUT"):
                peer = Peer(Identity(Role.MEMBER))  # who may nothing here
                driver.server.serve(peer, method.encode(), f"/v1/{path}".encode(), b"")  # type: ignore[arg-type]
                assert peer.status in (403, 404, 405)
                if peer.status == 403:
                    asked[method, path] = json.loads(peer.body)["error"].partition("; ")[2]
        assert asked == ASKED_AT_THE_DRIVER

    run_virtually(main)


def test_workers_are_answered_what_is_theirs_through_their_agents(tmp_path: Path) -> None:
    async def main(loop: VirtualLoop) -> None:
        job = Job(tmp_path, A)
        (worker,) = await job.train(1)
        host = job.world.hosts["a"]
        paths = ("drain", "end", "stacks", "page", "servers", "token", "next-round", "status")
        for number, path in enumerate(paths):
            host.say(words.Ask(number, worker.key, path, [], b"{}"))
        await job.until(lambda: len(host.of(words.Answer)) == len(paths), "answers")
        assert [each.status for each in host.of(words.Answer)] == [*[404] * (len(paths) - 1), 200]
        job.exits(worker, 0)
        assert await job.end() == 0

    run_virtually(main)
