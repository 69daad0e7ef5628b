"""Having hosts import what workers import: before a worker is there, and for those that are forked later.

Owns which agents were told to. What they do is :mod:`elastic_driver.launch.warm`'s. Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elastic_driver.launch.fleet.addresses import Agents
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.worker import Variables
from elastic_driver.rendezvous.agent_messages import Prepare, Prepared, Said, Warmed, WarmUp


class Warming:
    """See above.

    Args:
        agents: of the job.
        variables: of workers.
        on_warm: called with a process id and seconds whenever workers can be forked on a host from now on.
        on_prepared: called when a host has imported what workers import.
    """

    def __init__(
        self,
        agents: Agents,
        *,
        variables: Variables,
        on_warm: Callable[[int, float], None],
        on_prepared: Callable[[], None],
    ) -> None:
        self._agents = agents
        self._variables = variables
        self._on_warm = on_warm
        self._on_prepared = on_prepared
        self._warms = False
        self._prepared: dict[str, bool] = {}  # by agent: whether what its workers import is there, or is to be imported

    def prepare(self, hostname: str, sample: Callable[[], tuple[Sequence[str], Mapping[str, str]]]) -> bool:
        """Has a host import what workers import, before any runs there; see the driver's Preparer."""
        link = self._agents.link_of(hostname)
        if link is None:
            return False
        if link.agent not in self._prepared:
            self._prepared[link.agent] = False
            command, env = sample()
            link.send(Prepare(list(command), self._variables(link.facts, env)))
        return not self._prepared[link.agent]

    def has_workers(self, link: AgentLink) -> None:
        """A worker is started there: its host is no newcomer, and need not be prepared any more."""
        self._prepared.setdefault(link.agent, True)

    def warm_up(self) -> None:
        """Has later workers forked from warmed processes. Not before the first ones run: it would slow them down."""
        if not self._warms:
            self._warms = True
            for link in self._agents.links():
                link.send(WarmUp())

    # --- what the fleet tells (Part) -------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """A new agent does as the others do."""
        if self._warms:
            link.send(WarmUp())

    def lost(self, link: AgentLink, why: str) -> None:
        """Another agent of that host knows nothing of what was imported."""
        self._prepared.pop(link.agent, None)

    def take(self, link: AgentLink, message: Said) -> bool:
        """What an agent says of that. Returns whether it was that."""
        match message:
            case Warmed(pid, took_s):
                self._on_warm(pid, took_s)
            case Prepared():
                self._prepared[link.agent] = True
                self._on_prepared()
            case _:
                return False
        return True
