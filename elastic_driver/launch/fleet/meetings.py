"""Where the ranks of one generation of workers meet: a port that the agent of rank 0's host holds for them.

Owns which workers are a generation, and the ports that are held. A generation is all who are started in one round with
the same first host; its port is held until the next one begins. One that cannot meet is followed by another with the
next start. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver.dialects.dialect import Meeting
from elastic_driver.errors import LaunchError
from elastic_driver.launch.fleet.addresses import Addresses, Agents
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import HoldPort, LetGo, PortHeld, Said


@dataclass(frozen=True, slots=True)
class _Generation:
    """Workers that are started to meet each other.

    Attributes:
        number: no other generation of the job has it.
        round_id: its round.
        hosts: those of its workers; rank 0 is on the first.
        link: the agent that holds its port; None where there was none.
        meeting: where they meet, or why they cannot.
    """

    number: int
    round_id: int
    hosts: Sequence[str]
    link: AgentLink | None
    meeting: asyncio.Future[Meeting | LaunchError]

    @property
    def has_failed(self) -> bool:
        """Whether it is known that they cannot."""
        return self.meeting.done() and isinstance(self.meeting.result(), LaunchError)


class Meetings:
    """See above.

    Args:
        agents: of the job.
        addresses: of its hosts.
        ports: first and last port that may be held; None for any.
    """

    def __init__(self, agents: Agents, addresses: Addresses, ports: tuple[int, int] | None) -> None:
        self._agents = agents
        self._addresses = addresses
        self._ports = list(ports or ())
        self._last: _Generation | None = None
        self._open: dict[int, _Generation] = {}  # whose port is not held yet, by number

    def of(self, round_id: int, hosts: Sequence[str]) -> asyncio.Future[Meeting | LaunchError]:
        """Where workers that are started in this round meet; or why they cannot, which is the first host's fault.

        Args:
            round_id: the round.
            hosts: those of all who are planned, in the order of their first ranks.
        """
        last = self._last
        if last is not None and (last.round_id, last.hosts[0]) == (round_id, hosts[0]) and not last.has_failed:
            return last.meeting
        if last is not None and last.link is not None:
            last.link.send(LetGo(last.number))
        number = 1 if last is None else last.number + 1
        link = self._agents.link_of(hosts[0])
        self._last = _Generation(number, round_id, hosts, link, asyncio.get_running_loop().create_future())
        self._hold(self._last)
        return self._last.meeting

    def _hold(self, generation: _Generation) -> None:
        link = generation.link
        if link is None:
            why = f"cannot hold a port for rank 0: host {generation.hosts[0]} has no agent any more"
            generation.meeting.set_result(LaunchError(why))
            return
        self._open[generation.number] = generation
        link.send(HoldPort(generation.number, self._ports))
        link.overdue(f"hold a port for generation {generation.number}", generation.meeting.done)

    # --- what the fleet tells (Part) -------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """Nothing: the port of a new generation is held when its workers are started."""

    def lost(self, link: AgentLink, why: str) -> None:
        """What an agent was to hold is not held."""
        for generation in [each for each in self._open.values() if each.link is link]:
            self._settle(generation, LaunchError(f"cannot hold a port for rank 0: {why}"))

    def take(self, link: AgentLink, message: Said) -> bool:
        """Whether an agent holds a port. Returns whether it was that."""
        if not isinstance(message, PortHeld):
            return False
        generation = self._open.get(message.generation)
        if generation is not None and generation.link is link:
            if 0 < message.port < 1 << 16:
                address = self._addresses.of(generation.hosts)[generation.hosts[0]]
                self._settle(generation, Meeting(address, message.port))
            else:
                why = f"cannot hold a port for rank 0 on host {link.facts.host}: {message.error}"
                self._settle(generation, LaunchError(why))
        return True

    def _settle(self, generation: _Generation, meeting: Meeting | LaunchError) -> None:
        del self._open[generation.number]
        generation.meeting.set_result(meeting)
