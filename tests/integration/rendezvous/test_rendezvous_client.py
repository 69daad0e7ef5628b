"""The workers' client against the real server: answers, retries, the end of blocked calls, forks."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from elastic_driver.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousProtocolError,
    RendezvousTimeoutError,
    StaleRoundError,
)
from elastic_driver.rendezvous.authentication import opening, refusal
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.messages import Notice, RunningReport, WatchRequest
from elastic_driver.rendezvous.server.server import ServerLimits
from elastic_driver.system.local_socket import SocketFolder, url_of
from elastic_driver.words import NoticeKind
from tests.support.fakes.rendezvous_service import (
    ASSIGNMENT,
    OPERATOR,
    PATIENCE_S,
    READY,
    WORKER,
    Calls,
    Service,
    credential,
    descriptors,
    serving,
)
from tests.support.fakes.scripted_driver import scripted

pytestmark = pytest.mark.integration

NOTICE = Notice(1, 1, NoticeKind.ABORT, "worker b[0] is gone")
WATCH = WatchRequest(WORKER, 1, 0)
REPORT = RunningReport(WORKER, 1, 3)


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[RendezvousClient]:
    client = service.client()
    yield client
    client.close()


@pytest.fixture
def calls() -> Iterator[Calls]:
    started = Calls()
    yield started
    started.join()


# --- answers ---------------------------------------------------------------------------------------


def test_key_value(client: RendezvousClient) -> None:
    assert client.get(1, "a/b", "k y") is None
    client.put(1, "a/b", "k y", b"\0\xff")
    assert client.get(1, "a/b", "k y") == b"\0\xff"
    client.put(1, "a/b", "ü", b"")
    assert client.get(1, "a/b", "ü") == b""


def test_exchange(client: RendezvousClient, calls: Calls) -> None:
    def exchange(scope: str, rank: int) -> Callable[[], Any]:
        return lambda: client.exchange(1, scope, rank, 12, f"{scope}{rank}".encode(), timeout_s=PATIENCE_S)

    for rank in (3, 11, 0, 7, 2, 10, 1, 9, 8, 5, 4, 6):
        calls.start(exchange("left", rank))
        calls.start(exchange("right", rank))
    results = calls.join()
    assert results[::2] == [[f"left{rank}".encode() for rank in range(12)]] * 12
    assert results[1::2] == [[f"right{rank}".encode() for rank in range(12)]] * 12


def test_an_exchange_that_is_not_complete_in_time(client: RendezvousClient) -> None:
    with pytest.raises(
        RendezvousTimeoutError, match=r"round 1 arrived within 0.02 s: 2 of 3 are missing .*\(present: 1\)"
    ):
        client.exchange(1, "s", 1, 3, b"", timeout_s=0.02)
    with pytest.raises(RendezvousTimeoutError):
        client.exchange(1, "s", 1, 3, b"", timeout_s=0)


def test_an_exchange_among_strange_keys(client: RendezvousClient) -> None:
    client.put(1, "s", "x", b"")
    with pytest.raises(RendezvousProtocolError, match="keys other than 0 to 1"):
        client.exchange(1, "s", 0, 2, b"", timeout_s=PATIENCE_S)


def test_a_round_that_passes_while_a_call_is_blocked(service: Service, client: RendezvousClient, calls: Calls) -> None:
    calls.start(lambda: client.exchange(1, "s", 0, 2, b"", timeout_s=PATIENCE_S))
    calls.start(lambda: client.get(1, "s", "k", wait_s=PATIENCE_S))
    service.until_parked(2)
    service.call(lambda: service.keys.begin_round(4))
    for error in calls.join():
        assert isinstance(error, StaleRoundError)
        assert (error.round_id, error.current_round_id) == (1, 4)
    for operation in (
        lambda: client.put(1, "s", "k", b""),
        lambda: client.get(1, "s", "k"),
    ):
        with pytest.raises(StaleRoundError):
            operation()
    client.put(4, "s", "k", b"")


def decide(service: Service) -> bool:
    """Answers the present poll, if there is one just now."""
    for one in service.handler.next_rounds:
        if not one.done():
            one.set_result(ASSIGNMENT)
            return True
    return False


def test_next_round_asks_on_until_there_is_one(calls: Calls) -> None:
    with serving(limits=ServerLimits(poll_s=0.01)) as service:
        client = service.client()
        calls.start(lambda: client.next_round(READY))
        service.until(lambda: len(service.handler.next_rounds) >= 3, "the third poll")
        service.until(lambda: decide(service), "a poll to answer")
        assert calls.join() == [ASSIGNMENT]
        client.close()


def test_watch(service: Service, client: RendezvousClient, calls: Calls) -> None:
    calls.start(lambda: client.watch(WATCH))
    service.until_parked(1)
    service.call(lambda: service.handler.watches[0].set_result(NOTICE))
    assert calls.join() == [NOTICE]
    service.handler.current_round = 2
    with pytest.raises(StaleRoundError):
        client.watch(WATCH)


def test_a_watch_without_news() -> None:
    with serving(limits=ServerLimits(poll_s=0.01)) as service:
        client = service.client()
        assert client.watch(WATCH) is None
        client.close()


def test_running_and_status(service: Service, client: RendezvousClient) -> None:
    client.running(REPORT)
    assert service.handler.reports == [REPORT]
    assert client.status()["explain"] == "waiting"


def test_errors_are_told_apart(service: Service, client: RendezvousClient) -> None:
    other = service.client(OPERATOR)
    with pytest.raises(RendezvousProtocolError, match=r"\(403\): an operator may not do this; only a worker may"):
        other.next_round(READY)
    other.close()
    with pytest.raises(RendezvousProtocolError, match=r"\(400\): cannot store a value without"):
        client.put(1, "", "k", b"")
    with pytest.raises(RendezvousProtocolError, match=r"\(413\): the body exceeds 16777216 bytes"):
        client.put(1, "s", "k", bytes((16 << 20) + 1))
    service.handler.error = KeyError("bug")
    with pytest.raises(RendezvousProtocolError, match=r"\(500\): KeyError"):
        client.running(REPORT)
    assert client.status()["explain"] == "waiting"


def test_a_url_that_cannot_be() -> None:
    with pytest.raises(RendezvousProtocolError, match="expected https://HOST:PORT"):
        RendezvousClient("x:1", credential())


def test_no_proxy_is_asked(service: Service, client: RendezvousClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert client.status()["explain"] == "waiting"


# --- connections -----------------------------------------------------------------------------------


def test_connections_are_kept_and_shared(service: Service, client: RendezvousClient, calls: Calls) -> None:
    for number in range(50):
        client.put(1, "s", str(number), b"")
    assert service.call(lambda: len(service.connections)) == 1
    for _ in range(20):  # one thread after the other: no connection for each
        calls.start(lambda: client.get(1, "s", "0"))
        calls.join()
    assert service.call(lambda: len(service.connections)) == 1


def test_a_closed_client_leaves_no_descriptor(service: Service, calls: Calls) -> None:
    gc.collect()
    before = descriptors()
    client = service.client()
    for _ in range(5):
        calls.start(lambda: client.get(1, "s", "never", wait_s=PATIENCE_S))
    service.until_parked(5)
    assert client.status()
    client.close()
    assert {type(error) for error in calls.join()} == {RendezvousClosedError}
    service.until(lambda: not service.connections, "all connections are gone")
    assert descriptors() == before


def test_close_ends_blocked_calls_at_once(service: Service, calls: Calls) -> None:
    client = service.client()
    calls.start(lambda: client.watch(WATCH))
    calls.start(lambda: client.next_round(READY))
    calls.start(lambda: client.exchange(1, "s", 0, 2, b"", timeout_s=3600.0))
    service.until_parked(3)
    client.close()
    assert {type(error) for error in calls.join()} == {RendezvousClosedError}
    client.close()
    with pytest.raises(RendezvousClosedError):
        client.status()
    service.until_parked(0)


def test_close_ends_a_call_that_tries_again(calls: Calls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    client = RendezvousClient(f"https://127.0.0.1:{port}", credential())
    calls.start(client.status)
    client.close()
    assert isinstance(calls.join()[0], RendezvousClosedError)


def test_close_ends_a_call_that_is_connecting(calls: Calls) -> None:
    """A full backlog leaves the connection half made."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    address = listener.getsockname()
    fillers = []
    for _ in range(4):
        fillers.append(socket.socket())
        fillers[-1].setblocking(False)
        fillers[-1].connect_ex(address)
    client = RendezvousClient(f"https://127.0.0.1:{address[1]}", credential(), patience_s=3600.0)
    calls.start(client.status)
    deadline = time.monotonic() + PATIENCE_S
    while not any(connection.sock is not None for connection in tuple(client._busy)):
        assert time.monotonic() < deadline
    client.close()
    assert isinstance(calls.join()[0], RendezvousClosedError)
    for one in (*fillers, listener):
        one.close()


# --- a driver that comes and goes ------------------------------------------------------------------


def test_a_call_goes_on_over_a_restart_on_the_same_port(calls: Calls) -> None:
    first = Service()
    port, client = first.port, first.client()
    client.put(1, "s", "0", b"old")
    first.stop()
    calls.start(lambda: client.exchange(1, "s", 0, 2, b"new", timeout_s=PATIENCE_S))  # refused, for now
    with serving(port=port) as second:
        second.until_parked(1)
        second.call(lambda: next(iter(second.connections)).abort())
        second.until_parked(1)  # it came back
        client.put(1, "s", "1", b"one")
        assert calls.join() == [[b"new", b"one"]]
        client.close()


def test_a_driver_that_is_gone_is_given_up_after_the_patience() -> None:
    with serving() as service:
        client = service.client()
        assert client.status()
    client._patience_s = 0.3
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=rf"cannot reach the driver at 127.0.0.1 port {service.port} for 0.3 s: "):
        client.status()
    assert time.monotonic() - began > 0.1
    client.close()


class FakeOwner:
    """See Owner of the client."""

    def __init__(self, *, alive: bool) -> None:
        self.alive = alive
        self.waited = threading.Semaphore(0)
        self.answers = 0

    def is_waited_for(self, since: float) -> bool:
        assert since <= time.monotonic()
        self.waited.release()
        return self.alive

    def has_answered(self) -> None:
        self.answers += 1


@contextmanager
def stopped(service: Service) -> Iterator[None]:
    """The service stands still, as in a process that is stopped."""
    standing, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        assert go_on.wait(PATIENCE_S)

    service.loop.call_soon_threadsafe(stand)
    assert standing.wait(PATIENCE_S)
    try:
        yield
    finally:
        go_on.set()


def owned(service: Service, owner: FakeOwner) -> RendezvousClient:
    return RendezvousClient(service.url, credential(), patience_s=0.1, owner=owner)


def test_a_silent_driver_that_lives_is_waited_for(service: Service, calls: Calls) -> None:
    owner = FakeOwner(alive=True)
    client = owned(service, owner)
    client.running(REPORT)
    before = owner.answers  # a busy machine is as silent
    with stopped(service):
        calls.start(lambda: client.running(REPORT))
        for _ in range(3):  # far beyond the patience
            assert owner.waited.acquire(timeout=PATIENCE_S)
    assert calls.join() == [None]
    assert owner.answers == before + 1
    client.close()


def test_a_silent_driver_that_is_dead_is_given_up(service: Service) -> None:
    owner = FakeOwner(alive=False)
    client = owned(service, owner)
    with stopped(service), pytest.raises(RendezvousError, match=r"for 0\.1 s"):
        client.running(REPORT)
    assert owner.waited.acquire(blocking=False)
    assert owner.answers == 0
    client.close()


def test_a_goodbye_waits_for_nobody(service: Service) -> None:
    owner = FakeOwner(alive=True)
    client = owned(service, owner)
    with stopped(service), pytest.raises(RendezvousError):
        client.say_goodbye(WATCH)
    assert not owner.waited.acquire(blocking=False)
    client.close()


def test_close_ends_the_wait_for_a_driver_that_is_stopped(service: Service, calls: Calls) -> None:
    owner = FakeOwner(alive=True)
    client = owned(service, owner)
    with stopped(service):
        calls.start(lambda: client.next_round(READY, poll_s=0.01))
        assert owner.waited.acquire(timeout=PATIENCE_S)
        client.close()
        assert isinstance(calls.join()[0], RendezvousClosedError)


def test_a_meeting_has_its_time_when_the_driver_goes_on(service: Service, calls: Calls) -> None:
    """The driver is stopped for longer than a member waits for the others, and one of them comes after that."""
    owners = [FakeOwner(alive=True), FakeOwner(alive=True)]
    clients = [owned(service, owner) for owner in owners]
    with stopped(service):
        calls.start(lambda: clients[0].exchange(1, "s", 0, 2, b"zero", timeout_s=3.0))
        for _ in range(2):
            assert owners[0].waited.acquire(timeout=PATIENCE_S)
    service.until_parked(1)
    assert clients[1].exchange(1, "s", 1, 2, b"one", timeout_s=3.0) == [b"zero", b"one"]
    assert calls.join() == [[b"zero", b"one"]]
    for client in clients:
        client.close()


def test_the_end_of_the_driver_is_told(service: Service, calls: Calls) -> None:
    client = service.client()
    with serving() as ending:
        watcher = ending.client()
        calls.start(lambda: watcher.watch(WATCH))
        calls.start(lambda: watcher.next_round(READY))
        ending.until_parked(2)
    errors = calls.join()
    assert {type(error) for error in errors} == {RendezvousClosedError}
    assert {str(error) for error in errors} == {"the driver has ended"}
    watcher.close()
    client.close()


def answer(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


OK = answer("200 OK", b'{"explain": "x"}')


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"rubbish\r\n\r\n",
        answer("503 X\r\nConnection: close", b'{"error": "full"}'),
        answer("408 X\r\nConnection: close", b'{"error": "slow"}'),
    ],
    ids=["nothing", "half-a-head", "half-a-body", "rubbish", "full", "stalled"],
)
def test_a_broken_answer_is_asked_for_again(broken: bytes) -> None:
    with scripted(broken, broken, OK) as (url, got):
        client = RendezvousClient(url, credential())
        assert client.status() == {"explain": "x"}
        client.close()
    assert len(got) == 3


def test_a_repeated_wait_is_only_as_long_as_what_is_left() -> None:
    with scripted(b"", b"", answer("200 OK", bytes(4))) as (url, got):
        client = RendezvousClient(url, credential())
        assert client.exchange(1, "s", 0, 0, b"", timeout_s=100) == []
        client.close()
    waits = [float(line.split(b"wait_s=")[1].split()[0]) for line in got]
    assert 10 < waits[2] < waits[1] < waits[0] <= 100


# What is larger than any socket's buffer is not sent as a whole before the refusal.
@pytest.mark.parametrize("size", [0, 8 << 20])
@pytest.mark.parametrize("text", ["this name cannot authenticate here", "\x1b[2J"])
def test_a_refusal_on_this_machine_is_told_when_it_does_not_pass(text: str, size: int) -> None:
    """Also when the server closes with the request unread, which the kernel takes for a reset, or in its midst."""
    folder, name = SocketFolder.new(), opening(str(credential().identity))

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):  # it is shut down in the end
            while True:
                connection, _ = listener.accept()
                with connection:
                    assert connection.recv(len(name)) == name
                    connection.recv(1, socket.MSG_PEEK)  # the request is on its way
                    connection.sendall(refusal(text))

    with folder.listen("s.sock") as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        client = RendezvousClient(url_of(folder.path / "s.sock"), credential(), patience_s=0.3)
        try:
            with pytest.raises(RendezvousError, match=r"for 0\.3 s: the driver rejected worker a\[0\]#0: [^\x1b]+$"):
                client.put(1, "s", "k", bytes(size))
        finally:
            client.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
            folder.close()
        assert not thread.is_alive()


# --- processes -------------------------------------------------------------------------------------


def test_a_forked_child_has_connections_of_its_own(service: Service, client: RendezvousClient, calls: Calls) -> None:
    """The child asks and closes its client; the parent's parked call and idle connection go on."""
    client.put(1, "s", "0", b"value")
    calls.start(lambda: client.get(1, "s", "later", wait_s=PATIENCE_S))
    service.until_parked(1)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writer, client.get(1, "s", "0") or b"nothing")
            client.put(1, "s", "child", b"")
            client.close()
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.read(reader, 100) == b"value"
    os.close(reader)
    assert client.get(1, "s", "child") == b""
    client.put(1, "s", "later", b"late")
    assert calls.join() == [b"late"]


def test_a_child_that_closes_first_leaves_the_parents_calls(
    service: Service, client: RendezvousClient, calls: Calls
) -> None:
    calls.start(lambda: client.get(1, "s", "later", wait_s=PATIENCE_S))
    service.until_parked(1)
    pid = os.fork()
    if pid == 0:
        try:
            client.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert service.call(lambda: service.parked) == 1
    client.put(1, "s", "later", b"late")
    assert calls.join() == [b"late"]


def test_the_import_is_cheap() -> None:
    code = (
        "import sys, elastic_driver.rendezvous.client;"
        "print([name for name in ('numpy', 'torch', 'requests', 'asyncio', 'uvloop', 'httptools', 'urllib.request')"
        " if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
