"""Discovery sources, which list the hosts for the driver: the protocol, and a fixed list.

A source lists the hosts; the membership core decides what follows from that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_driver.hosts import Departure, Host


class HostDiscovery(Protocol):
    """A source of hosts."""

    async def find_hosts(self) -> tuple[Host, ...]:
        """Return the current hosts, in the user's order. Raises DiscoveryError if there is no answer."""

    async def wait_change(self, limit_s: float) -> None:
        """Wait until there is a reason to ask again, for at most ``limit_s``."""

    def departures(self) -> tuple[Departure, ...]:
        """Return the announced departures, as of now, among the hosts that it found last."""

    def remark(self) -> str:
        """Return a remark on the source, to be shown while a job waits for hosts; "" for none."""


class Hosts(HostDiscovery, Protocol):
    """A source of usable hosts: it finds only those that are up."""

    def down(self) -> frozenset[str]:
        """Return the names of the hosts that were listed but not up at the last check."""

    def answers(self) -> bool:
        """Return whether the underlying list last answered. If not, hosts that go down or up are still reported."""


class FixedHosts:
    """The hosts of ``-H`` or ``--hostfile``: always the same."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = tuple(hosts)

    async def find_hosts(self) -> tuple[Host, ...]:
        """Return the list."""
        return self._hosts

    async def wait_change(self, limit_s: float) -> None:
        """Wait for ``limit_s``: the list does not change."""
        await asyncio.sleep(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """Return an empty tuple: a fixed list announces no departures."""
        return ()

    def remark(self) -> str:
        """Return "": the list does not change."""
        return ""


class TimedDiscovery:
    """Another source, with the duration of each of its answers.

    Args:
        source: the other source.
        on_run: called after each run with its seconds, and whether it failed; not after a canceled one.
    """

    def __init__(self, source: HostDiscovery, on_run: Callable[[float, bool], None]) -> None:
        self._source = source
        self._on_run = on_run

    async def find_hosts(self) -> tuple[Host, ...]:
        """Ask the source, and report the time."""
        began = time.monotonic()
        try:
            hosts = await self._source.find_hosts()
        except Exception:
            self._on_run(time.monotonic() - began, True)
            raise
        self._on_run(time.monotonic() - began, False)
        return hosts

    async def wait_change(self, limit_s: float) -> None:
        """Wait until there is a reason to ask the source again, for at most ``limit_s``."""
        await self._source.wait_change(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """Return the source's departures."""
        return self._source.departures()

    def remark(self) -> str:
        """Return the source's remark."""
        return self._source.remark()
