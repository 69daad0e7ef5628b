"""The hosts reported as silent, and not yet as heard from again.

Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.roster import Roster


class SilenceListener(Protocol):
    """Notified of silent hosts; see FleetListener."""

    def host_silent(self, host: str, silent_s: float, *, sure: bool) -> None:
        """Called when nothing is heard from the host."""

    def host_heard(self, host: str) -> None:
        """Called when the host is heard from again, or starts over."""


class Silences:
    """Reports hosts as silent and as heard from again, each once.

    Args:
        roster: of the agents.
        names_of: returns the names under which the job knows an agent's host.

    Attributes:
        listener: receives the reports. To be set before anything else.
    """

    listener: SilenceListener

    def __init__(self, roster: Roster, names_of: Callable[[AgentLink], Iterable[str]]) -> None:
        self._roster = roster
        self._names_of = names_of
        self._silent: set[str] = set()

    def resume(self, names: Iterable[str]) -> None:
        """Restore the hosts that another driver has reported as silent."""
        self._silent.update(names)

    def link_silent(self, link: AgentLink, silent_s: float) -> None:
        """Report an agent's host as silent; first others in doubt, which may be silent for the same reason."""
        for other in tuple(self._roster.agents.values()):
            if other.is_in_doubt():
                self._is_silent(other, other.unheard_s, sure=False)
        self._is_silent(link, silent_s, sure=True)

    def _is_silent(self, link: AgentLink, silent_s: float, *, sure: bool) -> None:
        if self._roster.is_hosts_agent(link):
            for name in self._names_of(link):
                self._silent.add(name)
                self.listener.host_silent(name, silent_s, sure=sure)

    def link_heard(self, link: AgentLink) -> None:
        """Report an agent's host as heard from, if it was silent; it may be another agent."""
        if self._roster.is_hosts_agent(link):
            self._heard(self._names_of(link))

    def keep(self, names: Iterable[str]) -> None:
        """Keep only these hosts, and report all others as heard from."""
        self._heard(self._silent.difference(names))

    def _heard(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._silent:
                self._silent.discard(name)
                self.listener.host_heard(name)
