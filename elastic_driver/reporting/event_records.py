"""A job's events as JSON objects, for programs: in the event log, and on an event hook's input.

Owns the names of events and of their fields, which docs/events.md documents, and events.schema.json beside this module
for programs. Decides neither where nor when they are written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from elastic_driver.health.findings import (
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.sampler import Sampled
from elastic_driver.reporting.happenings import (
    ChiefEnded,
    ChiefStarted,
    ChiefStopped,
    DiscoveryRan,
    DiskReported,
    FirstFailure,
    Happening,
    HostLost,
    HostReady,
    HostsChanged,
    HostUnready,
    InternalError,
    JobEnded,
    JobStarted,
    LogCut,
    MomentPassed,
    NetworkChecked,
    NoticeGiven,
    PhaseChanged,
    ProcessDying,
    ProcessEnded,
    ProcessStarted,
    Remark,
    RoundFormed,
    RoundResumed,
    ServerAnswers,
    Status,
    StoodStill,
    TimeBooked,
    TookOver,
    Warmed,
    WorkerDismissed,
    WorkerHung,
    WorkersDrained,
    WorkersReady,
    WorkersStopped,
    WorkerTimeBooked,
)
from elastic_driver.reporting.instant import Instant
from elastic_driver.version import __version__

FORMAT = 1
"""The version of the records: increased when programs that read them would have to be changed."""
Record = dict[str, Any]


def records_of(happening: Happening) -> list[Record]:
    """Return the happening's events: ``{"event": NAME, ...}``, without the time; none for those that are periodic."""
    match happening:
        case Status() | DiscoveryRan() | DiskReported() | MomentPassed():
            return []
        case JobStarted(again=True) | ProcessStarted(again=True):
            return []
        case JobStarted(url, job_id):
            return [_record("job_started", format=FORMAT, version=__version__, rendezvous=url, job_id=job_id)]
        case HostsChanged(hosts):
            labels = {host.name: list(host.labels) for host in hosts if host.labels}
            more = {"labels": labels} if labels else {}
            return [_record("hosts_discovered", hosts={host.name: host.slots for host in hosts}, **more)]
        case HostReady(host, address, joined):
            return [_record("host_ready", host=host, address=address, joined=joined)]
        case HostUnready(host, reason, permanent):
            return [_record("host_unready", host=host, reason=reason, permanent=permanent)]
        case HostLost(host, reason):
            return [_record("host_lost", host=host, reason=reason)]
        case NetworkChecked():
            return [_of_check(happening)]
        case ProcessStarted(worker, pid):
            return [_record("worker_started", worker=worker.key, pid=pid)]
        case ServerAnswers(worker, number, address):
            return [_record("server_answers", worker=worker.key, parameter_server=number, address=address)]
        case ChiefStarted(number, pid, servers, workers):
            return [_record("chief_started", number=number, pid=pid, parameter_servers=servers, workers=workers)]
        case ChiefStopped(reason):
            return [_record("chief_stopped", reason=reason)]
        case ChiefEnded(number, pid, returncode, _, expected):
            return [_record("chief_exited", number=number, pid=pid, returncode=returncode, expected=expected)]
        case Warmed(pid, took_s):
            return [_record("warmed", pid=pid, took_s=round(took_s, 4))]
        case ProcessDying(worker, pid, how):
            return [_record("worker_dying", worker=worker.key, pid=pid, how=how)]
        case ProcessEnded(worker, pid, returncode=returncode, expected=expected):
            return [_record("worker_exited", worker=worker.key, pid=pid, returncode=returncode, expected=expected)]
        case WorkersStopped(stops):
            return [_record("worker_stopped", worker=worker.key, reason=reason) for worker, reason in stops]
        case WorkerHung(worker, reason):
            return [_record("worker_hung", worker=worker.key, reason=reason)]
        case WorkerSuspected():
            return [_of_suspicion(happening)]
        case WorkerCleared(worker, rank, why, took_s):
            return [_record("worker_cleared", worker=worker.key, rank=rank, why=why, took_s=round(took_s, 4))]
        case StragglerFound():
            return [_of_straggler(happening)]
        case StragglerGone(worker, rank, why, took_s):
            return [_record("straggler_gone", worker=worker.key, rank=rank, why=why, took_s=round(took_s, 4))]
        case WorkerDismissed(worker, reason):
            return [_record("worker_dismissed", worker=worker.key, reason=reason)]
        case PhaseChanged(phase, doing, on_change):
            return [_record("phase", phase=phase, doing=doing, on_change=on_change)]
        case WorkersReady(workers):
            return [_record("worker_ready", worker=worker.key) for worker in workers]
        case WorkersDrained(workers, undone):
            return [_record("worker_drained", worker=worker.key, undone=undone) for worker in workers]
        case StoodStill(stood_s, ended_s, trained):
            return [_record("stood_still", stood_s=round(stood_s, 4), ended_s=round(ended_s, 4), trained=trained)]
        case TookOver(epoch, away_s, workers, hosts, round_id, trained, pids):
            left = {"workers": workers, "hosts": hosts, "round_id": round_id, "trained": trained}
            of_them = {worker.key: pid for worker, pid in pids.items()}
            return [_record("took_over", epoch=epoch, away_s=round(away_s, 4), **left, pids=of_them)]
        case Stalled(stood_s, waits_for):
            return [_record("stalled", stood_s=round(stood_s, 4), waits_for=[worker.key for worker in waits_for])]
        case StallEnded(stood_s, waits_for, resumed):
            names = [worker.key for worker in waits_for]
            return [_record("stall_ended", stood_s=round(stood_s, 4), waits_for=names, resumed=resumed)]
        case TimeBooked(seconds, wall_s, share):
            booked = _rounded(seconds)
            return [_record("goodput", seconds=booked, wall_s=round(wall_s, 4), share=round(share, 6))]
        case WorkerTimeBooked(worker, seconds, wall_s):
            booked = _rounded(seconds)
            return [_record("worker_goodput", worker=worker.key, seconds=booked, wall_s=round(wall_s, 4))]
        case NoticeGiven(round_id, kind, reason):
            return [_record("notice", round_id=round_id, kind=kind, reason=reason)]
        case RoundFormed():
            return [_of_round(happening)]
        case RoundResumed(round_id, commits, took_s, stalled_s):
            costs = {"took_s": round(took_s, 4), "stalled_s": round(stalled_s, 4)}
            return [_record("round_resumed", round_id=round_id, commits=commits, **costs)]
        case Remark(text, warning):
            return [_record("report", text=text, warning=warning)]
        case LogCut(size):
            return [_record("log_cut", size_bytes=size)]
        case FirstFailure(worker, rank, how, last_lines, alike):
            return [
                _record(
                    "first_failure",
                    worker=worker.key,
                    rank=rank,
                    how=how,
                    last_lines=list(last_lines),
                    alike=[worker.key for worker in alike],
                )
            ]
        case InternalError(error, events):
            return [_record("internal_error", error=error, events=list(events))]
        case Sampled():
            return [_of_sample(happening)]
        case JobEnded(exit_code, message):
            return [_record("job_ended", exit_code=exit_code, message=message)]


def line_of(record: Record, instant: Instant) -> bytes:
    """Return a record as a line, at this instant; a value without a JSON form becomes text."""
    at_s = round(instant() - instant.began, 6)
    return json.dumps({"time": time.time(), "at_s": at_s, **record}, default=str, allow_nan=False).encode() + b"\n"


def _record(event: str, **fields: object) -> Record:
    return {"event": event, **fields}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {category: round(spent_s, 4) for category, spent_s in seconds.items()}


def _of_suspicion(one: WorkerSuspected) -> Record:
    return _record(
        "worker_suspected",
        worker=one.worker.key,
        rank=one.rank,
        kind=one.kind,
        why=one.why,
        collective=one.collective,
        stack=one.stack,
        frames=list(one.frames),
        still_s=round(one.still_s, 4),
        limit_s=round(one.limit_s, 4),
        limit=one.limit,
        ends_s=_short(one.ends_s),
        more=one.more,
        spared=one.spared,
    )


def _of_sample(one: Sampled) -> Record:
    return _record(
        "sampled",
        steps_per_s=_short(one.steps_per_s),
        waiting=_short(one.waiting),
        cpu=_short(one.cpu),
        memory_bytes=one.memory_bytes,
        gpu=_short(one.gpu),
        gpu_memory_bytes=one.gpu_memory_bytes,
        workers=one.workers,
        figures=dict(one.figures),
    )


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _of_straggler(one: StragglerFound) -> Record:
    return _record(
        "straggler",
        worker=one.worker.key,
        rank=one.rank,
        own_s=round(one.own_s, 6),
        median_s=round(one.median_s, 6),
        against_others=round(one.against_others, 4),
        against_past=round(one.against_past, 4),
        steps=one.steps,
    )


def _of_check(checked: NetworkChecked) -> Record:
    return _record(
        "network_checked",
        admitted=list(checked.admitted),
        barred=dict(checked.barred),
        unheard=list(checked.unheard),
        links=[
            {
                "hosts": list(link.hosts),
                "rtt_ms": round(link.rtt_s * 1e3, 4),
                "mbit_s": round(link.speed * 8 / 1e6, 3),
            }
            for link in checked.links
        ],
        slow=list(checked.slow),
        took_s=round(checked.took_s, 4),
    )


def _of_round(formed: RoundFormed) -> Record:
    return _record(
        "round_formed",
        round_id=formed.round_id,
        size=len(formed.members),
        old_size=formed.old_size,
        cause=formed.cause,
        commits=formed.commits,
        sync=formed.sync,
        backend=formed.backend,
        formed_in_s=round(formed.formed_in_s, 4),
        lost_s=_short(formed.lost_s, 6),
        since_commit_s=_short(formed.since_commit_s, 6),
        members=[{"rank": member.rank, "worker": member.worker.key, "pid": member.pid} for member in formed.members],
    )
