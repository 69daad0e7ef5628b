"""``horovod.runner.elastic.discovery``: the hosts of a job, as Horovod's driver sees them.

Owns the shapes. The order of hosts and the blacklist are the core's.
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
    """Hosts and their slots at one time. Never changes.

    Args:
        host_slots: host name -> slots.
        host_assignment_order: the names, in the order in which ranks are given.
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
        """The names."""
        return set(self._order)

    @property
    def host_assignment_order(self) -> list[str]:
        """The names, in the order in which ranks are given."""
        return list(self._order)

    def get_slots(self, host: str) -> int:
        """Slots of a host; 0 of one that is not here."""
        return self._host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """Slots of all."""
        return sum(self._host_slots[name] for name in self._order)


class HostManager:
    """Asks discovery, and remembers which hosts are out. May be used by several threads.

    For programs that look at hosts themselves; the driver has the same from its core.

    Args:
        discovery: tells the hosts.
        cooldown_range: shortest and longest time a blacklisted host stays out, seconds; None for ever.
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
        """Asks discovery. Returns what has changed, as HostUpdateResult has it; raises what discovery raises."""
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
        """Takes a host out."""
        with self._lock:
            self._blacklist = self._blacklist.fail(host, now=time.monotonic(), draw=random.random())

    def is_blacklisted(self, host: str) -> bool:
        """Whether it is out now."""
        with self._lock:
            self._blacklist = self._blacklist.expire(time.monotonic())
            return self._blacklist.is_blacklisted(host)

    @staticmethod
    def order_available_hosts(available_hosts: Iterable[str], prev_host_assignment_order: Sequence[str]) -> list[str]:
        """The available hosts, those of ``prev_host_assignment_order`` first and in that order."""
        # Those that are available have no order of their own: Horovod gives a set.
        listed = in_natural_order(Host(name, 1) for name in available_hosts)
        ordered = order_hosts([Host(name, 1) for name in prev_host_assignment_order], listed)
        return [host.name for host in ordered]
