"""Sentences shared by the terminal and the page: on workers that may hang or are slow, and on takeovers.

Pure. Does not depend on either of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_driver.health.findings import (
    NotDrained,
    Spared,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.happenings import TookOver
from elastic_driver.words import counted, in_seconds

# By the kind of the suspicion.
_NOT_ENDED = {
    "traced": "a worker in a debugger is not killed",
    "deadlock": "no worker is killed, since it is unclear which of them is at fault",
    "idle": "no worker is killed as long as none waits for it",
    "unheard": "no worker is killed for this",
}
_WARN = "with --hang-action warn it would only be reported"
_NAMED = 6


def of_takeover(taken: TookOver) -> str:
    """Word how long there was no driver, and the state of the workers."""
    if not taken.workers:
        left = "no worker is running"  # all have ended, or none has been started yet
    else:
        workers = counted(taken.workers, "worker")
        hosts = counted(taken.hosts, "host")
        present = "are still running" if taken.workers > 1 else "is still running"
        did = "kept training, no step is lost" if taken.trained else present
        left = f"{workers} on {hosts} {did}"
    return f"took over: no driver for {taken.away_s:.1f} s; {left}"


def of_stall(stood_s: float, waits_for: Sequence[WorkerId]) -> str:
    """Word how long no worker has made progress, and which ones they wait for."""
    named = ", ".join(map(str, waits_for[:_NAMED]))
    more = f" and {len(waits_for) - _NAMED} more" if len(waits_for) > _NAMED else ""
    who = f", waiting for worker{'s' if len(waits_for) > 1 else ''} {named}{more}" if waits_for else ""
    return f"stalled for {stood_s:.1f} s: no worker completes a step{who}"


def of_suspicion(suspected: WorkerSuspected) -> str:
    """Word which worker may hang, why, and the consequence."""
    others = f" (and {suspected.more} others like it)" if suspected.more else ""
    then = _NOT_ENDED.get(suspected.kind, "no worker is killed for this (--hang-action warn)")
    if suspected.spared:
        then = f"it is not killed for this: {suspected.spared}"
    elif suspected.kind == "stopped" and suspected.ends_s is not None:
        then = f"it will be killed in {suspected.ends_s:.0f} s unless that changes ({_WARN})"
    elif suspected.ends_s is not None:
        then = (
            f"it will be killed if it uses no CPU, does no I/O and does not wake for {suspected.ends_s:.0f} s ({_WARN})"
        )
    is_halted = suspected.kind in ("stopped", "traced") and suspected.still_s < suspected.limit_s
    limit = "" if is_halted else f" (the limit: {suspected.limit})"
    return f"{_named(suspected.worker, suspected.rank)}{others} may hang: {suspected.why}{limit}; {then}"


def of_cleared(cleared: WorkerCleared) -> str:
    """Word which worker is no longer suspected."""
    who = _named(cleared.worker, cleared.rank)
    return f"{who} is no longer suspected of hanging: {cleared.why}; it made no progress for {cleared.took_s:.1f} s"


def of_spared(spared: Spared) -> str:
    """Word which worker hangs, and is not killed."""
    return f"worker {spared.worker} hangs ({spared.why}) but is not killed: {spared.reason}"


def of_straggler(found: StragglerFound) -> str:
    """Word which worker is slow, and by how much."""
    slower = 1.0 / found.against_others
    past = 1.0 / found.against_past
    usual = f", and {past:.2g} times its own best" if past >= 1.1 else ", as it has always been"
    return (
        f"{_named(found.worker, found.rank)} is slow: its last {found.steps} steps took {_time(found.own_s)} each "
        f"without waiting, {slower:.2f} times the others' {_time(found.median_s)}{usual}"
    )


def of_straggler_gone(gone: StragglerGone) -> str:
    """Word which worker is no longer slow."""
    return f"{_named(gone.worker, gone.rank)} was slower than the others for {gone.took_s:.0f} s: {gone.why}"


def of_not_drained(kept: NotDrained) -> str:
    """Word which worker is slow, and is not drained."""
    return f"worker {kept.worker} is slow but is not drained: {kept.why}"


def _named(worker: WorkerId, rank: int | None) -> str:
    return f"worker {worker}" if rank is None else f"worker {worker} (rank {rank})"


def _time(seconds: float) -> str:
    return in_seconds(seconds, 2) if seconds >= 1 else in_seconds(seconds * 1e3).removesuffix("s") + "ms"
