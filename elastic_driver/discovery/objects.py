"""Discovery as a Python object, in the shape that Horovod's users know: a class with one method.

Owns the base class for users, and two ready-made subclasses. The calls of such an object, and the handling of its
failures and hangs, are in :mod:`elastic_driver.discovery.caller`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from elastic_driver.discovery.script import ScriptDiscovery
from elastic_driver.hosts import Host

# The default of --discovery-timeout.
_TIMEOUT_S = 10.0


class HostDiscovery(ABC):
    """The hosts that a job may use. Derive from it, and pass an object to ``elastic_driver.run(discovery=...)``.

    Any object with this method is accepted. It is called in the process and interpreter that created it, never by two
    threads at a time, a second after its last answer (``discovery_interval``).
    """

    @abstractmethod
    def find_available_hosts_and_slots(self) -> Mapping[str, int | Host]:
        """Return the hosts there are now: host name -> slots. May block, for at most ``discovery_timeout``.

        Instead of its slots, a host with labels has ``Host(name, slots, ("rack=a", "spot"))``. Known hosts keep their
        places, whatever the order. A host with 0 slots is ignored. An exception means that there is no answer now: the
        job continues with the hosts that it has.
        """


class HostDiscoveryScript(HostDiscovery):
    """The hosts that a script prints.

    Args:
        discovery_script: a shell command; it prints a line ``HOST:SLOTS`` or ``HOST`` for each host.
        slots: of hosts that are printed without slots; None makes that an error.
        timeout_s: the limit of a run, seconds; then its whole process tree is killed.
    """

    def __init__(self, discovery_script: str, slots: int | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._source = ScriptDiscovery(discovery_script, slots, timeout_s)

    def find_available_hosts_and_slots(self) -> dict[str, int | Host]:
        """Run the script once. Hosts with labels are returned as a ``Host``.

        Raises:
            DiscoveryError: it failed, hung, or did not print a list of hosts.
        """
        # In a thread of its own: the caller's may be running an event loop.
        with ThreadPoolExecutor(1, thread_name_prefix="elastic-driver-script") as executor:
            hosts = executor.submit(lambda: asyncio.run(self._source.find_hosts())).result()
        return {host.name: host if host.labels else host.slots for host in hosts}


class FixedHosts(HostDiscovery):
    """A fixed list of hosts, until it is replaced.

    Args:
        host_slots: host name -> slots, or the host with its labels.
    """

    def __init__(self, host_slots: Mapping[str, int | Host]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int | Host]:
        """Return the hosts."""
        return self._host_slots

    def set(self, host_slots: Mapping[str, int | Host]) -> None:
        """Replace the hosts. May be called from any thread."""
        self._host_slots = dict(host_slots)
