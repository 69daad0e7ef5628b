"""Whether a round goes on at all: since when none of its members has done anything, and whom they wait for.

Owns that judgement. :mod:`elastic_driver.health.hangs` has the looks at the workers that it is made from. Nobody is
ended for a stall; it says what time goes into.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elastic_driver.hosts import WorkerId

LEAST_S = 2.0
"""A shorter one is not reported: looks at workers come about once a second."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What the last look at a member says.

    Attributes:
        worker: the member.
        active_at: when it last did something other than to wait in a collective, the job's time, seconds.
        waits: whether it waits in a collective.
        is_fresh: whether the look is recent: else the member may be doing anything, or be gone.
        is_stopped: whether its process is stopped by a signal.
    """

    worker: WorkerId
    active_at: float
    waits: bool
    is_fresh: bool
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Stall:
    """No member of a round goes on.

    Attributes:
        since: when one of them did last, the job's time, seconds.
        waits_for: the members that the others wait for; empty where all wait for each other, or nobody waits.
    """

    since: float
    waits_for: tuple[WorkerId, ...]


def stall_of(sights: Collection[Sight], now: float, *, limit_s: float, lost: bool) -> Stall | None:
    """The stall that a round is in; None where it goes on, or nobody can know.

    Args:
        sights: all members, by ranks.
        now: the job's time, seconds.
        limit_s: how long nothing may happen in a round that goes on.
        lost: whether it is known that a member does nothing any more, or is lost: then the limit is not waited for.
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
