"""A driver's claim to a job that drivers of other machines may take over: the lock of a journal in etcd.

Owns the announcement that agents find there, and the reaction while etcd does not respond: then another driver may have
the job as soon as the lock's lease is over. Steps wait by themselves, as they cannot be written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import AgentMessage, InDoubt
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.system.job_clock import CallLater, Timer
from elastic_driver.words import in_seconds


class Lock(Protocol):
    """The interface of the lock that is used here. Used on the event loop.

    Attributes:
        on_doubt: called from any thread when it becomes doubtful whether this driver still has the lock, and when that
            is certain again.
    """

    on_doubt: Callable[[], object]

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is in doubt now."""

    def announce(self, *, epoch: int, name: str, urls: tuple[str, ...], fingerprint: str) -> None:
        """Publish who this driver is and where it listens, as soon as etcd responds. Never blocks."""


class Claim:
    """Watches the lock of one job; a Part that the fleet calls. Used on the event loop only.

    Args:
        lock: the lock of the journal.
        epoch, name: those of this driver.
        limit_s: how long agents keep their workers with a driver that is in doubt; after that the driver ends.
        fleet: has the agents.
        chronicle: reports to the user.
        call_later: measures the limit, on the job's clock.
        on_lost: called when the limit is over.
    """

    def __init__(
        self,
        lock: Lock,
        epoch: int,
        name: str,
        limit_s: float,
        *,
        fleet: Fleet,
        chronicle: Chronicle,
        call_later: CallLater,
        on_lost: Callable[[str], object],
    ) -> None:
        self._lock = lock
        self._epoch, self._name = epoch, name
        self._limit_s = limit_s
        self._fleet = fleet
        self._chronicle = chronicle
        self._call_later = call_later
        self._on_lost = on_lost
        self._limit: Timer | None = None  # while it is in doubt
        self._is_closed = False

    def begin(self, urls: Sequence[str], fingerprint: str) -> None:
        """Announce the driver, which listens now.

        Args:
            urls: where agents of all machines find it.
            fingerprint: the fingerprint of its certificate.
        """
        loop = asyncio.get_running_loop()
        self._lock.on_doubt = lambda: loop.call_soon_threadsafe(self._look)
        self._lock.announce(epoch=self._epoch, name=self._name, urls=tuple(urls), fingerprint=fingerprint)
        self._look()

    def close(self) -> None:
        """Stop watching: the driver ends."""
        self._is_closed = True
        self._lock.on_doubt = lambda: None
        if self._limit is not None:
            self._limit.cancel()

    # --- calls by the fleet (Part) ---------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """Notify an agent that has connected, or is back, of a doubt."""
        if self._limit is not None:
            link.send(InDoubt(is_so=True))

    def lost(self, link: AgentLink, why: str) -> None:
        """Do nothing."""

    def take(self, link: AgentLink, message: AgentMessage) -> bool:
        """Ignore the message: none from agents concerns the lock."""
        return False

    # --- calls by the lock -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        is_so = self._lock.is_in_doubt  # the present value: it may have changed since the call
        if self._is_closed or is_so == (self._limit is not None):
            return
        if is_so:
            self._limit = self._call_later(self._limit_s, self._is_too_late)
            self._chronicle.warning(
                "etcd does not answer: this driver may have lost the job to another one; training continues, but "
                f"this driver decides nothing until etcd answers, and gives up after {in_seconds(self._limit_s)} "
                "(--driver-timeout)"
            )
        elif self._limit is not None:
            self._limit.cancel()
            self._limit = None
            self._chronicle.warning("etcd answers again: this driver still has the job")
        # Agents without a connection to this driver have learned meanwhile that none drives.
        self._fleet.counts_from = math.inf if is_so else asyncio.get_running_loop().time()
        for link in self._fleet.links():
            link.send(InDoubt(is_so))

    def _is_too_late(self) -> None:
        self._on_lost(f"etcd has not answered for {in_seconds(self._limit_s)} (--driver-timeout)")
