"""The server of one machine's workers: a local socket, keys that others have, answers that come later."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.errors import RendezvousClosedError, RendezvousError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.messages import LeaveRequest
from elastic_driver.rendezvous.routes import WORKER as WORKERS
from elastic_driver.rendezvous.routes import Route, RouteRequest
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.system.local_socket import SocketFolder, url_of
from tests.support.fakes.rendezvous_service import IDENTITY, PATIENCE_S, WORKER, Service, serving

pytestmark = pytest.mark.integration

SECOND = WorkerId("a", 1, 0)


class Local:
    """A server on a local socket beside the service's, whose keys are elsewhere, too."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.puts: list[tuple[int, str, str, bytes]] = []
        self.wants: list[tuple[int, str, str, int]] = []
        self.wanted = threading.Event()
        self.asked: list[RouteRequest] = []
        self._clients: list[RendezvousClient] = []
        self.answer: asyncio.Future[tuple[int, bytes]] | None = None
        self.folder = SocketFolder.new()
        self.keys = KeyRoutes(upstream=self)
        routes = (
            *self.keys.routes,
            Route("POST", "leave", WORKERS, self._later),
            Route("GET", "status", WORKERS, lambda _: (200, b"{}")),
        )

        def make() -> RendezvousServer:
            return RendezvousServer(routes, admits=self.admits, on_error=service.errors.append)

        self.server: RendezvousServer = service.call(make)
        service.wait(self.server.start_local(self.folder.listen("workers.sock"), workers=4))
        service.call(lambda: self.keys.begin_round(1))

    def admits(self, identity: Identity) -> bool:
        return identity.worker in (WORKER, SECOND)

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        self.puts.append((round_id, scope, key, value))

    def want(self, round_id: int, scope: str, key: str, count: int) -> None:
        self.wants.append((round_id, scope, key, count))
        self.wanted.set()

    def _later(self, request: RouteRequest) -> asyncio.Future[tuple[int, bytes]]:
        self.asked.append(request)
        self.answer = asyncio.get_running_loop().create_future()
        self.wanted.set()
        return self.answer

    def client(self, identity: Identity = IDENTITY, *, patience_s: float = PATIENCE_S) -> RendezvousClient:
        url = url_of(self.folder.path / "workers.sock")
        self._clients.append(RendezvousClient(url, Credential(identity), patience_s=patience_s))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.service.wait(self.server.close())
        self.folder.close()

    def until_wanted(self) -> None:
        assert self.wanted.wait(PATIENCE_S)
        self.wanted.clear()


@pytest.fixture
def local() -> Iterator[Local]:
    with serving() as service:
        one = Local(service)
        yield one
        one.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def call(local: Local, function: Callable[[], Any]) -> Any:
    return local.service.call(function)


def test_the_workers_of_this_host_are_known_here_and_nobody_else(local: Local) -> None:
    assert local.client().status() == {}
    for identity in (Identity(Role.WORKER, WorkerId("a", 2, 0)), Identity(Role.OPERATOR)):
        with pytest.raises(RendezvousError, match=rf"rejected {re.escape(str(identity))}: unknown {identity.role};"):
            local.client(identity, patience_s=0.3).status()


def test_whom_others_could_stand_in_for_is_not_asked(local: Local) -> None:
    local.folder.path.chmod(0o755)
    with pytest.raises(RendezvousError, match="is open to other users"):
        local.client(patience_s=0.0).status()
    local.folder.path.chmod(0o700)
    assert local.client().status() == {}


class Alive:
    """An owner that is there, whatever becomes of its socket."""

    def is_waited_for(self, since: float) -> bool:
        return True

    def has_answered(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "why"), [("", "is open to other users"), ("-of-elsewhere", "does not exist: the process")]
)
def test_a_socket_that_is_not_for_this_process_is_not_waited_for(local: Local, name: str, why: str) -> None:
    """A worker under sudo, or in a container without the folder: else it would wait as long as its agent lives."""
    local.folder.path.chmod(0o755)
    url = url_of(Path(f"{local.folder.path}{name}/workers.sock"))
    client = RendezvousClient(url, Credential(IDENTITY), patience_s=PATIENCE_S, owner=Alive())
    with pytest.raises(RendezvousError, match=rf"cannot reach the driver at its local socket \S+: .*{why}"):
        client.status()


def test_a_socket_that_is_lost_is_waited_for_as_long_as_one_that_nobody_has(local: Local) -> None:
    url = url_of(local.folder.path / "workers.sock")
    client = RendezvousClient(url, Credential(IDENTITY), patience_s=0.1, owner=Alive())
    assert client.status() == {}
    local.service.wait(local.server.close())
    local.folder.close()
    with pytest.raises(RendezvousError, match=r"for 0\.1 s: .*does not exist: the process"):
        client.status()


def test_a_key_of_another_host(local: Local, pool: ThreadPoolExecutor) -> None:
    client = local.client()
    client.put(1, "s", "mine", b"1")
    assert local.puts == [(1, "s", "mine", b"1")]
    assert client.get(1, "s", "mine", wait_s=3600.0) == b"1"
    assert local.wants == []
    waiting = pool.submit(client.get, 1, "s", "theirs", wait_s=3600.0)
    local.until_wanted()
    assert local.wants == [(1, "s", "theirs", 0)]
    call(local, lambda: local.keys.take(2, "s", [("theirs", b"of another round")]))
    call(local, lambda: local.keys.take(1, "s", [("theirs", b"2")]))
    assert waiting.result(PATIENCE_S) == b"2"
    assert len(local.puts) == 1, "what has come from there does not go back"


def test_as_many_keys_as_all_hosts_have(local: Local, pool: ThreadPoolExecutor) -> None:
    first, second = local.client(), local.client(Identity(Role.WORKER, SECOND))
    calls = [
        pool.submit(client.exchange, 1, "all", rank, 3, str(rank).encode(), timeout_s=3600.0)
        for rank, client in enumerate((first, second))
    ]
    for _ in range(2):
        local.until_wanted()
        if len(local.wants) == 2:
            break
    assert set(local.wants) == {(1, "all", "", 3)}
    call(local, lambda: local.keys.take(1, "all", [("0", b"0"), ("2", b"2")]))
    assert [one.result(PATIENCE_S) for one in calls] == [[b"0", b"1", b"2"]] * 2


def test_an_answer_that_comes_later(local: Local, pool: ThreadPoolExecutor) -> None:
    client = local.client()
    for answer, error in (((204, b""), None), ((410, b'{"error": "end now"}'), RendezvousClosedError)):
        waiting = pool.submit(client.leave, LeaveRequest(WORKER, "SIGTERM"))
        local.until_wanted()
        assert local.asked[-1].identity == IDENTITY
        assert local.asked[-1].body == LeaveRequest(WORKER, "SIGTERM").to_json()
        assert local.answer is not None
        call(local, lambda future=local.answer, value=answer: future.set_result(value))
        if error is None:
            waiting.result(PATIENCE_S)
        else:
            with pytest.raises(error, match="end now"):
                waiting.result(PATIENCE_S)


def test_nobody_waits_any_more_for_an_answer(local: Local, pool: ThreadPoolExecutor) -> None:
    client = local.client()
    waiting = pool.submit(client.leave, LeaveRequest(WORKER, "SIGTERM"))
    local.until_wanted()
    client.close()
    with pytest.raises(RendezvousClosedError):
        waiting.result(PATIENCE_S)
    local.service.until(lambda: local.answer is not None and local.answer.cancelled(), "the answer is not wanted")
