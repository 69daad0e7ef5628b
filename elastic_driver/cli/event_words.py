"""A job's events as text, one line each, for readers of a journal.

Owns the wording only. The core decides what an event means for the job.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    WorkerRunning,
    WorkerServing,
    WorkerSpared,
    WorkersReported,
    WorkerStarted,
)
from elastic_driver.core.explain import names
from elastic_driver.hosts import Departure
from elastic_driver.reporting.printable import one_line
from elastic_driver.words import ReadyCause

# The most reports of an event, and the most hosts, that are shown.
_AT_MOST = 6
_WHY = {
    ReadyCause.START: "",
    ReadyCause.HOSTS_UPDATED: ": hosts have changed",
    ReadyCause.INTERNAL_ERROR: ": a collective failed",
    ReadyCause.REINIT: ": its script called shutdown() and init()",
}


def in_words(event: Event) -> str:
    """Describe an event in one line."""
    return one_line(_words(event))


def _words(event: Event) -> str:
    match event:
        case HostsDiscovered():
            return _hosts(event)
        case DiscoveryFailed(message=message):
            return f"host discovery failed: {message}"
        case HostsUnusable(reasons):
            return f"no usable host: {reasons}"
        case WorkerStarted(worker):
            return f"worker {worker} has started"
        case WorkerReady(worker, after, cause=cause, detail=detail):
            which = f"the round after round {after}" if after else "its first round"
            return f"worker {worker} is ready for {which}{_WHY[cause]}{_in_brackets(detail)}"
        case WorkerRunning(worker, number, commits, synced=synced):
            return f"worker {worker} {'trains' if synced else 'runs'} in round {number}, from commit {commits}"
        case WorkerDying(worker, how=how, error=error):
            return f"worker {worker} is about to exit: {how}{_in_brackets(error)}"
        case WorkerExited(worker, how=how, error=error):
            return f"worker {worker} {how}{_in_brackets(error)}"
        case WorkerExiting(worker):
            return f"worker {worker} has finished its script"
        case WorkerHung(worker, reason):
            return f"worker {worker} hangs: {reason}"
        case WorkerSpared(worker):
            return f"worker {worker} had finished its script, so the command that wraps it was not killed"
        case WorkerServing(worker, address):
            return f"worker {worker} serves at {address}"
        case WorkerReleased(worker):
            return f"the chief has released worker {worker}"
        case ChiefExited(number, how=how, error=error):
            return f"chief {number} {how}{_in_brackets(error)}"
        case HostLost(hostname, why, workers):
            with_it = f", and {names(workers)} with it" if workers else ""
            return f"host {hostname} is lost{with_it}{why and f': {why}'}"
        case HostSilent(hostname, silent_s, sure):
            return f"host {hostname} did not respond for {silent_s:.1f} s{'' if sure else ', nor did others'}"
        case HostHeard(hostname):
            return f"host {hostname} responds again"
        case WorkersReported(reports):
            return _several([_words(report) for report in reports])
        case HostsReported(silent_or_heard):
            return _several([_words(report) for report in silent_or_heard])
        case WorkerNotStarted(worker, message):
            return f"worker {worker} could not be started: {message}"
        case DrainRequested(hostname, slot, why, undo, within_s):
            what = f"host {hostname}" if slot is None else f"slot {slot} of host {hostname}"
            left = "" if within_s is None else f", {within_s:.0f} s left"
            return f"{what} may be used again: {why}" if undo else f"{what} is to be drained{left}: {why}"
        case StopRequested(name=name):
            return f"the job has been asked to end: {name}"
        case DriverFailed():
            return event.message
        case TimerExpired():
            return "a time limit or a pause has expired"


def _hosts(event: HostsDiscovered) -> str:
    text = f"hosts: {_listed([str(host) for host in event.hosts])}"
    text += "".join(f"; {_going(departure)}" for departure in event.departures)
    text += f"; not up: {_listed(sorted(event.down))}" if event.down else ""
    text += f"; importing: {_listed(sorted(event.preparing))}" if event.preparing else ""
    return text if event.answered else f"{text}; discovery still fails"


def _going(departure: Departure) -> str:
    left = "" if departure.within_s is None else f" in {departure.within_s:.0f} s"
    return f"{departure.hostname} is going away{left}: {departure.why}"


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _AT_MOST} more" if len(items) > _AT_MOST else ""
    return f"{', '.join(items[:_AT_MOST])}{more}" or "none"


def _several(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _AT_MOST} more" if len(texts) > _AT_MOST else ""
    return f"{'; '.join(texts[:_AT_MOST])}{more}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
