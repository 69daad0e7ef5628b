"""The hosts that the core is notified of: those that a source lists and that have an agent, and those that have joined.

If no host is dialled, only hosts that are both listed and joined.

See :class:`~elastic_driver.discovery.source.Hosts`. Owns when the source is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import NamedTuple, Protocol

from elastic_driver.errors import DiscoveryError
from elastic_driver.hosts import Departure, Host
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.kept import NOTHING, FleetFact, Keeper, MachineKept

# The agent of the driver's own machine takes about 0.2 s to connect; until then there would be no hosts at all.
_SETTLE_S = 5.0


class Source(Protocol):
    """Lists the wanted hosts; a HostDiscovery."""

    async def find_hosts(self) -> tuple[Host, ...]:
        """Return all of them. Raises DiscoveryError if there is no answer."""

    async def wait_change(self, limit_s: float) -> None:
        """Wait until there is reason to ask again, for at most limit_s seconds."""

    def departures(self) -> tuple[Departure, ...]:
        """Return the hosts announced to leave; see HostDiscovery."""

    def remark(self) -> str:
        """Return a remark about the source; see HostDiscovery."""


class _Machine(NamedTuple):
    """The last machine known under a host's name.

    Attributes:
        incarnation: see Host.
        agent: of a host that has joined; "" for a listed one.
        addresses: of a listed host.
    """

    incarnation: int = 0
    agent: str = ""
    addresses: frozenset[str] = frozenset()


class FleetDiscovery:
    """The hosts with an agent, as a HostDiscovery for the core.

    Args:
        source: lists the wanted hosts.
        fleet: gets agents started on them.
        on_settled: called when the first hosts have an agent, or cannot have one yet.
        only_listed: whether hosts that join are used only if the source lists them.
        keeper: persists the hosts' machines.
        machines: the machines known to the earlier driver.
        goes_on: whether there was an earlier driver. Then hosts without an agent are not waited for: meanwhile the job
            would continue with a host that is lost, and blame it.
    """

    def __init__(
        self,
        source: Source,
        fleet: Fleet,
        *,
        on_settled: Callable[[], None] = lambda: None,
        only_listed: bool = False,
        keeper: Keeper[FleetFact] = NOTHING,
        machines: Iterable[MachineKept] = (),
        goes_on: bool = False,
    ) -> None:
        self._source = source
        self._fleet = fleet
        self._only_listed = only_listed
        self._goes_on = goes_on
        self._on_settled = on_settled
        self._listed: tuple[Host, ...] | None = None  # the last answer
        self._error: DiscoveryError | None = None  # not reported yet
        self._answers = True
        self._down: frozenset[str] = frozenset()
        self._has_asked = False
        self._asking: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._seen = 0  # number of the fleet's changes seen
        self._keeper = keeper
        # By the names of hosts that are listed, or have joined.
        self._machines = {
            machine.host: _Machine(machine.incarnation, machine.agent, machine.addresses) for machine in machines
        }

    async def find_hosts(self) -> tuple[Host, ...]:
        """Return the present hosts. A source that is slow or fails hides no change of the fleet."""
        if self._waiting is None:
            self._asking = self._asking or asyncio.create_task(self._ask())
            try:
                await (self._wait(self._asking) if self._has_asked else self._asking)
            except asyncio.CancelledError:
                self._asking.cancel()
                await asyncio.wait((self._asking,))
                raise
            self._has_asked = True
            if self._asking.done():
                asking, self._asking = self._asking, None
                asking.result()
        self._seen = self._fleet.changes.count
        error, self._error = self._error, None
        if error is not None:
            raise error
        listed = self._listed or ()
        names = {host.name for host in listed}
        up = [host for host in listed if self._fleet.is_up(host.name)]
        self._down = frozenset(names.difference(host.name for host in up))
        others = () if self._only_listed else self._fleet.joined()
        hosts = self._with_incarnations([*up, *(host for host in others if host.name not in names)], names)
        return tuple(sorted(hosts, key=lambda host: self._fleet.node_rank(host.name)))

    def _with_incarnations(self, hosts: Sequence[Host], listed: Set[str]) -> list[Host]:
        """Give hosts incarnations that distinguish them from others that had their names before.

        A listed host that has rebooted keeps one of its addresses: what is known of it (a drain, a failure) still
        holds. A pod that replaces another has none of its addresses. A host that joins is another machine with each
        agent: a pod's container may be restarted before the loss has been noticed.
        """
        machines = {name: machine for name, machine in self._machines.items() if name in listed}
        told = []
        for host in hosts:
            last = self._machines.get(host.name, _Machine())
            link = self._fleet.link_of(host.name)
            if link is None:
                machine = last
            elif host.name in listed:
                addresses = link.facts.addresses
                is_other = bool(addresses and last.addresses) and addresses.isdisjoint(last.addresses)
                machine = _Machine(last.incarnation + is_other, addresses=addresses)
            else:
                is_other = last.agent not in ("", link.agent)
                machine = _Machine(last.incarnation + is_other, agent=link.agent)
            machines[host.name] = machine
            told.append(replace(host, incarnation=machine.incarnation))
        for name in self._machines.keys() - machines.keys():
            self._keeper.drop(MachineKept, name)
        for name, machine in machines.items():
            if self._machines.get(name) != machine:
                self._keeper.keep(MachineKept(name, *machine))
        self._machines = machines
        return told

    async def wait_change(self, limit_s: float) -> None:
        """Wait until the source or the fleet has changed, for at most limit_s seconds."""
        if self._asking is not None:
            await self._wait(self._asking)
            return
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._source.wait_change(limit_s))
        await self._wait(self._waiting)
        if self._waiting.done():
            waiting, self._waiting = self._waiting, None
            waiting.result()

    async def _wait(self, task: asyncio.Task[None]) -> None:
        """Wait until the task is done, or the fleet has changed."""
        changed = asyncio.create_task(self._fleet.changes.wait(self._seen))
        try:
            await asyncio.wait((task, changed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    def down(self) -> frozenset[str]:
        """Return the listed hosts that are not up. A host that had joined and is not up has left."""
        return self._down

    def answers(self) -> bool:
        """Return whether the source's last request has succeeded."""
        return self._answers

    def departures(self) -> tuple[Departure, ...]:
        """Return the hosts that the source announces to leave; those announced by agents are handled elsewhere."""
        return self._source.departures()

    def remark(self) -> str:
        """Return the remarks of the source and of the fleet."""
        return "; ".join(filter(None, (self._source.remark(), self._fleet.remark())))

    async def _ask(self) -> None:
        is_first = self._listed is None
        self._answers = False  # whatever it raises
        try:
            listed = await self._source.find_hosts()
        except DiscoveryError as error:
            self._error = error
            return
        self._answers = True
        # After a takeover, a host whose agent is not back yet must not seem to be gone.
        await self._fleet.returning.all_back()
        # No agent is started any more on a host that is about to leave.
        going = {departure.hostname for departure in self._source.departures()}
        await self._fleet.want([each.name for each in listed if each.name not in going or self._fleet.is_up(each.name)])
        if is_first:
            if not self._goes_on:
                await self._fleet.settle(_SETTLE_S)
            self._on_settled()
        self._listed = listed
