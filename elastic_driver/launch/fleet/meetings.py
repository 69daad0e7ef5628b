"""Where the ranks of one generation of workers meet: a port that the agent of rank 0's host holds for them.

Owns which workers form a generation, and the held ports. A generation is all workers started in one round with the same
first host; its port is held until the next one begins. After one that cannot meet, the next start begins another. Used
on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver.dialects.dialect import Meeting
from elastic_driver.errors import LaunchError
from elastic_driver.launch.fleet.addresses import Addresses, Agents
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import AgentMessage, HoldPort, LetGo, PortHeld, PortLevel


@dataclass(slots=True, eq=False)
class _Generation:
    """Workers that are started to meet each other.

    Attributes:
        round_id: its round.
        hosts: those of its workers; rank 0 is on the first.
        link: the agent that holds its port; None if there was none.
        meeting: where they meet, or why they cannot.
        number: unique among the generations whose port this agent holds; 0 until it is ordered to hold one.
    """

    round_id: int
    hosts: Sequence[str]
    link: AgentLink | None
    meeting: asyncio.Future[Meeting | LaunchError]
    number: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether it is known that they cannot meet."""
        return self.meeting.done() and isinstance(self.meeting.result(), LaunchError)


class Meetings:
    """Has agents hold the ports where workers meet.

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
        self._count = 0  # the highest number so far
        self._open: list[_Generation] = []  # whose port is not held yet
        self._before: dict[AgentLink, PortLevel] = {}  # ports held for the last generation of another driver

    def of(self, round_id: int, hosts: Sequence[str]) -> asyncio.Future[Meeting | LaunchError]:
        """Return where workers started in this round meet; or why they cannot, which is the first host's fault.

        Args:
            round_id: the round.
            hosts: those of all planned workers, in the order of their first ranks.
        """
        last, link = self._last, self._agents.link_of(hosts[0])
        if last is not None and (last.round_id, last.link) == (round_id, link) and not last.has_failed:
            return last.meeting
        if last is not None and last.link is not None and last.number:
            last.link.send(LetGo(last.number))
        self._last = _Generation(round_id, hosts, link, asyncio.get_running_loop().create_future())
        self._open.append(self._last)
        if link is None:
            why = f"cannot hold a port for rank 0: host {hosts[0]} no longer has an agent"
            self._settle(self._last, LaunchError(why))
        elif not link.is_away:  # else it may hold one, and reports that when it is back
            self._hold(self._last, link)
        self._let_go_but(link)
        return self._last.meeting

    def _let_go_but(self, link: AgentLink | None) -> None:
        """Release the ports of other agents, held for a generation that is over."""
        for other in [other for other in self._before if other is not link]:
            other.send(LetGo(self._before.pop(other).generation))

    def back(self, link: AgentLink, held: Sequence[PortLevel]) -> None:
        """Use or release the ports of an agent that is back: the last one may be the present generation's.

        Args:
            link: the agent.
            held: the ports that it holds for another driver's generations.
        """
        self._before.pop(link, None)
        by_age = sorted(held, key=lambda port: port.generation)
        self._count = max((self._count, *(port.generation for port in by_age)))
        last = self._last
        is_late = last is not None and last.link is not link
        for port in by_age if is_late else by_age[:-1]:
            link.send(LetGo(port.generation))
        if by_age and not is_late:
            self._before[link] = by_age[-1]
        if last is not None and last.link is link and not last.meeting.done():
            self._hold(last, link)

    def _hold(self, generation: _Generation, link: AgentLink) -> None:
        before = self._before.pop(link, None)
        if before is not None and before.round_id == generation.round_id:
            generation.number = before.generation
            self._is_held(generation, before.port)
            return
        if before is not None:
            link.send(LetGo(before.generation))
        self._count += 1
        number = generation.number = self._count
        link.send(HoldPort(number, self._ports, generation.round_id))
        link.overdue(f"hold a port for generation {number}", generation.meeting.done)

    # --- events of the fleet (Part) --------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """Do nothing: the port of a new generation is held when its workers are started."""

    def lost(self, link: AgentLink, why: str) -> None:
        """Fail the generations whose port a lost agent was to hold."""
        self._before.pop(link, None)
        for generation in [each for each in self._open if each.link is link]:
            self._settle(generation, LaunchError(f"cannot hold a port for rank 0: {why}"))

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        """Handle an agent's answer to an order to hold a port. Returns whether the message was one."""
        if not isinstance(message, PortHeld):
            return False
        number = message.generation
        generation = next((one for one in self._open if (one.link, one.number) == (link, number)), None)
        if generation is not None and number:
            if 0 < message.port < 1 << 16:
                self._is_held(generation, message.port)
            else:
                why = f"cannot hold a port for rank 0 on host {link.facts.host}: {message.error}"
                self._settle(generation, LaunchError(why))
        return True

    def _is_held(self, generation: _Generation, port: int) -> None:
        address = self._addresses.of(generation.hosts)[generation.hosts[0]]
        self._settle(generation, Meeting(address, port))

    def _settle(self, generation: _Generation, meeting: Meeting | LaunchError) -> None:
        self._open.remove(generation)
        generation.meeting.set_result(meeting)
