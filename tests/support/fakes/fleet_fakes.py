"""A fleet with nothing real around it: agents that are connections without a network, diallers that the test answers
for, and whoever is told, who only keeps it. On the test's own time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic_driver.core.events import KillWorker, StartWorker
from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.driver.agents import AgentSide, DriverAddresses
from elastic_driver.errors import LaunchError, SettingsError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.journal.entries import Facts
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.fleet.addresses import Addresses
from elastic_driver.launch.fleet.admission import Admission, WelcomeFacts
from elastic_driver.launch.fleet.dialling import AgentReach
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.kept import NOTHING, FleetFact, Keeper
from elastic_driver.launch.fleet.link import AgentFacts, AgentLink
from elastic_driver.launch.fleet.meetings import Meetings
from elastic_driver.launch.fleet.network_check import Checked, NetworkCheck
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.fleet.tickets import Ticket, Tickets, User
from elastic_driver.launch.fleet.warming import Warming
from elastic_driver.launch.fleet.worker import Worker
from elastic_driver.launch.fleet.workers import WorkerContext, Workers
from elastic_driver.launch.words import ExitStatus, Stream
from elastic_driver.rendezvous.agent_messages import PROTOCOL, AgentMessage, Bootstrap, Bye, Close, Hello, decoded
from elastic_driver.rendezvous.channel import FrameConnection
from elastic_driver.rendezvous.credentials import Identity, JobKey, Role
from elastic_driver.rendezvous.frames import Frame, FrameReader, Message, pack_frame
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.system.tasks import Tasks
from elastic_driver.version import __version__
from elastic_driver.words import Bar, OnChange
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

AGENT_TIMEOUT_S = 15.0
HOST_TIMEOUT_S = 5.0
GRACE_S, DRAIN_S = 5.0, 60.0
JOB = JobAddress("http://127.0.0.1:1", JobKey.new(), "j")
_T = TypeVar("_T", bound=AgentMessage)
_KEY = bytes(32)


def hello(**more: Any) -> Hello:
    """The first words of an agent."""
    values: dict[str, Any] = {
        "agent": secrets.token_hex(16),
        "protocol": PROTOCOL,
        "version": __version__,
        "resumes": False,
        "seen": 0,
        "key": _KEY.hex(),
        "host": "",
        "slots": 0,
        "machine": "machine",
        "boot_id": "",
        "cores": 4,
        "python": "Python",
        "pid": 1,
        "owner": "",
        "address": "10.0.0.1",
        "addresses": ["eth0 10.0.0.1/24"],
    }
    return Hello(**(values | more))


def facts(host: str, *, joined: bool = False, local: bool = False, peer: str = "10.0.0.1", **more: Any) -> AgentFacts:
    """Of an agent."""
    slots = 2 if joined else 0
    return AgentFacts(hello(**({"slots": slots} | more)), host, peer, "10.0.0.9", local=local, joined=joined)


class FakeTransport(asyncio.Transport):
    """What a connection writes into, and who is told of it."""

    def __init__(self, written: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._written = written
        self.reader = FrameReader()
        self.frames: list[Frame] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.frames += self.reader.feed(bytes(data))
        self._written()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class FakeConnection(FrameConnection):
    """A connection whose other end's kernel acknowledges, until it vanishes.

    Attributes:
        acknowledged_at: when it did so last, by the loop's clock; None for always.
        arrived_at: likewise, when something that was sent has arrived last.
    """

    acknowledged_at: float | None = None
    arrived_at: float | None = None

    @property
    def unacknowledged_s(self) -> float:
        return _since(self.acknowledged_at)

    def _look_at_arrivals(self, now: float) -> float:
        return _since(self.arrived_at)


def _since(at: float | None) -> float:
    return 0.0 if at is None else asyncio.get_running_loop().time() - at


class FakeAgent:
    """The other end of a link: keeps what it is told, says what the test says.

    Args:
        link: of the driver's side.
    """

    def __init__(self, link: AgentLink) -> None:
        self.link = link
        self.told: list[AgentMessage] = []
        self._last = 0
        self._seen = 0
        self.connect()

    def connect(self) -> None:
        """It dials in, for the first time or again."""
        self.transport = FakeTransport(self.written)
        self.connection = FakeConnection(
            on_frame=self.link.received,
            on_lost=lambda why: self.link.broken(self.connection, why),
        )
        self.connection.connection_made(self.transport)
        self.link.attach(self.connection, self._seen)

    def written(self) -> None:
        """Something was sent to it, which :meth:`heard` gives."""

    def hang_up(self) -> None:
        """Its connection ends."""
        self.connection.connection_lost(None)

    def vanishes(self) -> None:
        """From now on its machine acknowledges nothing."""
        self.connection.acknowledged_at = asyncio.get_running_loop().time()

    def hears_nothing(self) -> None:
        """From now on nothing arrives at its machine; what it sends does."""
        self.connection.arrived_at = asyncio.get_running_loop().time()

    def is_back(self) -> None:
        """Its machine acknowledges again."""
        self.connection.acknowledged_at = None

    def beat(self) -> None:
        """It says that it lives."""
        self.connection.data_received(pack_frame(0, self._seen, self._seen, []))

    def say(self, *messages: AgentMessage | Message) -> None:
        """It says this, in one frame."""
        self.heard()
        packed = [(each.message() if isinstance(each, AgentMessage) else each).pack() for each in messages]
        data = pack_frame(self._last + 1, self._seen, self._seen, packed)
        self._last += len(messages)
        self.connection.data_received(data)

    def heard(self) -> list[AgentMessage]:
        """All that it was told."""
        for frame in self.transport.frames:
            if frame.first:
                self.told += map(decoded, frame.messages)
                self._seen = frame.first + len(frame.messages) - 1
        self.transport.frames.clear()
        return self.told

    def of(self, kind: type[_T]) -> list[_T]:
        """What it was told of this kind."""
        return [each for each in self.heard() if isinstance(each, kind)]

    async def leaves(self) -> None:
        """It does as it is told: says goodbye."""
        await rest()
        assert self.of(Close)
        self.say(Bye())


class FakeDialled:
    """See Dialled."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[DialFailure] = asyncio.get_running_loop().create_future()
        self.closed = 0

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed += 1


@dataclass
class FakeDialler:
    """See Dialler. Keeps what it is asked.

    Attributes:
        dials: host and what its agent was given, in order.
        error: raised by the next dials.
        on_dial: called with each host, in the next turn of the loop.
        shows: whether others can read what agents are given.
    """

    shows: bool = False
    dials: list[tuple[str, Bootstrap]] = field(default_factory=list)
    dialled: list[FakeDialled] = field(default_factory=list)
    error: Exception | None = None
    on_dial: Callable[[str], None] = lambda host: None

    def shows_bootstrap(self, host: str) -> bool:
        return self.shows

    async def dial(self, host: str, bootstrap: Bootstrap) -> FakeDialled:
        await asyncio.sleep(0)
        self.dials.append((host, bootstrap))
        if self.error is not None:
            raise self.error
        self.dialled.append(FakeDialled())
        asyncio.get_running_loop().call_soon(self.on_dial, host)
        return self.dialled[-1]

    def hosts(self) -> list[str]:
        return [host for host, _ in self.dials]


class Listener:
    """A FleetListener that keeps what it is told."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.silent: list[tuple[str, bool]] = []
        self.heard: list[str] = []
        self.unready: list[tuple[str, DialFailure]] = []
        self.refused: list[str] = []
        self.warnings: list[str] = []
        self.leaves: list[tuple[str, str]] = []
        self.own_ends: list[tuple[str, float]] = []
        self.checks: list[Checked] = []
        self.left_out: set[str] = set()
        self.useless: list[str] = []
        self.errors: list[BaseException] = []
        self.superseded_by: list[int] = []

    def agent_came(self, facts: AgentFacts) -> None:
        self.came.append(facts.host)

    def agent_lost(self, facts: AgentFacts, why: str) -> None:
        self.lost.append((facts.host, why))

    def host_silent(self, host: str, silent_s: float, *, sure: bool) -> None:
        self.silent.append((host, sure))

    def host_heard(self, host: str) -> None:
        self.heard.append(host)

    def host_unready(self, host: str, failure: DialFailure) -> None:
        self.unready.append((host, failure))

    def node_refused(self, why: str) -> None:
        self.refused.append(why)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def network_checked(self, report: Checked) -> None:
        self.checks.append(report)

    def is_left_out(self, host: str) -> bool:
        return host in self.left_out

    def host_leaves(self, host: str, why: str, within_s: float | None) -> None:
        self.leaves.append((host, why))

    def own_machine_leaves(self, why: str, within_s: float) -> None:
        self.own_ends.append((why, within_s))

    def no_host_can_be_used(self, reasons: str) -> None:
        self.useless.append(reasons)

    def superseded(self, epoch: int) -> None:
        self.superseded_by.append(epoch)

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)


class Silent:
    """A Part with nothing to say."""

    def came(self, link: AgentLink) -> None:
        """Nothing."""

    def lost(self, link: AgentLink, why: str) -> None:
        """Nothing."""

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        return False


class Sink:
    """An OutputSink that keeps what comes."""

    def __init__(self) -> None:
        self.began: list[tuple[WorkerId, int, int]] = []
        self.written: list[tuple[WorkerId, Stream, bytes]] = []
        self.bars: list[tuple[WorkerId, Bar]] = []
        self.ended: list[WorkerId] = []

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        self.began.append((worker, pid, rank))

    def write(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        self.written.append((worker, stream, data))

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        self.bars.append((worker, bar))

    def end(self, worker: WorkerId) -> None:
        self.ended.append(worker)


class Stdin(StandardInput):
    """Nobody's, and keeps of whom it is told that they are there, and that they are gone."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.told: list[tuple[str, WorkerId]] = []

    def started(self, worker: WorkerId) -> None:
        self.told.append(("started", worker))

    def gone(self, worker: WorkerId) -> None:
        self.told.append(("gone", worker))


class Story:
    """What becomes of workers: keeps what it is told, and may have a bug.

    Attributes:
        told: what happened, to whom, and how.
        fails_at: raises at such a thing.
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, WorkerId, str]] = []
        self.fails_at = ""

    def of(self, worker: WorkerId) -> list[str]:
        """What happened to this one."""
        return [what for what, who, _ in self.told if who == worker]

    def _take(self, what: str, worker: WorkerId, how: object) -> None:
        self.told.append((what, worker, str(how)))
        if what == self.fails_at:
            raise ZeroDivisionError("a bug")

    def started(self, worker: Worker) -> None:
        self._take("started", worker.id, worker.pid)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        self._take("not started", worker, f"{type(error).__name__}: {error}")

    def dying(self, worker: Worker, status: ExitStatus | str) -> None:
        self._take("dying", worker.id, status)

    def exited(self, worker: Worker, status: ExitStatus) -> None:
        self._take("exited", worker.id, f"{status}; {' '.join(worker.last_lines)}".removesuffix("; "))

    def lost(self, workers: Sequence[Worker], why: str) -> None:
        for worker in workers:
            self._take("lost", worker.id, why)

    def killed(self, order: KillWorker) -> None:
        self._take("killed", order.worker, order.reason)

    def spared(self, order: KillWorker) -> None:
        self._take("spared", order.worker, order.reason)


class PlaceDialect:
    """A dialect whose workers are told their place in words; HERE is for those on the driver's machine."""

    on_change = OnChange.IN_PLACE

    def environment(self, start: WorkerStart, *, job: JobAddress) -> dict[str, str]:
        met = "" if start.meeting is None else f", at {start.meeting.address}:{start.meeting.port}"
        place = f"rank {start.planned.rank} of round {start.round_id} of job {job.job_id}, {start.cores} cores{met}"
        return {"HERE": "1", "PLACE": place}


class Dial:
    """An agent's end of one connection, on which both ends have proven themselves as the server has them do."""

    def __init__(self, admission: Admission, identity: Identity) -> None:
        self.connection: Any = admission.take_over(identity)
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)

    def says(self, word: AgentMessage | Message, *, first: int = 0) -> AgentMessage | None:
        """The answer to a word without a number."""
        message = word if isinstance(word, Message) else word.message()
        self.connection.data_received(pack_frame(first, 0, 0, [message.pack()]))
        return None if first else self.answer()

    def answer(self) -> AgentMessage | None:
        """What has come as the first word."""
        frame = next(iter(self.transport.frames), None)
        return None if frame is None else decoded(frame.messages[0])


class FakeFleet:
    """A Fleet and its Workers, with all that is around them.

    Args:
        local_names: mean this machine.
        requests: takes what workers say.
        no_address: hosts that have no address for the others.
        check: whether the network is checked before a host is used.
        own_host: the name of the driver's own machine in a job of nodes.
        dials: whether hosts are dialled; those elsewhere join by themselves where they are not.
        keeper: of what a later driver has to know.
        before: what the driver before has known.
    """

    def __init__(
        self,
        *,
        local_names: Sequence[str] = ("here",),
        requests: Any = None,
        no_address: Sequence[str] = (),
        check: bool = False,
        own_host: str = "",
        dials: bool = True,
        keeper: Keeper[FleetFact] = NOTHING,
        before: Facts | None = None,
    ) -> None:
        before = before or Facts()
        loop = asyncio.get_running_loop()
        self.local, self.remote = FakeDialler(), FakeDialler()
        self.listener, self.sink, self.tasks = Listener(), Sink(), Tasks()
        self.resolved: dict[str, Sequence[str]] = {}  # what names resolve to
        self.warnings: list[str] = []
        self.warmed: list[tuple[int, float]] = []
        self.tickets = Tickets(loop.time, join_key=b"join", keeper=keeper)
        self.tickets.take_over(before.agents.values(), before.tickets.values())

        async def fingerprint() -> str:
            return "f"

        async def urls(host: str) -> tuple[str, ...]:
            return (f"http://{host or 'loopback'}:1",)

        def address(facts: AgentFacts, route: str) -> str:
            if facts.host in no_address:
                raise SettingsError(f"host {facts.host} has no address")
            return route

        self.fleet = Fleet(
            tickets=self.tickets,
            reach=AgentReach(
                urls, AGENT_TIMEOUT_S, HOST_TIMEOUT_S, fingerprint=fingerprint, job="job", owner="owner", host=own_host
            ),
            local=self.local,
            remote=self.remote if dials else None,
            is_local=lambda name: name in local_names,
            addresses_of=lambda name: self.resolved.get(name, ()),
            address=address,
            tasks=self.tasks,
            check=NetworkCheck((100, 199), self.tasks, keeper=keeper, admitted=before.admitted) if check else None,
            keeper=keeper,
            clock=loop.time,
        )
        self.fleet.take_over(before.revoked.values(), before.leavers.values())
        self.addresses = Addresses(self.fleet, self.warnings.append)
        self.meetings = Meetings(self.fleet, self.addresses, None)
        self.warming = Warming(
            self.fleet,
            variables=_variables,
            on_warm=lambda pid, took_s: self.warmed.append((pid, took_s)),
            on_prepared=self.fleet.changes.report,
        )
        self.stdin, self.story = Stdin(), Story()
        self.workers = Workers(
            WorkerContext(
                self.fleet,
                self.addresses,
                self.meetings,
                self.warming,
                _variables,
                self.sink,
                self.stdin,
                self.tasks,
            ),
            PlaceDialect(),
            command=("train",),
            grace_s=GRACE_S,
            drain_s=DRAIN_S,
            listener=self.story,
        )
        self.fleet.serve(self.listener, self.workers, requests or Silent(), self.meetings, self.warming)

    async def order(self, *workers: WorkerId, hosts: Sequence[str] = (), round_id: int = 3) -> None:
        """These are to be started, to meet each other where hosts are named."""
        for worker in workers:
            self.workers.start(StartWorker(worker, SlotInfo(0, 1, 0, 1, 0, 1), hosts=tuple(hosts)), JOB, round_id)
        await rest()

    def side(self) -> AgentSide:
        """Of a driver."""
        return AgentSide(
            self.tickets,
            Admission(self.tickets, welcome_facts(), self.fleet),
            self.fleet,
            self.addresses,
            _variables,
            self.sink,
            self.stdin,
            DriverAddresses("127.0.0.1", addresses=tuple, certificate=OwnCertificate()),
            self.tasks,
            join_token="",
        )

    def arrives(
        self, host: str, *, ticket: bool = True, other_end: Callable[[AgentLink], FakeAgent] | None = None, **more: Any
    ) -> FakeAgent:
        """An agent dials in: with the newest ticket of this host, or by itself.

        Args:
            host: its host.
            ticket: whether it has one.
            other_end: makes its end of the link; a FakeAgent where it is None.
            more: what it says of itself.

        Raises:
            RefusedError: it cannot be taken in.
        """
        if ticket:
            dials = [each for name, each in (*self.local.dials, *self.remote.dials) if name == host]
            role, _, number = dials[-1].identity.partition(" ")
            user = User(secrets.token_hex(16), b"", "10.0.0.1", 1)
            taken = self.tickets.take(Identity(Role(role), number=number), user)
            assert isinstance(taken, Ticket), "the ticket is good for nothing"
        link = self.fleet.arrives(facts(host, joined=not ticket, **more))
        self.tickets.admit(link.agent, _KEY)
        agent = FakeAgent(link) if other_end is None else other_end(link)
        self.fleet.settled(link)
        return agent

    async def has(self, *hosts: str) -> list[FakeAgent]:
        """These are wanted, and have an agent."""
        await self.fleet.want(hosts)
        await rest()
        return [self.arrives(host) for host in hosts]

    async def close(self) -> None:
        """As at the end of a job."""
        await self.tasks.end()
        await self.fleet.close()


def _variables(facts: AgentFacts, env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name != "HERE" or facts.local}


async def rest(turns: int = 50) -> None:
    """Lets the loop do what there is to do, while no time passes."""
    for _ in range(turns):
        await asyncio.sleep(0)


class AtOnce(ThreadPoolExecutor):
    """Runs what would block at once: other threads know nothing of the test's time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def welcome_facts(**more: Any) -> WelcomeFacts:
    """What a fake driver tells its agents of its job."""
    facts = {
        "job_id": "fake",
        "poll_s": 0.0,
        "cwd": "/",
        "umask": -1,
        "warm": False,
        "preload": None,
        "prefix_timestamp": False,
        "agent_timeout_s": 15.0,
    }
    return WelcomeFacts(**(facts | more))


def on_fleet(main: Callable[[FakeFleet], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Runs a test on a fleet, which is ended afterwards."""

    async def run(loop: VirtualLoop) -> None:
        loop.set_default_executor(AtOnce())
        fleet = FakeFleet(**options)
        try:
            await main(fleet)
            assert fleet.listener.errors == []
        finally:
            await fleet.tasks.end()
            for link in fleet.fleet.links():
                link.close("the test is over")

    run_virtually(run)
