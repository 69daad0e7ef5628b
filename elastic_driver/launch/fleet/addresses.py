"""Where the workers of one host listen for those of the others.

Owns the choice between loopback and the addresses of the hosts. A host's address comes from its agent and the fleet
(:meth:`~elastic_driver.launch.fleet.fleet.Fleet.address_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from elastic_driver.errors import LaunchError
from elastic_driver.launch.fleet.link import AgentLink

LOOPBACK = "127.0.0.1"


class Agents(Protocol):
    """What is needed of the fleet."""

    def link_of(self, hostname: str) -> AgentLink | None:
        """Return the agent of a host; None if it has none now."""

    def links(self) -> Sequence[AgentLink]:
        """Return all agents that are not lost."""

    def address_of(self, link: AgentLink, others: Sequence[AgentLink]) -> str:
        """Return where the workers of this agent listen for those of the others.

        Raises:
            LaunchError: its host has no such address.
        """


class Addresses:
    """Chooses the addresses where workers listen.

    Args:
        agents: of the job.
        warn: called with one-line warnings about failures that do not end the job.
    """

    def __init__(self, agents: Agents, warn: Callable[[str], None]) -> None:
        self._agents = agents
        self._warn = warn

    def of(self, hostnames: Sequence[str]) -> Mapping[str, str]:
        """Return the addresses of all hosts of one round, by name: loopback while all are on one machine."""
        links = {name: self._agents.link_of(name) for name in hostnames}
        distinct = list({id(link): link for link in links.values() if link is not None}.values())
        if len(distinct) < 2:
            return dict.fromkeys(hostnames, LOOPBACK)
        return {name: LOOPBACK if link is None else self._address(link, distinct) for name, link in links.items()}

    def _address(self, link: AgentLink, others: Sequence[AgentLink]) -> str:
        try:
            return self._agents.address_of(link, others)
        except LaunchError as error:
            # It was alone when its workers were started. They will notice; the job must not end for that.
            self._warn(str(error))
            return link.facts.peer or LOOPBACK

    def for_all(self, hostname: str) -> str:
        """Return where all present and future other hosts reach a host; "" means the driver's own machine.

        Loopback if the host has no other address: then no other host can join.

        Raises:
            LaunchError: the host no longer has an agent.
        """
        links = self._agents.links()
        link = self._agents.link_of(hostname) if hostname else next((link for link in links if link.facts.local), None)
        if link is None and hostname:
            raise LaunchError(f"host {hostname} no longer has an agent")
        if link is None:  # the driver's machine is not one of the job's: others have dialled this address
            return next((link.facts.ours for link in links), LOOPBACK)
        try:
            return self._agents.address_of(link, links)
        except LaunchError:
            if any(not link.facts.local for link in links):
                raise
            return LOOPBACK
