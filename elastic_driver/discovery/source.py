"""What tells the driver which hosts there are: the protocol, and the list that stays.

A source says what there is; what that means is the membership core's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_driver.hosts import Departure, Host


class HostDiscovery(Protocol):
    """Tells the hosts there are."""

    async def find_hosts(self) -> tuple[Host, ...]:
        """All hosts now, in the user's order. Raises DiscoveryError when there is no answer."""

    async def wait_change(self, limit_s: float) -> None:
        """Blocks until there is reason to ask again, for ``limit_s`` at most."""

    def departures(self) -> tuple[Departure, ...]:
        """Of the hosts that it has found last, those that are about to go, as of now."""

    def remark(self) -> str:
        """What there is to say of it while a job waits for hosts; "" for nothing."""


class Hosts(HostDiscovery, Protocol):
    """Tells the hosts that the driver can use: those that it finds are up."""

    def down(self) -> frozenset[str]:
        """Names of those that are listed, too, but not up, as it has found last."""

    def answers(self) -> bool:
        """Whether what lists the hosts has answered last. If not, changes of who is up are told all the same."""


class FixedHosts:
    """The hosts of ``-H`` or ``--hostfile``: always the same."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = tuple(hosts)

    async def find_hosts(self) -> tuple[Host, ...]:
        """The list."""
        return self._hosts

    async def wait_change(self, limit_s: float) -> None:
        """They do not change."""
        await asyncio.sleep(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """None: they stay."""
        return ()

    def remark(self) -> str:
        """Nothing: it does not change."""
        return ""


class TimedDiscovery:
    """Another's answers, and how long each took.

    Args:
        source: the other.
        on_run: told after each run: seconds, and whether it has failed. One that is given up is not told.
    """

    def __init__(self, source: HostDiscovery, on_run: Callable[[float, bool], None]) -> None:
        self._source = source
        self._on_run = on_run

    async def find_hosts(self) -> tuple[Host, ...]:
        """See HostDiscovery."""
        began = time.monotonic()
        try:
            hosts = await self._source.find_hosts()
        except Exception:
            self._on_run(time.monotonic() - began, True)
            raise
        self._on_run(time.monotonic() - began, False)
        return hosts

    async def wait_change(self, limit_s: float) -> None:
        """See HostDiscovery."""
        await self._source.wait_change(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """See HostDiscovery."""
        return self._source.departures()

    def remark(self) -> str:
        """See HostDiscovery."""
        return self._source.remark()
