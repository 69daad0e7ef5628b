"""``horovod.runner.elastic.discovery``: the hosts of a job, as in Horovod's driver.

Owns Horovod's interfaces. The order of hosts and the blacklist are the core's.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from elastic_driver.compat.elastic.worker import HostUpdateResult
from elastic_driver.core.assignment import order_hosts
from elastic_driver.core.blacklist import Blacklist
from elastic_driver.discovery.caller import Finder, as_host
from elastic_driver.discovery.objects import FixedHosts, HostDiscovery, HostDiscoveryScript
from elastic_driver.hosts import Host, in_natural_order

__all__ = [
    "DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS",
    "DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS",
    "DiscoveredHosts",
    "FixedHosts",
    "HostDiscovery",
    "HostDiscoveryScript",
    "HostManager",
    "HostUpdateResult",
]

# Horovod's bounds of a cooldown range, which users' programs read.
DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS = 1
DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS = 60 * 60


class DiscoveredHosts:
    """Hosts and their slots at one time. Immutable.

    Args:
        host_slots: host name -> slots.
        host_assignment_order: the names, in rank order.
    """

    def __init__(self, host_slots: Mapping[str, int], host_assignment_order: Sequence[str]) -> None:
        self._host_slots = dict(host_slots)
        self._order = [name for name in host_assignment_order if name in host_slots]

    @property
    def host_slots(self) -> dict[str, int]:
        """Host name -> slots."""
        return dict(self._host_slots)

    @property
    def available_hosts(self) -> set[str]:
        """The names of the hosts."""
        return set(self._order)

    @property
    def host_assignment_order(self) -> list[str]:
        """The names, in rank order."""
        return list(self._order)

    def get_slots(self, host: str) -> int:
        """Return a host's number of slots; 0 for an unknown host."""
        return self._host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """Return the number of slots of all hosts."""
        return sum(self._host_slots[name] for name in self._order)


class HostManager:
    """The hosts of a discovery object, without the blacklisted ones. Thread-safe.

    For programs that use it directly; the driver here gets its hosts from its core.

    Args:
        discovery: lists the hosts.
        cooldown_range: the shortest and longest time on the blacklist, seconds; None for no limit.
    """

    def __init__(self, discovery: Finder, cooldown_range: tuple[float, float] | None = None) -> None:
        self._discovery = discovery
        self._lock = threading.Lock()
        self._listed: tuple[Host, ...] = ()
        self._blacklist = Blacklist(cooldown_range)

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """The hosts of the last answer that are not blacklisted."""
        with self._lock:
            self._blacklist = self._blacklist.expire(time.monotonic())
            usable = [host for host in self._listed if not self._blacklist.is_blacklisted(host.name)]
        return DiscoveredHosts({host.name: host.slots for host in usable}, [host.name for host in usable])

    def update_available_hosts(self) -> int:
        """Query discovery. Returns the changes, as bits of HostUpdateResult; raises what discovery raises."""
        listed = [as_host(name, value) for name, value in self._discovery.find_available_hosts_and_slots().items()]
        found = {host.name: host.slots for host in listed}
        with self._lock:
            before = {host.name: host.slots for host in self._listed}
            self._listed = order_hosts(self._listed, listed)
            self._blacklist = self._blacklist.forgive_absent(found)
        result = HostUpdateResult.no_update
        for name in {*before, *found}:
            old, new = before.get(name, 0), found.get(name, 0)
            if new > old:
                result |= HostUpdateResult.added
            elif new < old:
                result |= HostUpdateResult.removed
        return result

    def blacklist(self, host: str) -> None:
        """Blacklist a host."""
        with self._lock:
            self._blacklist = self._blacklist.fail(host, now=time.monotonic(), draw=random.random())

    def is_blacklisted(self, host: str) -> bool:
        """Return whether a host is blacklisted now."""
        with self._lock:
            self._blacklist = self._blacklist.expire(time.monotonic())
            return self._blacklist.is_blacklisted(host)

    @staticmethod
    def order_available_hosts(available_hosts: Iterable[str], prev_host_assignment_order: Sequence[str]) -> list[str]:
        """Return the available hosts, those in ``prev_host_assignment_order`` first and in that order."""
        # Horovod passes the available hosts as a set, without an order.
        listed = in_natural_order(Host(name, 1) for name in available_hosts)
        ordered = order_hosts([Host(name, 1) for name in prev_host_assignment_order], listed)
        return [host.name for host in ordered]
