"""Makes hosts import what workers import: before a worker runs, and for those forked later.

Owns which agents have been ordered to. The agents' part is :mod:`elastic_driver.launch.warm`. Used on the event loop
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elastic_driver.launch.fleet.addresses import Agents
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.worker import Variables
from elastic_driver.rendezvous.agent_messages import AgentMessage, Prepare, Prepared, Warmed, WarmUp


class Warming:
    """Orders agents to prepare their hosts and to fork workers.

    Args:
        agents: of the job.
        variables: selects the variables of workers to send.
        on_warm: called with a PID and seconds whenever a host can fork workers from now on.
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
        self._prepared: dict[str, bool] = {}  # by agent: whether it has imported what its workers import

    def prepare(self, hostname: str, sample: Callable[[], tuple[Sequence[str], Mapping[str, str]]]) -> bool:
        """Make a host import what workers import, before any runs there; see the driver's Preparer."""
        link = self._agents.link_of(hostname)
        if link is None:
            return False
        if link.agent not in self._prepared:
            self._prepared[link.agent] = False
            command, env = sample()
            link.send(Prepare(list(command), self._variables(link.facts, env)))
        return not self._prepared[link.agent]

    def has_workers(self, link: AgentLink) -> None:
        """Record that a worker is started there: its host no longer needs to be prepared."""
        self._prepared.setdefault(link.agent, True)

    def warm_up(self) -> None:
        """Fork later workers from warmed processes. Not before the first ones run, which it would slow down."""
        if not self._warms:
            self._warms = True
            for link in self._agents.links():
                link.send(WarmUp())

    # --- events of the fleet (Part) --------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """Warm up a new agent if the others do."""
        if self._warms:
            link.send(WarmUp())

    def lost(self, link: AgentLink, why: str) -> None:
        """Forget an agent: another one of that host has imported nothing."""
        self._prepared.pop(link.agent, None)

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        """Handle an agent's report about warming. Returns whether the message was one."""
        match message:
            case Warmed(pid, took_s):
                self._on_warm(pid, took_s)
            case Prepared():
                self._prepared[link.agent] = True
                self._on_prepared()
            case _:
                return False
        return True
