"""The hosts that the core hears of: those that a source lists and that have an agent, and those that have joined.

Where no host is dialled, only those that are listed and have joined.

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

# The agent of the driver's own machine takes some 0.2 s to come; until then there would be no hosts at all.
_SETTLE_S = 5.0


class Source(Protocol):
    """Tells the hosts that are wanted; a HostDiscovery."""

    async def find_hosts(self) -> tuple[Host, ...]:
        """All of them. Raises DiscoveryError when there is no answer."""

    async def wait_change(self, limit_s: float) -> None:
        """Blocks until there is reason to ask again."""

    def departures(self) -> tuple[Departure, ...]:
        """See HostDiscovery."""

    def remark(self) -> str:
        """See HostDiscovery."""


class _Machine(NamedTuple):
    """The machine that a host was last.

    Attributes:
        incarnation: see Host.
        agent: of one that has joined; "" for one that is listed.
        addresses: of one that is listed.
    """

    incarnation: int = 0
    agent: str = ""
    addresses: frozenset[str] = frozenset()


class FleetDiscovery:
    """See above.

    Args:
        source: lists the hosts that are wanted.
        fleet: has agents on them.
        on_settled: called when the first hosts have an agent, or cannot have one yet.
        only_listed: whether hosts that join are used only where the source lists them.
        keeper: of the machines that hosts are.
        machines: those that the driver before has known.
        goes_on: whether there was one. Then hosts that have no agent yet are not waited for: who looks at the job's
            hosts would go on with one that is lost, and blame it.
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
        self._listed: tuple[Host, ...] | None = None  # as it was answered last
        self._error: DiscoveryError | None = None  # which nobody was told yet
        self._answers = True
        self._down: frozenset[str] = frozenset()
        self._has_asked = False
        self._asking: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._seen = 0  # changes of the fleet
        self._keeper = keeper
        # By the names of hosts that are listed, or have joined.
        self._machines = {each.host: _Machine(each.incarnation, each.agent, each.addresses) for each in machines}

    async def find_hosts(self) -> tuple[Host, ...]:
        """See HostDiscovery. A source that takes its time, or fails, hides no change of the fleet."""
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
        """Tells hosts from others that have had their names before.

        A listed host that has rebooted has an address that it had: what is known of it (a drain, a failure) still
        holds. A pod that takes another's place has none of its addresses. One that joins is another machine with each
        agent: a pod's container may be started again before anybody has asked who is gone.
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
        """See HostDiscovery."""
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
        """Blocks until it is done, or the fleet has changed."""
        changed = asyncio.create_task(self._fleet.changes.wait(self._seen))
        try:
            await asyncio.wait((task, changed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    def down(self) -> frozenset[str]:
        """See Hosts. Who has joined, and is not up any more, has left."""
        return self._down

    def answers(self) -> bool:
        """See Hosts."""
        return self._answers

    def departures(self) -> tuple[Departure, ...]:
        """See HostDiscovery. Agents say so themselves, and are believed at once."""
        return self._source.departures()

    def remark(self) -> str:
        """See HostDiscovery."""
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
        # Where another driver had the job, a host whose agent is not back yet must not seem to be gone.
        await self._fleet.returning.all_back()
        # On a host that is about to go no agent is started any more.
        going = {departure.hostname for departure in self._source.departures()}
        await self._fleet.want([each.name for each in listed if each.name not in going or self._fleet.is_up(each.name)])
        if is_first:
            if not self._goes_on:
                await self._fleet.settle(_SETTLE_S)
            self._on_settled()
        self._listed = listed
