"""Whom the driver's workers believe: changed and made-up words."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elastic_driver.errors import RendezvousClosedError, RendezvousError, StaleRoundError
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.rendezvous.environment import ENV_RENDEZVOUS
from elastic_driver.rendezvous.messages import (
    JobOver,
    LeaveRequest,
    Notice,
    Removed,
    WatchRequest,
)
from elastic_driver.rendezvous.proof import REPLY_HEADER, Session
from elastic_driver.words import NoticeKind
from elastic_driver.worker.engine.choice import usable_backends
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.fakes.rendezvous_service import (
    IDENTITY,
    KEY,
    NONCE,
    PATIENCE_S,
    READY,
    WORKER,
    Calls,
    Service,
    credential,
    scripted,
    serving,
)

pytestmark = pytest.mark.integration

WATCH = WatchRequest(WORKER, 1, 0)


@pytest.fixture
def listening() -> Iterator[Service]:
    with serving() as running:
        yield running


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
