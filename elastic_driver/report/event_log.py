"""The event log: what happened to the job, one JSON object a line, for programs.

A log must never end the job that it tells of, nor hold it up: a full disc or a vanished file is said once and then
borne, and a disc that hangs is a thread's business.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from elastic_driver.errors import SettingsError
from elastic_driver.report.happenings import (
    ChiefEnded,
    ChiefStarted,
    ChiefStopped,
    FirstFailure,
    Happening,
    HostLost,
    HostReady,
    HostsChanged,
    HostUnready,
    InternalError,
    JobEnded,
    JobStarted,
    MomentPassed,
    NetworkChecked,
    NoticeGiven,
    ProcessDying,
    ProcessEnded,
    ProcessStarted,
    Remark,
    RoundFormed,
    RoundResumed,
    ServerAnswers,
    Status,
    StragglerFound,
    StragglerGone,
    Warmed,
    WorkerCleared,
    WorkerDismissed,
    WorkerHung,
    WorkersStopped,
    WorkerSuspected,
)
from elastic_driver.system.file_writer import FLUSH_S, FileWriter
from elastic_driver.system.safe_files import open_named


class EventLog:
    """Appends events to a file. See Listener.

    Args:
        path: the file; None for no log.
        on_warning: told once when it cannot be written; at the next event, or at the end.

    Raises:
        SettingsError: the file cannot be opened, may be another user's, or is a pipe that nobody reads.
    """

    live = False

    def __init__(self, path: Path | None, *, on_warning: Callable[[str], None] = lambda text: None) -> None:
        self._path = path
        self._on_warning = on_warning
        self._writer: FileWriter | None = None
        self._trouble = ""  # written by the writer's thread, once
        self._late = False
        if path is not None:
            try:
                # A pipe does not block: one that nobody reads must hold up neither the start nor, once full, the end.
                self._descriptor = open_named(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            except OSError as error:
                raise SettingsError(f"cannot write the event log {path} (--event-log): {error.strerror}") from error
            self._writer = FileWriter("elasticrun-events")

    def hear(self, happening: Happening) -> None:
        """See Listener."""
        match happening:
            case Status() | MomentPassed():
                pass
            case JobStarted(url, job_id):
                self.write("job_started", rendezvous=url, job_id=job_id)
            case HostsChanged(hosts):
                labels = {host.name: list(host.labels) for host in hosts if host.labels}
                more = {"labels": labels} if labels else {}
                self.write("hosts_discovered", hosts={host.name: host.slots for host in hosts}, **more)
            case HostReady(host, address, joined):
                self.write("host_ready", host=host, address=address, joined=joined)
            case HostUnready(host, reason, permanent):
                self.write("host_unready", host=host, reason=reason, permanent=permanent)
            case HostLost(host, reason):
                self.write("host_lost", host=host, reason=reason)
            case NetworkChecked():
                self._write_check(happening)
            case ProcessStarted(worker, pid):
                self.write("worker_started", worker=worker.key, pid=pid)
            case ServerAnswers(worker, number, address):
                self.write("server_answers", worker=worker.key, parameter_server=number, address=address)
            case ChiefStarted(number, pid, servers, workers):
                self.write("chief_started", number=number, pid=pid, parameter_servers=servers, workers=workers)
            case ChiefStopped(reason):
                self.write("chief_stopped", reason=reason)
            case ChiefEnded(number, pid, returncode, _, expected):
                self.write("chief_exited", number=number, pid=pid, returncode=returncode, expected=expected)
            case Warmed(pid, took_s):
                self.write("warmed", pid=pid, took_s=round(took_s, 4))
            case ProcessDying(worker, pid, how):
                self.write("worker_dying", worker=worker.key, pid=pid, how=how)
            case ProcessEnded(worker, pid, returncode=returncode, expected=expected):
                self.write("worker_exited", worker=worker.key, pid=pid, returncode=returncode, expected=expected)
            case WorkersStopped(stops):
                for worker, reason in stops:
                    self.write("worker_stopped", worker=worker.key, reason=reason)
            case WorkerHung(worker, reason):
                self.write("worker_hung", worker=worker.key, reason=reason)
            case WorkerSuspected():
                self._write_suspicion(happening)
            case WorkerCleared(worker, rank, why, took_s):
                self.write("worker_cleared", worker=worker.key, rank=rank, why=why, took_s=round(took_s, 4))
            case StragglerFound():
                self._write_straggler(happening)
            case StragglerGone(worker, rank, why, took_s):
                self.write("straggler_gone", worker=worker.key, rank=rank, why=why, took_s=round(took_s, 4))
            case WorkerDismissed(worker, reason):
                self.write("worker_dismissed", worker=worker.key, reason=reason)
            case NoticeGiven(round_id, kind, reason):
                self.write("notice", round_id=round_id, kind=kind, reason=reason)
            case RoundFormed():
                self._write_round(happening)
            case RoundResumed(round_id, commits, took_s):
                self.write("round_resumed", round_id=round_id, commits=commits, took_s=round(took_s, 4))
            case Remark(text, warning):
                self.write("report", text=text, warning=warning)
            case FirstFailure(worker, rank, how, last_lines, alike):
                self.write(
                    "first_failure",
                    worker=worker.key,
                    rank=rank,
                    how=how,
                    last_lines=list(last_lines),
                    alike=[worker.key for worker in alike],
                )
            case InternalError(error, events):
                self.write("internal_error", error=error, events=list(events))
            case JobEnded(exit_code, message):
                self.write("job_ended", exit_code=exit_code, message=message)

    def _write_suspicion(self, one: WorkerSuspected) -> None:
        self.write(
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
            ends_s=None if one.ends_s is None else round(one.ends_s, 4),
            more=one.more,
        )

    def _write_straggler(self, one: StragglerFound) -> None:
        self.write(
            "straggler",
            worker=one.worker.key,
            rank=one.rank,
            own_s=round(one.own_s, 6),
            median_s=round(one.median_s, 6),
            against_others=round(one.against_others, 4),
            against_past=round(one.against_past, 4),
            steps=one.steps,
        )

    def _write_check(self, checked: NetworkChecked) -> None:
        self.write(
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

    def _write_round(self, formed: RoundFormed) -> None:
        self.write(
            "round_formed",
            round_id=formed.round_id,
            size=len(formed.members),
            old_size=formed.old_size,
            cause=formed.cause,
            commits=formed.commits,
            sync=formed.sync,
            backend=formed.backend,
            formed_in_s=round(formed.formed_in_s, 4),
            members=[
                {"rank": member.rank, "worker": member.worker.key, "pid": member.pid} for member in formed.members
            ],
        )

    def write(self, event: str, **fields: object) -> None:
        """Appends ``{"time": unix seconds, "event": event, **fields}``; a value without a JSON form becomes text.

        It is in the file a moment later. Never blocks.
        """
        if self._writer is None:
            return
        if self._trouble:
            self.close()
            return
        line = json.dumps({"time": time.time(), "event": event, **fields}, default=str, allow_nan=False)
        data = line.encode() + b"\n"
        if not self._writer.put(functools.partial(self._append, data), len(data)) and not self._late:
            self._late = True
            self._on_warning(f"the event log {self._path} misses events: the disc does not keep up")

    def _append(self, data: bytes) -> None:
        """One write for each line, so that it is there as a whole. In the writer's thread."""
        if self._trouble:
            return
        try:
            if os.write(self._descriptor, data) < len(data):
                self._trouble = "there is no room for a whole line"
        except BlockingIOError:
            self._trouble = "there is no room for a whole line"
        except OSError as error:
            self._trouble = error.strerror or str(error)

    def _close(self) -> None:
        try:
            os.close(self._descriptor)
        except OSError as error:  # some file systems tell only here that the disc is full
            self._trouble = self._trouble or error.strerror or str(error)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Closes the file when all is written, or the time is over. Idempotent."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.put(self._close)
        writer.close(timeout_s)
        if self._trouble:
            self._on_warning(f"cannot write the event log {self._path}: {self._trouble}; going on without it")
        elif writer.lost:
            self._on_warning(f"{writer.lost} bytes are not in the event log {self._path}: the disc does not keep up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
