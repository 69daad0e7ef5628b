"""A driver among fakes: hosts that the test names, agents that answer at once, and words that are kept.

The driver, its fleet and all that it says to agents are real. At the other end of each agent's link is a
:class:`FakeHost`: it does as it is told with workers that are numbers, and says what the test has them say. So a test
sees of the driver what an agent sees, and nothing of how the driver keeps its workers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_driver.core.state import State
from elastic_driver.dialects.dialect import Dialect
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.driver.build import build
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.driver.recording import job_of
from elastic_driver.hosts import Departure, Host, WorkerId
from elastic_driver.journal.past import Recorded
from elastic_driver.launch.fleet.discovery import FleetDiscovery
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous import agent_messages as words
from elastic_driver.rendezvous.agent_messages import AgentMessage, worker_named
from elastic_driver.rendezvous.messages import (
    DrainHostRequest,
    LeaveRequest,
    NextRoundReply,
    NextRoundRequest,
    RunningReport,
)
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.event_log import EventLog
from elastic_driver.reporting.narrator import Narrator
from elastic_driver.reporting.tally import Tally
from elastic_driver.settings.settings import Settings
from elastic_driver.system.job_clock import JobClock
from elastic_driver.vitals import Vitals
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.fleet_fakes import AtOnce, FakeAgent, FakeFleet
from tests.support.fakes.played_disk import Disk
from tests.support.fakes.virtual_loop import VirtualLoop

PATIENCE_S = 150.0
OURS = OurDialect({}, exported={})


@dataclass
class FakeWorker:
    """A worker that an agent was told to start.

    Attributes:
        worker: which.
        start: the order.
        host: where it runs.
        exit_code: of it; None while it runs.
        last_lines: what it has printed at last.
        is_stubborn: whether it does not end by SIGTERM.
        stops: the orders to stop it.
    """

    worker: WorkerId
    start: words.Start
    host: FakeHost
    exit_code: int | None = None
    last_lines: Sequence[str] = ()
    is_stubborn: bool = False
    stops: list[words.Stop] = field(default_factory=list)

    def end(self, exit_code: int) -> None:
        """Its process ends, and nothing is left of it. Harmless when repeated."""
        if self.exit_code is None:
            self.exit_code = exit_code
            key = self.worker.key
            self.host.say(words.Exited(key, exit_code, list(self.last_lines)), words.Finished(key))


class FakeHost(FakeAgent):
    """An agent that does as it is told, as soon as it is told.

    Args:
        link: of the driver's side.
        world: whose host it is.
    """

    def __init__(self, link: AgentLink, world: FakeWorld) -> None:
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.waiting: dict[WorkerId, asyncio.Future[NextRoundReply]] = {}
        self.open: dict[WorkerId, NextRoundRequest] = {}
        self.unkept: list[AgentMessage] = []  # what it would have said while there was no driver
        self.held: dict[int, words.PortLevel] = {}  # ports, by generation
        self._world = world
        self._done = 0  # of what it was told
        self._wakes = self._is_gone = self._stalls = False
        super().__init__(link)

    def vanishes(self) -> None:
        super().vanishes()
        self._is_gone = True

    def is_back(self) -> None:
        super().is_back()
        self._is_gone = False
        self.written()

    def stalls(self) -> None:
        """From now on it does nothing of what it is told."""
        self._stalls = True

    def comes_back(self, link: AgentLink, world: FakeWorld) -> None:
        """Another driver has welcomed it, and this is that driver's side. It says what it knows."""
        levels = self.levels()
        self.link, self._world, self._stalls = link, world, False
        self.told, self._done, self._last, self._seen = [], 0, 0, 0
        world.hosts[link.facts.host] = self
        world.started.update(self.workers)
        self.connect()
        self.say(levels, *map(words.Ready, self.open.values()))
        unkept, self.unkept = self.unkept, []
        if unkept:
            self.say(*unkept)

    def levels(self) -> words.Levels:
        """What it knows."""
        rounds, notices = self.of(words.Round), self.of(words.NoticeSet)
        return words.Levels(
            [
                words.WorkerLevel(
                    worker.key,
                    words.WorkerPhase.RUNS if one.exit_code is None else words.WorkerPhase.ENDED,
                    7,
                    one.start.label,
                    one.start.rank,
                    leaving=False,
                    exiting=False,
                )
                for worker, one in self.workers.items()
            ],
            max((one.round_id for one in rounds), default=0),
            max((one.notice.version for one in notices), default=0),
            1.5,
            list(self.held.values()),
        )

    def say(self, *messages: AgentMessage | words.Message) -> None:
        """It says this; nothing once it is lost."""
        if self._stalls:
            self.unkept += [each for each in messages if isinstance(each, AgentMessage)]
        elif not self.link.is_lost:
            super().say(*messages)

    def written(self) -> None:
        if not self._wakes:
            self._wakes = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._wakes = False
        if self._is_gone or self._stalls:
            return
        orders, self._done = self.heard()[self._done :], len(self.told)
        for order in orders:
            self._do(order)
        if not orders and not self.link.is_lost:
            self.beat()

    def _do(self, order: AgentMessage) -> None:
        match order:
            case words.HoldPort(generation, round_id=round_id):
                held = self.held[generation] = words.PortLevel(generation, round_id, 20000 + generation)
                self.say(words.PortHeld(generation, held.port, ""))
            case words.LetGo(generation):
                del self.held[generation]
            case words.Start():
                self._start(order)
            case words.Stop(key):
                worker = self.workers.get(worker_named(key))
                if worker is not None:
                    worker.stops.append(order)
                    if not worker.is_stubborn:
                        worker.end(-order.signal)
            case words.Kill(key):
                worker = self.workers.get(worker_named(key))
                if worker is not None:
                    worker.end(-signal.SIGKILL)
            case words.Prepare():
                self.say(words.Prepared())
            case words.KillAll():
                self.kill_all()
            case words.PassOn(number):
                self._world.passed_on.append(signal.Signals(number))
            case words.Reply(key, reply):
                answer = self.waiting.pop(worker_named(key), None)
                self.open.pop(worker_named(key), None)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
            case words.Close():
                self.kill_all()
                self.say(words.Bye())

    def _start(self, order: words.Start) -> None:
        name = worker_named(order.worker)
        self._world.asked.append(name)
        error = self._world.why_not_started(name)
        if error:
            self.say(words.NotStarted(order.worker, error, bad_command=False))
            return
        worker = self.workers[name] = self._world.started[name] = FakeWorker(name, order, self)
        self.say(words.Started(order.worker, len(self._world.asked)))
        self._world.on_start(worker)

    def kill_all(self) -> None:
        """SIGKILL to all."""
        for worker in self.workers.values():
            worker.end(-signal.SIGKILL)

    def ask(self, request: NextRoundRequest) -> asyncio.Future[NextRoundReply]:
        """One of its workers asks for its round."""
        answer: asyncio.Future[NextRoundReply] = asyncio.get_running_loop().create_future()
        self.waiting[request.worker], self.open[request.worker] = answer, request
        if not self._stalls:  # else it stays open
            self.say(words.Ready(request))
        return answer


class FakeWorld:
    """The hosts of a job: wherever the driver dials, an agent comes.

    Attributes:
        fleet: the driver's side of them.
        hosts: those that there have been, by name; the latest agent of each.
        asked: the workers that agents were told to start, in order.
        started: those that have been.
        passed_on: signals for all workers.
        start_error: why none can be started; "" where they can.
        on_start: called with each that starts.
    """

    def __init__(self) -> None:
        self.fleet = FakeFleet(local_names=())
        self.fleet.remote.on_dial = self._come
        self.hosts: dict[str, FakeHost] = {}
        self.asked: list[WorkerId] = []
        self.started: dict[WorkerId, FakeWorker] = {}
        self.passed_on: list[signal.Signals] = []
        self.start_error = ""
        self.on_start: Callable[[FakeWorker], None] = lambda worker: None

    def why_not_started(self, worker: WorkerId) -> str:
        """Why a worker cannot be started; "" where it can."""
        return self.start_error

    def _come(self, host: str) -> None:
        agent = self.fleet.arrives(host, other_end=lambda link: FakeHost(link, self))
        assert isinstance(agent, FakeHost)
        self.hosts[host] = agent

    def living(self) -> list[WorkerId]:
        return [worker for worker, process in self.started.items() if process.exit_code is None]

    def break_orders(self, kind: type[AgentMessage], error: Exception) -> None:
        """From now on it raises this when an agent is to be told such a thing."""
        for host in self.hosts.values():
            send = host.link.send

            def broken(message: AgentMessage, send: Callable[[AgentMessage], None] = send) -> None:
                if isinstance(message, kind):
                    raise error
                send(message)

            host.link.send = broken  # type: ignore[method-assign]


class FakeSource:
    """See HostDiscovery: the hosts that the test names."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = hosts
        self.error: Exception | None = None
        self.asked = 0

    async def find_hosts(self) -> tuple[Host, ...]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.hosts

    async def wait_change(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """None."""
        return ()

    def remark(self) -> str:
        return ""


class FakeConsole:
    """See Console: keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.live = False
        self.fail_at = ""  # raises where a text holds this

    def _say(self, text: str) -> None:
        self.said.append(text)
        if self.fail_at and self.fail_at in text:
            raise ValueError("a bug of the console")

    line = detail = warning = error = _say

    def status(self, text: str, figures: Sequence[str] = ()) -> None:
        """The present."""
        self._say(text)

    def look(self) -> None:
        """There are no tracebacks to let go of."""

    def worker_ended(self, label: str, *, has_failed: bool) -> str:
        return ""

    def shows(self, lines: Sequence[str]) -> bool:
        return False

    def summary(self, summary: Any, *, exit_code: int, message: str) -> None:
        self._say(f"summary: {message}")


class Job:
    """A driver among fakes, to be used on a running loop."""

    def __init__(
        self,
        folder: Path,
        *hosts: Host,
        clock: JobClock | None = None,
        dialect: Dialect = OURS,
        disk: Disk | None = None,
        before: Recorded | None = None,
        **settings: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            loop.set_default_executor(AtOnce())
            clock = clock or JobClock(loop.time)
        self.world = FakeWorld()
        self.discovery = FakeSource(*hosts)
        self.console = FakeConsole()
        self.events = folder / "events.jsonl"
        self.log = EventLog(self.events)
        slots = sum(host.slots for host in hosts)
        values = {
            "command": ("true",),
            "num_proc": slots,
            "min_num_proc": 1,
            "hosts": hosts,
            "elastic": True,
        } | settings
        self.driver = driver_of(
            Settings(**values),
            self.world.fleet,
            self.discovery,
            Chronicle(self.log, Narrator(self.console)),  # type: ignore[arg-type]
            dialect=dialect,
            clock=clock,
            disk=disk,
            before=before,
        )
        self._running = loop.create_task(self.driver.run())
        self._questions = 0

    async def dies(self) -> State:
        """The driver is no more, and its agents do nothing from now on. Returns what its journal would say."""
        state = self.driver.stepper.state
        for host in self.world.hosts.values():
            host.stalls()
        self.driver.abandon("it dies")
        await self.end()
        return state

    async def end(self) -> int:
        """Blocks until the job has ended."""
        async with asyncio.timeout(None if isinstance(self._running.get_loop(), VirtualLoop) else PATIENCE_S):
            code = await self._running
        self.log.close()
        return code

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Blocks until it holds; looked at whenever the loop has worked, and less often when that takes real time."""
        end = time.monotonic() + PATIENCE_S
        takes_time = not isinstance(self._running.get_loop(), VirtualLoop)
        for looks in itertools.count():
            if condition():
                return
            assert not self._running.done(), f"{what}; but the job has ended: {self.text()}"
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.002 if takes_time and looks > 1000 else 0)
        raise AssertionError(f"not seen: {what}; {self.text()}")

    # --- what workers do -------------------------------------------------------------------------------------------

    async def started(self, count: int) -> list[WorkerId]:
        await self.until(lambda: len(self.world.started) >= count, f"{count} workers started")
        return list(self.world.started)

    def living(self) -> list[WorkerId]:
        return self.world.living()

    def exits(self, worker: WorkerId, exit_code: int) -> None:
        """The worker's process ends."""
        self.world.started[worker].end(exit_code)

    def ready(
        self, worker: WorkerId, *, after: int = 0, commits: int = 0, cause: ReadyCause = ReadyCause.START
    ) -> asyncio.Future[NextRoundReply]:
        """The worker asks for its round, as its agent passes it on."""
        request = NextRoundRequest(worker, after, commits, cause, "", (Backend.NATIVE,), 0)
        return self.world.hosts[worker.hostname].ask(request)

    def running(self, worker: WorkerId, round_id: int, commits: int = 0) -> None:
        """The worker trains."""
        self._say(worker, words.Running(RunningReport(worker, round_id, commits)))

    def lives(self, worker: WorkerId) -> None:
        """The worker's agent has heard it."""
        self._say(worker, words.Heard({worker.key: (0, True)}, [], []))

    def sees(self, worker: WorkerId, vitals: Vitals) -> None:
        """The worker's agent has looked at it."""
        self._say(worker, words.VitalsSeen({worker.key: vitals}))

    def leaves(self, worker: WorkerId, why: str) -> None:
        """The worker was sent a signal, and asks to leave."""
        self._questions += 1
        body = LeaveRequest(worker, why).to_json()
        self._say(worker, words.Ask(self._questions, worker.key, "leave", [], body))

    def _say(self, worker: WorkerId, message: AgentMessage) -> None:
        self.world.hosts[worker.hostname].say(message)

    async def train(self, count: int) -> list[WorkerId]:
        """Has that many workers come to their first round and train."""
        workers = await self.started(count)
        answers = [self.ready(worker) for worker in workers]
        await self.until(lambda: all(answer.done() for answer in answers), "the first round")
        for worker in workers:
            self.running(worker, 1)
        return workers

    # --- what people do --------------------------------------------------------------------------------------------

    def interrupt(self, number: signal.Signals) -> None:
        """The driver is sent a signal."""
        self.driver.interrupts.interrupt(number)

    async def drain(self, host: Host | str, *, undo: bool = False) -> None:
        """An operator drains a host."""
        await self.driver.rounds.drain(DrainHostRequest(host if isinstance(host, str) else host.name, undo=undo))

    def status(self) -> dict[str, Any]:
        return self.driver.status.document()

    # --- what is told ----------------------------------------------------------------------------------------------

    def text(self) -> str:
        return "\n".join(self.console.said)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        if self.log._writer is not None:
            written = threading.Event()
            self.log._writer.put(written.set)
            assert written.wait(PATIENCE_S)
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]


def driver_of(
    settings: Settings,
    fleet: FakeFleet,
    source: Any,
    chronicle: Chronicle,
    *,
    dialect: Dialect = OURS,
    clock: JobClock | None = None,
    disk: Disk | None = None,
    before: Recorded | None = None,
) -> ElasticDriver:
    """A driver of such a fleet; its hosts are listed by this source, and its journal is on this disk."""
    return build(
        settings,
        discovery=FleetDiscovery(source, fleet.fleet),
        chronicle=chronicle,
        dialect=dialect,
        job=job_of(settings, "fake"),
        agents=fleet.side(),
        tally=Tally(),
        clock=clock,
        journal=disk,  # type: ignore[arg-type]
        before=before,
    )
