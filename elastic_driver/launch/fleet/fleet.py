"""The fleet: which hosts have an agent, and how every wanted host gets one.

Owns which hosts are wanted, and what follows when a host gets an agent, loses it, falls silent or is leaving. The
parts: the present agents (:mod:`~elastic_driver.launch.fleet.roster`), starting more
(:mod:`~elastic_driver.launch.fleet.dialling`), and the names of this machine
(:mod:`~elastic_driver.launch.fleet.names`). The core is only notified of hosts with an agent
(:mod:`elastic_driver.launch.fleet.discovery`), so a host that cannot be reached yet has not failed. Decides nothing
about workers. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from elastic_driver.errors import LaunchError, RendezvousProtocolError
from elastic_driver.hosts import Host
from elastic_driver.launch.dial.dialler import DialFailure, Dialler
from elastic_driver.launch.fleet.admission import RefusedError
from elastic_driver.launch.fleet.changes import Changes
from elastic_driver.launch.fleet.dialling import AgentReach, Dialling
from elastic_driver.launch.fleet.hosts_to_check import HostsToCheck
from elastic_driver.launch.fleet.kept import NOTHING, FleetFact, Keeper, LeaverKept, RevokedKept
from elastic_driver.launch.fleet.leavers import Leavers
from elastic_driver.launch.fleet.link import AgentFacts, AgentLink
from elastic_driver.launch.fleet.names import HostNames
from elastic_driver.launch.fleet.network_check import GATHER_S, LIMIT_S, Checked, NetworkCheck
from elastic_driver.launch.fleet.returning import Returning
from elastic_driver.launch.fleet.roster import Roster
from elastic_driver.launch.fleet.silences import Silences
from elastic_driver.launch.fleet.tickets import Tickets
from elastic_driver.rendezvous.agent_messages import AgentMessage, Bye, Close, Leaves, Levels, Warning
from elastic_driver.system.keeping import Keeping
from elastic_driver.system.tasks import Tasks

# How long an agent may take to end, beyond the time in which its workers die.
_CLOSE_S = 15.0


class FleetListener(Protocol):
    """Receives events of hosts. Called on the event loop."""

    def agent_came(self, facts: AgentFacts) -> None:
        """Called when a host has got an agent."""

    def agent_lost(self, facts: AgentFacts, why: str) -> None:
        """Called when a host's agent is lost, and its workers with it."""

    def host_unready(self, host: str, failure: DialFailure) -> None:
        """Called while a wanted host has no agent yet, once for each reason."""

    def warn(self, text: str) -> None:
        """Warn the user."""

    def node_refused(self, why: str) -> None:
        """Called when a node of a job of nodes has dialled in, but cannot be one of them."""

    def network_checked(self, report: Checked) -> None:
        """Called after a check of the network between hosts; barred hosts are also reported as unready."""

    def is_left_out(self, host: str) -> bool:
        """Return whether a host gets no workers for a while, since others' workers cannot reach it."""

    def host_silent(self, host: str, silent_s: float, *, sure: bool) -> None:
        """Called when nothing has been heard from a host's agent for so long, and its machine has acknowledged nothing.

        If it is not sure yet, another host is silent, and this one may be silent for the same reason.
        """

    def host_heard(self, host: str) -> None:
        """Called when a silent host is heard from again, or has another agent."""

    def host_leaves(self, host: str, why: str, within_s: float | None) -> None:
        """Called when a host's agent reports that the host is to be drained and, if known, when its machine is gone."""

    def own_machine_leaves(self, why: str, within_s: float) -> None:
        """Called when the driver's own machine is going away, and the driver with it."""

    def no_host_can_be_used(self, reasons: str) -> None:
        """Called when no host has an agent, and another try can help on none of the wanted ones."""

    def superseded(self, epoch: int) -> None:
        """Called when an agent obeys a driver of a higher epoch: this driver has lost the job."""

    def failed(self, error: BaseException) -> None:
        """Called when an internal error has occurred while a message of an agent was handled."""


class Part(Protocol):
    """A part of the driver that exchanges messages with agents about one subject."""

    def came(self, link: AgentLink) -> None:
        """Called when an agent has connected."""

    def lost(self, link: AgentLink, why: str) -> None:
        """Called when an agent is lost."""

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        """Handle a message of an agent. Returns whether it was of this subject.

        Raises:
            RendezvousProtocolError: it was, but is invalid. The agent's connection is cut.
        """


class Staff(Part, Protocol):
    """The part that makes agents start workers."""

    def has_workers(self, link: AgentLink) -> bool:
        """Return whether workers run there, or are being started."""


class Fleet:
    """The hosts with an agent, and the wanted ones that still lack one.

    Args:
        tickets: which agents may dial in.
        reach: how agents reach the driver.
        local, remote: start agents on this machine, and on others; None if those dial in by themselves.
        is_local: returns whether a name means this machine. May block.
        addresses_of: returns the addresses to which a name resolves. May block.
        address: returns where a host's workers listen, given its agent and its address by route. Raises SettingsError.
        tasks: runs background tasks.
        check: the network check before a host is used; None if there is none.
        keeper: persists the agents, and whatever else a later driver needs to know of them.
        clock: the job's time, seconds; None for that of the running loop.

    Attributes:
        changes: of the present hosts, and of the reasons why others are missing.
        keepings, counts_from: see LinkOwner; the former is to be set before any agent dials in.
        returning: the agents of an earlier driver that have to reconnect.
    """

    def __init__(
        self,
        *,
        tickets: Tickets,
        reach: AgentReach,
        local: Dialler,
        remote: Dialler | None,
        is_local: Callable[[str], bool],
        addresses_of: Callable[[str], Sequence[str]],
        address: Callable[[AgentFacts, str], str],
        tasks: Tasks,
        check: NetworkCheck | None = None,
        keeper: Keeper[FleetFact] = NOTHING,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._tickets = tickets
        self._reach = reach
        self._address = address
        self._check = check
        self._listener: FleetListener
        self._staff: Staff
        self._parts: Sequence[Part]
        self.changes = Changes()
        self.keepings: Sequence[Keeping] = ()
        self.counts_from = -math.inf
        self._names = HostNames(is_local)
        self._roster = Roster(self._names, reach.host, keeper)
        self._dialling = Dialling(
            tickets=tickets,
            reach=reach,
            names=self._names,
            local=local,
            remote=remote,
            changes=self.changes,
            tasks=tasks,
            listener=self,
            keeper=keeper,
        )
        self.returning = Returning(self._roster, self._names, self.changes, partial(self._link, is_away=True))
        if check is not None:
            check.serve(HostsToCheck(self, self._roster, self.names_of, lambda: self._wanted, lambda: self._listener))
        self._leaving = Leavers(addresses_of, tasks, self.changes.report, keeper=keeper, clock=clock)
        self._wanted: dict[str, None] = {}  # in the order of their list, which may have tens of thousands
        self._silences = Silences(self._roster, self.names_of)
        # Whether an earlier driver's agents may be here before this one knows which hosts are wanted.
        self._lists_are_to_come = self._closing = False
        self._over = Close()  # the message to agents that are to end
        self._all_gone = asyncio.Event()

    def serve(self, listener: FleetListener, staff: Staff, *parts: Part) -> None:
        """Set the listener and the parts that exchange messages with agents. To be called once, first of all."""
        self._listener, self._staff = listener, staff
        self._silences.listener = listener
        self._parts = (staff, *parts) if self._check is None else (staff, *parts, self._check)

    def take_over(self, revoked: Iterable[RevokedKept], leavers: Iterable[LeaverKept]) -> None:
        """Restore what the earlier driver knew of hosts without an agent. To be called before anything else."""
        self._dialling.take_over(revoked)
        self._leaving.take_over(leavers)

    # --- from another driver ---------------------------------------------------------------------------------------

    def resume(self, silent: Iterable[str]) -> None:
        """Resume after another driver: its agents are away (``returning``), and the core knows of the silent hosts."""
        self._lists_are_to_come = True
        self._silences.resume(silent)

    def returned(self, link: AgentLink, levels: Levels) -> None:
        """Treat an agent that has come back like any other, once its state has been handled."""
        link.returned(levels)
        self._roster.keep(link)
        if self._roster.is_hosts_agent(link):
            self._up(link)
        if self._roster.is_ending(link):  # since nothing was sent to it while it was away
            link.send(self._over)

    def abandon(self) -> None:
        """Leave the agents to another driver: cut their connections, and send them nothing."""
        self._closing = True
        for link in self.links():
            link.abandon()
            self._roster.remove(link)
        self._all_gone.set()
        self.changes.report()
        self._dialling.abandon()

    # --- for discovery ---------------------------------------------------------------------------------------------

    async def want(self, names: Sequence[str]) -> None:
        """Set all hosts that are to have an agent, besides those that have joined."""
        await self._names.look_up([*names, *self._reach.more])
        if self._closing:
            return
        back, self._wanted = [name for name in names if name not in self._wanted], dict.fromkeys(names)
        for link in filter(None, map(self.link_of, back)):
            # A host that was off the list may be another machine now, whose predecessor died with this agent.
            if not link.connected and not link.facts.local and not self._staff.has_workers(link):
                link.lose("its connection is broken, and its host was no longer listed")
        wanted = dict.fromkeys(map(self._names.canonical, (*names, *self._reach.more)))
        joined = map(self._names.canonical, self._roster.joined)
        self._leaving.keep({*wanted, *joined}, self._roster.hosts)
        self._silences.keep((*names, *(link.facts.host for link in self.links())))
        for host in wanted:
            if host not in self._dialling and host not in self._leaving:
                self._dialling.begin(host, has_agent=host in self._roster.hosts)
        for host in self._dialling.not_in(wanted):
            self._unwant(host)
        if self._lists_are_to_come:
            self._lists_are_to_come = False
            for host, link in self._roster.hosts.items():
                # It was listed when the earlier driver looked.
                if host not in wanted and not link.facts.joined and not self._staff.has_workers(link):
                    self._end(link)

    def is_up(self, name: str) -> bool:
        """Return whether the host has an agent that is not about to end, and may be used."""
        link = self.link_of(name)
        return link is not None and self._is_usable(link)

    def joined(self) -> tuple[Host, ...]:
        """Return the hosts that have joined by themselves and may be used, in the order of the roster."""
        return self._roster.joined_hosts(self._is_usable)

    def node_rank(self, name: str) -> float:
        """Return the node rank that this host was given; infinite if it has none."""
        return self._roster.node_rank(name)

    def _is_usable(self, link: AgentLink) -> bool:
        return not (link.is_away or self._roster.is_ending(link)) and (self._check is None or self._check.admits(link))

    def remark(self) -> str:
        """Return which hosts have no agent yet, and why; "" if all have one."""
        waits = self._dialling.remarks(self._roster.hosts) + ([] if self._check is None else self._check.remarks())
        more = f"; and {len(waits) - 3} more hosts" if len(waits) > 3 else ""
        return "; ".join(waits[:3]) + more

    async def settle(self, limit_s: float) -> None:
        """Wait until each wanted host has an agent or a failed try, for at most limit_s; then for the network check."""
        await self.changes.wait_until(lambda: self._closing or not self.awaits_others(), limit_s)
        check = self._check
        if check is not None:
            await self.changes.wait_until(
                lambda: self._closing or all(map(check.is_settled, self.links())), GATHER_S + LIMIT_S
            )

    def awaits_others(self) -> bool:
        """Return whether more hosts may get an agent soon."""
        hosts = map(self._names.canonical, self._wanted)
        return any(host not in self._roster.hosts and self._dialling.is_first_try(host) for host in hosts)

    # --- for the workers (Agents) ----------------------------------------------------------------------------------

    def link_of(self, hostname: str) -> AgentLink | None:
        """Return the agent of a host; None if it has none now."""
        return self._roster.link_of(hostname)

    def works_for_s(self, hostname: str) -> float:
        """Return how long a host has been heard from without a gap, seconds; infinite without an agent."""
        link = self.link_of(hostname)
        return math.inf if link is None else link.works_for_s

    def unheard(self, least_s: float) -> dict[str, float]:
        """Return how long nothing has arrived from agents that are connected and not silent, by their hosts' names.

        A machine may acknowledge what it is sent although its agent sends nothing: see AgentLink.
        """
        return {name: link.silent_s for link in self._roster.unheard(least_s) for name in self.names_of(link)}

    def has_address(self, address: str) -> bool:
        """Return whether one of the job's hosts has this address. Its other names are not looked up."""
        return self._roster.has_address(address)

    def give_up(self, hostname: str, why: str) -> None:
        """Give a silent host up before its lease has ended. A host that is heard from again, or has no agent, stays."""
        link = self.link_of(hostname)
        if link is not None and link.is_silent:
            link.give_up(why)

    def links(self) -> Sequence[AgentLink]:
        """Return all agents that are not lost."""
        return tuple(self._roster.agents.values())

    def address_of(self, link: AgentLink, others: Sequence[AgentLink]) -> str:
        """Return the address where a host's workers listen: by route, or as chosen by the user."""
        route = link.facts.hello.address
        if link.facts.local:
            # Its agent came over loopback; the others have dialled the address by which they reach this machine.
            route = next((other.facts.ours for other in others if not other.facts.local), route)
        try:
            return self._address(link.facts, route)
        except ValueError as error:
            raise LaunchError(str(error)) from None

    def idle(self, link: AgentLink) -> None:
        """End an agent whose last worker has ended, if its host is leaving or not wanted."""
        host = self._names.canonical(link.facts.host)
        is_unwanted = not link.facts.joined and host not in self._dialling and not self._lists_are_to_come
        if host in self._leaving or is_unwanted or self._closing:
            self._end(link)
        self.changes.report()

    def job_over(self, exit_code: int, why: str, *, preempted: bool = False) -> None:
        """Set the job's end as reported to agents that are ended from now on. See Close."""
        self._over = Close(exit_code, why, preempted)

    async def close(self) -> None:
        """End all agents. Blocks until they have ended."""
        self._closing = True
        if self._check is not None:
            self._check.close()
        self.changes.report()
        for link in self.links():
            self._end(link)
        if self._roster.agents:
            # An agent that is neither heard from nor lost by then is left to its own lease.
            limit_s = self._reach.agent_timeout_s + _CLOSE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._all_gone.wait()
        for link in self.links():
            link.close("the job has ended")
        await self._dialling.close()

    # --- for the admission (Host) ----------------------------------------------------------------------------------

    def known(self, agent: str) -> AgentLink | None:
        """Return an agent of the job by its id, or None."""
        return self._roster.agents.get(agent)

    def arrives(self, facts: AgentFacts) -> AgentLink:
        """Admit a new agent to the roster, and return its link. Raises RefusedError."""
        if self._closing:
            raise RefusedError("the job is over", is_over=True)
        self._roster.check_id(facts)
        if facts.hello.alike:
            facts = replace(facts, host=self._roster.free_name(facts.host))
        host = self._names.canonical(facts.host)
        if not facts.joined and host not in self._dialling:
            raise RefusedError(f"host {facts.host} is no longer wanted")
        self._roster.check_name(facts)
        if not facts.joined:
            facts = replace(facts, local=host == self._names.own)
        link = self._link(facts)
        self._roster.add(link)
        self._all_gone.clear()
        return link

    def _link(self, facts: AgentFacts, *, is_away: bool = False) -> AgentLink:
        return AgentLink(
            facts,
            self,
            agent_timeout_s=self._reach.agent_timeout_s,
            host_timeout_s=self._reach.host_timeout_s,
            is_away=is_away,
        )

    def superseded(self, epoch: int) -> None:
        """Report that a driver of a higher epoch has the job."""
        self._listener.superseded(epoch)

    def settled(self, link: AgentLink) -> None:
        """Make a welcomed agent its host's agent, once the name is free."""
        if self._roster.settle(link):
            self._up(link)

    def turned_away(self, host: str, why: str) -> None:
        """Record why an agent of a host was rejected."""
        self._dialling.turned_away(self._names.canonical(host), why)

    def revoked(self, host: str, why: str) -> None:
        """Bar a host whose ticket has been revoked, and give its agent up."""
        host = self._names.canonical(host)
        failure = DialFailure(why, permanent=True)
        self._dialling.bar(host, failure)
        for link in self.links():
            if not link.facts.joined and self._names.canonical(link.facts.host) == host:
                link.give_up(why)
        if host in self._dialling:
            self._dialling.unready(host, failure)
        else:
            self._listener.warn(why)

    def warn(self, text: str) -> None:
        """Warn the user."""
        self._listener.warn(text)

    def node_refused(self, why: str) -> None:
        """Report a node that cannot be one of the job on the driver's terminal, where people wait for it."""
        self._listener.node_refused(why)

    # --- messages of agents (LinkOwner) ----------------------------------------------------------------------------

    def take(self, link: AgentLink, message: AgentMessage) -> None:
        """Hand a message of an agent to its part."""
        try:
            self._take(link, message)
        except RendezvousProtocolError:
            raise
        except Exception as error:
            self._listener.failed(error)

    def _take(self, link: AgentLink, message: AgentMessage) -> None:
        if self.returning.takes(link, message):
            return
        for part in self._parts:
            if part.take(link, message):
                return
        match message:
            case Warning(text):
                self._listener.warn(text if link.facts.local else f"host {link.facts.host}: {text}")
            case Leaves(why, within_s):
                self._leaves(link, why, within_s)
            case Bye():
                # Its last message: an end that was ordered is not a loss.
                if self._roster.is_ending(link):
                    link.close("its agent has exited")
                    self._forget(link, "its agent has exited")
                else:
                    link.lose("its agent has exited")
            case _:
                raise RendezvousProtocolError(f"unexpected message {message.name} from an agent")

    def link_silent(self, link: AgentLink, silent_s: float) -> None:
        """Report a silent host, or doubt about it."""
        self._silences.link_silent(link, silent_s)

    def link_heard(self, link: AgentLink) -> None:
        """Report that a silent host is heard from again."""
        self._silences.link_heard(link)

    def link_back(self, link: AgentLink) -> None:
        """Record that an agent is connected again, perhaps from another address; orders may wait for that."""
        self._roster.keep(link)
        self.changes.report()

    def link_lost(self, link: AgentLink, why: str) -> None:
        """Report the loss of an agent, and forget it."""
        if not self._roster.is_ending(link):
            self._listener.agent_lost(link.facts, why)
        self._forget(link, why)
        self.returning.lost(link)

    # --- events of dialling (DiallingListener) ---------------------------------------------------------------------

    def host_unready(self, host: str, failure: DialFailure) -> None:
        """Report that a wanted host has no agent yet."""
        self._listener.host_unready(host, failure)

    def none_can_be_dialled(self, reasons: str) -> None:
        """Report that no host can be used, unless some have joined by themselves."""
        if not self._roster.agents:
            self._listener.no_host_can_be_used(reasons)

    def command_ended(self, host: str) -> None:
        """Give this machine's own agent up, which is dead then; the connections of others show whether they are."""
        link = self._roster.hosts.get(host)
        if link is not None and link.facts.local:
            link.lose("its agent has died")

    # --- hosts -----------------------------------------------------------------------------------------------------

    def _unwant(self, host: str) -> None:
        link = self._roster.hosts.get(host)
        if link is None or link.facts.joined:
            self._dialling.end(host)
            return
        # Its workers leave first. The command that started its agent ends with it.
        self._dialling.end(host, when=lambda: link.is_lost)
        if not self._staff.has_workers(link):
            self._end(link)

    def _up(self, link: AgentLink) -> None:
        self._listener.agent_came(link.facts)
        self._silences.link_heard(link)
        self._dialling.came(self._names.canonical(link.facts.host))
        for part in self._parts:
            part.came(link)
        self.changes.report()

    def _leaves(self, link: AgentLink, why: str, within_s: float | None) -> None:
        if within_s is not None and within_s < 0:
            raise RendezvousProtocolError(f"host {link.facts.host} cannot go away in {within_s} s")
        name = self._names.canonical(link.facts.host)
        if name in self._leaving and within_s is None:
            return
        self._leaving.leaves(name, within_s)
        for each in self.names_of(link):
            self._listener.host_leaves(each, why, within_s)
        if link.facts.local and within_s is not None:
            self._listener.own_machine_leaves(why, within_s)
        if not self._staff.has_workers(link):
            self._end(link)
        self.changes.report()

    def names_of(self, link: AgentLink, names: Iterable[str] | None = None) -> list[str]:
        """Return the names under which the job knows a host: of this machine all names, or all listed ones."""
        return self._roster.names_of(link, self._wanted if names is None else names)

    def _end(self, link: AgentLink) -> None:
        if self._roster.ends(link):
            link.send(self._over)

    def _forget(self, link: AgentLink, why: str) -> None:
        host = self._names.canonical(link.facts.host)
        was_hosts_agent = self._roster.is_hosts_agent(link)
        self._roster.remove(link)
        self._tickets.give_up(link.agent)
        for part in self._parts:
            try:
                part.lost(link, why)
            except Exception as error:
                self._listener.failed(error)
        if was_hosts_agent:
            if host not in self._leaving:
                if not self._closing:
                    self._dialling.gone(host)
            elif host in self._dialling:
                self._dialling.end(host)
                self._leaving.left(host, link.facts.peer)
            else:
                self._leaving.forget(host)
            newcomer = self._roster.take_waiting(link.facts.host)
            if newcomer is not None and self._roster.settle(newcomer):
                self._up(newcomer)
        if not self._roster.agents:
            self._all_gone.set()
        self.changes.report()
