"""The agents of a driver that had the job before this one: which of them are away, and when they are back.

Owns nothing but who is asked about them. For how long they are waited for, and what becomes of what they say, is the
driver's (:mod:`elastic_driver.driver.takeover`). Used on the event loop only.
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
from elastic_driver.rendezvous.agent_messages import Levels, Said


class Former(Protocol):
    """Whose the agents are until they are back."""

    def back(self, link: AgentLink, levels: Levels) -> None:
        """One is back, and says what it knows.

        Raises:
            RendezvousProtocolError: it cannot know that. Its connection is cut.
        """

    def gone(self, link: AgentLink) -> None:
        """One that was away is lost."""


class Returning:
    """See above.

    Args:
        roster: of the agents.
        names: of hosts.
        changes: are waited for.
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
        self._former: Former

    async def expect(self, former: Former, agents: Sequence[AgentKept], names: Sequence[str]) -> None:
        """Has these away. To be called once, before anybody can come.

        Args:
            former: whose they are until they are back.
            agents: that were welcomed, and not given up. Their keys are known already (Tickets.take_over).
            names: under which hosts are known, beside theirs.
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
        """Those that are not back yet."""
        return [link for link in self._roster.agents.values() if link.is_away]

    async def all_back(self) -> None:
        """Blocks until none is away any more. Before that nobody is dialled, nor is anybody unwanted."""
        while self.away():
            await self._changes.wait(self._changes.count)

    def takes(self, link: AgentLink, message: Said) -> bool:
        """Whether what an agent says is said by one that is back, which is handed on.

        Raises:
            RendezvousProtocolError: it says that too late, or something else before.
        """
        is_levels = isinstance(message, Levels)
        if link.is_away != is_levels:
            why = "says what it knows first" if link.is_away else "has said already what it knows"
            raise RendezvousProtocolError(f"cannot take message {message.name}: an agent that is back {why}")
        if isinstance(message, Levels):
            self._former.back(link, message)
        return is_levels

    def lost(self, link: AgentLink) -> None:
        """An agent is lost."""
        if link.is_away:
            self._former.gone(link)
