"""Stalls of a round: since when none of its members has done anything, and which members the others wait for.

Owns that judgment, from the observations in :mod:`elastic_driver.health.hangs`. No worker is killed for a stall; it
explains lost time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elastic_driver.hosts import WorkerId

LEAST_S = 2.0
"""A shorter stall is not reported: observations of workers come about once a second."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The last observation of a member.

    Attributes:
        worker: the member.
        active_at: when it last did something other than wait in a collective, the job's time, seconds.
        waits: whether it waits in a collective.
        is_fresh: whether the observation is recent: otherwise the member may be doing anything, or have ended.
        is_stopped: whether its process is stopped by a signal.
    """

    worker: WorkerId
    active_at: float
    waits: bool
    is_fresh: bool
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Stall:
    """No member of a round makes progress.

    Attributes:
        since: when the last of them made progress, in the job's time, seconds.
        waits_for: the members that the others wait for; empty if all wait for each other, or none waits.
    """

    since: float
    waits_for: tuple[WorkerId, ...]


def stall_of(sights: Collection[Sight], now: float, *, limit_s: float, lost: bool) -> Stall | None:
    """Return the stall of a round; None if it makes progress, or that is unknown.

    Args:
        sights: all members, by rank.
        now: the job's time, seconds.
        limit_s: how long nothing may happen in a healthy round.
        lost: whether a member is known to be lost or inactive: then the limit does not apply.
    """
    fresh = [sight for sight in sights if sight.is_fresh]
    if not fresh or (len(fresh) < len(sights) and not any(sight.waits for sight in fresh)):
        return None
    since = max(sight.active_at for sight in sights)
    is_sure = lost or any(sight.is_stopped for sight in fresh)
    if now - since < (LEAST_S if is_sure else limit_s):
        return None
    others = tuple(sight.worker for sight in sights if not (sight.is_fresh and sight.waits))
    return Stall(since, others if len(others) < len(sights) else ())
