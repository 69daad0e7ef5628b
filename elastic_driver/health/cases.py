"""Workers at a standstill now, though others wait for them, or for no visible reason.

Owns that judgment of one moment, in words; :mod:`elastic_driver.health.hangs` decides whether it has lasted, and the
consequences. A worker that waits in a collective is innocent, however long it waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from elastic_driver.health.findings import Kind
from elastic_driver.health.seen import Seen
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import STOPPED, Waiting


class Case(NamedTuple):
    """The reason for a worker's standstill: the kind, in words, and the collective that others wait in, or ""."""

    kind: Kind
    why: str
    collective: str


Cases = dict[WorkerId, Case]


def case_of_halt(seen: Seen) -> Case:
    """Return the case of a process that is stopped."""
    vitals = seen.vitals
    if vitals.state == STOPPED and not vitals.traced:
        return Case(Kind.STOPPED, "it is stopped by a signal (state T)", "")
    return Case(Kind.TRACED, f"it is stopped by a debugger (state {vitals.state})", "")


def cases_of_round(members: Mapping[WorkerId, Seen], ranks: Mapping[WorkerId, int], limit_s: float) -> Cases | None:
    """Return the cases of a round. None if unknown, since a worker that matters is not observed.

    Args:
        members: the members whose last observation is recent, and of this round.
        ranks: the ranks of all members.
        limit_s: after how long a standstill is suspicious.
    """
    by_rank = {ranks[worker]: worker for worker in members}
    root = members.get(by_rank[0]) if 0 in by_rank else None
    listed = () if root is None else root.vitals.waiting
    # The time that rank 0 slept through with its host does not count as waiting.
    heard_s = 0.0 if root is None else root.at_s - root.heard_s
    overdue = [one for one in listed if min(one.since_s, heard_s) >= limit_s]
    if overdue:
        return _of_waiting(overdue, members, by_rank, limit_s)
    if not listed:
        return _by_counts(members, ranks, limit_s)
    return None if any(one.since_s >= limit_s for one in listed) else {}


def _of_waiting(
    overdue: Collection[Waiting], members: Mapping[WorkerId, Seen], by_rank: Mapping[int, WorkerId], limit_s: float
) -> Cases:
    """Return the cases from the waits that rank 0 knows."""
    cases: Cases = {}
    all_wait = True
    for one in sorted(overdue, key=lambda one: (-one.since_s, one.name)):
        for rank in one.missing:
            worker = by_rank.get(rank)
            if worker is None:
                all_wait = False
                continue
            seen = members[worker]
            if seen.vitals.waits_s > 0:
                all_wait = all_wait and seen.waits_s >= limit_s
                continue
            all_wait = False
            if seen.is_still(limit_s) and worker not in cases:
                text = f"it has not submitted {one.name}, for which others have waited {one.since_s:.0f} s"
                cases[worker] = _awaited(seen, text, one.name)
    if not cases and all_wait:
        # It is unknowable which of them are at fault; the fewest are named.
        one = min(overdue, key=lambda one: (len(one.missing), -one.since_s, one.name))
        for rank in one.missing:
            text = (
                f"it has not submitted {one.name}, for which others have waited {one.since_s:.0f} s, and is "
                "itself waiting: the ranks wait for each other"
            )
            cases[by_rank[rank]] = Case(Kind.DEADLOCK, text, one.name)
    return cases


def _by_counts(members: Mapping[WorkerId, Seen], ranks: Mapping[WorkerId, int], limit_s: float) -> Cases | None:
    """Return the cases without those waits: the member that does not wait while all others do; or that submitted least.

    None if members that may wait or be waited for are not observed, or were not until a moment ago.
    """
    if len(members) < len(ranks):
        return None
    known = {worker: seen for worker, seen in members.items() if seen.vitals.pulse_s is not None}
    waiters = [worker for worker, seen in known.items() if seen.vitals.waits_s > 0]
    if not waiters:
        return {
            worker: Case(Kind.IDLE, f"{_does_nothing(seen)}, and no other worker waits for it", "")
            for worker, seen in known.items()
            if seen.is_still(limit_s) and seen.at_s - seen.quiet_s >= limit_s
        }
    if len(known) < len(ranks) or any(known[worker].vitals.waits_s < limit_s for worker in waiters):
        return {}
    if any(known[worker].waits_s < limit_s for worker in waiters):
        return None
    others = [worker for worker in known if worker not in dict.fromkeys(waiters)]
    counts = {worker: known[worker].vitals.submitted for worker in (others or waiters)}
    fewest = min(counts.values())
    waited_s = min(known[worker].vitals.waits_s for worker in waiters)
    if others:
        text = f"it is not waiting in a collective, and all others have waited for {waited_s:.0f} s"
        return {
            worker: _awaited(known[worker], text, "")
            for worker, count in counts.items()
            if count == fewest and known[worker].is_still(limit_s)
        }
    if fewest == max(counts.values()):
        return {}  # the collective itself makes no progress
    text = (
        f"it has submitted {fewest} collectives, others have submitted more, and all have waited for {waited_s:.0f} s"
    )
    return {
        worker: Case(Kind.DEADLOCK, f"{text}: the ranks wait for each other", "")
        for worker, count in counts.items()
        if count == fewest
    }


def _awaited(seen: Seen, text: str, collective: str) -> Case:
    vitals = seen.vitals
    if vitals.traced:
        return Case(Kind.TRACED, f"{text}; it is in a debugger", collective)
    if vitals.state == "D":
        text += "; it is in an uninterruptible system call (state D), usually waiting for a disk"
    return Case(Kind.LACKS, text, collective)


def _does_nothing(seen: Seen) -> str:
    text = f"it has used no CPU and done no I/O for {seen.at_s - seen.quiet_s:.0f} s"
    return f"{text} (state D: usually waiting for a disk)" if seen.vitals.state == "D" else text
