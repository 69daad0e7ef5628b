"""The keeper of the job's workers: sends orders to their hosts' agents, and tracks each process.

Owns each worker from the order to start it until nothing is left of it: one record, which only the keeper writes. Knows
nothing of rounds and of the server, and leaves a worker's environment to its dialect. Decides nothing: the core decides
which workers are started and stopped, and what a death means. The fleet knows which agent is whose, and that it is lost
(:mod:`elastic_driver.launch.fleet.fleet`); the other end is :mod:`elastic_driver.launch.agent.workers`.

Messages of one link arrive in order. Once Start is on it, Stop, Kill and Labels may follow at once: the agent keeps
them until the process exists. So only earlier orders are kept here.

Used on the event loop only. No order blocks, except for the last one (:meth:`Workers.stop_all`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_driver.core.events import KillWorker, StartWorker
from elastic_driver.dialects.dialect import Dialect, JobAddress, Meeting, WorkerStart
from elastic_driver.errors import LaunchError, RendezvousProtocolError
from elastic_driver.hosts import CHIEF, Host, SlotInfo, WorkerId
from elastic_driver.launch.fleet.addresses import Addresses, Agents
from elastic_driver.launch.fleet.changes import Changes
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.meetings import Meetings
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.fleet.warming import Warming
from elastic_driver.launch.fleet.worker import Phase, Variables, Worker, WorkerListener, note_last_words
from elastic_driver.launch.words import CommandNotFoundError, ExitStatus, OutputSink, Stream
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Dying,
    Exited,
    Finished,
    InputTaken,
    Interrupted,
    Kill,
    KillAll,
    Labels,
    Levels,
    NotStarted,
    Output,
    PassOn,
    Redrawn,
    Shown,
    Spared,
    Start,
    Started,
    Stop,
    WorkerLevel,
    WorkerPhase,
    worker_named,
)
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Bar, Ending

# Between the signal that makes a hung worker print its stacks and the one that ends it.
_LAST_WORDS_S = 2.0
# Grace for workers whose peers are lost: time for exit handlers, since the connections are shut down.
BROKEN_S = 0.2


class Hosts(Agents, Protocol):
    """What the keeper needs of the fleet."""

    @property
    def changes(self) -> Changes:
        """Changes of the agents: one has connected, is lost, or has reconnected."""

    def idle(self, link: AgentLink) -> None:
        """Called when the last worker of this agent has ended."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts around a job's workers.

    Attributes:
        agents: start the workers.
        addresses: of their hosts.
        meetings: where workers started together meet.
        warming: of their hosts.
        variables: selects the variables to send.
        sink: receives their output.
        stdin: the driver's standard input.
        tasks: runs background tasks; an error in one ends the job.
    """

    agents: Hosts
    addresses: Addresses
    meetings: Meetings
    warming: Warming
    variables: Variables
    sink: OutputSink
    stdin: StandardInput
    tasks: Tasks


class Workers:
    """The workers of the job. Used on the event loop only.

    Args:
        around: the parts around them.
        dialect: of the workers.
        command: the command that each of them runs.
        grace_s: between SIGTERM and SIGKILL, seconds.
        drain_s: the same for a worker that may checkpoint first, since the change is planned, seconds.
        listener: notified of starts and ends.
    """

    def __init__(
        self,
        around: WorkerContext,
        dialect: Dialect,
        *,
        command: Sequence[str],
        grace_s: float,
        drain_s: float,
        listener: WorkerListener,
    ) -> None:
        self._around = around
        self._agents = around.agents
        self._dialect = dialect
        self._command = command
        self._grace_s = {Ending.USUAL: grace_s, Ending.PLANNED: drain_s, Ending.BROKEN: min(BROKEN_S, grace_s)}
        self._listener = listener
        self._workers: dict[WorkerId, Worker] = {}
        self._of: dict[str, set[WorkerId]] = {}  # by agent: those that it was ordered to start
        self._unable: set[str] = set()  # agents on whose host the command cannot be run
        self._ending: set[WorkerId] = set()  # at the job's end: those that were alive then
        self._have_ended = asyncio.Event()
        self._job_ends = False
        self._end_signal = signal.SIGTERM

    @property
    def living(self) -> Mapping[WorkerId, Worker]:
        """Workers whose processes run now. A chief is not one of them."""
        return {
            worker: one for worker, one in self._workers.items() if one.phase is Phase.RUNS and worker.hostname != CHIEF
        }

    def pid(self, worker: WorkerId) -> int | None:
        """Return its PID; None if it is not running."""
        one = self._workers.get(worker)
        return one.pid if one is not None and one.phase is Phase.RUNS else None

    def has_workers(self, link: AgentLink) -> bool:
        """Return whether an agent has workers that run or are being started."""
        return bool(self._of.get(link.agent))

    # --- starts ----------------------------------------------------------------------------------------------------

    def start(
        self, order: StartWorker, job: JobAddress, round_id: int, resets: int = 0, *, restarted: bool = False
    ) -> None:
        """Start a worker of this job, while this round runs (0 if none does), after so many unplanned resets.

        Args:
            order: the worker and its place. No other start has had its name.
            job: where the driver is.
            round_id, resets, restarted: see WorkerStart.
        """
        if self._job_ends:
            return
        worker = order.worker
        link = self._agents.link_of(worker.hostname)
        if link is not None and link.is_away:
            self.expect((worker,))  # ordered again if its agent has not received the order
            return
        assert worker not in self._workers, worker
        # Not all of them: each start would cost as much as the job has hosts.
        some = list(dict.fromkeys((worker.hostname, *order.hosts[:1], *order.hosts[-1:])))
        start = WorkerStart(
            worker,
            order.planned,
            order.hosts,
            round_id,
            self._cores(worker.hostname),
            resets,
            restarted=restarted,
            address=self._around.addresses.of(some)[worker.hostname],
            parameter_server=order.parameter_server,
        )
        meeting = self._around.meetings.of(round_id, order.hosts) if order.hosts else None
        rank = order.planned.rank if order.parameter_server is None else -1
        one = self._workers[worker] = Worker(worker, rank, _label_of(order))
        self._around.tasks.start(self._start(one, start, job, meeting))

    def sample(self, host: Host, job: JobAddress) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the command of restarted workers, and the environment of one on this host, except for its place."""
        planned = SlotInfo(0, host.slots, 0, host.slots, 0, 1)
        cores = self._cores(host.name)
        start = WorkerStart(WorkerId(host.name, 0, 0), planned, (host.name,), 0, cores, restarted=True)
        return self._command, self._dialect.environment(start, job=job)

    def _cores(self, hostname: str) -> int:
        """Return how many processors its workers may use together; 1 without an agent: they will not start."""
        link = self._agents.link_of(hostname)
        return 1 if link is None else link.facts.hello.cores

    async def _start(
        self, one: Worker, start: WorkerStart, job: JobAddress, meeting: asyncio.Future[Meeting | LaunchError] | None
    ) -> None:
        try:
            if meeting is not None:
                start = replace(start, meeting=_met(start, await asyncio.shield(meeting)))
            link = await self._agent_for(one.id)
            if not self._job_ends:
                self._order(one, link, start, job)
        except LaunchError as error:
            if not self._job_ends:
                self._not_started(one, error)

    async def _agent_for(self, worker: WorkerId) -> AgentLink:
        """Return the agent of a worker's host, once it is connected.

        An agent without a connection is back in a moment, or lost, and another may have joined under the host's name.
        An order to a lost agent would fail, and the host would be blamed for that.
        """
        while True:
            seen = self._agents.changes.count
            link = self._agents.link_of(worker.hostname)
            if link is None:
                raise LaunchError(f"cannot start worker {worker}: its host no longer has an agent")
            if link.connected:
                return link
            await self._agents.changes.wait(seen)

    def _order(self, one: Worker, link: AgentLink, start: WorkerStart, job: JobAddress) -> None:
        """Order its agent to start a worker, and send the orders given meanwhile."""
        links = self._agents.links()
        if len(links) > 1:
            self._agents.address_of(link, links)  # raises for a host without an address, which the others could not use
        env = self._around.variables(link.facts, self._dialect.environment(start, job=job))
        order = Start(one.id.key, list(self._command), env, one.label, one.rank)
        self._around.warming.has_workers(link)
        self._send_start(one, link, self._around.stdin.given_by(order, one.id, link))

    def _send_start(self, one: Worker, link: AgentLink, order: Start) -> None:
        link.send(order)
        one.link, one.phase, one.has_input = link, Phase.ORDERED, bool(order.stdin)
        self._of.setdefault(link.agent, set()).add(one.id)
        self._is_ordered(one, link)
        if one.stop is not None:
            self._stop(one, one.stop)

    @staticmethod
    def _is_ordered(one: Worker, link: AgentLink) -> None:
        link.overdue(f"start worker {one.id}", lambda: one.phase is not Phase.ORDERED)

    # --- from another driver ---------------------------------------------------------------------------------------

    def expect(self, workers: Iterable[WorkerId]) -> None:
        """Expect workers that may run: their agents report it when they come back, or are lost with them.

        Args:
            workers: none that is known already, each of a host whose agent is away.
        """
        for worker in workers:
            link = self._agents.link_of(worker.hostname)
            assert link is not None, worker
            assert link.is_away, worker
            assert worker not in self._workers, worker
            self._workers[worker] = Worker(worker, -1, "", Phase.AWAY, link)
            self._of.setdefault(link.agent, set()).add(worker)

    def back(self, link: AgentLink, levels: Levels, known: Container[WorkerId]) -> list[Worker]:
        """Take over what an agent that is back reports of its workers.

        Args:
            link: the agent.
            levels: its report.
            known: the workers that the job has. The end of any other has been handled.

        Returns:
            Those whose processes run.
        """
        before = self._of.pop(link.agent, set())
        for worker in before:
            del self._workers[worker]
        running = []
        for level in levels.workers:
            worker = worker_named(level.worker)
            phase = _phase_of(level, is_known=worker in known)
            one = self._workers[worker] = Worker(worker, level.rank, level.label, phase, link, level.pid)
            self._of.setdefault(link.agent, set()).add(worker)
            self._around.warming.has_workers(link)
            if level.phase is WorkerPhase.ORDERED:
                self._is_ordered(one, link)
            if phase is not Phase.ORDERED:  # it may send output
                self._around.sink.begin(worker, one.pid, one.rank, one.label)
            if level.phase is WorkerPhase.RUNS:
                running.append(one)
        for worker in sorted(before):
            if worker not in self._workers:
                self._is_gone(worker)
        return running

    # --- orders ----------------------------------------------------------------------------------------------------

    def stop(self, worker: WorkerId, ending: Ending = Ending.USUAL) -> None:
        """Send SIGTERM (or end_by's signal), then SIGKILL after the grace; to a starting worker once it exists."""
        one = self._workers.get(worker)
        if one is not None:
            self._stop(one, ending)

    def _stop(self, one: Worker, ending: Ending) -> None:
        if one.link is None:
            one.stop = min(one.stop or ending, ending, key=self._grace_s.__getitem__)
        elif one.phase in (Phase.ORDERED, Phase.RUNS):
            grace_s = self._grace_s[ending]
            one.link.send(Stop(one.id.key, grace_s, ending is Ending.BROKEN, int(self._end_signal)))
            one.link.overdue(
                f"stop worker {one.id} within {grace_s:g} s", lambda: one.phase is Phase.DEAD, takes_s=grace_s
            )

    def kill(self, order: KillWorker) -> None:
        """Send SIGKILL; a worker that hangs prints its threads' stacks first. The listener is notified of the outcome.

        Spares a worker that has ended, and one that is exiting after its script has ended. One that waits to be started
        is stopped as soon as its process exists.
        """
        one = self._workers.get(order.worker)
        if one is None or one.phase is Phase.DEAD:
            self._listener.spared(order)
            return
        if one.phase in (Phase.AWAY, Phase.ENDS):
            return  # ordered again when its agent is back; or its end is reported next
        if one.link is None:
            self._stop(one, Ending.USUAL)
        else:
            self._kill(one, one.link, order)
            if order.exits:
                return  # its agent reports the outcome
        self._listener.killed(order)

    def _kill(self, one: Worker, link: AgentLink, order: KillWorker) -> None:
        if order.exits or order.hangs:
            if one.kill is not None:
                return
            one.kill = order
        link.send(Kill(one.id.key, _LAST_WORDS_S if order.hangs else 0.0, order.exits))

        def is_done() -> bool:
            return one.phase is Phase.DEAD or (order.exits and one.kill is not order)

        link.overdue(f"kill worker {one.id}", is_done)

    def label(self, worker: WorkerId, label: str) -> None:
        """Set what stands in the prefix of its output from now on."""
        one = self._workers.get(worker)
        if one is not None and one.phase is not Phase.DEAD and label != one.label:
            one.label = label
            if one.link is not None:
                one.link.send(Labels({worker.key: label}))

    def pass_on(self, number: signal.Signals) -> None:
        """Send this signal to the process of each running worker, but not to its children.

        A signal that would end a process without a handler (all except SIGQUIT, which is meant to) is sent only to
        processes that handle it: a script may not have installed its handler yet.
        """
        for link in self._agents.links():
            link.send(PassOn(int(number)))

    def kill_all(self) -> None:
        """Send SIGKILL now to all that is left of all workers, including what dead ones have left behind."""
        for link in self._agents.links():
            link.send(KillAll())

    # --- the end of the job ----------------------------------------------------------------------------------------

    def end_by(self, number: signal.Signals) -> None:
        """End workers with this signal instead of SIGTERM from now on: it ends the job."""
        self._end_signal = number

    def job_ends(self) -> None:
        """Start no more workers; stop each one that is being started as soon as its process exists."""
        if self._job_ends:
            return
        self._job_ends = True
        for worker in tuple(self._workers.values()):
            if worker.link is None:
                self._forget(worker)
            elif worker.phase is Phase.ORDERED:
                self._stop(worker, Ending.USUAL)

    async def stop_all(self, limit_s: float) -> None:
        """Stop all workers. Blocks until nothing is left of those alive, or for ``limit_s`` seconds.

        What dead ones have left, perhaps with a long grace, ends with their agents.
        """
        self.job_ends()
        for worker in list(self._workers.values()):
            if worker.phase is Phase.RUNS:
                self._stop(worker, Ending.USUAL)
        self._ending = {worker.id for worker in self._workers.values() if worker.phase is not Phase.DEAD}
        if self._ending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._have_ended.wait()

    def abandon(self) -> None:
        """Leave the workers to another driver: their ends are no longer awaited."""
        self._have_ended.set()

    # --- events of the fleet (Part) --------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """Do nothing: starts that wait for an agent watch ``changes``."""

    def lost(self, link: AgentLink, why: str) -> None:
        """Report the workers of a lost agent as lost."""
        self._unable.discard(link.agent)
        there = [self._workers[worker] for worker in sorted(self._of.get(link.agent, ()))]
        lost = [one for one in there if one.phase in (Phase.RUNS, Phase.AWAY, Phase.ENDS)]
        ordered = [one for one in there if one.phase is Phase.ORDERED]
        for one in there:
            self._forget(one)
        for one in lost:
            self._is_killed(one)
        if lost:
            self._listener.lost(lost, why)
        for one in ordered:
            self._listener.not_started(one.id, LaunchError(f"cannot start worker {one.id}: {why}"))

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        """Handle a message of an agent about its workers' processes. Returns whether it was one.

        Raises:
            RendezvousProtocolError: it is invalid.
        """
        match message:
            case Output(key, stream, data):
                if one := self._record(link, key):
                    self._around.sink.write(one.id, "stderr" if stream == "stderr" else "stdout", data)
            case Redrawn(key, stream, label, is_line, data):
                if one := self._record(link, key):
                    of: Stream = "stderr" if stream == "stderr" else "stdout"
                    self._around.sink.bar(one.id, Bar(of, label, data, is_line))
            case Started(key):
                if (one := self._record(link, key)) and one.phase is Phase.ORDERED:
                    self._started(one, message)
            case NotStarted(key, error, bad_command):
                if (one := self._record(link, key)) and one.phase in (Phase.ORDERED, Phase.ENDS):
                    self._not_started(one, self._why_not(one, link, error, bad_command=bad_command))
            case Dying(key):
                if (one := self._record(link, key)) and one.phase in (Phase.RUNS, Phase.ENDS):
                    self._dying(one, message)
            case Exited(key, returncode):
                if (one := self._record(link, key)) and one.phase in (Phase.RUNS, Phase.ENDS):
                    note_last_words(one, message)
                    self._exited(one, ExitStatus(returncode, note=message.note))
            case Finished(key):
                if one := self._record(link, key):
                    self._finished(one)
            case Spared(key):
                if one := self._record(link, key):
                    self._spared(one)
            case InputTaken(key) | Shown(key) | Interrupted(key):
                if one := self._record(link, key):
                    self._around.stdin.take(one.id, message)
            case _:
                return False
        return True

    def _record(self, link: AgentLink, key: str) -> Worker | None:
        """Return a worker's record, if it is one of this agent's own; None otherwise."""
        one = self._workers.get(worker_named(key))
        return one if one is not None and one.link is link else None

    def _started(self, one: Worker, news: Started) -> None:
        one.phase, one.pid, one.script, one.digest = Phase.RUNS, news.pid, news.script, news.digest
        self._around.sink.begin(one.id, one.pid, one.rank, one.label)
        self._around.stdin.started(one.id)
        self._listener.started(one)

    def _why_not(self, one: Worker, link: AgentLink, error: str, *, bad_command: bool) -> LaunchError:
        if bad_command:
            # A file or folder may be missing on this host only: then it is the host's fault.
            self._unable.add(link.agent)
            if all(each.agent in self._unable for each in self._agents.links()):
                return CommandNotFoundError(error)
        return LaunchError(error)

    def _not_started(self, one: Worker, error: LaunchError) -> None:
        self._forget(one)
        self._listener.not_started(one.id, error)

    def _dying(self, one: Worker, news: Dying) -> None:
        self._around.stdin.gone(one.id)  # another may be started in its place at once
        note_last_words(one, news)
        if not one.is_dying:
            one.is_dying = True
            code = news.returncode
            self._listener.dying(one, news.how if code is None else ExitStatus(code, note=news.note))

    def _exited(self, one: Worker, status: ExitStatus) -> None:
        one.phase = Phase.DEAD
        self._around.stdin.gone(one.id)
        self._is_killed(one)
        self._listener.exited(one, status)

    def _is_killed(self, one: Worker) -> None:
        """Report that it was killed if its agent might have spared it."""
        order, one.kill = one.kill, None
        if order is not None and order.exits:
            self._listener.killed(order)

    def _finished(self, one: Worker) -> None:
        if one.phase is Phase.RUNS:
            raise RendezvousProtocolError(f"cannot finish worker {one.id}: it has not exited")
        if one.phase is Phase.DEAD:
            self._forget(one)
        elif one.phase is Phase.ENDS:
            self._forget(one)
            self._listener.lost((one,), "its exit status was lost with the driver")

    def _spared(self, one: Worker) -> None:
        order = one.kill
        if order is not None and order.exits and one.phase is Phase.RUNS:
            one.kill = None
            self._listener.spared(order)

    def _forget(self, one: Worker) -> None:
        """Drop its record: nothing is left of it."""
        del self._workers[one.id]
        one.phase = Phase.DEAD
        self._around.stdin.gone(one.id)
        self._around.sink.end(one.id)
        self._is_gone(one.id)
        if one.link is not None:
            there = self._of[one.link.agent]
            there.discard(one.id)
            if not there:
                del self._of[one.link.agent]
                if not one.link.is_lost:
                    self._agents.idle(one.link)

    def _is_gone(self, worker: WorkerId) -> None:
        if worker in self._ending:
            self._ending.discard(worker)
            if not self._ending:
                self._have_ended.set()


def _phase_of(level: WorkerLevel, *, is_known: bool) -> Phase:
    """Return a worker's phase according to its agent.

    If it has ended but the job still has it, its end will be reported as for any other.
    """
    match level.phase:
        case WorkerPhase.RUNS:
            return Phase.RUNS
        case WorkerPhase.ORDERED:
            return Phase.ORDERED
        case WorkerPhase.ENDED:
            return Phase.ENDS if is_known else Phase.DEAD


def _label_of(order: StartWorker) -> str:
    if order.parameter_server is not None:
        return f"ps{order.parameter_server}"
    return "standby" if order.standby else str(order.planned.rank)


def _met(start: WorkerStart, meeting: Meeting | LaunchError) -> Meeting | None:
    """Return where its generation meets; None if that failed on the host of another worker.

    Raises:
        LaunchError: it failed on this worker's host.
    """
    if isinstance(meeting, Meeting):
        return meeting
    if start.worker.hostname == start.hosts[0]:
        raise meeting
    return None  # the core ends the round together with the other host's workers
