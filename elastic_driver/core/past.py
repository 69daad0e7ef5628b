"""Handling of the past: what is dropped when, which reports come too late, and which are impossible.

Owns the only code that drops anything of a worker or of a round, and the only code that rejects a report for its time.
A report that was true once, such as an answered request or a message of a process that has ended, is late: it changes
nothing. A report that was never true raises an error, since its sender is broken.
"""

from __future__ import annotations

import math
from dataclasses import replace

from elastic_driver.core.events import (
    ChiefExited,
    DiscoveryFailed,
    DrainRequested,
    DriverFailed,
    Event,
    HostHeard,
    HostLost,
    HostsDiscovered,
    HostSilent,
    HostsReported,
    HostsUnusable,
    StopRequested,
    TimerExpired,
    WorkerDying,
    WorkerExited,
    WorkerExiting,
    WorkerHung,
    WorkerNotStarted,
    WorkerReady,
    WorkerReleased,
    WorkerReport,
    WorkerRunning,
    WorkerServing,
    WorkerSpared,
    WorkersReported,
    WorkerStarted,
)
from elastic_driver.core.registry import WorkerStateRegistry
from elastic_driver.core.state import Round, State, WorkerPhase, WorkerRecord, record_of
from elastic_driver.errors import ElasticError
from elastic_driver.hosts import Departure, WorkerId

WorkerEvent = WorkerReport | WorkerNotStarted


class IllegalEventError(ElasticError, ValueError):
    """An event that cannot have happened in this job. The state is unchanged."""


def forget_worker(state: State, worker: WorkerId) -> State:
    """Drop the record of a worker whose process has ended.

    The rest stays: it is a member of its round until the next one, its reports there count, and its name is never used
    again.
    """
    return replace(state, workers=state.workers.without(worker))


def forget_round(state: State, following: Round) -> State:
    """Begin a round: drop the round before, the reset between them, its reports, and its progress."""
    return replace(
        state,
        round=following,
        reset=None,
        registry=WorkerStateRegistry(following.members),
        setbacks=state.setbacks.next_round(),
    )


def record_unless_late(state: State, event: WorkerEvent) -> WorkerRecord | None:
    """Return the record of the worker that an event concerns; None if the event is late, or no news."""
    record = record_of(state, event.worker)
    if record is None:
        return None  # the process has ended
    match event:
        case WorkerStarted():
            late = record.phase is not WorkerPhase.BOOTING
        case WorkerServing():
            late = record.phase is not WorkerPhase.BOOTING or not state.policy.has_chief
        case WorkerReleased():
            # A worker whose place is back stays: the chief is notified again.
            late = record.phase is not WorkerPhase.MEMBER or record.leave_by is None
        case WorkerReady() if not state.policy.on_change.asks_for_rounds:
            # Of workers that may become another kind, only the first that asks; their other requests are late.
            asks = state.policy.becomes_in_place and event.after_round == 0
            late = not asks or record.phase is WorkerPhase.LEAVING
        case WorkerReady():
            # A request that was already answered, or a repetition of an open one.
            late = event.after_round != record.round_id or record.phase in (WorkerPhase.READY, WorkerPhase.LEAVING)
        case WorkerRunning():
            late = event.round_id != record.round_id or record.phase is not WorkerPhase.MEMBER
        case WorkerDying():
            late = record.phase is WorkerPhase.LEAVING
        case WorkerExiting():
            # It has reported that before; and no server has a script that could be over.
            late = record.exit_by is not None or record.killed is not None or state.policy.has_chief
        case WorkerHung():
            late = record.killed is not None
        case WorkerSpared():
            late = record.killed is None
        case WorkerExited() | WorkerNotStarted():
            late = False
    return None if late else record


def is_known(state: State, event: WorkerRunning) -> bool:
    """Return whether the state already has all that a member reports of its training, so that it has no effect."""
    record = record_unless_late(state, event)
    if record is None or not record.running or event.another:
        return False
    return event.commits <= record.commits and (record.has_state or not event.synced)


def why_impossible(state: State, event: Event) -> str:
    """Return why the event cannot have happened, late or not; "" if it can."""
    match event:
        case WorkersReported():
            return next(filter(None, (why_impossible(state, report) for report in event.reports)), "")
        case HostsDiscovered():
            names = [host.name for host in event.hosts]
            if len(names) != len(set(names)):
                return "a host is listed twice"
            if not event.down.isdisjoint(names):
                return "a host is both up and down"
            if not event.preparing.issubset(names):
                return "a host that is not up is preparing for workers"
            of_hosts = (f"host {host.name} has {host.slots} slots" for host in event.hosts if host.slots < 1)
            return next(of_hosts, "") or next(filter(None, map(_why_no_departure, event.departures)), "")
        case DrainRequested():
            return _why_no_departure(Departure(event.hostname, event.why, event.within_s))
        case HostsReported():
            return next(filter(None, (why_impossible(state, report) for report in event.reports)), "")
        case HostSilent():
            return "" if event.silent_s >= 0 else f"host {event.hostname} has been silent for {event.silent_s} s"
        case HostLost():
            if any(worker.hostname != event.hostname for worker in event.workers):
                return f"a worker of another host is lost with host {event.hostname}"
            never = next((worker for worker in event.workers if not _was_started(state, worker)), None)
            return _why_no_draw(event.draw) if never is None else f"worker {never} was never started"
        case HostHeard():
            return ""
        case ChiefExited():
            return "" if 1 <= event.number <= state.chiefs else f"chief {event.number} was never started"
        case DiscoveryFailed() | HostsUnusable() | StopRequested() | DriverFailed() | TimerExpired():
            return ""
        case _:
            return _why_impossible_of_worker(state, event)


def _why_no_departure(departure: Departure) -> str:
    within_s = departure.within_s
    is_time = within_s is None or 0 <= within_s < math.inf
    return "" if is_time else f"host {departure.hostname} goes away in {within_s} s"


def _why_impossible_of_worker(state: State, event: WorkerEvent) -> str:
    worker = event.worker
    record = record_of(state, worker)
    if not _was_started(state, worker):
        return f"worker {worker} was never started"
    match event:
        case WorkerReady(after_round=round_id) | WorkerRunning(round_id=round_id):
            # It may refer to the rounds before it first called init().
            last = max(state.rounds_before, state.round_id if record is None else record.round_id)
            if not 0 <= round_id <= last:
                return f"worker {worker} refers to round {round_id}; the last one that it can know is {last}"
            if isinstance(event, WorkerReady) and any(rank < 0 for rank in event.unreachable):
                return f"worker {worker} refers to rank {min(event.unreachable)}"
            if isinstance(event, WorkerReady) and not 0 <= event.uncommitted_s < math.inf:
                return f"worker {worker} has trained for {event.uncommitted_s} s since its last commit"
        case _:
            pass
    if isinstance(event, WorkerDying | WorkerExited) and not 0 <= (event.raised_s or 0.0) < math.inf:
        return f"worker {worker} raised an error {event.raised_s} s before its end"
    return _why_no_draw(event.draw if isinstance(event, WorkerDying | WorkerExited | WorkerNotStarted) else 0.0)


def _was_started(state: State, worker: WorkerId) -> bool:
    is_alive = record_of(state, worker) is not None
    return is_alive or state.attempts.has_given((worker.hostname, worker.slot), worker.attempt)


def _why_no_draw(draw: float) -> str:
    return "" if 0 <= draw <= 1 else f"{draw} is not a random number from 0 to 1"
