"""The fleet: which hosts have an agent, and what is done so that all that are wanted have one.

Owns the agents' links, one a machine, and the hosts' states: wanted or not, with an agent or not, leaving or not. The
core hears of hosts with an agent only (:mod:`elastic_driver.launch.fleet.discovery`), so a host that cannot be reached
yet is no failed one. Decides nothing about workers. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_driver.errors import LaunchError, RendezvousProtocolError
from elastic_driver.hosts import Host, in_natural_order
from elastic_driver.launch.dial.dialler import DialFailure, Dialler
from elastic_driver.launch.fleet.dialling import Calls
from elastic_driver.launch.fleet.door import Door, Ticket
from elastic_driver.launch.fleet.leavers import Leavers
from elastic_driver.launch.fleet.link import AgentFacts, AgentLink
from elastic_driver.launch.fleet.network_check import GATHER_S, LIMIT_S, Checked, NetworkCheck
from elastic_driver.launch.fleet.reception import RefusedError
from elastic_driver.rendezvous.agent_messages import JOB_IS_OVER, Bootstrap, Bye, Close, Leaves, Said
from elastic_driver.system.interfaces import address_in
from elastic_driver.system.tasks import Tasks

# What an agent may take to end, beyond the time that its workers' deaths take.
_CLOSE_S = 15.0
# Hosts that are dialled at a time. A host that is silent holds a place for ssh's time limit.
_SIDE_BY_SIDE = 64
# Names that are looked up at a time.
_LOOKED_UP = 1024


class FleetListener(Protocol):
    """Is told of hosts. Called on the event loop."""

    def agent_came(self, facts: AgentFacts) -> None:
        """A host has an agent."""

    def agent_lost(self, facts: AgentFacts, why: str) -> None:
        """A host's agent is lost, and its workers with it."""

    def host_unready(self, host: str, failure: DialFailure) -> None:
        """A host that is wanted has no agent yet; told once for each reason."""

    def warn(self, text: str) -> None:
        """Something that the user has to know."""

    def node_refused(self, why: str) -> None:
        """A node of a job of nodes has come, and cannot be one of them."""

    def network_checked(self, report: Checked) -> None:
        """The network between hosts was checked; those barred are told of as unready, too."""

    def is_left_out(self, host: str) -> bool:
        """Whether a host gets no workers for a while, since others' workers cannot reach it."""

    def host_silent(self, host: str, silent_s: float, *, sure: bool) -> None:
        """Nothing has been heard of a host's agent for so long, and its machine has acknowledged nothing.

        Where it is not sure yet, another host is silent, and this one may be so for the same reason.
        """

    def host_heard(self, host: str) -> None:
        """A host that was silent is heard again, or has another agent."""

    def host_leaves(self, host: str, why: str, within_s: float | None) -> None:
        """A host is to be drained: its agent says so, and, if it knows, when its machine is gone."""

    def own_machine_leaves(self, why: str, within_s: float) -> None:
        """The driver's own machine goes away, and the driver with it."""

    def no_host_can_be_used(self, reasons: str) -> None:
        """No host has an agent, and on none of those wanted another try can help."""

    def failed(self, error: BaseException) -> None:
        """An error of our own, while an agent was listened to."""


class Staff(Protocol):
    """What the fleet needs of the launcher."""

    def has_workers(self, link: AgentLink) -> bool:
        """Whether workers run there, or are being started."""

    def came(self, link: AgentLink) -> None:
        """An agent is there."""

    def lost(self, link: AgentLink, why: str) -> None:
        """It is lost."""

    def take(self, link: AgentLink, message: Said) -> bool:
        """What an agent says of processes. Returns whether it was that."""


class Spokesman(Protocol):
    """Takes what workers say through their agents."""

    def came(self, link: AgentLink) -> None:
        """An agent is there."""

    def lost(self, link: AgentLink) -> None:
        """It is lost."""

    def take(self, link: AgentLink, message: Said) -> bool:
        """What an agent says for its workers. Returns whether it was that."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How agents come to the driver.

    Attributes:
        urls: gives the driver's URLs for the agent of a host; for one on this machine, "". May have the driver listen.
        agent_timeout_s, fingerprint, job: see Bootstrap.
        host_timeout_s: see AgentLink.
        owner: the driver's process, as Bootstrap has it.
        host, node_rank: of the driver's own machine in a job of nodes: its name, and see Bootstrap.
    """

    urls: Callable[[str], Awaitable[tuple[str, ...]]]
    agent_timeout_s: float
    host_timeout_s: float
    fingerprint: str
    job: str
    owner: str
    host: str = ""
    node_rank: int = -1


class Fleet:
    """See above.

    Args:
        door: who may dial in.
        reach: how they come.
        local, remote: start agents on this machine, and on others; None where those come by themselves.
        is_local: whether a name means this machine. May block.
        addresses_of: what a name resolves to. May block.
        address: chooses where a host's workers listen: of its agent, and its address by route. Raises SettingsError.
        tasks: run what nobody waits for.
        check: of the network, before a host is used; None for none.
    """

    def __init__(
        self,
        *,
        door: Door,
        reach: Reach,
        local: Dialler,
        remote: Dialler | None,
        is_local: Callable[[str], bool],
        addresses_of: Callable[[str], Sequence[str]],
        address: Callable[[AgentFacts, str], str],
        tasks: Tasks,
        check: NetworkCheck | None = None,
    ) -> None:
        self._door = door
        self._reach = reach
        self._local_dialler, self._remote_dialler = local, remote
        self._is_local = is_local
        self._address = address
        self._tasks = tasks
        self._check = check
        if check is not None:
            check.serve(self)
        self._listener: FleetListener
        self._staff: Staff
        self._spokesman: Spokesman
        self._agents: dict[str, AgentLink] = {}  # by agent: all that are not lost
        self._hosts: dict[str, AgentLink] = {}  # by the name that it was dialled, or has joined, under
        self._joined: dict[str, AgentLink] = {}
        self._waiting: dict[str, AgentLink] = {}  # newcomers under the name of a host that may yet come back
        self._local_names: dict[str, bool] = {}
        self._local_call = ""  # the name under which this machine's agent was dialled
        self._wanted: dict[str, None] = {}  # in the order of their list, which may have tens of thousands
        self._calls: dict[str, Calls] = {}
        self._hopeless: set[str] = set()  # of these, where another try cannot help
        self._former_calls: set[Calls] = set()  # of hosts that are not wanted any more, until they have ended
        self._side_by_side = asyncio.Semaphore(_SIDE_BY_SIDE)
        self._told: dict[str, DialFailure] = {}
        self._revoked: dict[str, DialFailure] = {}  # hosts that are kept out for as long as the job lasts
        self._leaving = Leavers(addresses_of, tasks, self._change)  # names whose agent wants to leave, or has left
        self._silent: set[str] = set()  # names of which it was told that they are silent, and not that they are heard
        self._said_of_tickets = False
        self._ending: set[str] = set()  # agents that were told to close
        self._closing = False
        self._over = Close()  # what agents that are to end are told
        self._all_gone = asyncio.Event()
        self._changes = 0
        self._watching: set[asyncio.Future[None]] = set()

    def serve(self, listener: FleetListener, staff: Staff, spokesman: Spokesman) -> None:
        """Says who is told of hosts, and takes what agents say. To be called once, before anything else."""
        self._listener, self._staff, self._spokesman = listener, staff, spokesman

    # --- for discovery ---------------------------------------------------------------------------------------------

    async def want(self, names: Sequence[str]) -> None:
        """These are all hosts that are to have an agent, beside those that have joined."""
        loop = asyncio.get_running_loop()
        wanted = dict.fromkeys(names)
        new = [name for name in names if name not in self._local_names]
        for at in range(0, len(new), _LOOKED_UP):
            # Side by side: looking a name up may take seconds. Not all of a long list: nothing else is done meanwhile.
            some = new[at : at + _LOOKED_UP]
            are_local = await asyncio.gather(*(loop.run_in_executor(None, self._is_local, name) for name in some))
            self._local_names.update(zip(some, are_local, strict=True))
        for name in [name for name, local in self._local_names.items() if not local and name not in wanted]:
            del self._local_names[name]
        if self._closing:
            return
        back, self._wanted = [name for name in names if name not in self._wanted], wanted
        for link in filter(None, map(self.link_of, back)):
            # What was away from the list may be another machine by now, and this agent have died with the one before.
            if not link.connected and not link.facts.local and not self._staff.has_workers(link):
                link.lose("its connection is broken, and its host was not listed any more")
        self._leaving.keep({self._call_of(name) for name in (*names, *self._joined)}, self._hosts)
        for name in self._silent - {*names, *(link.facts.host for link in self._agents.values())}:
            self._silent.discard(name)
            self._listener.host_heard(name)  # there is nothing to be heard of any more
        for name in self._wanted:
            call = self._call_of(name)
            if call not in self._calls and call not in self._leaving:
                self._begin(call)
        still = {self._call_of(name) for name in self._wanted}
        for call in [call for call in self._calls if call not in still]:
            self._unwant(call)

    @property
    def changes(self) -> int:
        """How often something has changed here."""
        return self._changes

    async def wait_change(self, seen: int) -> None:
        """Blocks until there are more changes than that."""
        if self._changes == seen:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watching.add(future)
            try:
                await future
            finally:
                self._watching.discard(future)

    def is_up(self, name: str) -> bool:
        """Whether the host has an agent that is not about to end, and may be used."""
        link = self.link_of(name)
        return link is not None and self._is_usable(link)

    def joined(self) -> tuple[Host, ...]:
        """The hosts that have joined by themselves. Nobody has listed them: their names give the order.

        Of nodes that were told their place among all, that does; they come before those that were not.
        """
        hosts = in_natural_order(
            Host(link.facts.host, link.facts.hello.slots, tuple(link.facts.hello.labels.split()))
            for link in self._joined.values()
            if self._is_usable(link)
        )
        return tuple(sorted(hosts, key=lambda host: self.node_rank(host.name)))

    def node_rank(self, name: str) -> float:
        """The place among the nodes that this host was told; infinite for none."""
        link = self.link_of(name)
        return math.inf if link is None or link.facts.hello.node_rank < 0 else link.facts.hello.node_rank

    def _is_usable(self, link: AgentLink) -> bool:
        return link.agent not in self._ending and (self._check is None or self._check.admits(link))

    def remark(self) -> str:
        """Which hosts have no agent yet, and why; "" for none."""
        waits = [
            f"host {name} is not ready: {call.failure.reason} (tried {call.tries} time{'s' if call.tries > 1 else ''})"
            if call.failure is not None
            else f"host {name} is not ready: its agent has not come yet"
            if call.dials
            else f"host {name} has not joined yet (elasticrun join)"
            for name, call in self._calls.items()
            if call.failure is not None or name not in self._hosts
        ] + ([] if self._check is None else self._check.remarks())
        more = f"; and {len(waits) - 3} more hosts" if len(waits) > 3 else ""
        return "; ".join(waits[:3]) + more

    async def settle(self, limit_s: float) -> None:
        """Blocks until each wanted host has an agent, or a try has failed, but no longer than that.

        And until those that have one may be used, or not; that takes what a check takes at most.
        """
        await self._wait_until(lambda: not self.awaits_others(), limit_s)
        check = self._check
        if check is not None:
            await self._wait_until(lambda: all(map(check.is_settled, self.links())), GATHER_S + LIMIT_S)

    async def _wait_until(self, holds: Callable[[], bool], limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self._closing and not holds():
                    await self.wait_change(self._changes)

    # --- for the launcher (Agents) ---------------------------------------------------------------------------------

    def link_of(self, hostname: str) -> AgentLink | None:
        """See Agents."""
        return self._hosts.get(self._call_of(hostname))

    def works_for_s(self, hostname: str) -> float:
        """For how long a host has been heard without a gap; for ever if it has no agent. See AgentLink."""
        link = self.link_of(hostname)
        return math.inf if link is None else link.works_for_s

    def unheard(self, least_s: float) -> dict[str, float]:
        """For how long nothing has come from agents that are connected and not silent, by their hosts' names.

        A machine whose agent says nothing may acknowledge all the same what it is sent: see AgentLink.
        """
        links = [link for link in self._agents.values() if not link.is_silent and link.silent_s >= least_s]
        return {name: link.silent_s for link in links for name in self._names_of(link)}

    def has_address(self, address: str) -> bool:
        """Whether one of the job's hosts has this address. Its other names are not looked up."""
        for link in self._agents.values():
            ends = (link.facts.hello.address, link.facts.peer)
            if address in ends or address in map(address_in, link.facts.hello.addresses):
                return True
        return False

    def give_up(self, hostname: str, why: str) -> None:
        """A silent host is lost, before its lease has ended. One that is heard again, or has no agent, stays."""
        link = self.link_of(hostname)
        if link is not None and link.is_silent:
            link.give_up(why)

    def links(self) -> Sequence[AgentLink]:
        """See Agents."""
        return tuple(self._agents.values())

    def address_of(self, link: AgentLink, others: Sequence[AgentLink]) -> str:
        """See Agents: the address by route, or what the user has chosen."""
        route = link.facts.hello.address
        if link.facts.local:
            # Its agent came over loopback; the others have come to the address by which they reach this machine.
            route = next((other.facts.ours for other in others if not other.facts.local), route)
        try:
            return self._address(link.facts, route)
        except ValueError as error:
            raise LaunchError(str(error)) from None

    def idle(self, link: AgentLink) -> None:
        """See Agents."""
        host = link.facts.host
        call = self._call_of(host)
        if call in self._leaving or (not link.facts.joined and call not in self._calls) or self._closing:
            self._end(link)
        self._change()

    def prepared(self, link: AgentLink) -> None:
        """See Agents."""
        self._change()

    def job_over(self, exit_code: int, why: str, *, preempted: bool = False) -> None:
        """Agents that are told to end from now on hear of it. See Close."""
        self._over = Close(exit_code, why, preempted)

    async def close(self) -> None:
        """See Agents."""
        self._closing = True
        if self._check is not None:
            self._check.close()
        self._change()
        for link in self.links():
            self._end(link)
        if self._agents:
            # Who is neither heard nor lost by then is left to its own lease.
            limit_s = self._reach.agent_timeout_s + _CLOSE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._all_gone.wait()
        for link in self.links():
            link.close("the job has ended")
        await asyncio.gather(*(call.close() for call in (*self._calls.values(), *self._former_calls)))

    # --- for the check of the network (Hosts) ----------------------------------------------------------------------

    def present(self) -> Sequence[AgentLink]:
        """See Hosts."""
        listed = dict.fromkeys(map(self.link_of, (*self._wanted, *self._joined)))
        return [link for link in listed if link is not None and link.agent not in self._ending]

    def awaits_others(self) -> bool:
        """See Hosts."""
        calls = (self._calls.get(name) for name in map(self._call_of, self._wanted) if name not in self._hosts)
        return any(call is not None and call.dials and not call.tries for call in calls)

    def gets_workers(self, link: AgentLink) -> bool:
        """See Hosts."""
        return not all(map(self._listener.is_left_out, self._names_of(link)))

    def admitted(self) -> None:
        """See Hosts."""
        self._change()

    def checked(self, report: Checked) -> None:
        """See Hosts."""
        self._listener.network_checked(report)

    def barred(self, host: str, reason: str) -> None:
        """See Hosts."""
        self._listener.host_unready(host, DialFailure(reason))
        self._change()

    # --- for the reception (Host) ----------------------------------------------------------------------------------

    def known(self, agent: str) -> AgentLink | None:
        """See Host."""
        return self._agents.get(agent)

    def arrives(self, facts: AgentFacts) -> AgentLink:
        """See Host."""
        if self._closing:
            raise RefusedError(JOB_IS_OVER)
        self._check_number(facts)
        if facts.hello.alike:
            facts = replace(facts, host=self._free_name(facts.host))
        name = facts.host
        if not facts.joined and self._call_of(name) not in self._calls:
            raise RefusedError(f"host {name} is not wanted any more")
        for older in (self._hosts.get(self._call_of(name)), self._waiting.get(name)):
            if older is not None and (not facts.joined or (older.connected and older.agent not in self._ending)):
                raise RefusedError(
                    f"the job has a host {name} already, with an agent of its own: give another name with --host"
                )
        if not facts.joined:
            facts = replace(facts, local=self._call_of(name) == self._local_call)
        link = AgentLink(
            facts, self, agent_timeout_s=self._reach.agent_timeout_s, host_timeout_s=self._reach.host_timeout_s
        )
        self._agents[link.agent] = link
        self._all_gone.clear()
        return link

    def _free_name(self, name: str) -> str:
        """For a node, which has nobody who could give it another: the first of its names that is nobody else's.

        Several may be on one machine, or have a machine's name in common.
        """
        names = itertools.chain((name,), (f"{name}-{number}" for number in itertools.count(2)))
        return next(each for each in names if not self._is_taken(each))

    def _is_taken(self, name: str) -> bool:
        links = (self._hosts.get(self._call_of(name)), self._waiting.get(name))
        # The driver's own host has its name before its agent has come, too.
        return name == self._reach.host or any(
            link is not None and link.connected and link.agent not in self._ending for link in links
        )

    def _check_number(self, facts: AgentFacts) -> None:
        """No two agents have one number. One that has not heard its welcome says hello once more, as a new one."""
        older = self._agents.get(facts.hello.agent)
        if older is not None:
            if older.seen or older.connected:
                raise RefusedError("the job has an agent of this number already")
            older.lose("its agent has not heard that it was taken in, and begins anew")

    def settled(self, link: AgentLink) -> None:
        """See Host."""
        facts = link.facts
        if facts.joined:
            if self._call_of(facts.host) in self._hosts:
                self._waiting[facts.host] = link
                return
            self._joined[facts.host] = link
        self._up(link)

    def turned_away(self, host: str, why: str) -> None:
        """See Host."""
        call = self._calls.get(self._call_of(host))
        if call is not None:
            call.turned_away(why)

    def revoked(self, host: str, why: str) -> None:
        """See Host."""
        name = self._call_of(host)
        failure = self._revoked[name] = DialFailure(why, permanent=True)
        call = self._calls.get(name)
        if call is not None:
            call.bar(failure)
        for link in self.links():
            if not link.facts.joined and self._call_of(link.facts.host) == name:
                link.give_up(why)
        if call is not None:
            self.unready(name, failure)
        else:
            self._listener.warn(why)

    def warn(self, text: str) -> None:
        """See Host."""
        self._listener.warn(text)

    def node_refused(self, why: str) -> None:
        """See Host. Who waits for the node looks at the driver's terminal."""
        self._listener.node_refused(why)

    # --- what agents say (LinkOwner) -------------------------------------------------------------------------------

    def take(self, link: AgentLink, message: Said) -> None:
        """See LinkOwner."""
        try:
            self._take(link, message)
        except RendezvousProtocolError:
            raise
        except Exception as error:
            self._listener.failed(error)

    def _take(self, link: AgentLink, message: Said) -> None:
        if self._staff.take(link, message) or self._spokesman.take(link, message):
            return
        if self._check is not None and self._check.take(link, message):
            return
        match message:
            case Leaves(why, within_s):
                self._leaves(link, why, within_s)
            case Bye():
                # Its last message: an end that was asked for is no loss.
                if link.agent in self._ending:
                    link.close("its agent has ended")
                    self._forget(link, "its agent has ended")
                else:
                    link.lose("its agent has ended")
            case _:
                raise RendezvousProtocolError(f"an agent may not say {message.name}")

    def link_silent(self, link: AgentLink, silent_s: float) -> None:
        """See LinkOwner."""
        for other in self._agents.values():
            if other.is_in_doubt():
                self._is_silent(other, other.unheard_s, sure=False)
        self._is_silent(link, silent_s, sure=True)

    def _is_silent(self, link: AgentLink, silent_s: float, *, sure: bool) -> None:
        if self._hosts.get(self._call_of(link.facts.host)) is link:
            for name in self._names_of(link):
                self._silent.add(name)
                self._listener.host_silent(name, silent_s, sure=sure)

    def link_heard(self, link: AgentLink) -> None:
        """See LinkOwner."""
        if self._hosts.get(self._call_of(link.facts.host)) is link:
            self._heard(link)

    def link_lost(self, link: AgentLink, why: str) -> None:
        """See LinkOwner."""
        if link.agent not in self._ending:
            self._listener.agent_lost(link.facts, why)
        self._forget(link, why)

    # --- what diallers say (CallListener) --------------------------------------------------------------------------

    def unready(self, host: str, failure: DialFailure) -> None:
        """See CallListener."""
        if host not in self._calls:
            return  # it is wanted no more
        if self._told.get(host) != failure:
            self._told[host] = failure
            self._listener.host_unready(host, failure)
        self._change()
        (self._hopeless.add if failure.permanent else self._hopeless.discard)(host)
        if not self._agents and len(self._hopeless) == len(self._calls):
            reasons = "; ".join(f"{name}: {call.failure.reason}" for name, call in self._calls.items() if call.failure)
            self._listener.no_host_can_be_used(reasons)

    def shows_ticket(self, host: str) -> None:
        """See CallListener. It is the same for most hosts of a job, and said once."""
        if not self._said_of_tickets:
            self._said_of_tickets = True
            self._listener.warn(
                f"host {host}: the rsh agent forwards no standard input, so its agent has a ticket on its command "
                "line, and every user of the job's machines is trusted (docs/clusters.md, --launcher-bootstrap)"
            )

    def ended(self, host: str) -> None:
        """See CallListener. Of this machine's own agent it is known that it is dead; its connection tells of others."""
        link = self._hosts.get(host)
        if link is not None and link.facts.local:
            link.lose("its agent has died")

    # --- hosts -----------------------------------------------------------------------------------------------------

    def _call_of(self, name: str) -> str:
        """The name under which a host's agent was dialled: all names of this machine have one."""
        if self._local_names.get(name):
            self._local_call = self._local_call or name
            return self._local_call
        return name

    def _begin(self, name: str) -> None:
        local = bool(self._local_names.get(name))
        call = Calls(
            name,
            self._local_dialler if local else self._remote_dialler,
            door=self._door,
            bootstrap=self._bootstrap,
            listener=self,
            tasks=self._tasks,
            side_by_side=self._side_by_side,
        )
        self._calls[name] = call
        revoked = self._revoked.get(name)
        if revoked is not None:
            call.bar(revoked)
            self.unready(name, revoked)
        elif name not in self._hosts:
            call.begin()

    async def _bootstrap(self, host: str, ticket: Ticket) -> Bootstrap:
        local = bool(self._local_names.get(host))
        return Bootstrap(
            urls=await self._reach.urls("" if local else host),
            identity=str(ticket.identity),
            key=ticket.key.hex(),
            host=host,
            agent_timeout_s=self._reach.agent_timeout_s,
            fingerprint="" if local else self._reach.fingerprint,
            owner=self._reach.owner if local else "",
            job=self._reach.job,
            node_rank=self._reach.node_rank if local else -1,
        )

    def _unwant(self, name: str) -> None:
        call = self._calls.pop(name)
        self._hopeless.discard(name)
        self._told.pop(name, None)
        link = self._hosts.get(name)
        if link is None or link.facts.joined:
            self._end_call(call)
            return
        # Its workers leave first. The command that has started its agent ends with it.
        self._end_call(call, link)
        if not self._staff.has_workers(link):
            self._end(link)

    def _end_call(self, call: Calls, after: AgentLink | None = None) -> None:
        async def end() -> None:
            while after is not None and not after.is_lost:
                await self.wait_change(self._changes)
            await call.close()
            self._former_calls.discard(call)

        self._former_calls.add(call)
        self._tasks.start(end())

    def _up(self, link: AgentLink) -> None:
        name = self._call_of(link.facts.host)
        self._hosts[name] = link
        self._told.pop(name, None)
        self._staff.came(link)
        self._spokesman.came(link)
        self._listener.agent_came(link.facts)
        self._heard(link)
        call = self._calls.get(name)
        self._hopeless.discard(name)
        if call is not None:
            call.came()
        if self._check is not None:
            self._check.came(link)
        self._change()

    def _leaves(self, link: AgentLink, why: str, within_s: float | None) -> None:
        if within_s is not None and within_s < 0:
            raise RendezvousProtocolError(f"host {link.facts.host} goes away in {within_s} s")
        name = self._call_of(link.facts.host)
        if name in self._leaving and within_s is None:
            return
        self._leaving.leaves(name, within_s)
        for each in self._names_of(link):
            self._listener.host_leaves(each, why, within_s)
        if link.facts.local and within_s is not None:
            self._listener.own_machine_leaves(why, within_s)
        if not self._staff.has_workers(link):
            self._end(link)
        self._change()

    def _names_of(self, link: AgentLink) -> list[str]:
        """The names under which the job knows a host: of this machine all that are listed."""
        name = self._call_of(link.facts.host)
        if name != self._local_call:
            return [link.facts.host]
        listed = [each for each in (*self._wanted, *self._joined) if self._call_of(each) == name]
        return listed or [link.facts.host]  # workers may live there yet

    def _heard(self, link: AgentLink) -> None:
        for name in self._names_of(link):
            if name in self._silent:
                self._silent.discard(name)
                self._listener.host_heard(name)

    def _end(self, link: AgentLink) -> None:
        if link.agent not in self._ending:
            self._ending.add(link.agent)
            link.send(self._over)

    def _forget(self, link: AgentLink, why: str) -> None:
        self._agents.pop(link.agent, None)
        self._door.give_up(link.agent)
        self._ending.discard(link.agent)
        name = self._call_of(link.facts.host)
        if self._check is not None:
            self._check.lost(link)
        self._staff.lost(link, why)
        self._spokesman.lost(link)
        if self._hosts.get(name) is link:
            del self._hosts[name]
            self._joined.pop(link.facts.host, None)
            call = self._calls.get(name)
            if name in self._leaving:
                if call is not None:
                    del self._calls[name]
                    self._hopeless.discard(name)
                    self._end_call(call)
                    self._leaving.left(name, link.facts.peer)
                else:
                    self._leaving.forget(name)
            elif call is not None and not self._closing:
                call.gone()
            newcomer = self._waiting.pop(link.facts.host, None)
            if newcomer is not None and not newcomer.is_lost:
                self._joined[link.facts.host] = newcomer
                self._up(newcomer)
        elif self._waiting.get(link.facts.host) is link:
            del self._waiting[link.facts.host]
        if not self._agents:
            self._all_gone.set()
        self._change()

    def _change(self) -> None:
        self._changes += 1
        watching, self._watching = self._watching, set()
        for future in watching:
            if not future.done():
                future.set_result(None)
