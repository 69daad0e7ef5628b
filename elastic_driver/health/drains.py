"""Which slow worker leaves, and when: one at a time, and never one that the job needs.

Owns the pauses between two drains, and who waits for one. What a drain does is the core's.
"""

from __future__ import annotations

from elastic_driver.core.draining import why_needed
from elastic_driver.core.events import DrainRequested
from elastic_driver.core.state import State
from elastic_driver.health.findings import NotDrained, StragglerFound
from elastic_driver.hosts import WorkerId

DRAIN_PAUSE_S = 60.0
"""After a drain the others have to show how fast they are without the slow one."""
HOST_PAUSE_S = 3600.0
"""A host that is slow again after one of its places was drained has something that no drain cures."""


class Drains:
    """The slow workers of one job.

    Attributes:
        waiting: those that could not be drained when they were found.
    """

    def __init__(self) -> None:
        self.waiting: dict[WorkerId, StragglerFound] = {}
        self._last_at: float | None = None
        self._hosts: dict[str, float] = {}  # by host: when one of its places was drained last

    def consider(self, slow: StragglerFound, state: State, now: float) -> list[DrainRequested | NotDrained]:
        """Has a slow worker leave where the job can spare it. Says once why not, and keeps it for later."""
        worker = slow.worker
        # Where places have to go in multiples, one alone would leave the host's others without use.
        slot = worker.slot if state.policy.multiple == 1 else None
        why = self._why_not_yet(worker.hostname, now) or why_needed(state, worker.hostname, slot)
        if why:
            is_known = worker in self.waiting
            self.waiting[worker] = slow
            return [] if is_known else [NotDrained(worker, why)]
        self.waiting.pop(worker, None)
        self._last_at = now
        # Hosts of always new names may come.
        self._hosts = {host: at for host, at in self._hosts.items() if now - at < HOST_PAUSE_S}
        self._hosts[worker.hostname] = now
        how = f"it is {1 / slow.against_others:.2f} times slower than the others (--straggler-action drain)"
        return [DrainRequested(worker.hostname, slot, how)]

    def _why_not_yet(self, hostname: str, now: float) -> str:
        if self._last_at is not None and now - self._last_at < DRAIN_PAUSE_S:
            return f"another slow worker was drained {now - self._last_at:.0f} s ago"
        if now - self._hosts.get(hostname, float("-inf")) < HOST_PAUSE_S:
            return f"a place of host {hostname} was drained for that already"
        return ""
