"""The two rules that are time limits: ``--heartbeat-timeout`` for silent workers, ``--hang-timeout`` for standstills.

Owns when each worker was last heard and when it last made progress, by the job's time. That stops with the driver: no
worker is blamed for a silence that the driver slept through.

A member repeats its watch request at least each quarter of the heartbeat timeout. The request shows that the process is
not stopped and that Python runs in it; it contains how many operations the member has finished and whether it waits for
others in one. A pulse that needs no lock of Python's shows the same, except that Python runs. A waiting member is not
the one that hangs, however long it waits. A READY worker, which may be a standby for hours, repeats its request for a
round as often, and counts as waiting all the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from elastic_driver.core.events import WorkerHung
from elastic_driver.hosts import WorkerId


def interval_s(timeout_s: float, hang_timeout_s: float) -> float:
    """Return how often to check, and how often members must be heard, with these limits: 0 for never."""
    limits = [limit for limit in (timeout_s, hang_timeout_s) if limit]
    return min(limits) / 4 if limits else 0.0


@dataclass(slots=True)
class _Member:
    heard_at: float
    progress: int
    progress_at: float
    waiting: bool
    finished: int = 0  # as its pulse counts: of its process, not of its round


class Heartbeats:
    """The members under watch.

    Args:
        timeout_s: how long a member may be silent; 0 for no limit.
        hang_timeout_s: how long a member may neither finish operations nor wait in one; 0 for no limit.
    """

    def __init__(self, timeout_s: float, hang_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._members: dict[WorkerId, _Member] = {}
        self.interval_s = interval_s(timeout_s, hang_timeout_s)

    def heard(self, worker: WorkerId, progress: int, *, waiting: bool, now: float) -> None:
        """Record a member's request for notices, or a worker's for its round."""
        member = self._members.get(worker)
        if member is None:
            self._members[worker] = _Member(now, progress, now, waiting)
            return
        member.heard_at = now
        if progress != member.progress or waiting or member.waiting:
            member.progress_at = now
        member.progress, member.waiting = progress, waiting

    def alive(self, worker: WorkerId, now: float, *, submitted: int = 0, finished: int = 0) -> None:
        """Record that a member's process lives, whichever thread holds Python's lock.

        Args:
            worker: the worker; one that is not under watch stays so.
            now: the present, seconds.
            submitted, finished: its operations; 0 if they are not counted.
        """
        member = self._members.get(worker)
        if member is None:
            return
        member.heard_at = now
        if submitted:
            waiting = submitted > finished
            if finished != member.finished or waiting or member.waiting:
                member.progress_at = now
            member.finished, member.waiting = finished, waiting

    def forget(self, worker: WorkerId) -> None:
        """Stop watching a worker that has left its round, or is dead."""
        self._members.pop(worker, None)

    def keep(self, workers: Collection[WorkerId]) -> None:
        """End the watch of all but these: the round is over for the others."""
        self._members = {worker: self._members[worker] for worker in workers if worker in self._members}

    def look_in_s(self, now: float) -> float:
        """Return how long until a limit may be exceeded, at most ``interval_s``."""
        due = [self.interval_s]
        for member in self._members.values():
            if self._timeout_s:
                due.append(member.heard_at + self._timeout_s - now)
            if self._hang_timeout_s and not member.waiting:
                due.append(member.progress_at + self._hang_timeout_s - now)
        return max(0.0, min(due))

    def overdue_hosts(self, now: float) -> list[str]:
        """Return the hosts of workers that exceed a limit."""
        due = (worker.hostname for worker, member in self._members.items() if self._is_due(member, now))
        return list(dict.fromkeys(due))

    def find(
        self,
        now: float,
        *,
        audible_s: Mapping[str, float] | None = None,
        excused: Callable[[WorkerId], bool] = lambda worker: False,
    ) -> list[WorkerHung]:
        """Return the workers to kill, and why; each only once. To be called when ``look_in_s`` says.

        Args:
            now: the present, seconds.
            audible_s: by host, how long its workers could have been heard: their time begins when that began. A missing
                host has been heard all the time.
            excused: whether a worker's silence is not its fault (a debugger has stopped it): its silence begins anew. A
                standstill does not.
        """
        found = []
        audible_s = audible_s or {}
        for worker, member in self._members.items():
            if not self._is_due(member, now):
                continue
            began = now - audible_s.get(worker.hostname, math.inf)
            member.heard_at, member.progress_at = max(member.heard_at, began), max(member.progress_at, began)
            if self._is_silent(member, now) and excused(worker):
                member.heard_at = now
            if self._is_silent(member, now):
                found.append(WorkerHung(worker, f"no heartbeat for {now - member.heard_at:.1f} s", True))
            elif self._is_still(member, now):
                found.append(WorkerHung(worker, f"no progress for {now - member.progress_at:.1f} s", False))
        for hung in found:
            del self._members[hung.worker]
        return found

    def _is_due(self, member: _Member, now: float) -> bool:
        return self._is_silent(member, now) or self._is_still(member, now)

    def _is_silent(self, member: _Member, now: float) -> bool:
        return bool(self._timeout_s) and now - member.heard_at >= self._timeout_s

    def _is_still(self, member: _Member, now: float) -> bool:
        return bool(self._hang_timeout_s) and not member.waiting and now - member.progress_at >= self._hang_timeout_s
