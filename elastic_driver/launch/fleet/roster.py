"""The roster: the agents that are not lost, and the host of each of them.

Owns which agent a name means, and whether another may have that name; and persists the present agents for a later
driver. What follows when an agent joins or is lost is up to the fleet (:mod:`elastic_driver.launch.fleet.fleet`). Used
on the event loop only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from elastic_driver.hosts import Host, in_natural_order
from elastic_driver.launch.fleet.admission import RefusedError
from elastic_driver.launch.fleet.kept import NOTHING, AgentKept, FleetFact, Keeper
from elastic_driver.launch.fleet.link import AgentFacts, AgentLink
from elastic_driver.launch.fleet.names import HostNames
from elastic_driver.system.interfaces import address_in


class Roster:
    """The agents that are not lost, by id and by host.

    Args:
        names: of hosts.
        reserved: a name that no node gets, since the driver's own host has it; "" if there is none.
        keeper: persists the agents.

    Attributes:
        agents: all that are not lost, by their own ids.
        hosts: those that are a host's agent, by the canonical name of the host.
        joined: those of these that have joined, by name.
    """

    def __init__(self, names: HostNames, reserved: str, keeper: Keeper[FleetFact] = NOTHING) -> None:
        self._keeper = keeper
        self._names = names
        self._reserved = reserved
        self.agents: dict[str, AgentLink] = {}
        self.hosts: dict[str, AgentLink] = {}
        self.joined: dict[str, AgentLink] = {}
        self._waiting: dict[str, AgentLink] = {}  # newcomers under the name of a host that may yet come back
        self._ending: set[str] = set()  # agents that were ordered to end

    def link_of(self, hostname: str) -> AgentLink | None:
        """Return the agent of a host; None if it has none now."""
        return self.hosts.get(self._names.canonical(hostname))

    def is_hosts_agent(self, link: AgentLink) -> bool:
        """Return whether it is its host's agent, rather than waiting to become it."""
        return self.link_of(link.facts.host) is link

    def names_of(self, link: AgentLink, wanted: Iterable[str]) -> list[str]:
        """Return the names under which the job knows a host: of this machine all listed ones."""
        host = self._names.canonical(link.facts.host)
        if host != self._names.own:
            return [link.facts.host]
        listed = [name for name in (*wanted, *self.joined) if self._names.canonical(name) == host]
        return listed or [link.facts.host]  # it may still have workers

    def unheard(self, least_s: float) -> list[AgentLink]:
        """Return the agents that are connected and not silent, and from which nothing has arrived for so long."""
        return [link for link in self.agents.values() if not link.is_silent and link.silent_s >= least_s]

    def node_rank(self, hostname: str) -> float:
        """Return the node rank that this host was given; infinite if it has none."""
        link = self.link_of(hostname)
        return math.inf if link is None or link.facts.hello.node_rank < 0 else link.facts.hello.node_rank

    def joined_hosts(self, is_usable: Callable[[AgentLink], bool]) -> tuple[Host, ...]:
        """Return the hosts that have joined, as they describe themselves, ordered by name for want of a list.

        Nodes with a node rank are ordered by that, before those without.
        """
        hosts = in_natural_order(map(_host_of, filter(is_usable, self.joined.values())))
        return tuple(sorted(hosts, key=lambda host: self.node_rank(host.name)))

    def has_address(self, address: str) -> bool:
        """Return whether an agent's machine has this address."""
        for link in self.agents.values():
            ends = (link.facts.hello.address, link.facts.peer)
            if address in ends or address in map(address_in, link.facts.hello.addresses):
                return True
        return False

    def is_ending(self, link: AgentLink) -> bool:
        """Return whether it was ordered to end."""
        return link.agent in self._ending

    def ends(self, link: AgentLink) -> bool:
        """Record that it is ordered to end. Returns whether it was not before."""
        if self.is_ending(link):
            return False
        self._ending.add(link.agent)
        self.keep(link)
        return True

    # --- names -----------------------------------------------------------------------------------------------------

    def check_id(self, facts: AgentFacts) -> None:
        """Reject a second agent with one id, except one that missed its welcome and sends hello again, as a new one.

        Raises:
            RefusedError: the job has an agent with this id.
        """
        older = self.agents.get(facts.hello.agent)
        if older is not None:
            if older.seen or older.connected:
                raise RefusedError("the job already has an agent with this id")
            older.lose("its agent did not receive its welcome, and starts over")

    def check_name(self, facts: AgentFacts) -> None:
        """Reject an agent whose host has one. A joiner may wait for the end of one that has no connection.

        Raises:
            RefusedError: the name is another agent's.
        """
        for older in self._holders(facts.host):
            if not facts.joined or self._is_present(older):
                raise RefusedError(
                    f"the job already has a host {facts.host} with an agent of its own: pass another name with --host"
                )

    def free_name(self, name: str) -> str:
        """Return the first free name for a node, for which no person could choose another.

        Several nodes may be on one machine, or share a machine's name.
        """
        names = itertools.chain((name,), (f"{name}-{number}" for number in itertools.count(2)))
        # The driver's own host has its name even before its agent has connected.
        return next(
            each for each in names if each != self._reserved and not any(map(self._is_present, self._holders(each)))
        )

    def _holders(self, name: str) -> list[AgentLink]:
        """Return the agents that have a name, or wait for it."""
        return [link for link in (self.link_of(name), self._waiting.get(name)) if link is not None]

    def _is_present(self, link: AgentLink) -> bool:
        return link.connected and not self.is_ending(link)

    # --- agents ----------------------------------------------------------------------------------------------------

    def add(self, link: AgentLink) -> None:
        """Add a new agent, which is about to get its connection."""
        self.agents[link.agent] = link
        self.keep(link)

    def keep(self, link: AgentLink, *, given_up: bool = False) -> None:
        """Persist the present facts of an agent."""
        facts = link.facts
        self._keeper.keep(
            AgentKept(
                link.agent,
                facts.hello.key,
                facts.host,
                facts.peer,
                facts.ours,
                facts.local,
                facts.joined,
                ending=self.is_ending(link),
                given_up=given_up,
                hello=None if given_up else facts.hello,
            )
        )

    def settle(self, link: AgentLink) -> bool:
        """Make it the agent of its host. Returns False if it has to wait until the one before is lost."""
        facts = link.facts
        name = self._names.canonical(facts.host)
        if facts.joined:
            if name in self.hosts:
                self._waiting[facts.host] = link
                return False
            self.joined[facts.host] = link
        self.hosts[name] = link
        return True

    def remove(self, link: AgentLink) -> None:
        """Forget an agent that is lost, or has ended."""
        self.agents.pop(link.agent, None)
        self._ending.discard(link.agent)
        self.keep(link, given_up=True)
        host = link.facts.host
        if self.is_hosts_agent(link):
            del self.hosts[self._names.canonical(host)]
            self.joined.pop(host, None)
        elif self._waiting.get(host) is link:
            del self._waiting[host]

    def take_waiting(self, host: str) -> AgentLink | None:
        """Return the agent that has waited for a name; it waits no more."""
        newcomer = self._waiting.pop(host, None)
        return None if newcomer is None or newcomer.is_lost else newcomer


def _host_of(link: AgentLink) -> Host:
    return Host(link.facts.host, link.facts.hello.slots, tuple(link.facts.hello.labels.split()))
