"""Discovery as a Python object, in the shape that Horovod's users know: a class with one method.

Owns the class that users derive from, and the two that come with it. Where such an object is asked, and what happens
when it fails or hangs, is :mod:`elastic_driver.discovery.caller`'s.
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
    """Tells the hosts that a job may use. Derive from it, and give an object to ``elastic_driver.run(discovery=...)``.

    Any object with this method will do. It is asked in the process and interpreter that it was made in, never by two
    threads at a time, a second after its last answer (``discovery_interval``).
    """

    @abstractmethod
    def find_available_hosts_and_slots(self) -> Mapping[str, int | Host]:
        """Host name -> slots, now. May block, for ``discovery_timeout`` at most.

        In place of its slots, a host with labels is given as ``Host(name, slots, ("rack=a", "spot"))``.
        Hosts that were there before keep their places, whatever the order. A host with 0 slots is as good as none. An
        exception means that there is no answer now: the job goes on with the hosts that it has.
        """


class HostDiscoveryScript(HostDiscovery):
    """Runs a script that prints the hosts.

    Args:
        discovery_script: a shell command; it prints a line ``HOST:SLOTS`` or ``HOST`` for each host.
        slots: of hosts that are printed without any; None makes that an error.
        timeout_s: how long a run may take; then its whole process tree is killed.
    """

    def __init__(self, discovery_script: str, slots: int | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._source = ScriptDiscovery(discovery_script, slots, timeout_s)

    def find_available_hosts_and_slots(self) -> dict[str, int | Host]:
        """Runs the script once. Hosts that it prints labels of are given as a ``Host``.

        Raises:
            DiscoveryError: it failed, hung, or printed something else than hosts.
        """
        # In a thread of its own: the one that asks may have an event loop running.
        with ThreadPoolExecutor(1, thread_name_prefix="elastic-driver-script") as executor:
            hosts = executor.submit(lambda: asyncio.run(self._source.find_hosts())).result()
        return {host.name: host if host.labels else host.slots for host in hosts}


class FixedHosts(HostDiscovery):
    """The same hosts until they are set anew.

    Args:
        host_slots: host name -> slots, or the host with its labels.
    """

    def __init__(self, host_slots: Mapping[str, int | Host]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int | Host]:
        """The hosts."""
        return self._host_slots

    def set(self, host_slots: Mapping[str, int | Host]) -> None:
        """Other hosts from now on. From any thread."""
        self._host_slots = dict(host_slots)
