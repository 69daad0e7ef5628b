"""Agents as real processes, and the driver's end of their connections: what they say is kept, what they are told is
the test's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.admission import Admission, RefusedError
from elastic_driver.launch.fleet.link import AgentFacts, AgentLink
from elastic_driver.launch.fleet.tickets import Tickets
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Bootstrap,
    Bye,
    Close,
    Levels,
    Output,
    Start,
    Started,
)
from elastic_driver.rendezvous.channel import FrameConnection
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.system.keeping import Keeping
from tests.support.fakes.fleet_fakes import welcome_facts
from tests.support.paths import PROGRAMS
from tests.support.processes import forked
from tests.support.processes.carriers import carriers_of

_PROGRAM = PROGRAMS / "forked_agent_program.py"
PATIENCE_S = 150.0
JOIN_KEY = b"the key of whoever has the token"
A, B = WorkerId("a", 0, 0), WorkerId("a", 1, 0)
_T = TypeVar("_T", bound=AgentMessage)
_R = TypeVar("_R")


class FakeDriver:
    """A driver that takes agents in and does nothing of itself. Used on one event loop.

    Args:
        cwd: of the workers.
        agent_timeout_s: see Bootstrap.
        before: the driver that has had the job before, whose agents this one takes over.
        welcome_facts: others than the usual.
    """

    def __init__(
        self, cwd: Path, *, agent_timeout_s: float = 15.0, before: FakeDriver | None = None, **more: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        self.agent_timeout_s = agent_timeout_s
        self.before = before
        self.tickets = Tickets(loop.time, join_key=JOIN_KEY) if before is None else before.tickets
        self.welcome_facts = welcome_facts(
            **({"job_id": os.urandom(8).hex(), "cwd": str(cwd), "agent_timeout_s": agent_timeout_s} | more)
        )
        self.admission = Admission(self.tickets, self.welcome_facts, self)
        self.links: dict[str, AgentLink] = {}
        self.said: list[AgentMessage] = []
        self.lost: list[str] = []
        self.refuses = ""
        self.superseded_by: list[int] = []  # epochs that agents have obeyed
        self.keepings: tuple[Keeping, ...] = ()
        self.counts_from = -math.inf
        self.comes_of: Callable[[AgentMessage], object] = lambda message: None  # with each that it takes
        self.takes = 0  # connections on which an agent was welcomed
        self._news = asyncio.Event()
        # Of the job, however often it listens.
        self._certificate = OwnCertificate() if before is None else before._certificate
        self._server: RendezvousServer | None = None
        self.port = 0 if before is None else before.port

    async def listen(self) -> None:
        server = self._server = RendezvousServer(
            (),
            key_of=self.tickets.key_of,
            admits=lambda identity: self.tickets.key_of(identity) is not None,
            agents=self.admission.take_over,
            certificate=self._certificate,
        )
        self.port = await server.start("127.0.0.1", self.port)

    async def listen_here(self, listening: socket.socket) -> None:
        """Listens at a socket of this machine, too."""
        assert self._server is not None
        await self._server.start_local(listening)

    async def deafen(self) -> None:
        """Listens no more, and cuts what there is."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()
        for link in self.links.values():
            self.cut(link)
        self.admission.close()

    def successor(self, epoch: int, driver: str = "", **more: Any) -> FakeDriver:
        """A driver that takes the job over; it does not listen yet. Its agents come back to it."""
        facts = dataclasses.asdict(self.welcome_facts) | {"epoch": epoch, "driver": driver or f"driver {epoch}"} | more
        return type(self)(Path(facts.pop("cwd")), before=self, **facts)

    def freeze(self, link: AgentLink) -> FrameConnection:
        """Says nothing more to it, and reads nothing, as a driver that is stopped. Returns the connection, which is
        left open.
        """
        connection = link._connection
        assert connection is not None
        self.pause(link)
        link._channel.detach()
        return connection

    def cut(self, link: AgentLink) -> None:
        if link._connection is not None:
            link._connection.abort("the test cuts it")

    def pause(self, link: AgentLink) -> None:
        """Reads nothing more of it, as a driver that is stopped."""
        assert link._connection is not None
        assert link._connection._transport is not None
        link._connection._transport.pause_reading()

    def resume(self, link: AgentLink) -> None:
        assert link._connection is not None
        assert link._connection._transport is not None
        link._connection._transport.resume_reading()

    def rubbish(self, link: AgentLink, data: bytes) -> None:
        assert link._connection is not None
        assert link._connection._transport is not None
        link._connection._transport.write(data)

    @property
    def link(self) -> AgentLink:
        return next(reversed(self.links.values()))

    # --- Host and LinkOwner ----------------------------------------------------------------------------------------

    def known(self, agent: str) -> AgentLink | None:
        link = self.links.get(agent)
        if link is None and self.before is not None and agent in self.before.links:
            link = self._made(self.before.links[agent].facts, is_away=True)
        return None if link is None or link.is_lost else link

    def arrives(self, facts: AgentFacts) -> AgentLink:
        if self.refuses:
            raise RefusedError(self.refuses)
        return self._made(facts, is_away=False)

    def _made(self, facts: AgentFacts, *, is_away: bool) -> AgentLink:
        timeout_s = self.agent_timeout_s
        link = AgentLink(facts, self, agent_timeout_s=timeout_s, host_timeout_s=5.0, is_away=is_away)
        self.links[link.agent] = link
        self._news.set()
        return link

    def superseded(self, epoch: int) -> None:
        self.superseded_by.append(epoch)
        self._news.set()

    def settled(self, link: AgentLink) -> None:
        self._news.set()

    def node_refused(self, why: str) -> None:
        """See Host."""

    def turned_away(self, host: str, why: str) -> None:
        """See Host."""

    def revoked(self, host: str, why: str) -> None:
        """See Host."""

    def warn(self, text: str) -> None:
        """See Host."""

    def take(self, link: AgentLink, message: AgentMessage) -> None:
        self.said.append(message)
        if isinstance(message, Levels):
            link.returned(message)
        self.comes_of(message)
        if isinstance(message, Bye):
            link.close("its agent has exited")
        self._news.set()

    def link_silent(self, link: AgentLink, silent_s: float) -> None:
        """See LinkOwner."""

    def link_heard(self, link: AgentLink) -> None:
        """See LinkOwner."""

    def link_back(self, link: AgentLink) -> None:
        """See LinkOwner."""

    def link_lost(self, link: AgentLink, why: str) -> None:
        self.lost.append(why)
        self._news.set()

    # --- for the tests ---------------------------------------------------------------------------------------------

    def tell(self, message: AgentMessage) -> None:
        self.link.send(message)

    def start(
        self, command: Sequence[str], worker: WorkerId = A, *, env: Mapping[str, str] = os.environ, label: str = "0"
    ) -> None:
        self.tell(Start(worker.key, list(command), dict(env), label, 0))

    def python(self, source: str, *arguments: str, worker: WorkerId = A) -> None:
        self.start([sys.executable, "-c", source, *arguments], worker)

    async def until(self, condition: Callable[[], _R], what: str) -> _R:
        """Blocks until it holds; looked at whenever something has come, and now and then."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (found := condition()):
                    self._news.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await self._news.wait()
                return found
        except TimeoutError:
            raise AssertionError(f"not seen: {what}; said: {self.said}; lost: {self.lost}") from None

    def of(self, kind: type[_T], worker: WorkerId | None = None) -> list[_T]:
        return [
            one
            for one in self.said
            if isinstance(one, kind) and (worker is None or getattr(one, "worker", None) == worker.key)
        ]

    async def hears(self, kind: type[_T], worker: WorkerId | None = None, *, nth: int = 1) -> _T:
        found = await self.until(lambda: self.of(kind, worker)[nth - 1 : nth], f"{nth} of {kind.name}")
        return found[0]

    async def runs(self, worker: WorkerId = A) -> psutil.Process:
        """Blocks until the worker's process is there."""
        return psutil.Process((await self.hears(Started, worker)).pid)

    def output(self, worker: WorkerId = A, stream: str = "stdout") -> bytes:
        return b"".join(one.blob for one in self.of(Output, worker) if one.stream == stream)

    async def writes(self, text: str, worker: WorkerId = A, stream: str = "stdout") -> None:
        await self.until(lambda: text.encode() in self.output(worker, stream), f"output {text!r}")

    def bootstrap(self, host: str = "a", **more: Any) -> Bootstrap:
        ticket = self.tickets.issue(host, PATIENCE_S)
        values = {
            "urls": (f"https://127.0.0.1:{self.port}",),
            "identity": str(ticket.identity),
            "key": ticket.key.hex(),
            "host": host,
            "agent_timeout_s": self.agent_timeout_s,
        } | more
        return Bootstrap(**values)

    def joiner(self, host: str = "a", slots: int = 2, **more: Any) -> Bootstrap:
        return self.bootstrap(host, **{"identity": "joiner", "key": JOIN_KEY.hex(), "slots": slots} | more)


class Agent:
    """An agent's process, forked from one that has imported what it needs.

    Attributes:
        popen: it.
        stderr: what it says.
    """

    def __init__(self, bootstrap: Bootstrap, runtime: Path) -> None:
        env = os.environ | {"XDG_RUNTIME_DIR": str(runtime)}
        stdin, given = os.pipe()
        stderr, said = os.pipe()
        self.popen: subprocess.Popen[bytes] | forked.ForkedProcess
        try:
            if forked.starts_afresh():
                command = [sys.executable, "-m", "elastic_driver.launch.agent"]
                self.popen = subprocess.Popen(command, stdin=stdin, stderr=said, env=env, start_new_session=True)
            else:
                self.popen = forked.start_driver([str(_PROGRAM)], env, 1, said, Path.cwd(), stdin=stdin)
        finally:
            os.close(stdin)
            os.close(said)
        self.stderr = open(stderr, "rb")  # noqa: SIM115 - closed with the agent
        with open(given, "wb") as file:
            file.write(bootstrap.to_json() + b"\n")

    async def ends(self) -> tuple[int, str]:
        """Its exit code and what it has said."""

        def wait() -> tuple[int, str]:
            with self.stderr:
                text = self.stderr.read().decode()
            return self.popen.wait(PATIENCE_S), text

        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.to_thread(wait)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self.stderr.close()


class Scene:
    """A driver, and agents that are gone at its end."""

    def __init__(self, folder: Path, driver: FakeDriver) -> None:
        self.folder = folder
        self.driver = driver
        self.agents: list[Agent] = []

    def agent(self, bootstrap: Bootstrap | None = None) -> Agent:
        self.agents.append(Agent(bootstrap or self.driver.bootstrap(), self.folder))
        return self.agents[-1]

    async def ready(self, bootstrap: Bootstrap | None = None) -> Agent:
        """An agent that the driver has taken in."""
        before = len(self.driver.links)
        one = self.agent(bootstrap)
        await self.driver.until(lambda: len(self.driver.links) > before or one.popen.poll() is not None, "an agent")
        assert one.popen.poll() is None, await one.ends()
        return one

    async def ends_well(self, agent: Agent) -> None:
        self.driver.tell(Close())
        assert await agent.ends() == (0, "")
        assert self.driver.of(Bye)


@contextlib.asynccontextmanager
async def scene(folder: Path, **options: Any) -> AsyncIterator[Scene]:
    """A driver that listens; afterwards nothing is left of it, of agents and of workers."""
    (folder / "work").mkdir(exist_ok=True)
    kind = options.pop("kind", FakeDriver)
    driver: FakeDriver = kind(options.pop("cwd", folder / "work"), **options)
    await driver.listen()
    one = Scene(folder, driver)
    try:
        yield one
    finally:
        await driver.deafen()
        for link in driver.links.values():
            link.close("the test is over")
        for agent in one.agents:
            agent.close()
        await gone(marked(driver.welcome_facts.job_id))


def marked(job_id: str) -> list[psutil.Process]:
    """All processes that carry the job's mark."""
    return carriers_of("ELASTIC_DRIVER_MARK", lambda mark: mark.partition("-")[0] == job_id)


async def gone(processes: Sequence[psutil.Process]) -> None:
    """Blocks until these are dead."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE_S)
    assert [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def act(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
