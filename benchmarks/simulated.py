"""A job of simulated workers: the real driver, with its server and core, in one process; all its workers in another.

The driver's launcher "starts" a worker by telling the other process, which connects, speaks the wire protocol as a
worker with the native engine does, and has no training. No process is started but the driver's.

    driver's process                                this process, one asyncio loop
    ElasticDriver ── SimulatedLauncher ──pipe──►  Simulation: a Worker for each that is started
          └── RendezvousServer ◄────── HTTP ─────────┘  two connections each, like the real client's
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import json
import multiprocessing
import os
import pstats
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import uvloop

from elastic_driver.dialects.ours import OurDialect
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.launch.launcher import ExitStatus
from elastic_driver.rendezvous.credentials import ENV_KEY, Identity, Role
from elastic_driver.rendezvous.environment import ENV_RENDEZVOUS
from elastic_driver.rendezvous.messages import (
    API,
    NextRoundRequest,
    Notice,
    RoundAssignment,
    RunningReport,
    WatchRequest,
    parse_next_round_reply,
)
from elastic_driver.rendezvous.proof import HELLO, NONCE_BYTES, PROOF, REPLY_HEADER, Session, digest_of, is_same
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.console import Console
from elastic_driver.report.event_log import EventLog
from elastic_driver.report.narrator import Narrator
from elastic_driver.settings.settings import Settings
from elastic_driver.words import Backend, NoticeKind, ReadyCause

SLOTS_PER_HOST = 8
PATIENCE_S = 120.0
_ADDRESS = b"\x09127.0.0.1\xff\xff\x03" + b"s" * 16  # about what a rank 0 publishes


class _Lines(asyncio.Protocol):
    """JSON objects, one a line, both ways over a socket pair."""

    def __init__(self, take: Callable[[list[Any]], None]) -> None:
        self._take = take
        self._rest = b""
        self._transport: Any = None
        self._unsent: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def send(self, *words: object) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(json.dumps(words).encode() + b"\n")

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not self._transport.is_closing():
            self._transport.write(b"".join(unsent))


# --- the driver's process ------------------------------------------------------------------------------------------


class SimulatedProcess:
    """See WorkerProcess."""

    def __init__(self, worker: WorkerId, pid: int, label: str, ends: Callable[[WorkerId], None]) -> None:
        self.worker, self.pid, self.label = worker, pid, label
        self.exited: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self.dying: asyncio.Future[ExitStatus | str] = asyncio.get_running_loop().create_future()
        self.last_lines: Sequence[str] = ()
        self._ends = ends

    def end(self, returncode: int) -> None:
        if not self.exited.done():
            self._ends(self.worker)
            self.dying.cancel()
            self.exited.set_result(ExitStatus(returncode))

    def watch_threads(self, pid: int, thread: int) -> None:
        """It has none, and is dead at once."""

    @property
    def runs_script(self) -> bool:
        return False

    async def print_stacks(self, limit_s: float) -> None:
        """It has none."""

    async def wait(self) -> ExitStatus:
        return await self.exited

    async def stop(self, grace_s: float) -> ExitStatus:
        self.end(-15)
        return await self.exited

    def kill(self) -> None:
        self.end(-9)


class SimulatedLauncher:
    """See Launcher. Is told of deaths through the pipe, and tells of starts and ends."""

    descriptors_each = 0

    def __init__(self) -> None:
        self.pipe: _Lines
        self._living: dict[WorkerId, SimulatedProcess] = {}
        self._started = 0

    def check_hosts(self, hosts: Sequence[Host]) -> None:
        """They need not be machines."""

    def cores(self, hostname: str) -> int:
        return 1

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> SimulatedProcess:
        self._started += 1
        process = SimulatedProcess(worker, self._started, label, self._ended)
        self._living[worker] = process
        self.pipe.send("start", worker.key, env[ENV_RENDEZVOUS], env[ENV_KEY])
        return process

    def _ended(self, worker: WorkerId) -> None:
        del self._living[worker]
        self.pipe.send("end", worker.key)

    def end(self, worker: WorkerId, returncode: int) -> None:
        if worker in self._living:
            self._living[worker].end(returncode)

    def kill(self) -> None:
        for process in tuple(self._living.values()):
            process.kill()

    async def close(self) -> None:
        self.kill()


class ToldHosts:
    """See HostDiscovery. Answers when it is told to go."""

    def __init__(self, hosts: tuple[Host, ...]) -> None:
        self._hosts = hosts
        self.go = asyncio.Event()

    async def find_hosts(self) -> tuple[Host, ...]:
        await self.go.wait()
        return self._hosts

    def remark(self) -> str:
        return ""


def _drive(pipe: socket.socket, settings: Settings, profile_to: str | None) -> None:
    """The driver's process."""

    async def main() -> None:
        launcher, discovery = SimulatedLauncher(), ToldHosts(settings.hosts or ())

        def take(words: list[Any]) -> None:
            if words[0] == "go":
                discovery.go.set()
            else:
                launcher.end(WorkerId.parse(words[1]), words[2])

        _, launcher.pipe = await asyncio.get_running_loop().create_connection(lambda: _Lines(take), sock=pipe)
        launcher.pipe.send("ready")
        with Console(log_level=settings.log_level) as console, EventLog(None) as log:
            driver = ElasticDriver(
                settings,
                discovery=discovery,
                launcher=launcher,
                chronicle=Chronicle(log, Narrator(console)),
                dialect=OurDialect(os.environ, exported={}),
                job_id="simulated",
            )
            await driver.run()

    profile = cProfile.Profile() if profile_to is not None else None
    if profile is not None:
        profile.enable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    if profile is not None and profile_to is not None:
        profile.disable()
        with open(profile_to, "w") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(45)


# --- the workers ---------------------------------------------------------------------------------------------------


class _Asker(asyncio.Protocol):
    """A keep-alive connection of a worker, on which one request is under way at a time."""

    def __init__(self, job: Simulation, name: str, key: bytes) -> None:
        self._job = job
        self._name, self._key = name, key
        self._nonce = ""
        self._session: Session | None = None
        self._number = 0
        self._transport: Any = None
        self._buffer = b""
        self._request = ("", "", b"")  # under way
        self._answer: Callable[[int, bytes], None] | None = None

    @property
    def busy(self) -> bool:
        return self._answer is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._session, self._number, self._buffer = None, 0, b""
        self._nonce = os.urandom(NONCE_BYTES).hex()
        self._send(f"GET {API}/hello", f"{HELLO} {self._name} {self._nonce}")

    def ask(self, method: str, path: str, body: bytes, answer: Callable[[int, bytes], None]) -> None:
        assert self._answer is None
        self._answer = answer
        self._request = (method, path, body)
        if self._session is not None:
            self._send_request(self._session)

    def _send_request(self, session: Session) -> None:
        method, path, body = self._request
        self._number += 1
        digest = digest_of(body)
        proof = session.of_request(self._number, method.encode(), f"{API}/{path}".encode(), digest)
        authorization = f"{PROOF} {proof.decode()} {digest.decode()}".rstrip()
        length = f"Content-Length: {len(body)}\r\n" if method != "GET" else ""
        self._send(f"{method} {API}/{path}", authorization, length, body)

    def _send(self, first: str, authorization: str, length: str = "", body: bytes = b"") -> None:
        head = f"{first} HTTP/1.1\r\nHost: {self._job.host}\r\nAccept-Encoding: identity\r\n{length}"
        message = f"{head}Authorization: {authorization}\r\n\r\n".encode() + body
        self._job.sent_bytes += len(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        self._job.received_bytes += len(data)
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head[head.rindex(b"Content-Length: ") + 16 :].split(b"\r", 1)[0])
        if len(rest) < length:
            return
        status, body, self._buffer = int(head[9:12]), rest[:length], rest[length:]
        if self._session is None:
            greeting = json.loads(body)
            self._session = Session(self._key, self._name, self._nonce, greeting["nonce"])
            assert is_same(greeting["proof"].encode(), self._session.greeting)
            if self._answer is not None:
                self._send_request(self._session)
            return
        given = head.partition(REPLY_HEADER.encode() + b": ")[2][:32]
        assert is_same(given, self._session.of_reply(self._number, status, body))
        answer, self._answer = self._answer, None
        if answer is not None:
            answer(status, body)

    def close(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None:  # like the real client, it asks again
            self._job.broken += 1
            self._job.connect(self)


class Worker:
    """A simulated worker: what worker/rounds/runtime.py, watch.py and native_engine.py send, and nothing else."""

    def __init__(self, job: Simulation, worker: WorkerId, key: bytes) -> None:
        self.job, self.worker = job, worker
        self._name, self._key = str(Identity(Role.WORKER, worker)), key
        self.assignment: RoundAssignment | None = None
        self.ended = False
        self._round = 0  # the last that was joined
        self._main = self._connect()
        self._watch: _Asker | None = None
        self._ask_round(ReadyCause.START)

    def _connect(self) -> _Asker:
        return self.job.connect(_Asker(self.job, self._name, self._key))

    def _ask_round(self, cause: ReadyCause) -> None:
        self.assignment = None
        if self._main.busy:  # with a request of the round that broke
            self._main.close()
            self._main = self._connect()
        request = NextRoundRequest(
            self.worker, self._round, self.job.commits, cause, "", (Backend.NATIVE, Backend.TORCH), os.getpid()
        )
        self._say_ready(request.to_json())

    def _say_ready(self, body: bytes) -> None:
        def answer(status: int, reply: bytes) -> None:
            if status == 204:
                self._say_ready(body)
                return
            match parse_next_round_reply(reply):
                case RoundAssignment() as assignment:
                    self._join(assignment)
                case _:
                    self.end()

        self._main.ask("POST", "next-round?wait_s=15.000", body, answer)

    def _join(self, assignment: RoundAssignment) -> None:
        self.assignment = assignment
        self._round = assignment.round_id
        self._ask_notice(0)
        if self.job.on_assigned is None or self.job.on_assigned(self):
            self.connect()

    def connect(self) -> None:
        """What the native engine does with the server: rank 0 publishes where it listens, the others wait for that."""
        assert self.assignment is not None
        path = f"rounds/{self._round}/kv/engine/0"
        if self.assignment.slot.rank == 0:
            self._main.ask("PUT", path, _ADDRESS, self._connected)
        else:
            self._main.ask("GET", f"{path}?wait_s=30.000", b"", self._connected)

    def _connected(self, status: int, reply: bytes) -> None:
        if status not in (200, 204):  # the round is over; the watch says so
            return
        report = RunningReport(self.worker, self._round, self.job.commits)
        self._main.ask("POST", "running", report.to_json(), lambda status, _: self.job.trains(self, status))

    def _ask_notice(self, version: int) -> None:
        of_round = self._round

        def answer(status: int, reply: bytes) -> None:
            if self._round != of_round or self.assignment is None or status == 409:
                return
            if status == 204:
                self._ask_notice(version)
                return
            notice = Notice.from_json(reply)
            match notice.kind:
                case NoticeKind.ABORT:
                    self._ask_round(ReadyCause.INTERNAL_ERROR)
                case NoticeKind.HOSTS_UPDATED:
                    self._ask_round(ReadyCause.HOSTS_UPDATED)
                case NoticeKind.NONE:
                    self._ask_notice(notice.version)
                case NoticeKind.JOB_OVER:
                    self.end()

        if self._watch is not None and self._watch.busy:  # parked in the round before
            self._watch.close()
            self._watch = None
        if self._watch is None:
            self._watch = self._connect()
        body = WatchRequest(self.worker, of_round, version, 0, waiting=True).to_json()
        self._watch.ask("POST", "watch?wait_s=15.000", body, answer)

    def end(self) -> None:
        self.ended = True
        for asker in (self._main, self._watch):
            if asker is not None:
                asker.close()


class Simulation:
    """The workers of a job, and what they have seen. In one asyncio loop.

    Attributes:
        workers: the living ones.
        received_bytes, sent_bytes: of all connections to the server, so far.
        broken: connections that were cut while a request was under way; it was sent again.
        on_assigned: asked when a worker has got its place; False keeps it from going on.
        commits: what workers say of their state.
        driver_pid: the driver's process.
    """

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.received_bytes = self.sent_bytes = self.broken = 0
        self.on_assigned: Callable[[Worker], bool] | None = None
        self.commits = 1
        self.host = ""
        self._port = 0
        self._round, self._size, self._training = 0, 0, 0
        self._changed = asyncio.Event()
        self._failure = ""
        self._pipe: _Lines
        self._connecting: set[asyncio.Task[Any]] = set()
        self._driver_ready = asyncio.Event()
        self.driver_pid = 0

    async def ready(self) -> None:
        """Waits until the driver's process has come up, with all it imports."""
        async with asyncio.timeout(PATIENCE_S):
            await self._driver_ready.wait()

    def connect(self, asker: _Asker) -> _Asker:
        name, _, port = self.host.partition(":")
        task = asyncio.get_running_loop().create_task(self._connect(asker, name, int(port)))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return asker

    async def _connect(self, asker: _Asker, host: str, port: int) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: asker, host, port)
        except OSError as error:
            self.lost(f"cannot connect: {error}")

    def take(self, words: list[Any]) -> None:
        """The driver's process says something."""
        if words[0] == "ready":
            self._driver_ready.set()
            return
        worker = WorkerId.parse(words[1])
        if words[0] == "start":
            if not self.host:
                self.host = words[2].removeprefix("http://")
            self.workers[worker] = Worker(self, worker, bytes.fromhex(words[3]))
        else:
            ended = self.workers.pop(worker, None)
            if ended is not None:
                ended.end()

    def trains(self, worker: Worker, status: int) -> None:
        """A worker has said that it trains."""
        if status != 204:
            self.lost(f"a report was answered with {status}")
        assignment = worker.assignment
        if assignment is None:
            return
        if assignment.round_id > self._round:
            self._round, self._size, self._training = assignment.round_id, assignment.slot.size, 0
        if assignment.round_id == self._round:
            self._training += 1
            if self._training == self._size:
                self._changed.set()

    def lost(self, why: str) -> None:
        """Something went wrong."""
        self._failure = self._failure or why
        self._changed.set()

    def go(self) -> None:
        """Has discovery give its answer: the workers are started."""
        self._pipe.send("go")

    def kill(self, worker: WorkerId) -> None:
        """A worker's process dies."""
        self.workers[worker].end()
        self._pipe.send("exit", worker.key, -9)

    async def until_all_train(self, round_id: int) -> int:
        """Waits until all members of a round have said that they train. Returns how many there are."""
        async with asyncio.timeout(PATIENCE_S):
            while self._round < round_id or self._training < self._size:
                self._changed.clear()
                await self._changed.wait()
                if self._failure:
                    raise RuntimeError(self._failure)
        return self._size

    async def end(self) -> None:
        for worker in self.workers.values():
            worker.end()
        await asyncio.gather(*self._connecting, return_exceptions=True)


@contextlib.asynccontextmanager
async def simulation(
    size: int, *, slots_per_host: int = SLOTS_PER_HOST, profile_to: str | None = None, **limits: Any
) -> AsyncIterator[Simulation]:
    """A job of that many workers, whose driver waits for :meth:`Simulation.go`."""
    needed = 2 * size + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        if hard < needed:
            raise RuntimeError(f"cannot simulate {size} workers: {needed} open files are needed, {hard} allowed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    hosts = tuple(Host(f"node{index:04}", slots_per_host) for index in range(size // slots_per_host))
    settings = Settings(
        command=("true",), num_proc=size, min_num_proc=1, max_num_proc=size, hosts=hosts, log_level="FATAL", **limits
    )
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = socket.socketpair()
    process = spawn.Process(target=_drive, args=(theirs, settings, profile_to), daemon=True)
    process.start()
    theirs.close()
    job = Simulation()
    try:
        job.driver_pid = process.pid or 0
        _, job._pipe = await asyncio.get_running_loop().create_connection(lambda: _Lines(job.take), sock=ours)
        yield job
    finally:
        await job.end()
        process.terminate()
        deadline = time.monotonic() + 30
        while process.exitcode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if process.exitcode is None:
            process.kill()
        process.join()
        process.close()
