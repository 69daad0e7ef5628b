"""Takeover of a job from another driver: from its journal, and the reports of its agents when they are back.

Owns which agents are waited for, and for how long. An agent that is back is like any other from then on, so everything
here comes before that: the driver learns what the agent knows, and sends it what it lacks
(:mod:`elastic_driver.core.redo`). Decides nothing about workers. Used on the event loop only.

An agent keeps its workers for as long as its driver's machine reports that there is no driver, and no longer than
``agent_timeout_s`` without such a report. So it has met this driver, or its lease is over, when that time and a margin
have passed since this driver began to listen (docs/decisions/0044, "While there is no driver"). An agent that is
stopped does not observe its lease, and its workers may train on, among themselves. On this machine it is killed then.
Otherwise, as long as no member of the current round is known to leave it, the driver waits for all of them, until no
agent waits for a driver any more.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic_driver.core.assignment import places_of
from elastic_driver.core.events import Command, GiveUpHost
from elastic_driver.core.redo import HostLevels, OlderStateError, redo, unknown
from elastic_driver.core.standing import JobActivity, standing_of
from elastic_driver.core.state import State, WorkerPhase, chief_of, record_of
from elastic_driver.driver.agent_requests import AgentRequests
from elastic_driver.driver.chief import TakeoverListener
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.hosts import CHIEF, WorkerId
from elastic_driver.launch.fleet.addresses import Addresses
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.kept import AgentKept, may_come_back
from elastic_driver.launch.fleet.link import AGAIN_S, MARGIN_S, AgentLink
from elastic_driver.launch.fleet.meetings import Meetings
from elastic_driver.launch.fleet.warming import Warming
from elastic_driver.launch.fleet.worker import Worker
from elastic_driver.launch.fleet.workers import Workers
from elastic_driver.rendezvous import agent_messages
from elastic_driver.rendezvous.agent_messages import Levels, worker_named
from elastic_driver.rendezvous.messages import Notice
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.happenings import TookOver
from elastic_driver.system.process_name import is_stopped, pid_in, send

_AWAY = "announced by the previous driver, which has died"
_UNKNOWN = "after the driver's absence, its agent does not know it"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long agents are waited for.

    Attributes:
        agent_timeout_s: as in Bootstrap.
        driver_timeout_s: how long agents wait for a driver.
    """

    agent_timeout_s: float
    driver_timeout_s: float


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the driver that take the reports of agents."""

    stepper: Stepper
    fleet: Fleet
    addresses: Addresses
    workers: Workers
    meetings: Meetings
    warming: Warming
    worker_events: TakeoverListener
    rounds: Rounds
    requests: AgentRequests
    chronicle: Chronicle


class _Known:
    """The workers of a state: not a set, which would be created anew for each of a thousand agents."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __contains__(self, worker: object) -> bool:
        is_one = isinstance(worker, WorkerId) and record_of(self._state, worker) is not None
        return is_one or (worker is not None and worker == chief_of(self._state))


class Takeover:
    """Takes over one job.

    Args:
        parts: those of the driver.
        agents: those of the previous driver, except for those that it has given up.
        limits: the limits of their return.
        epoch: that of this driver.
        away_s: how long there was no driver, at most.
        carry_out: carries out commands, as of a time.
        clock: the job's time.
        on_nobody: called when no agent has come back, and none will.
    """

    def __init__(
        self,
        parts: Parts,
        agents: Sequence[AgentKept],
        limits: Limits,
        *,
        epoch: int,
        away_s: float,
        carry_out: Callable[[Sequence[Command], float], None],
        clock: Callable[[], float],
        on_nobody: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._agents = {kept.agent: kept for kept in agents}
        self._limits = limits
        self._epoch = epoch
        self._away_s = away_s
        self._carry_out = carry_out
        self._clock = clock
        self._on_nobody = on_nobody
        self._is_done = False  # whether all agents are back or lost
        self._back = 0  # agents
        self._went_on: dict[WorkerId, int] = {}  # their workers, and the ids of their processes
        self._killed: set[str] = set()  # agents
        self._late: list[AgentLink] = []  # agents whose leases are over, and that may be stopped
        self._trained: frozenset[WorkerId] = frozenset()  # the members of the last round
        self._trained_on: frozenset[str] = frozenset()  # their hosts
        self._trains = False  # whether that round trained
        self._is_broken = False  # whether one of its members is known to leave it
        self._ranked: Sequence[WorkerId] = ()  # the members to whom these ranks belong
        self._ranks: Mapping[WorkerId, int] = {}

    # --- the start -------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Initialize all parts from the journal. To be called once, before anything can connect."""
        parts, state = self._parts, self._parts.stepper.state
        self._trained = frozenset(state.members)
        self._trained_on = frozenset(worker.hostname for worker in state.members)
        self._trains = standing_of(state).doing in (JobActivity.TRAINING, JobActivity.FINISHING)
        names = {record.worker.hostname for record in state.workers}
        names |= {worker.hostname for worker in state.members} | {host.name for host in state.hosts}
        if state.policy.has_chief:
            names.add(CHIEF)
        await parts.fleet.returning.expect(self, tuple(self._agents.values()), sorted(names))
        parts.fleet.resume(silence.hostname for silence in state.silent)
        parts.workers.expect(
            [worker for worker in self._processes(state) if parts.fleet.link_of(worker.hostname) is not None]
        )
        # A launched round of restarted workers begins when all of them run.
        has_begun = state.round is not None and state.launch is None
        if state.round_id and has_begun:
            parts.requests.begin_round(state.round_id)
        if state.round is not None and has_begun:
            hosts = sorted({worker.hostname for worker in state.members})
            parts.rounds.resume(state.round, places_of(state.members), parts.addresses.of(hosts))
            if state.notice_version:
                notice = Notice(state.notice_version, state.round_id, state.round.notice, _AWAY)
                parts.rounds.notify(notice)
                parts.requests.notify(notice)

    def listens(self) -> None:
        """Begin to wait, since agents can connect from now on. To be called once."""
        parts, state = self._parts, self._parts.stepper.state
        for link in parts.fleet.returning.away():
            self._wait_for(link)
        nowhere = [worker for worker in self._processes(state) if parts.fleet.link_of(worker.hostname) is None]
        self._lose(nowhere, "its agent was lost during the driver's absence")
        self._look_who_is_away()

    @staticmethod
    def _processes(state: State) -> list[WorkerId]:
        """Return all workers, and the chief."""
        chief = chief_of(state)
        return [*(record.worker for record in state.workers), *(() if chief is None else (chief,))]

    def _wait_for(self, link: AgentLink, waited_s: float = 0.0) -> None:
        """Wait until an agent's lease is over, or longer: see :meth:`_may_train_on`. Check one of this machine."""
        lease_s, last_s = self._limits.agent_timeout_s + MARGIN_S, self._limits.driver_timeout_s + MARGIN_S
        if not may_come_back(self._agents[link.agent]):
            # Its remaining processes end within that time, see docs/decisions/0009.
            link.wait_for_return(AGAIN_S, lambda: self._has_died(link))
            return
        rest_s = lease_s - waited_s
        if rest_s <= 0:
            rest_s = last_s - waited_s
            if rest_s <= 0 or not (self._kill_stopped(link) or self._may_train_on(link, rest_s)):
                self._lose_agent(link)
                return
        look_s = min(AGAIN_S, rest_s) if link.facts.local else rest_s
        link.wait_for_return(look_s, lambda: self._wait_for(link, waited_s + look_s))

    def _has_died(self, link: AgentLink) -> None:
        self._is_awaited_no_more(link)
        self._note_leaving(link)
        link.lose("its agent died during the driver's absence")

    def _kill_stopped(self, link: AgentLink) -> bool:
        """Kill an agent of this machine that is stopped. Return whether it has been killed, now or before.

        A slow one is not killed: its workers may have trained for long since their last commit.
        """
        owner = link.facts.hello.owner
        pid = pid_in(owner)
        if link.agent in self._killed:
            return True
        if not link.facts.local or pid is None or not is_stopped(pid) or not send(owner, signal.SIGKILL):
            return False
        self._killed.add(link.agent)
        self._parts.chronicle.warning(
            f"host {link.facts.host}: its agent is stopped and has not reconnected: killing it, and its workers with it"
        )
        return True

    # --- returning agents (Former) ---------------------------------------------------------------------------------

    def back(self, link: AgentLink, levels: Levels) -> None:
        """Take back an agent and its workers. See Former."""
        parts, state = self._parts, self._parts.stepper.state
        by_host = self._by_host(link, levels, state)
        try:
            commands = [command for each in by_host for command in redo(state, each)]
        except OlderStateError as error:
            parts.chronicle.warning(str(error))
            link.give_up(str(error))
            return
        given_up = next((command for command in commands if isinstance(command, GiveUpHost)), None)
        if given_up is not None:
            link.give_up(given_up.reason)
            return
        gone = [worker for each in by_host for worker in unknown(state, each)]
        known = _Known(state)
        running = parts.workers.back(link, levels, known)
        parts.fleet.returned(link, levels)
        parts.meetings.back(link, levels.held)
        if parts.fleet.names_of(link, self._trained_on):
            parts.warming.has_workers(link)  # its process had them, even if they have ended by now
        self._is_awaited_no_more(link)
        self._back += 1
        # They have seen it go. The journal only tells when it last wrote.
        self._away_s = min(self._away_s, levels.alone_s)
        for one in running:
            if one.id in known:
                self._goes_on(one, state)
        self._carry_out(commands, self._clock())
        self._tell_labels(state, [one.id for one in running])
        for worker in gone:
            record = record_of(state, worker)
            if record is not None and record.phase in (WorkerPhase.MEMBER, WorkerPhase.READY):
                parts.chronicle.warning(f"worker {worker} has ended, and its exit status is unknown: {_UNKNOWN}")
        self._lose(gone, _UNKNOWN)
        self._note_leaving(link)
        self._look_who_is_away()

    def gone(self, link: AgentLink) -> None:
        """Stop waiting for an agent. See Former."""
        self._is_awaited_no_more(link)
        self._look_who_is_away()

    def _is_awaited_no_more(self, link: AgentLink) -> None:
        if link in self._late:
            self._late.remove(link)

    def _by_host(self, link: AgentLink, levels: Levels, state: State) -> list[HostLevels]:
        """Group an agent's report by the names of its host: this machine may have several.

        Raises:
            RendezvousProtocolError: it speaks for workers of another agent.
        """
        there: dict[str, list[WorkerId]] = {link.facts.host: []}
        ended: dict[str, list[WorkerId]] = {}
        fleet = self._parts.fleet
        # Only this machine has more than one.
        for name in fleet.names_of(link, state.workers.by_host):
            if fleet.link_of(name) is link and name in state.workers.by_host:
                there.setdefault(name, [])
        chief = chief_of(state)
        if chief is not None and fleet.link_of(chief.hostname) is link:
            there.setdefault(chief.hostname, [])
        for silence in state.silent:
            if fleet.link_of(silence.hostname) is link:
                there.setdefault(silence.hostname, [])
        for level in levels.workers:
            worker = worker_named(level.worker)
            other = fleet.link_of(worker.hostname)
            # A name of this machine that is no longer listed, and has no worker, was not looked up.
            if other is not link and (other is not None or not link.facts.local):
                raise RendezvousProtocolError(f"this agent is not responsible for worker {worker}")
            there.setdefault(worker.hostname, [])
            has_ended = level.phase is agent_messages.WorkerPhase.ENDED
            (ended if has_ended else there).setdefault(worker.hostname, []).append(worker)
        return [
            HostLevels(name, tuple(there[name]), tuple(ended.get(name, ())), levels.round_id, levels.notice_version)
            for name in there
        ]

    def _goes_on(self, one: Worker, state: State) -> None:
        self._parts.worker_events.back(one)
        if one.id == chief_of(state):
            return  # not a worker
        self._went_on[one.id] = one.pid
        record = record_of(state, one.id)
        # Restarted workers never report anything: they are watched only for their ends.
        asks = state.policy.on_change.asks_for_rounds
        if asks and record is not None and record.phase in (WorkerPhase.MEMBER, WorkerPhase.READY):
            # From now on: a frozen worker does not report anything by itself.
            self._parts.rounds.heard(one.id, 0, waiting=True, leaving=False, exiting=False)

    def _tell_labels(self, state: State, workers: Sequence[WorkerId]) -> None:
        if state.members is not self._ranked:
            self._ranked = state.members
            self._ranks = {worker: rank for rank, worker in enumerate(state.members)}
        for worker in workers:
            if worker in self._ranks:
                self._parts.workers.label(worker, str(self._ranks[worker]))

    def _lose(self, workers: Sequence[WorkerId], why: str) -> None:
        """Report these workers to the core as lost, as with a host."""
        if workers and not self._parts.stepper.is_over:
            self._parts.worker_events.lost([Worker(worker, -1, "") for worker in workers], why)

    # --- agents that do not return ---------------------------------------------------------------------------------

    def _has_trained(self, link: AgentLink) -> bool:
        return any(self._parts.fleet.link_of(worker.hostname) is link for worker in self._trained)

    def _may_train_on(self, link: AgentLink, rest_s: float) -> bool:
        """Return whether its workers may train on: only if it is stopped; otherwise its lease is over.

        Args:
            link: an agent that is late.
            rest_s: how much longer an agent may wait for a driver.
        """
        if self._is_broken or not self._has_trained(link):
            return False
        if link not in self._late:
            self._late.append(link)
            self._parts.chronicle.warning(
                f"host {link.facts.host}: none of the round's agents has reconnected: its workers may still be "
                f"training with each other, so the driver waits for them for at most {rest_s:.0f} s"
            )
        return True

    def _note_leaving(self, link: AgentLink) -> None:
        """Note that members are back or dead, so that they leave their round: its collectives never complete.

        To be called while the agent has their host.
        """
        if self._is_broken or not self._has_trained(link):
            return
        self._is_broken = True
        for late in tuple(self._late):
            self._lose_agent(late)

    @staticmethod
    def _lose_agent(link: AgentLink) -> None:
        link.lose("its agent has not reconnected since the driver's absence")

    def _look_who_is_away(self) -> None:
        """Report the takeover once no agent is away any more."""
        parts = self._parts
        if self._is_done or parts.fleet.returning.away():
            return
        self._is_done = True
        parts.fleet.changes.report()
        if self._back:
            went_on, hosts = self._went_on, {worker.hostname for worker in self._went_on}
            parts.chronicle.took_over(
                TookOver(
                    self._epoch,
                    self._away_s,
                    len(went_on),
                    len(hosts),
                    parts.stepper.state.round_id,
                    # A round that was forming, or is over, does not train.
                    trained=self._trains and self._trained <= went_on.keys(),
                    pids=went_on,
                )
            )
        elif not parts.stepper.is_over:
            self._on_nobody()
