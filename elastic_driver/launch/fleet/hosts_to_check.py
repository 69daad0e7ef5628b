"""The hosts whose network is checked, as the network check needs them: see its Hosts.

Owns nothing. The fleet knows the hosts and who is notified of a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.fleet.changes import Changes
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.network_check import Checked
from elastic_driver.launch.fleet.roster import Roster


class CheckListener(Protocol):
    """Notified of checks; see FleetListener."""

    def host_unready(self, host: str, failure: DialFailure) -> None:
        """Called when a host is not to be used."""

    def network_checked(self, report: Checked) -> None:
        """Called when the network was checked."""

    def is_left_out(self, host: str) -> bool:
        """Return whether a host gets no workers for a while."""


class CheckedFleet(Protocol):
    """What is needed of the fleet; see Hosts."""

    changes: Changes

    def awaits_others(self) -> bool:
        """Return whether more hosts may get an agent soon."""

    def address_of(self, link: AgentLink, others: Sequence[AgentLink]) -> str:
        """Return where the workers of an agent listen for those of others."""


class HostsToCheck:
    """Adapts the fleet to the network check.

    Args:
        fleet: whose hosts they are.
        roster: of its agents.
        names_of: returns the names under which the job knows an agent's host.
        wanted: returns the names that are to have an agent, in the order of their list.
        listener: returns the listener to notify.
    """

    def __init__(
        self,
        fleet: CheckedFleet,
        roster: Roster,
        names_of: Callable[[AgentLink], Iterable[str]],
        wanted: Callable[[], Iterable[str]],
        listener: Callable[[], CheckListener],
    ) -> None:
        self.changes = fleet.changes
        self.awaits_others = fleet.awaits_others
        self.address_of = fleet.address_of
        self._roster = roster
        self._names_of = names_of
        self._wanted = wanted
        self._listener = listener

    def present(self) -> Sequence[AgentLink]:
        """Return the agents of all hosts, in the order of their list, without those that are about to end."""
        listed = dict.fromkeys(map(self._roster.link_of, (*self._wanted(), *self._roster.joined)))
        return [link for link in listed if link is not None and not (link.is_away or self._roster.is_ending(link))]

    def gets_workers(self, link: AgentLink) -> bool:
        """Return whether an agent's usable host gets workers."""
        return not all(map(self._listener().is_left_out, self._names_of(link)))

    def admitted(self) -> None:
        """Wake all that wait for more usable hosts."""
        self.changes.report()

    def checked(self, report: Checked) -> None:
        """Report a check that has ended, with news."""
        self._listener().network_checked(report)

    def barred(self, host: str, reason: str) -> None:
        """Report a host as not ready."""
        self._listener().host_unready(host, DialFailure(reason))
        self.changes.report()
