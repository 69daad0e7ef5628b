"""Where a coordinator hears of its workers' servers: any source of hosts, as levels of addresses.

Owns what a host means here: a server on each of its slots, on ports that follow each other. Knows nothing of
TensorFlow, and of what is done with a listing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_driver.discovery.caller import as_host
from elastic_driver.discovery.objects import HostDiscoveryScript
from elastic_driver.discovery.script import file_of
from elastic_driver.discovery.source import HostDiscovery
from elastic_driver.errors import RendezvousClosedError, SettingsError
from elastic_driver.hosts import Departure, Host, with_number
from elastic_driver.tensorflow.addresses import checked_address
from elastic_driver.tensorflow.driver_link import DriverLink


@dataclass(frozen=True, slots=True)
class Leave:
    """A server that is there still, and is to be left.

    Attributes:
        within_s: how long its closure may take; None when nobody has said.
    """

    within_s: float | None = None


Listing = Mapping[str, Leave | None]
"""All servers there are: address -> None, or that it is about to go."""


class Ended(Exception):
    """Nobody tells of servers any more."""


class Source(Protocol):
    """Tells the servers. Used by one thread."""

    def next(self, stop: threading.Event) -> Listing | None:
        """All servers now. Blocks until there is reason to look again, or it is to stop; None for no news.

        Raises:
            Ended: there will be no answer any more.
            Exception: there is none now.
        """

    def close(self) -> None:
        """It is not asked any more."""


class Finder(Protocol):
    """What can be asked for hosts: any object with Horovod's method."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int | Host]:
        """Host name -> slots, or the host with its labels."""


class FinderSource:
    """Asks an object again and again.

    Args:
        finder: the object.
        port: of the first server on each host; None where the object's names are addresses themselves.
        interval_s: between an answer and the next question.
    """

    def __init__(self, finder: Finder, *, port: int | None, interval_s: float) -> None:
        self._finder = finder
        self._port = port
        self._interval_s = interval_s
        self._pause_s = 0.0

    def next(self, stop: threading.Event) -> Listing | None:
        """See Source."""
        if stop.wait(self._pause_s):
            return None
        self._pause_s = self._interval_s
        found = self._finder.find_available_hosts_and_slots()
        if self._port is None:
            return {checked_address(str(name)): None for name, value in found.items() if value != 0}
        return servers_of((as_host(str(name), value) for name, value in found.items()), (), self._port)

    def close(self) -> None:
        """Nothing is open."""


class AsyncSource:
    """Follows one of the driver's own sources, on an event loop of the thread that asks.

    Args:
        discovery: the source.
        port: of the first server on each host.
    """

    def __init__(self, discovery: HostDiscovery, *, port: int) -> None:
        self._discovery = discovery
        self._port = port
        self._runner = asyncio.Runner()
        self._has_answered = False

    def next(self, stop: threading.Event) -> Listing | None:
        """See Source."""
        return self._runner.run(self._next(stop))

    async def _next(self, stop: threading.Event) -> Listing | None:
        if self._has_answered:
            await self._discovery.wait_change(_LOOK_S)
            if stop.is_set():
                return None
        hosts = await self._discovery.find_hosts()
        self._has_answered = True
        return servers_of(hosts, self._discovery.departures(), self._port)

    def close(self) -> None:
        """Ends what the source has left running."""
        with contextlib.suppress(RuntimeError):
            self._runner.close()


class LinkSource:
    """Asks the driver, as the chief of a job of elasticrun.

    Args:
        link: to the driver.
    """

    def __init__(self, link: DriverLink) -> None:
        self._link = link
        self._version = 0

    def next(self, stop: threading.Event) -> Listing | None:
        """See Source."""
        try:
            servers = self._link.wait(self._version, _LINK_S)
        except RendezvousClosedError as error:
            raise Ended(str(error)) from error
        if servers is None:
            return None
        self._version = servers.version
        return {one.address: Leave(one.leave_within_s) if one.leaving else None for one in servers.workers}

    def close(self) -> None:
        """Ends the link."""
        self._link.close()


# How long a source may say nothing until the end of the following is looked for.
_LOOK_S = 1.0
_LINK_S = 10.0


def servers_of(hosts: Iterable[Host], departures: Iterable[Departure], port: int) -> dict[str, Leave | None]:
    """The servers of hosts: one a slot, from ``port`` (or the host's label ``port=N``) on.

    Raises:
        SettingsError: a port cannot be.
    """
    leaves = {departure.hostname: Leave(departure.within_s) for departure in departures}
    servers: dict[str, Leave | None] = {}
    for host in hosts:
        first = _label(host, "port") or str(port)
        for slot in range(host.slots):
            if not first.isascii() or not first.isdecimal() or int(first) + slot > 65535:
                raise SettingsError(f"host {host.name!r}: {first} is no port that {host.slots} servers can begin at")
            servers[with_number(host.name, int(first) + slot)] = leaves.get(host.name)
    return servers


def _label(host: Host, key: str) -> str:
    return next((value for name, _, value in (label.partition("=") for label in host.labels) if name == key), "")


def as_source(discovery: Any, *, port: int | None, interval_s: float) -> Source:
    """What tells the servers, of whatever was given: an object, a script, one of the driver's own sources.

    Raises:
        SettingsError: it is none of these, or ``port`` is needed, or there is no such script.
    """
    if port is not None and not 0 < port < 65536:
        raise SettingsError(f"{port} is not a port")
    if isinstance(discovery, str) or hasattr(discovery, "find_hosts"):
        if port is None:
            raise SettingsError("give port=, where the servers on the hosts listen")
        if isinstance(discovery, str):
            file = file_of(discovery)
            if file is not None and "$" not in discovery and not discovery.startswith("~") and not file.is_file():
                raise SettingsError(f"there is no script {str(file)!r}")
            return FinderSource(HostDiscoveryScript(discovery, 1), port=port, interval_s=interval_s)
        return AsyncSource(discovery, port=port)
    if hasattr(discovery, "find_available_hosts_and_slots"):
        if port is None and isinstance(discovery, HostDiscoveryScript):
            raise SettingsError("give port=, where the servers on the hosts listen")
        return FinderSource(discovery, port=port, interval_s=interval_s)
    raise SettingsError(f"a {type(discovery).__name__} tells no hosts: it has no find_available_hosts_and_slots()")


def pods(
    selector: str,
    *,
    namespace: str | None = None,
    names: str = "ip",
    slots: int = 1,
    timeout_s: float = 10.0,
    departure_taints: Iterable[str] = (),
) -> HostDiscovery:
    """The pods with these labels, for ``follow``: they are watched, and those that are about to go are drained.

    Needs ``elastic_driver[kubernetes]``, and the right to get, list and watch pods (and nodes, for taints).

    Args:
        selector: of labels, as in "app=train".
        namespace: of the pods; None for this one's.
        names: which of a pod's names is the host in its address: "ip", "dns", "hostname" or "pod".
        slots: servers in each pod.
        timeout_s: how long the API may take to answer.
        departure_taints: keys of taints that mean a departure, beside those that are known.

    Raises:
        SettingsError: one of these cannot be.
    """
    from elastic_driver.discovery.kubernetes.pods import Reading
    from elastic_driver.discovery.kubernetes.source import KubernetesDiscovery
    from elastic_driver.settings.pods import RACK_FROM, SLOTS_FROM, check_pods

    taints = tuple(departure_taints)
    check_pods(
        selector=selector,
        namespace=namespace,
        slots_from=SLOTS_FROM,
        rack_from=RACK_FROM,
        pod_names=names,
        departure_taints=taints,
    )
    return KubernetesDiscovery(selector, namespace, Reading(names, "", slots, RACK_FROM, taints), timeout_s)
