"""A driver's claim to its job, where drivers of other machines may have that after it: the lock of a journal in etcd.

Owns what agents find there, and what is said and done while etcd does not answer: then another driver may have the job
as soon as the lock's lease is over. Steps wait by themselves, as they cannot be written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import InDoubt, Said
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.system.job_clock import CallLater, Timer
from elastic_driver.words import in_seconds


class Lock(Protocol):
    """What is needed of it. Used on the event loop.

    Attributes:
        on_doubt: called from any thread when it becomes doubtful whether it is still this driver's, and when it is
            certain again.
    """

    on_doubt: Callable[[], object]

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is so now."""

    def announce(self, *, epoch: int, name: str, urls: tuple[str, ...], fingerprint: str) -> None:
        """Has it say who this driver is and where it listens, as soon as etcd answers. Never blocks."""


class Claim:
    """See above; a Part of those that speak with agents. Used on the event loop only.

    Args:
        lock: of the journal.
        epoch, name: of this driver.
        limit_s: for how long agents keep their workers with a driver that is in doubt; then that ends.
        fleet: has the agents.
        chronicle: tells the user.
        call_later: measures that, on the job's clock.
        on_lost: called when it is over.
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
        """The driver listens.

        Args:
            urls: where agents of all machines find it.
            fingerprint: of its certificate.
        """
        loop = asyncio.get_running_loop()
        self._lock.on_doubt = lambda: loop.call_soon_threadsafe(self._look)
        self._lock.announce(epoch=self._epoch, name=self._name, urls=tuple(urls), fingerprint=fingerprint)
        self._look()

    def close(self) -> None:
        """The driver ends."""
        self._is_closed = True
        self._lock.on_doubt = lambda: None
        if self._limit is not None:
            self._limit.cancel()

    # --- what the fleet tells (Part) -------------------------------------------------------------------------------

    def came(self, link: AgentLink) -> None:
        """An agent is there, or is back."""
        if self._limit is not None:
            link.send(InDoubt(is_so=True))

    def lost(self, link: AgentLink, why: str) -> None:
        """See Part."""

    def take(self, link: AgentLink, message: Said) -> bool:
        """See Part. No agent says anything of this."""
        return False

    # --- what the lock tells ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        is_so = self._lock.is_in_doubt  # as it is now: it may have been told otherwise since
        if self._is_closed or is_so == (self._limit is not None):
            return
        if is_so:
            self._limit = self._call_later(self._limit_s, self._is_too_late)
            self._chronicle.warning(
                "etcd does not answer: this driver may have lost the job to another one; training goes on, and nothing "
                f"is decided meanwhile, for {in_seconds(self._limit_s)} (--driver-timeout) at most"
            )
        elif self._limit is not None:
            self._limit.cancel()
            self._limit = None
            self._chronicle.warning("etcd answers again: this driver still has the job")
        # Agents that do not hear this driver have been told meanwhile that nobody drives.
        self._fleet.counts_from = math.inf if is_so else asyncio.get_running_loop().time()
        for link in self._fleet.links():
            link.send(InDoubt(is_so))

    def _is_too_late(self) -> None:
        self._on_lost(f"etcd has not answered for {in_seconds(self._limit_s)} (--driver-timeout)")
