"""A job of simulated agents: the real driver, with server, fleet and core, in one process; all hosts in another.

The driver's dialler "starts" an agent by telling the other process, where it dials in and speaks the real protocol,
with the real link of an agent and its real book of rounds. Only its workers are simulated: they ask what a worker with
the native engine asks, and have no training. No process is started but the driver's.

    driver's process                                  this process, one asyncio loop
    ElasticDriver ── Fleet ── SimulatedDialler ──pipe──►  Simulation: a SimulatedAgent for each that is dialled,
                       └── Admission ◄──── frames ──────┘  with a Worker for each that it is told to start
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
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from multiprocessing.context import SpawnProcess as Process
from typing import Any
from unittest import mock

import uvloop

from elastic_driver.core.events import ReportResumed
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.driver.agents import AgentSide, DriverAddresses
from elastic_driver.driver.build import build
from elastic_driver.driver.recording import Recording, recording
from elastic_driver.errors import RendezvousClosedError, StaleRoundError
from elastic_driver.hosts import Departure, Host, WorkerId
from elastic_driver.journal.entries import Facts
from elastic_driver.launch.agent.host_rounds import HostRounds
from elastic_driver.launch.agent.link import DriverLink, DriverLostError, RefusedError
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.fleet import admission, dialling
from elastic_driver.launch.fleet.addresses import Addresses
from elastic_driver.launch.fleet.admission import Admission, WelcomeFacts
from elastic_driver.launch.fleet.dialling import AgentReach
from elastic_driver.launch.fleet.discovery import FleetDiscovery
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.kept import NOTHING, Keeper
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.fleet.tickets import Tickets
from elastic_driver.launch.words import Stream
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Bootstrap,
    Bye,
    Close,
    Exited,
    Finished,
    HoldPort,
    Kill,
    KillAll,
    Labels,
    PortHeld,
    Round,
    Start,
    Started,
    Stop,
    WarmUp,
    Welcome,
    WorkerLevel,
    WorkerPhase,
    worker_named,
)
from elastic_driver.rendezvous.channel import Channel, FrameConnection
from elastic_driver.rendezvous.frames import Frame, pack_frame
from elastic_driver.rendezvous.messages import (
    NextRoundRequest,
    Notice,
    RoundAssignment,
    RunningReport,
    WatchRequest,
)
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.console import Console
from elastic_driver.reporting.event_log import EventLog
from elastic_driver.reporting.happenings import TookOver
from elastic_driver.reporting.narrator import Narrator
from elastic_driver.reporting.tally import Tally
from elastic_driver.settings.machines import remote_environment
from elastic_driver.settings.settings import Settings
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.process_name import name_of_this_process, place_of_sockets
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Backend, Bar, NoticeKind, ReadyCause

SLOTS_PER_HOST = 8
PATIENCE_S = 500.0
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


class _Dialled:
    """See Dialled: it ends with its connection."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[DialFailure] = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """There is nothing to end."""


class SimulatedDialler:
    """See Dialler: the other process dials in."""

    def __init__(self) -> None:
        self.pipe: _Lines

    def shows_bootstrap(self, host: str) -> bool:
        """Nobody else is here to read it."""
        return False

    async def dial(self, host: str, bootstrap: Bootstrap) -> _Dialled:
        self.pipe.send("dial", bootstrap.to_word())
        return _Dialled()


class _NoOutput:
    """See OutputSink: nobody writes any."""

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None: ...

    def write(self, worker: WorkerId, stream: Stream, data: bytes) -> None: ...

    def bar(self, worker: WorkerId, bar: Bar) -> None: ...

    def end(self, worker: WorkerId) -> None: ...


class ToldHosts:
    """See HostDiscovery. Answers when it is told to go."""

    def __init__(self, hosts: tuple[Host, ...]) -> None:
        self._hosts = hosts
        self.go = asyncio.Event()

    async def find_hosts(self) -> tuple[Host, ...]:
        await self.go.wait()
        return self._hosts

    async def wait_change(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """None."""
        return ()

    def remark(self) -> str:
        return ""


def _agents_of(recorded: Recording, clock: JobClock, dialler: SimulatedDialler) -> AgentSide:
    """As a job has it (driver/agent_side.py), but for how agents are started: none is of this machine."""
    settings, journal, tasks = recorded.job.settings, recorded.journal, Tasks()
    facts = Facts() if recorded.before is None else recorded.before.facts
    keeper: Keeper[Any] = journal or NOTHING
    tickets = Tickets(clock, keeper=keeper)
    tickets.take_over(facts.agents.values(), facts.tickets.values())
    certificate = OwnCertificate(facts.ways.certificate)
    ways = DriverAddresses(
        "127.0.0.1",
        addresses=lambda: (),
        certificate=certificate,
        before=facts.ways,
        limit_s=settings.driver_timeout_s,
        folder=settings.journal_folder,
        keeper=keeper,
    )

    async def urls(host: str) -> tuple[str, ...]:
        """Over TLS, as those of other machines come."""
        await certificate.make()  # before the journal has the ways, with the certificate
        return ((await ways.open_loopback()).replace("http:", "https:"),)

    fleet = Fleet(
        tickets=tickets,
        reach=AgentReach(
            urls,
            agent_timeout_s=settings.agent_timeout_s,
            host_timeout_s=settings.host_timeout_s,
            fingerprint=certificate.make,
            job="simulated",
            owner=name_of_this_process(),
        ),
        local=dialler,
        remote=dialler,
        is_local=lambda name: False,
        addresses_of=lambda name: [],
        address=lambda facts, route: route,
        tasks=tasks,
        keeper=keeper,
        clock=clock,
    )
    fleet.take_over(facts.revoked.values(), facts.leavers.values())

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr)

    welcome_facts = WelcomeFacts(
        job_id="simulated",
        agent_timeout_s=settings.agent_timeout_s,
        poll_s=0.0,
        cwd=os.getcwd(),
        umask=0o22,
        warm=False,
        preload=None,
        prefix_timestamp=False,
        epoch=0 if journal is None else journal.epoch,
        driver="" if journal is None else journal.driver,
        driver_timeout_s=0.0 if journal is None else settings.driver_timeout_s,
        place=place_of_sockets(),
    )
    return AgentSide(
        tickets,
        Admission(tickets, welcome_facts, fleet, keeper),
        fleet,
        Addresses(fleet, warn),
        lambda facts, env: remote_environment(env),
        _NoOutput(),
        StandardInput(None, None),
        ways,
        tasks,
        join_token="",
    )


class _Telling(Chronicle):
    """Tells the other process, too, what has happened."""

    pipe: _Lines

    def host_ready(self, host: str, address: str, joined: int) -> None:
        super().host_ready(host, address, joined)
        self.pipe.send("agent")

    def round_resumed(self, command: ReportResumed) -> None:
        super().round_resumed(command)
        self.pipe.send("resumed", command.round_id)

    def took_over(self, taken: TookOver) -> None:
        super().took_over(taken)
        self.pipe.send("took over", taken.workers, taken.trained)


def _drive(pipe: socket.socket, settings: Settings, profile_to: str | None) -> None:
    """The driver's process."""
    # Hundreds of agents are one process here, and say hello one after the other. On a busy machine that takes longer
    # than one of them may take, and all that are late would be dialled again.
    dialling._DIAL_IN_S = admission._HELLO_S = PATIENCE_S

    async def main() -> None:
        dialler = SimulatedDialler()
        told = ToldHosts(settings.hosts or ())

        def take(words: list[Any]) -> None:
            told.go.set()

        _, dialler.pipe = await asyncio.get_running_loop().create_connection(lambda: _Lines(take), sock=pipe)
        with (
            Console(log_level=settings.log_level) as console,
            EventLog(None) as log,
            recording(settings, "simulated", console) as recorded,
        ):
            before = recorded.before
            clock = JobClock(begins=None if before is None else before.clock)
            agents = _agents_of(recorded, clock, dialler)
            chronicle = _Telling(log, Narrator(console))
            chronicle.pipe = dialler.pipe
            driver = build(
                settings,
                discovery=FleetDiscovery(
                    told,
                    agents.fleet,
                    keeper=recorded.journal or NOTHING,
                    machines=() if before is None else before.facts.machines.values(),
                ),
                chronicle=chronicle,
                dialect=OurDialect(os.environ, exported={}),
                job=recorded.job,
                agents=agents,
                tally=Tally(),
                clock=clock,
                journal=recorded.journal,
                before=before,
            )
            dialler.pipe.send("ready")
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


# --- the agents ----------------------------------------------------------------------------------------------------


class SimulatedAgent:
    """One host: a real link to the driver, real answers for its workers, and no processes."""

    def __init__(self, job: Simulation, bootstrap: Bootstrap) -> None:
        self.job = job
        self.link = DriverLink(bootstrap, self)
        self.rounds = HostRounds(self.link.send, self, is_heard=lambda: True)
        self.rounds.serve(_Store(self))
        self.workers: dict[WorkerId, Worker] = {}
        self._keys: dict[tuple[str, str], bytes] = {}
        self._waiting: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._round = 0
        self._started = 0
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        try:
            await self.link.keep()
        except (RefusedError, DriverLostError) as error:
            self.job.lost(str(error))

    def close(self) -> None:
        """Ends its connection."""
        self._keeping.cancel()
        self.link.close()
        self.rounds.close()

    # LinkOwner

    def not_welcomed_yet(self, why: str, left_s: float) -> None:
        """Do nothing: the link retries."""

    def cannot_ask(self, why: str) -> None:
        """Do nothing: the link retries."""

    def failed(self, error: BaseException) -> None:
        """Fail the benchmark: an internal error has occurred."""
        self.job.lost(f"{error!r}")

    def welcomed(self, welcome: Welcome) -> None:
        """It is taken in."""

    def seen(self) -> None:
        """The driver has taken something."""

    def alone(self) -> None:
        """There is no driver; workers train."""

    def taken_over(self, welcome: Welcome, untold: Sequence[AgentMessage], alone_s: float) -> None:
        """Another driver is told all that there is (launch/agent/coming_back.py)."""
        running = WorkerPhase.RUNS
        levels = [
            WorkerLevel(worker.key, running, one.pid, "", 0, leaving=False, exiting=False)
            for worker, one in self.workers.items()
        ]
        for message in (self.rounds.levels(levels, alone_s), *self.rounds.reports(), *self.rounds.questions(), *untold):
            self.link.send(message)

    def take(self, message: AgentMessage) -> None:
        """Does what the driver says."""
        match message:
            case HoldPort(generation):
                self.link.send(PortHeld(generation, 29500, ""))
            case Start(key):
                worker = worker_named(key)
                self._started += 1
                self.link.send(Started(key, self._started))
                self.workers[worker] = self.job.workers[worker] = Worker(self, worker, self._started)
            case Stop(key):
                self.end(worker_named(key), -15)
            case Kill(key):
                self.end(worker_named(key), -9)
            case KillAll() | Close():
                for worker in tuple(self.workers):
                    self.end(worker, -9)
                if isinstance(message, Close):
                    self.link.send(Bye())
            case Round(round_id):
                self.rounds.begin_round(round_id)
            case Labels() | WarmUp():
                pass
            case _:
                assert self.rounds.take(message), message

    def end(self, worker: WorkerId, returncode: int) -> None:
        """A worker's process is dead."""
        ended = self.workers.pop(worker, None)
        if ended is not None:
            del self.job.workers[worker]
            ended.ended = True
            self.rounds.gone(worker)
            self.link.send(Exited(worker.key, returncode, []))
            self.link.send(Finished(worker.key))

    def end_all(self, returncode: int) -> None:
        """All processes of its workers are dead."""
        for worker in tuple(self.workers):
            self.end(worker, returncode)

    # Processes

    def runs(self, worker: WorkerId) -> bool:
        """Whether it lives."""
        return worker in self.workers

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        """It has none."""

    # Store: what the agent's server does with keys

    def begin_round(self, round_id: int) -> None:
        """Fences the past."""
        self._round = round_id
        self._keys.clear()
        self._waiting.clear()

    def take_keys(self, round_id: int, scope: str, entries: Iterable[tuple[str, bytes]]) -> None:
        """Takes keys that workers of other hosts have set."""
        if round_id == self._round:
            for key, value in entries:
                self._keys[scope, key] = value
                for waiting in self._waiting.pop((scope, key), ()):
                    waiting()

    def put(self, round_id: int, scope: str, key: str, value: bytes) -> None:
        """A worker here sets a key."""
        self.rounds.put(round_id, scope, key, value)
        self.take_keys(round_id, scope, [(key, value)])

    def want(self, round_id: int, scope: str, key: str, answer: Callable[[], None]) -> None:
        """A worker here waits for a key, in vain when its round is over."""
        if round_id != self._round:
            return
        if (scope, key) in self._keys:
            answer()
        else:
            self._waiting.setdefault((scope, key), []).append(answer)
            self.rounds.want(round_id, scope, key, 0)


class _Store:
    """The keys of an agent, as its rounds see them."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self.begin_round = agent.begin_round
        self.take = agent.take_keys


class Worker:
    """A simulated worker: what worker/rounds/runtime.py, watch.py and native_engine.py ask, and nothing else."""

    def __init__(self, agent: SimulatedAgent, worker: WorkerId, pid: int) -> None:
        self.agent, self.job, self.worker, self.pid = agent, agent.job, worker, pid
        self.assignment: RoundAssignment | None = None
        self.ended = False
        self._round = 0  # the last that was joined
        asyncio.get_running_loop().call_soon(self._ask_round, ReadyCause.START)

    def _ask_round(self, cause: ReadyCause) -> None:
        if self.ended:
            return
        self.assignment = None
        request = NextRoundRequest(
            self.worker, self._round, self.job.commits, cause, "", (Backend.NATIVE, Backend.TORCH), os.getpid()
        )

        def answered(future: asyncio.Future[Any]) -> None:
            if self.ended or future.cancelled():
                return
            if future.exception() is not None:
                self.job.lost(f"worker {self.worker}: {future.exception()!r}")
            elif isinstance(future.result(), RoundAssignment):
                self._join(future.result())

        asyncio.ensure_future(self.agent.rounds.next_round(request)).add_done_callback(answered)

    def _join(self, assignment: RoundAssignment) -> None:
        self.assignment = assignment
        self._round = assignment.round_id
        self._ask_notice(0)
        if self.job.on_assigned is None or self.job.on_assigned(self):
            self.connect()

    def connect(self) -> None:
        """What the native engine does: rank 0 publishes where it listens, the others wait for that."""
        assert self.assignment is not None
        if self.assignment.slot.rank == 0:
            self.agent.put(self._round, "engine", "0", _ADDRESS)
            self._connected(self._round)
        else:
            of_round = self._round
            self.agent.want(of_round, "engine", "0", lambda: self._connected(of_round))

    def _connected(self, of_round: int) -> None:
        if not self.ended and self._round == of_round and self.assignment is not None:
            self.agent.rounds.running(RunningReport(self.worker, of_round, self.job.commits))
            self.job.trains(self.assignment)

    def _ask_notice(self, version: int) -> None:
        of_round = self._round

        def answered(future: asyncio.Future[Notice]) -> None:
            if self.ended or future.cancelled() or self._round != of_round or self.assignment is None:
                return
            notice = future.result()
            match notice.kind:
                case NoticeKind.ABORT:
                    self._ask_round(ReadyCause.INTERNAL_ERROR)
                case NoticeKind.HOSTS_UPDATED:
                    self._ask_round(ReadyCause.HOSTS_UPDATED)
                case NoticeKind.NONE:
                    self._ask_notice(notice.version)
                case NoticeKind.JOB_OVER:
                    pass  # the driver stops this worker next

        request = WatchRequest(self.worker, of_round, version, 0, waiting=True)
        with contextlib.suppress(StaleRoundError, RendezvousClosedError):
            asyncio.ensure_future(self.agent.rounds.watch(request)).add_done_callback(answered)


class Simulation:
    """The hosts of a job, and what they have seen. In one asyncio loop.

    Attributes:
        agents: all that were dialled.
        workers: the living ones.
        received_bytes: of all connections to the driver, so far.
        on_assigned: asked when a worker has got its place; False keeps it from going on.
        commits: what workers say of their state.
        process: the driver's.
        took_over: what a new driver says: how many workers went on, and whether they are all of a round that trained.
    """

    def __init__(self, start: Callable[[], tuple[Process, socket.socket]]) -> None:
        self._start = start
        self.agents: list[SimulatedAgent] = []
        self.workers: dict[WorkerId, Worker] = {}
        self.received_bytes = 0
        self.on_assigned: Callable[[Worker], bool] | None = None
        self.commits = 1
        self._came = 0
        self._round, self._size, self._training, self._resumed = 0, 0, 0, 0
        self._changed = asyncio.Event()
        self._failure = ""
        self._ending = False
        self._pipe: _Lines
        self._driver_ready = asyncio.Event()
        self.took_over: tuple[int, bool] | None = None

    @property
    def driver_pid(self) -> int:
        return self.process.pid or 0

    async def begin(self) -> None:
        """Starts the driver's process."""
        self.process, end = self._start()
        self._driver_ready.clear()
        _, self._pipe = await asyncio.get_running_loop().create_connection(lambda: _Lines(self.take), sock=end)

    def kill_driver(self) -> None:
        """Blocks until it is dead."""
        self.process.kill()
        self.process.join()
        self.process.close()

    async def until_taken_over(self) -> tuple[int, bool]:
        """Waits until another driver has all agents. Returns took_over."""
        await self._until(lambda: self.took_over is not None)
        assert self.took_over is not None
        return self.took_over

    async def ready(self) -> None:
        """Waits until the driver's process has come up, with all it imports."""
        async with asyncio.timeout(PATIENCE_S):
            await self._driver_ready.wait()

    def take(self, words: list[Any]) -> None:
        """The driver's process says something."""
        match words:
            case ["ready"]:
                self._driver_ready.set()
            case ["dial", word]:
                self.agents.append(SimulatedAgent(self, Bootstrap.from_word(word)))
            case ["agent"]:
                self._came += 1
                self._changed.set()
            case ["took over", workers, trained]:
                self.took_over = workers, trained
                self._changed.set()
            case ["resumed", round_id]:
                self._resumed = round_id
                self._changed.set()
            case _:
                raise ValueError(f"unknown message from the driver's process: {words}")

    def trains(self, assignment: RoundAssignment) -> None:
        """A worker has said that it trains."""
        if assignment.round_id > self._round:
            self._round, self._size, self._training = assignment.round_id, assignment.slot.size, 0
        if assignment.round_id == self._round:
            self._training += 1

    def lost(self, why: str) -> None:
        """Something went wrong."""
        if not self._ending:
            self._failure = self._failure or why
            self._changed.set()

    def go(self) -> None:
        """Has discovery give its answer: the agents are dialled, and workers are started."""
        self._pipe.send("go")

    def kill(self, worker: WorkerId) -> None:
        """A worker's process dies."""
        self.workers[worker].agent.end(worker, -9)

    async def until_agents(self, count: int) -> None:
        """Waits until the driver has taken that many agents in."""
        await self._until(lambda: self._came >= count)

    async def until_all_train(self, round_id: int) -> int:
        """Waits until the driver knows that all members of a round train. Returns how many there are."""
        await self._until(lambda: self._resumed >= round_id)
        assert (self._round, self._training) == (self._resumed, self._size)
        return self._size

    async def _until(self, fulfilled: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not fulfilled():
                self._changed.clear()
                await self._changed.wait()
                if self._failure:
                    raise RuntimeError(self._failure)

    def ends(self) -> None:
        """From now on nothing that breaks is news."""
        self._ending = True

    def close(self) -> None:
        """Ends all agents."""
        for agent in self.agents:
            agent.close()


@contextlib.contextmanager
def _counting(job: Simulation) -> Iterator[None]:
    """Counts what comes on all connections of frames in this process.

    But for frames without messages: how many of them there are is a matter of time.
    """
    received, taken = FrameConnection.data_received, Channel.received
    beat_bytes = len(pack_frame(0, 0, 0, []))

    def count(connection: FrameConnection, data: bytes) -> None:
        job.received_bytes += len(data)
        received(connection, data)

    def take(channel: Channel, frame: Frame) -> None:
        job.received_bytes -= 0 if frame.messages else beat_bytes
        taken(channel, frame)

    with (
        mock.patch.object(FrameConnection, "data_received", count),
        mock.patch.object(Channel, "received", take),
    ):
        yield


@contextlib.asynccontextmanager
async def simulation(
    size: int, *, slots_per_host: int = SLOTS_PER_HOST, profile_to: str | None = None, **limits: Any
) -> AsyncIterator[Simulation]:
    """A job of that many workers, whose driver waits for :meth:`Simulation.go`."""
    needed = size // slots_per_host + 256
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

    def start() -> tuple[Process, socket.socket]:
        ours, theirs = socket.socketpair()
        process = spawn.Process(target=_drive, args=(theirs, settings, profile_to), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    job = Simulation(start)
    await job.begin()
    try:
        with _counting(job):
            yield job
    finally:
        job.ends()
        process = job.process
        process.terminate()
        deadline = time.monotonic() + 30
        while process.exitcode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        job.close()
        if process.exitcode is None:
            process.kill()
        process.join()
        process.close()
