"""The loop that asks discovery repeatedly and reports changes to the core.

Owns what was last reported to the core. Does not know where hosts come from, and decides nothing about them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from elastic_driver.core.events import DiscoveryFailed, HostsDiscovered
from elastic_driver.core.state import LAST_MOMENT_S
from elastic_driver.dialects.dialect import JobAddress
from elastic_driver.discovery.source import Hosts
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import DiscoveryError, shortage
from elastic_driver.hosts import Host
from elastic_driver.launch.fleet.workers import Workers
from elastic_driver.reporting.chronicle import Chronicle


class Preparer(Protocol):
    """Lets hosts import the workers' modules before any worker runs there."""

    def prepare(self, hostname: str, sample: Callable[[], tuple[Sequence[str], Mapping[str, str]]]) -> bool:
        """Let a host import them if no worker has run there yet. Idempotent.

        Args:
            hostname: the host.
            sample: returns the command and the environment of a worker there.

        Returns:
            Whether it is still importing.
        """


class DiscoveryLoop:
    """Asks discovery and posts the changes. Used on the event loop only.

    Args:
        discovery: finds the hosts.
        interval_s: how often it is asked, seconds.
        stepper: takes the events, and has the state.
        chronicle: reports the hosts.
        clock: the job's time, seconds.
        workers: know how a worker is started.
        preparer: lets new hosts import the workers' modules; None if none do.
    """

    def __init__(
        self,
        discovery: Hosts,
        interval_s: float,
        stepper: Stepper,
        *,
        chronicle: Chronicle,
        clock: Callable[[], float],
        workers: Workers,
        preparer: Preparer | None,
    ) -> None:
        self._discovery = discovery
        self._interval_s = interval_s
        self._stepper = stepper
        self._chronicle = chronicle
        self._clock = clock
        self._workers = workers
        self._preparer = preparer

    async def run(self, job: JobAddress) -> None:
        """Ask until it is canceled.

        Args:
            job: where the driver is, for hosts that prepare.
        """
        last: tuple[tuple[Host, ...], frozenset[str], frozenset[str]] | None = None
        fails = False  # as the core knows it
        known: dict[str, float] = {}  # hosts that are about to go away, and when, as the core knows it
        while True:
            try:
                hosts = await self._discovery.find_hosts()
            except DiscoveryError as error:
                fails = True
                self._stepper.post(DiscoveryFailed(str(error), error.may_pass))
            except Exception as error:
                reason = shortage(error)
                if not reason:
                    raise
                fails = True
                self._stepper.post(DiscoveryFailed(f"cannot look for hosts: {reason}", may_pass=True))
            else:
                departures, down = self._discovery.departures(), self._discovery.down()
                answered = not fails or self._discovery.answers()
                now = self._clock()
                going = {
                    departure.hostname: now + (math.inf if departure.within_s is None else departure.within_s)
                    for departure in departures
                }
                # Compared with what the core knows: a repeated countdown is no news.
                sooner = any(by < known.get(name, math.inf) - LAST_MOMENT_S for name, by in going.items())
                is_back = fails and answered
                if last is None or hosts != last[0] or is_back:
                    self._chronicle.hosts(hosts)
                found = hosts, down, self._preparing(hosts, job)
                if found != last or is_back or going.keys() != known.keys() or sooner:
                    self._stepper.post(HostsDiscovered(hosts, departures, down, answered, found[2]))
                    known = going
                last, fails = found, not answered
            await self._discovery.wait_change(self._interval_s)

    def _preparing(self, hosts: Sequence[Host], job: JobAddress) -> frozenset[str]:
        """Return the hosts without any worker so far that are importing the modules of restarted workers."""
        preparer, state = self._preparer, self._stepper.state
        if preparer is None or not state.policy.on_change.restarts or not state.round_id:
            return frozenset()
        sample = self._workers.sample
        return frozenset(host.name for host in hosts if preparer.prepare(host.name, partial(sample, host, job)))
