"""The launcher of a job on many hosts: has each host's agent start, stop and kill its workers.

See :class:`~elastic_driver.launch.launcher.Launcher`. Owns what is known of the workers of all agents. Which agent is
whose, and that it is lost, is the fleet's (:mod:`elastic_driver.launch.fleet.fleet`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.errors import LaunchError, RendezvousProtocolError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.fleet.worker import RemoteWorker
from elastic_driver.launch.launcher import CommandNotFoundError, OutputSink, Stream
from elastic_driver.rendezvous.agent_messages import (
    Dying,
    Exited,
    Finished,
    HoldPort,
    InputTaken,
    Interrupted,
    KillAll,
    LetGo,
    NotStarted,
    Output,
    PassOn,
    PortHeld,
    Prepare,
    Prepared,
    Said,
    Shown,
    Spared,
    Start,
    Started,
    Stop,
    Warmed,
    WarmUp,
    Warning,
    worker_named,
)

LOOPBACK = "127.0.0.1"
# Between two looks at whether an agent is connected again.
_LOOK_S = 0.05


class Agents(Protocol):
    """What the launcher needs of the fleet."""

    def link_of(self, hostname: str) -> AgentLink | None:
        """The agent of a host; None when there is none now."""

    def links(self) -> Sequence[AgentLink]:
        """All agents that are not lost."""

    def address_of(self, link: AgentLink, others: Sequence[AgentLink]) -> str:
        """Where the workers of this agent listen for those of the others.

        Raises:
            LaunchError: its host has no such address.
        """

    def idle(self, link: AgentLink) -> None:
        """The last worker of this agent has ended."""

    def prepared(self, link: AgentLink) -> None:
        """Its host has imported what workers import."""

    async def close(self) -> None:
        """Ends all agents. Blocks until they have ended."""


@dataclass(frozen=True, slots=True)
class _Start:
    """A worker that an agent was told to start."""

    link: AgentLink
    label: str
    rank: int
    future: asyncio.Future[RemoteWorker]


class AgentLauncher:
    """See above.

    Args:
        agents: of the job.
        sink: takes the workers' output.
        on_warm: called with a host's name, a process id and seconds whenever workers can be forked there from now on.
        warn: takes one-line reports of what went wrong and does not end the job.
        abroad: what of a worker's variables it gets on another machine than the driver's.
        ports: first and last port that may be held for workers; None for any.
        here: what it gets of them on the driver's.
        stdin: whose the driver's standard input is; None for nobody's.
    """

    def __init__(
        self,
        agents: Agents,
        sink: OutputSink,
        *,
        on_warm: Callable[[int, float], None],
        warn: Callable[[str], None],
        abroad: Callable[[Mapping[str, str]], dict[str, str]] = dict,
        ports: tuple[int, int] | None = None,
        here: Callable[[Mapping[str, str]], dict[str, str]] = dict,
        stdin: StandardInput | None = None,
    ) -> None:
        self._stdin = StandardInput(None, None) if stdin is None else stdin
        self._abroad, self._here = abroad, here
        self._ports = list(ports or ())
        self._holding: dict[tuple[str, int], asyncio.Future[int]] = {}  # by agent and generation
        self._agents = agents
        self._sink = sink
        self._on_warm = on_warm
        self._warn = warn
        self._workers: dict[WorkerId, RemoteWorker] = {}
        self._starting: dict[WorkerId, _Start] = {}
        self._of: dict[str, set[WorkerId]] = {}  # by agent: who runs there, or is being started
        self._unable: set[str] = set()  # agents on whose host the command cannot be run
        self._warming = False
        self._prepared: dict[str, bool] = {}  # by agent: whether what its workers import is there, or is to be imported
        self._closing = False

    def cores(self, hostname: str) -> int:
        """See Launcher. 1 for a host that has no agent any more: its workers will not start."""
        link = self._agents.link_of(hostname)
        return 1 if link is None else link.facts.hello.cores

    def addresses(self, hostnames: Sequence[str]) -> Mapping[str, str]:
        """See Launcher: loopback while all are on one machine."""
        links = {name: self._agents.link_of(name) for name in hostnames}
        distinct = list({id(link): link for link in links.values() if link is not None}.values())
        if len(distinct) < 2:
            return dict.fromkeys(hostnames, LOOPBACK)
        return {name: LOOPBACK if link is None else self._address(link, distinct) for name, link in links.items()}

    def _address(self, link: AgentLink, others: Sequence[AgentLink]) -> str:
        try:
            return self._agents.address_of(link, others)
        except LaunchError as error:
            # It was alone when its workers were started. They will find out; the job must not end of it.
            self._warn(str(error))
            return link.facts.peer or LOOPBACK

    def address_for_all(self, hostname: str) -> str:
        """Where a host is reached by all others that are there, or may come; of the driver's own machine for "".

        Loopback where the host has no other address: then no other can come.

        Raises:
            LaunchError: the host has no agent any more.
        """
        links = self._agents.links()
        link = self._agents.link_of(hostname) if hostname else next((one for one in links if one.facts.local), None)
        if link is None and hostname:
            raise LaunchError(f"host {hostname} has no agent any more")
        if link is None:  # the driver's machine is none of the job's: others have come to it by this
            return next((one.facts.ours for one in links), LOOPBACK)
        try:
            return self._agents.address_of(link, links)
        except LaunchError:
            if any(not one.facts.local for one in links):
                raise
            return LOOPBACK

    async def hold_port(self, hostname: str, generation: int) -> int:
        """See Launcher.

        Raises:
            LaunchError: the host has no agent any more, or no port.
        """
        link = self._agents.link_of(hostname)
        if link is None:
            raise LaunchError(f"cannot hold a port for rank 0: host {hostname} has no agent any more")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        key = link.agent, generation
        self._holding[key] = future
        link.send(HoldPort(generation, self._ports))
        link.overdue(f"hold a port for generation {generation}", future.done)
        try:
            return await future
        finally:
            self._holding.pop(key, None)

    def let_go(self, hostname: str, generation: int) -> None:
        """See Launcher."""
        link = self._agents.link_of(hostname)
        if link is not None:
            link.send(LetGo(generation))

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> RemoteWorker:
        """See Launcher.

        Raises:
            CommandNotFoundError: the command cannot be run, on none of the hosts that there are.
            LaunchError: the process could not be started, here, or its host has no agent any more.
        """
        link = await self._agent_for(worker)
        links = self._agents.links()
        if len(links) > 1:
            self._agents.address_of(link, links)  # a host without one is of no use to the others
        future: asyncio.Future[RemoteWorker] = asyncio.get_running_loop().create_future()
        self._starting[worker] = _Start(link, label, rank_at_launch, future)
        self._of.setdefault(link.agent, set()).add(worker)
        self._prepared.setdefault(link.agent, True)  # whoever has had workers is no newcomer
        order = Start(worker.key, list(command), self._variables(link, env), label, rank_at_launch)
        link.send(self._stdin.given_by(order, worker, link))
        link.overdue(f"start worker {worker}", future.done)
        try:
            return await future
        except asyncio.CancelledError:
            # Nobody takes the process any more, but it may come to be.
            link.send(Stop(worker.key, 0.0))
            raise

    def _variables(self, link: AgentLink, env: Mapping[str, str]) -> dict[str, str]:
        return self._here(env) if link.facts.local else self._abroad(env)

    def prepare(self, hostname: str, sample: Callable[[], tuple[Sequence[str], Mapping[str, str]]]) -> bool:
        """Has a host import what workers import, before any runs there; see the driver's Preparer."""
        link = self._agents.link_of(hostname)
        if link is None:
            return False
        if link.agent not in self._prepared:
            self._prepared[link.agent] = False
            command, env = sample()
            link.send(Prepare(list(command), self._variables(link, env)))
        return not self._prepared[link.agent]

    async def _agent_for(self, worker: WorkerId) -> AgentLink:
        """Return the agent of a worker's host, once it is connected.

        One without a connection is back in a moment, or lost, and another may have joined under the host's name. An
        order to a lost agent would fail, and the host would be blamed for that.
        """
        while True:
            if self._closing:
                raise LaunchError(f"cannot start worker {worker}: the job is ending")
            link = self._agents.link_of(worker.hostname)
            if link is None:
                raise LaunchError(f"cannot start worker {worker}: its host has no agent any more")
            if link.connected:
                return link
            await asyncio.sleep(_LOOK_S)

    def warm_up(self) -> None:
        """Has later workers forked from warmed processes. Not before the first ones run: it would slow them down."""
        if not self._warming:
            self._warming = True
            for link in self._agents.links():
                link.send(WarmUp())

    def pass_on(self, number: signal.Signals) -> None:
        """See Launcher."""
        for link in self._agents.links():
            link.send(PassOn(int(number)))

    def kill(self) -> None:
        """See Launcher."""
        for link in self._agents.links():
            link.send(KillAll())

    async def close(self) -> None:
        """See Launcher."""
        self._closing = True
        await self._agents.close()

    # --- what the fleet tells --------------------------------------------------------------------------------------

    def has_workers(self, link: AgentLink) -> bool:
        """Whether workers run there, or are being started."""
        return bool(self._of.get(link.agent))

    def came(self, link: AgentLink) -> None:
        """A host has an agent."""
        if self._warming:
            link.send(WarmUp())

    def lost(self, link: AgentLink, why: str) -> None:
        """An agent is lost, and its workers are with it."""
        for (agent, _), holding in tuple(self._holding.items()):
            if agent == link.agent and not holding.done():
                holding.set_exception(LaunchError(f"cannot hold a port for rank 0: {why}"))
        self._unable.discard(link.agent)
        self._prepared.pop(link.agent, None)
        for worker in sorted(self._of.pop(link.agent, ())):
            process = self._workers.pop(worker, None)
            starting = self._starting.pop(worker, None)
            self._sink.end(worker)
            self._stdin.gone(worker)
            if process is not None:
                process.lost(why)
            elif starting is not None and not starting.future.done():
                starting.future.set_exception(LaunchError(f"cannot start worker {worker}: {why}"))

    def take(self, link: AgentLink, message: Said) -> bool:
        """What an agent says of its workers' processes. Returns whether it was that."""
        match message:
            case Output(key, stream, data):
                worker = worker_named(key)
                if self._is_of(link, worker):
                    self._sink.write(worker, _stream(stream), data)
            case Started(key, pid):
                self._started(link, worker_named(key), pid)
            case NotStarted(key, error, bad_command):
                self._not_started(link, worker_named(key), error, bad_command=bad_command)
            case PortHeld(generation, port, error):
                self._port_held(link, generation, port, error)
            case Dying(key):
                if process := self._process(link, key):
                    self._stdin.gone(process.worker)  # another may be started in its place at once
                    process.is_dying(message)
            case Exited(key):
                if process := self._process(link, key):
                    self._stdin.gone(process.worker)
                    process.has_exited(message)
            case Finished(key):
                if process := self._process(link, key):
                    if not process.exited.done():
                        raise RendezvousProtocolError(f"worker {process.worker} cannot be finished: it has not exited")
                    process.has_finished()
                    self._gone(link, process.worker)
            case Spared(key):
                if process := self._process(link, key):
                    process.spared()
            case InputTaken(key) | Shown(key) | Interrupted(key):
                worker = worker_named(key)
                if self._is_of(link, worker):
                    self._stdin.take(worker, message)
            case Warmed(pid, took_s):
                self._on_warm(pid, took_s)
            case Prepared():
                self._prepared[link.agent] = True
                self._agents.prepared(link)
            case Warning(text):
                self._warn(text if link.facts.local else f"host {link.facts.host}: {text}")
            case _:
                return False
        return True

    def _is_of(self, link: AgentLink, worker: WorkerId) -> bool:
        return worker in self._of.get(link.agent, ())

    def _process(self, link: AgentLink, key: str) -> RemoteWorker | None:
        """An agent speaks for its own workers only."""
        worker = worker_named(key)
        return self._workers.get(worker) if self._is_of(link, worker) else None

    def _started(self, link: AgentLink, worker: WorkerId, pid: int) -> None:
        if worker not in self._starting or not self._is_of(link, worker):
            return
        start = self._starting.pop(worker)
        process = RemoteWorker(worker, pid, start.label, link)
        self._workers[worker] = process
        self._sink.begin(worker, pid, start.rank, start.label)
        self._stdin.started(worker)
        if not start.future.done():
            start.future.set_result(process)

    def _not_started(self, link: AgentLink, worker: WorkerId, error: str, *, bad_command: bool) -> None:
        if worker not in self._starting or not self._is_of(link, worker):
            return
        if bad_command:
            # A file or folder that is missing may be missing on this host only: then it is the host's fault.
            self._unable.add(link.agent)
        is_everywhere = bad_command and all(each.agent in self._unable for each in self._agents.links())
        future = self._starting.pop(worker).future
        if not future.done():
            future.set_exception((CommandNotFoundError if is_everywhere else LaunchError)(error))
        self._gone(link, worker)

    def _port_held(self, link: AgentLink, generation: int, port: int, error: str) -> None:
        holding = self._holding.get((link.agent, generation))
        if holding is None or holding.done():
            return
        if 0 < port < 1 << 16:
            holding.set_result(port)
        else:
            holding.set_exception(LaunchError(f"cannot hold a port for rank 0 on host {link.facts.host}: {error}"))

    def _gone(self, link: AgentLink, worker: WorkerId) -> None:
        if self._workers.pop(worker, None) is not None:
            self._sink.end(worker)
        self._stdin.gone(worker)
        of_link = self._of.get(link.agent, set())
        of_link.discard(worker)
        if not of_link:
            self._of.pop(link.agent, None)
            self._agents.idle(link)


def _stream(name: str) -> Stream:
    return "stderr" if name == "stderr" else "stdout"
