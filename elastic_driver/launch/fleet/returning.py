"""The agents of an earlier driver of the job: which of them are away, and when they are back.

Owns only the waiting. How long they are waited for, and what follows from their reports, is up to the driver
(:mod:`elastic_driver.driver.takeover`). Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.launch.fleet.changes import Changes
from elastic_driver.launch.fleet.kept import AgentKept
from elastic_driver.launch.fleet.link import AgentFacts, AgentLink
from elastic_driver.launch.fleet.names import HostNames
from elastic_driver.launch.fleet.roster import Roster
from elastic_driver.rendezvous.agent_messages import AgentMessage, Levels


class AgentsOwner(Protocol):
    """The owner of the agents until they are back."""

    def back(self, link: AgentLink, levels: Levels) -> None:
        """Handle the state that an agent reports when it is back.

        Raises:
            RendezvousProtocolError: it is impossible. The agent's connection is cut.
        """

    def gone(self, link: AgentLink) -> None:
        """Handle the loss of an agent that was away."""


class Returning:
    """Waits for the agents of an earlier driver.

    Args:
        roster: of the agents.
        names: of hosts.
        changes: of the fleet.
        make_link: makes the link of an agent that is away.
    """

    def __init__(
        self,
        roster: Roster,
        names: HostNames,
        changes: Changes,
        make_link: Callable[[AgentFacts], AgentLink],
    ) -> None:
        self._roster = roster
        self._names = names
        self._changes = changes
        self._make_link = make_link
        self._former: AgentsOwner

    async def expect(self, former: AgentsOwner, agents: Sequence[AgentKept], names: Sequence[str]) -> None:
        """Add the agents to the roster as away. To be called once, before any agent can dial in.

        Args:
            former: their owner until they are back.
            agents: those that were welcomed, and not given up. Their keys are known already (Tickets.take_over).
            names: under which hosts are known, besides theirs.
        """
        self._former = former
        await self._names.look_up([*(kept.host for kept in agents), *names])
        for kept in agents:
            link = self._make_link(kept.facts)
            self._roster.add(link)
            self._roster.settle(link)
            if kept.ending:
                self._roster.ends(link)

    def away(self) -> Sequence[AgentLink]:
        """Return the agents that are not back yet."""
        return [link for link in self._roster.agents.values() if link.is_away]

    async def all_back(self) -> None:
        """Wait until all agents are back. Before that no host is dialled or dropped."""
        while self.away():
            await self._changes.wait(self._changes.count)

    def takes(self, link: AgentLink, message: AgentMessage) -> bool:
        """Return whether a message is the report of an agent that is back, and hand it on.

        Raises:
            RendezvousProtocolError: it is a second report, or another message before the first.
        """
        is_levels = isinstance(message, Levels)
        if link.is_away != is_levels:
            why = "must report its state first" if link.is_away else "has already reported its state"
            raise RendezvousProtocolError(f"cannot accept message {message.name}: an agent that is back {why}")
        if isinstance(message, Levels):
            self._former.back(link, message)
        return is_levels

    def lost(self, link: AgentLink) -> None:
        """Report that an agent is lost, if it was away."""
        if link.is_away:
            self._former.gone(link)
