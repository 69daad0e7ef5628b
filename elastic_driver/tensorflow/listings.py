"""Listings of a coordinator's servers, from any source of hosts.

Owns the mapping of hosts to servers: one server per slot, on consecutive ports. Each listing is complete, so there are
no events of change. Knows nothing of TensorFlow, and of the use of a listing.
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
    """The announced departure of a server that is still running.

    Attributes:
        within_s: how long its closure may take, seconds; None if unknown.
    """

    within_s: float | None = None


Listing = Mapping[str, Leave | None]
"""All servers: address -> None, or its announced departure."""


class Ended(Exception):
    """The source will not list servers any more."""


class Source(Protocol):
    """A source of listings. Used by one thread."""

    def next(self, stop: threading.Event) -> Listing | None:
        """Return the next listing. Blocks until the servers may have changed, or ``stop`` is set; None for no news.

        Raises:
            Ended: there will be no more listings.
            Exception: no listing is available now.
        """

    def close(self) -> None:
        """Close the source."""


class Finder(Protocol):
    """An object with Horovod's method."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int | Host]:
        """Return host name -> slots, or the host with its labels."""


class FinderSource:
    """Polls an object.

    Args:
        finder: the object.
        port: the port of the first server on each host; None if the object's names are addresses.
        interval_s: the pause between an answer and the next request, seconds.
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
        """Do nothing: there is nothing to close."""


class AsyncSource:
    """Uses one of the driver's own sources, on an event loop in the calling thread.

    Args:
        discovery: the source.
        port: the port of the first server on each host.
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
        """End the source's tasks."""
        with contextlib.suppress(RuntimeError):
            self._runner.close()


class LinkSource:
    """Gets the servers from the driver, in the chief of a job of elasticrun.

    Args:
        link: the link to the driver.
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
        return {worker.address: Leave(worker.leave_within_s) if worker.leaving else None for worker in servers.workers}

    def close(self) -> None:
        """Close the link."""
        self._link.close()


# How long a source may block until the caller checks whether to stop, seconds.
_LOOK_S = 1.0
_LINK_S = 10.0


def servers_of(hosts: Iterable[Host], departures: Iterable[Departure], port: int) -> dict[str, Leave | None]:
    """Return the servers of hosts: one per slot, on ports from ``port`` (or the host's label ``port=N``) upwards.

    Raises:
        SettingsError: a port is invalid.
    """
    leaves = {departure.hostname: Leave(departure.within_s) for departure in departures}
    servers: dict[str, Leave | None] = {}
    for host in hosts:
        first = _label(host, "port") or str(port)
        for slot in range(host.slots):
            if not first.isascii() or not first.isdecimal() or int(first) + slot > 65535:
                raise SettingsError(f"host {host.name!r}: cannot number the ports of {host.slots} servers from {first}")
            servers[with_number(host.name, int(first) + slot)] = leaves.get(host.name)
    return servers


def _label(host: Host, key: str) -> str:
    return next((value for name, _, value in (label.partition("=") for label in host.labels) if name == key), "")


def as_source(discovery: Any, *, port: int | None, interval_s: float) -> Source:
    """Return a source for the given discovery: an object, a script, or one of the driver's own sources.

    Raises:
        SettingsError: the discovery is of another kind, ``port`` is missing, or the script does not exist.
    """
    if port is not None and not 0 < port < 65536:
        raise SettingsError(f"cannot use port={port}: it must be from 1 to 65535")
    if isinstance(discovery, str) or hasattr(discovery, "find_hosts"):
        if port is None:
            raise SettingsError("port= is required: the port at which the servers on the hosts listen")
        if isinstance(discovery, str):
            file = file_of(discovery)
            if file is not None and "$" not in discovery and not discovery.startswith("~") and not file.is_file():
                raise SettingsError(f"cannot find the script {str(file)!r}")
            return FinderSource(HostDiscoveryScript(discovery, 1), port=port, interval_s=interval_s)
        return AsyncSource(discovery, port=port)
    if hasattr(discovery, "find_available_hosts_and_slots"):
        if port is None and isinstance(discovery, HostDiscoveryScript):
            raise SettingsError("port= is required: the port at which the servers on the hosts listen")
        return FinderSource(discovery, port=port, interval_s=interval_s)
    raise SettingsError(
        f"cannot discover hosts with a {type(discovery).__name__}: it has no find_available_hosts_and_slots()"
    )


def pods(
    selector: str,
    *,
    namespace: str | None = None,
    names: str = "ip",
    slots: int = 1,
    timeout_s: float = 10.0,
    departure_taints: Iterable[str] = (),
) -> HostDiscovery:
    """Return a discovery for ``follow`` that watches the pods with these labels, and drains those about to leave.

    Needs ``elastic_driver[kubernetes]``, and permission to list and watch pods (and nodes, for taints).

    Args:
        selector: a label selector, such as "app=train".
        namespace: of the pods; None for the default namespace: this pod's, or the kubeconfig's.
        names: which of a pod's names is the host in its address: "ip", "dns", "hostname" or "pod".
        slots: the number of servers in each pod.
        timeout_s: the limit of an answer of the API, seconds.
        departure_taints: further keys of taints that announce a departure, besides the well-known ones.

    Raises:
        SettingsError: an argument is invalid.
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
