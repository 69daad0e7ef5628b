"""Draining of slow workers: one at a time, and never one that the job needs.

Owns the pauses between two drains, and the workers that wait for one. The core defines what a drain does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_driver.core.draining import why_needed
from elastic_driver.core.events import DrainRequested
from elastic_driver.core.state import State
from elastic_driver.health.findings import NotDrained, StragglerFound, StragglerGone
from elastic_driver.hosts import WorkerId

DRAIN_PAUSE_S = 60.0
"""Pause after a drain, in which the others have to show how fast they are without the slow worker."""
HOST_PAUSE_S = 3600.0
"""A host that is slow again this soon after one of its places was drained has a problem that no drain fixes."""


@dataclass(frozen=True, slots=True)
class DrainsKept:
    """The pauses as stored in the journal, for a driver that takes over the job. Times are the job's.

    Attributes:
        last_at: when a slow worker was last drained; None for never.
        hosts: by host, when one of its places was last drained.
    """

    last_at: float | None
    hosts: dict[str, float]


class Drains:
    """The slow workers of one job.

    Attributes:
        last_at: when one was last drained, on the job's clock; None for never.
    """

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, StragglerFound] = {}  # those that could not be drained when they were found
        self.last_at: float | None = None
        self._hosts: dict[str, float] = {}  # by host: when one of its places was last drained

    def kept(self) -> DrainsKept:
        """Return the pauses, for the journal. Workers that wait for a drain will be found slow again."""
        return DrainsKept(self.last_at, dict(self._hosts))

    def go_on(self, kept: DrainsKept) -> None:
        """Restore the pauses of a driver that has died. Must be called first."""
        self.last_at, self._hosts = kept.last_at, dict(kept.hosts)

    def take(self, news: StragglerFound | StragglerGone, state: State, now: float) -> list[DrainRequested | NotDrained]:
        """Drain a worker that has become slow, if the job can do without it; forget one that is no longer slow."""
        if isinstance(news, StragglerFound):
            return self._consider(news, state, now)
        self._waiting.pop(news.worker, None)
        return []

    def look(
        self, state: State, now: float, *, trains: Callable[[WorkerId], bool]
    ) -> list[DrainRequested | NotDrained]:
        """Check whether a waiting worker can be drained by now. ``trains``: whether a worker trains in this round."""
        waiting = [slow for slow in self._waiting.values() if trains(slow.worker)]
        return [found for slow in waiting for found in self._consider(slow, state, now)]

    def _consider(self, slow: StragglerFound, state: State, now: float) -> list[DrainRequested | NotDrained]:
        """Drain a worker, or report once why not and keep it for later."""
        worker = slow.worker
        # If places come in multiples, draining one alone would leave the host's others unused.
        slot = worker.slot if state.policy.multiple == 1 else None
        why = self._why_not_yet(worker.hostname, now) or why_needed(state, worker.hostname, slot)
        if why:
            is_known = worker in self._waiting
            self._waiting[worker] = slow
            return [] if is_known else [NotDrained(worker, why)]
        self._waiting.pop(worker, None)
        self.last_at = now
        # Host names may never be reused.
        self._hosts = {host: at for host, at in self._hosts.items() if now - at < HOST_PAUSE_S}
        self._hosts[worker.hostname] = now
        how = f"it is {1 / slow.against_others:.2f} times slower than the others (--straggler-action drain)"
        return [DrainRequested(worker.hostname, slot, how)]

    def _why_not_yet(self, hostname: str, now: float) -> str:
        if self.last_at is not None and now - self.last_at < DRAIN_PAUSE_S:
            return f"another slow worker was drained {now - self.last_at:.0f} s ago"
        if now - self._hosts.get(hostname, float("-inf")) < HOST_PAUSE_S:
            return f"a slow worker of host {hostname} was drained recently"
        return ""
