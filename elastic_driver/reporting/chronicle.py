"""The job's chronicle: turns what the driver observes into happenings, and passes each to all listeners.

Owns the memory needed for that: the rounds, the workers' last output lines, the commits on disk, the length of a wait.
Makes no decisions, words no lines and does no I/O; the listeners do (:mod:`~elastic_driver.reporting.narrator` for the
terminal, :mod:`~elastic_driver.reporting.event_log`). A new listener is a new class, given to the chronicle.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_driver.core.events import Event, PublishRound, Report, ReportResumed, SetNotice, StopWorker
from elastic_driver.core.setbacks import Failure
from elastic_driver.core.standing import Standing
from elastic_driver.health.findings import ReportedFinding, StallEnded
from elastic_driver.health.sampler import Sampled
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.rendezvous.messages import DiskReport
from elastic_driver.reporting.goodput import Goodput
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
    Listener,
    Member,
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
    RoundSummary,
    ServerAnswers,
    Status,
    StoodStill,
    Summary,
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
from elastic_driver.words import Backend, NoticeKind

# Rounds in the closing table. A job of weeks has hundreds.
_FIRST_ROUNDS, _LAST_ROUNDS = 5, 15
# A wait is reported after the first number of seconds, and again after an interval that doubles each time up to the
# second. After the third number of seconds it is a warning.
_WAIT_S, _LONGEST_WAIT_S, _WORRY_S = 5.0, 300.0, 30.0
# How often the time booked is reported: often enough that little is lost if the driver is killed.
_BOOKED_S = 60.0
# Workers whose last output lines are kept, of those that failed since the last round was formed.
_MOST_LAST_WORDS = 1024
# Folders of commits that are tracked, and named at the end. New hosts may add new folders without end.
_MOST_FOLDERS, _NAMED_FOLDERS = 64, 6
# What users should know about the backend of a round. Each driver of a job reports it once.
_OF_BACKENDS: Mapping[Backend | None, str] = {
    Backend.HOROVOD: "the workers run Horovod's own library: connections between them are neither encrypted "
    "nor authenticated",
    Backend.TORCH: "PyTorch's Gloo carries the collectives, which is slower: ELASTIC_DRIVER_BACKEND asks for it, or a "
    "worker lacks the native extension (where it runs, `elasticrun --check-build` says why)",
}


@dataclass(slots=True)
class _Folder:
    """A folder of commits on disk, according to the last report of the worker that writes them."""

    report: DiskReport
    troubled: int = 0  # consecutive reports of trouble

    def __str__(self) -> str:
        report = self.report
        newest = f"commit {report.written}" if report.written >= 0 else "no commit"
        behind = f" of {report.commits}" if report.written < report.commits else ""
        return f"{newest}{behind} in {report.where}" + (f" ({report.trouble})" if report.trouble else "")


@dataclass(slots=True)
class _Round:
    """A round of the summary; took_s is None until all its members have resumed, commits if the round has none."""

    round_id: int
    size: int
    cause: str
    commits: int | None
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChronicleKept:
    """The rounds of the summary in the form kept in the journal, for a driver that takes the job over. See Summary.

    Attributes:
        first, last: the first rounds, and the last ones.
        left_out, left_out_s, unknown: the number of rounds between those, their time, and how many have an unknown
            time.
        has_trained: whether any round has trained.
        stood_still_s: for how long drivers stood still in total, seconds.
    """

    first: tuple[RoundSummary, ...]
    last: tuple[RoundSummary, ...]
    left_out: int
    left_out_s: float
    unknown: int
    has_trained: bool
    stood_still_s: float


class Process(Protocol):
    """A worker's process, as far as the chronicle reports it."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def label(self) -> str:
        """The prefix of its output lines."""

    @property
    def last_lines(self) -> Sequence[str]:
        """The last lines of its output."""

    @property
    def error_file(self) -> str:
        """The error that it raised and wrote to a file; "" for none."""


class Exit(Protocol):
    """How a process has ended; ``str()`` describes it."""

    @property
    def returncode(self) -> int:
        """The exit status, as of :class:`subprocess.Popen`."""

    @property
    def reason(self) -> str:
        """Why the exit was not observed, if its host is lost; else ""."""


class Chronicle:
    """Notifies its listeners of everything that happens to the job.

    Args:
        listeners: each is notified of everything, in this order.
        instant: the time of each happening.

    Attributes:
        goodput: accounts for the time of the job and of its workers.
    """

    def __init__(self, *listeners: Listener, instant: Instant | None = None) -> None:
        self._instant = instant or Instant()
        self.goodput = Goodput(self._instant)
        self._listeners: list[Listener] = [self.goodput, *listeners]
        self._failed: list[Listener] = []
        self._book_from: float | None = None  # on the clock of look()
        self._first: list[_Round] = []
        self._last: deque[_Round] = deque()
        self._left_out = 0
        self._left_out_s = 0.0
        self._unknown = 0
        self._present: _Round | None = None
        self._last_words: dict[WorkerId, Sequence[str]] = {}
        self._dying: set[WorkerId] = set()
        self._folders: dict[str, _Folder] = {}
        self._waiting_since: float | None = None
        self._stood_still_s = 0.0
        self._stalled_s = 0.0  # the stall that led to the present round
        self._has_trained = False
        self._told_of: set[str] = set()
        self._waits_for = ""
        self._wait_step_s = self._report_after_s = _WAIT_S

    def kept(self) -> ChronicleKept:
        """Return the state to keep in the journal."""
        first, last = self._summaries()
        return ChronicleKept(
            tuple(first),
            tuple(last),
            self._left_out,
            self._left_out_s,
            self._unknown,
            self._has_trained,
            self._stood_still_s,
        )

    def go_on(self, kept: ChronicleKept) -> None:
        """Continue with the rounds of a driver that has died. Must be called before all other methods."""
        self._first, last = (
            [_Round(round_.round_id, round_.size, round_.cause, round_.commit, round_.took_s) for round_ in rounds]
            for rounds in (kept.first, kept.last)
        )
        self._last = deque(last)
        rounds = last or self._first
        self._present = rounds[-1] if rounds else None
        self._left_out, self._left_out_s, self._unknown = kept.left_out, kept.left_out_s, kept.unknown
        self._has_trained, self._stood_still_s = kept.has_trained, kept.stood_still_s

    def _tell(self, happening: Happening) -> None:
        with self._instant:
            for listener in self._listeners:
                try:
                    listener.hear(happening)
                except Exception as error:  # a bug; a mere observer of the job must not end it
                    self._note_failure(listener, error, happening)

    def _note_failure(self, listener: Listener, error: Exception, happening: Happening) -> None:
        """Report a listener's failure, once per listener, to all listeners, this one included if it still works."""
        if isinstance(happening, InternalError) and sys.stderr is not None:
            print(happening.error, file=sys.stderr)  # the failed listener may be the terminal
        if listener in self._failed:
            return
        self._failed.append(listener)
        at = "".join(f", {frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-1:])
        self.warning(
            f"{type(listener).__name__} failed on an event of the job; the job continues, but its output may be "
            f"wrong from here on: {type(error).__name__}: {error}{at}"
        )

    def stands(self, standing: Standing) -> None:
        """Report the job's new standing."""
        self._tell(PhaseChanged(standing.phase, standing.doing, standing.on_change))

    def workers_ready(self, workers: Sequence[WorkerId]) -> None:
        """Report started workers that ask for their first round, or run."""
        self._tell(WorkersReady(workers))

    def workers_drained(self, workers: Sequence[WorkerId], *, undone: bool) -> None:
        """Report workers that are to be drained; or, if ``undone``, that may stay after all."""
        self._tell(WorkersDrained(workers, undone))

    def _book(self) -> None:
        with self._instant:
            booked = self.goodput.job()
            if booked is not None:
                self._tell(TimeBooked(booked.seconds, booked.wall_s, booked.share))

    def also(self, listener: Listener) -> None:
        """Add a listener, which gets all further happenings."""
        self._listeners.append(listener)

    @property
    def disk_reports(self) -> list[DiskReport]:
        """The last report on each folder of commits that is tracked."""
        return [folder.report for folder in self._folders.values()]

    def started(self, url: str, job_id: str, *, again: bool = False) -> None:
        """Report that the rendezvous server listens; ``again`` for a job that another driver has run before."""
        self._tell(JobStarted(url, job_id, again))

    def hosts(self, hosts: Sequence[Host]) -> None:
        """Report that discovery returned other hosts than before."""
        self._tell(HostsChanged(hosts))

    def discovery_ran(self, took_s: float, *, failed: bool) -> None:
        """Report a run of discovery."""
        self._tell(DiscoveryRan(took_s, failed))

    def host_ready(self, host: str, address: str, joined: int) -> None:
        """Report that a host has an agent."""
        self._tell(HostReady(host, address, joined))

    def host_unready(self, host: str, reason: str, *, permanent: bool) -> None:
        """Report that a host has no agent yet."""
        self._tell(HostUnready(host, reason, permanent))

    def host_lost(self, host: str, reason: str) -> None:
        """Report that a host's agent is lost."""
        self._tell(HostLost(host, reason))

    def network_checked(self, checked: NetworkChecked) -> None:
        """Report a check of the network between hosts."""
        self._tell(checked)

    def worker_started(self, worker: WorkerId, pid: int, *, again: bool = False) -> None:
        """Report that a process runs; ``again`` if another driver has had it started."""
        self._tell(ProcessStarted(worker, pid, again))

    def server_answers(self, worker: WorkerId, parameter_server: int | None, address: str) -> None:
        """Report that a server answers, and as which parameter server it was started, if any."""
        self._tell(ServerAnswers(worker, parameter_server, address))

    def chief_started(self, number: int, pid: int, servers: int, workers: int) -> None:
        """Report that the script runs as the chief, beside the driver, with this many servers and workers."""
        self._tell(ChiefStarted(number, pid, servers, workers))

    def chief_stopped(self, reason: str) -> None:
        """Report that the chief is being stopped, in order to be restarted."""
        self._tell(ChiefStopped(reason))

    def chief_exited(self, number: int, pid: int, returncode: int, how: str, *, expected: bool) -> None:
        """Report that the chief has ended."""
        self._tell(ChiefEnded(number, pid, returncode, how, expected))

    def warmed(self, pid: int, took_s: float) -> None:
        """Report that workers can be forked from a warm process from now on."""
        self._tell(Warmed(pid, took_s))

    def worker_dying(self, worker: WorkerId, process: Process, how: str) -> None:
        """Report that a process is about to end; the system may take a while to free its resources."""
        self._dying.add(worker)
        self._note_last_words(worker, process)
        self._tell(ProcessDying(worker, process.pid, how))

    def worker_exited(self, worker: WorkerId, process: Process, status: Exit, *, expected: bool) -> None:
        """Report that a process has ended; ``expected`` if it had been dismissed or stopped."""
        foretold = worker in self._dying or bool(status.reason)
        self._dying.discard(worker)
        # A process that was stopped because of another's failure may have failed before that.
        if status.returncode and (process.error_file or not expected):
            self._note_last_words(worker, process)
        self._tell(ProcessEnded(worker, process.pid, process.label, status.returncode, str(status), expected, foretold))
        self._book_worker(worker)

    def worker_not_started(self, worker: WorkerId) -> None:
        """Book the time of a process that could not be started, or ended at once."""
        self._book_worker(worker)

    def _book_worker(self, worker: WorkerId) -> None:
        with self._instant:
            booked = self.goodput.take_out(worker)
            if booked is not None:
                self._tell(WorkerTimeBooked(worker, booked.seconds, booked.wall_s))

    def _note_last_words(self, worker: WorkerId, process: Process) -> None:
        # Only the first failure is needed. Hosts with ever new names may fail as long as the job waits for slots.
        if worker in self._last_words or len(self._last_words) < _MOST_LAST_WORDS:
            self._last_words[worker] = tuple(process.last_lines)

    def worker_stopped(self, worker: WorkerId, reason: str) -> None:
        """Report that a worker is being stopped."""
        self._tell(WorkersStopped(((worker, reason),)))

    def workers_stopped(self, commands: Sequence[StopWorker]) -> None:
        """Report that workers are being stopped, for one or several reasons."""
        if commands:
            self._tell(WorkersStopped([(command.worker, command.reason) for command in commands]))

    def worker_hung(self, worker: WorkerId, reason: str) -> None:
        """Report that a worker is frozen or hangs, and is about to be killed."""
        self._tell(WorkerHung(worker, reason))

    def found(self, finding: ReportedFinding | Sampled) -> None:
        """Report a finding on the workers' health: a suspected hang, a straggler, a stall of the round, or a sample."""
        if isinstance(finding, StallEnded) and not finding.resumed:
            self._stalled_s = finding.stood_s
        self._tell(finding)

    def worker_dismissed(self, worker: WorkerId, reason: str) -> None:
        """Report that a worker is notified that it has no slot any more."""
        self._tell(WorkerDismissed(worker, reason))

    def notice(self, command: SetNotice) -> None:
        """Report a notice to the members of a round."""
        if command.kind is not NoticeKind.NONE:
            self._tell(NoticeGiven(command.round_id, command.kind, command.reason))

    def round_formed(self, command: PublishRound, pids: Mapping[WorkerId, int], since_s: float) -> None:
        """Report a new round.

        Args:
            command: the round.
            pids: process ids of its members.
            since_s: seconds since the change (or the start).
        """
        self._last_words.clear()
        members = [Member(placed.slot.rank, placed.worker, pids.get(placed.worker)) for placed in command.placed]
        formed = _Round(command.round_id, len(members), command.cause, command.commits)
        if command.backend is None:
            # Its members need not report anything: the round trains once their processes run.
            formed.took_s, formed.commits = since_s, None
            self._stalled_s = 0.0
        elif command.backend is Backend.HOROVOD:
            formed.commits = None  # they report no commits
        self._tell_of_backend(command)
        self._keep(formed)
        since_commit_s = command.lost_s
        self._tell(
            RoundFormed(
                command.round_id,
                command.old_size,
                command.cause,
                command.commits,
                command.sync,
                command.backend,
                since_s,
                members,
                command.reinit,
                None if since_commit_s is None else self.goodput.trained_s(since_commit_s),
                since_commit_s,
            )
        )

    def _keep(self, formed: _Round) -> None:
        """Keep a round for the summary: the first ones, the last ones, and sums of those between."""
        self._present = formed
        if len(self._first) < _FIRST_ROUNDS:
            self._first.append(formed)
            return
        self._last.append(formed)
        if len(self._last) > _LAST_ROUNDS:
            dropped = self._last.popleft()
            self._left_out += 1
            self._left_out_s += dropped.took_s or 0.0
            self._unknown += dropped.took_s is None

    def round_resumed(self, command: ReportResumed) -> None:
        """Report that all members of the round train."""
        self._has_trained = True
        commits: int | None = command.commits
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        took_s = command.took_s + stalled_s
        if self._present is not None and self._present.round_id == command.round_id:
            commits = None if self._present.commits is None else command.commits
            self._present.took_s, self._present.commits = took_s, commits
        self._tell(RoundResumed(command.round_id, commits, took_s, stalled_s))

    def report(self, command: Report) -> None:
        """Report a remark of the core."""
        self._tell(Remark(command.text, command.warning))

    def _tell_of_backend(self, command: PublishRound) -> None:
        # A single worker needs no backend, whichever it has.
        hosts = {placed.worker.hostname for placed in command.placed}
        several = len(command.placed if command.backend is Backend.TORCH else hosts) > 1
        said = _OF_BACKENDS.get(command.backend) if several else None
        if said is not None and said not in self._told_of:
            self._told_of.add(said)
            self.remark(said)

    def remark(self, text: str) -> None:
        """Report something that may interest the user."""
        self._tell(Remark(text, warning=False))

    def warning(self, text: str) -> None:
        """Warn the user."""
        self._tell(Remark(text, warning=True))

    def on_disk(self, report: DiskReport) -> None:
        """Note a folder's newest commit on disk, for the summary; warn at intervals while commits do not reach it.

        A worker reports trouble at once itself; this warns of trouble that persists over several heartbeats.
        """
        folder = self._folders.pop(report.folder, None) or _Folder(report)
        # Another worker may have become the folder's writer, and have written nothing yet.
        folder.report = replace(report, written=max(report.written, folder.report.written))
        folder.troubled = folder.troubled + 1 if report.trouble else 0
        self._folders[report.folder] = folder
        self._tell(DiskReported(report.folder, report.where, folder.report.written, report.commits, report.trouble))
        if len(self._folders) > _MOST_FOLDERS:
            del self._folders[next(iter(self._folders))]
        if folder.troubled >= 2 and folder.troubled.bit_count() == 1:
            self.warning(f"commits are not reaching the disk: the newest is {folder}")

    def stood_still(self, stood_s: float, *, ended_s: float = 0.0, trained: bool = False) -> None:
        """Report that the driver was stopped, or starved. That time is not counted in the cost of changes.

        Args:
            stood_s: for how long, seconds.
            ended_s: how long ago it resumed, seconds.
            trained: whether the workers are known to have trained meanwhile.
        """
        self._stood_still_s += stood_s
        self._tell(StoodStill(stood_s, ended_s, trained))

    def took_over(self, taken: TookOver) -> None:
        """Report that this driver has taken the job over from one that died."""
        self._tell(taken)

    def found_on_disk(self, where: str, newest: int, damaged: tuple[int, ...] = ()) -> None:
        """Note the commits in the driver's own folder, once no process writes there any more.

        Args:
            where: the folder.
            newest: the newest commit from which training can resume; -1 for none.
            damaged: newer ones, which are unusable.
        """
        if not self._folders and not self._has_trained:
            return  # the folder may be one that could not be read
        if not self._folders:
            self._folders[""] = _Folder(DiskReport("", where, newest, newest, "", drivers=True))
        for folder in self._folders.values():
            last = folder.report
            if last.drivers:
                # A complete commit may have been damaged since.
                written = newest if last.written in damaged else max(last.written, newest)
                trouble = f"commit {max(damaged)} is damaged" if damaged else last.trouble
                folder.report = replace(
                    last, written=written, commits=max(last.commits, newest), trouble=last.trouble or trouble
                )

    def _standstill_notes(self) -> list[tuple[str, bool]]:
        if not self._stood_still_s:
            return []
        return [(f"the driver stood still for {self._stood_still_s:.0f} s in total, which is not counted above", False)]

    def _goodput_notes(self) -> list[tuple[str, bool]]:
        booked = self.goodput.job()
        return [(booked.told(), False)] if booked is not None and booked.share else []

    def _disk_notes(self) -> list[tuple[str, bool]]:
        """Return the summary's lines on commits on disk, each with whether it is a warning."""
        folders = sorted(self._folders.values(), key=lambda folder: -folder.report.written)
        notes = [(f"on disk: {folder}", bool(folder.report.trouble)) for folder in folders[:_NAMED_FOLDERS]]
        more = len(folders) - len(notes)
        return notes + ([(f"on disk: {more} more folders, none with a newer commit", False)] if more else [])

    @property
    def live(self) -> bool:
        """Whether any listener shows the status."""
        return any(listener.live for listener in self._listeners)

    def status(self, text: str, figures: tuple[str, ...] = ()) -> None:
        """Report the present status, for the live line, and its figures."""
        self._tell(Status(text, figures))

    def look(self, now: float) -> bool:
        """Do periodic work; to be called about once a second. Returns whether to report a wait of the job now."""
        self._tell(MomentPassed())
        if self._book_from is None or now >= self._book_from:
            if self._book_from is not None:
                self._book()
            self._book_from = now + _BOOKED_S
        since = self._waiting_since
        return since is not None and not self.live and now - since >= self._report_after_s

    def waits(self, now: float, reason: str, *, patience: float = 1.0) -> None:
        """Note what the job waits for, or is about to end for; "" for nothing. A long wait is reported at intervals.

        Args:
            now: the present, seconds.
            reason: identifies the wait.
            patience: how many times longer than others this wait usually takes.
        """
        if reason != self._waits_for:
            self._waits_for = reason
            self._waiting_since = now if reason else None
            self._wait_step_s = self._report_after_s = patience * _WAIT_S

    def still_waiting(self, text: str, now: float) -> None:
        """Report a wait, and schedule the next report."""
        waited_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        self._wait_step_s = min(2 * self._wait_step_s, _LONGEST_WAIT_S)
        self._report_after_s = waited_s + self._wait_step_s
        self._tell(Remark(f"for {waited_s:.0f} s now: {text}", warning=waited_s >= _WORRY_S))

    def first_failure(self, failure: Failure) -> None:
        """Report the last output of the worker that failed first; the message that ends the job follows."""
        lines = self._last_words.get(failure.worker, ())
        alike = [worker for worker, words in self._last_words.items() if words == lines and worker != failure.worker]
        self._tell(FirstFailure(failure.worker, failure.rank, failure.how, lines, alike))

    def internal_error(self, error: BaseException, history: Sequence[tuple[float, Event]]) -> None:
        """Report a bug of the driver, with all that a bug report needs."""
        text = "".join(traceback.format_exception(error)).rstrip()
        began = history[0][0] if history else 0.0
        self._tell(InternalError(text, [f"{at - began:10.3f} {event!r}" for at, event in history]))

    def ended(self, exit_code: int, message: str) -> None:
        """Report that the job has ended, and nothing of it runs any more."""
        with self._instant:
            self._book()
            self._tell(JobEnded(exit_code, message, self._summary()))

    def _summaries(self) -> tuple[list[RoundSummary], list[RoundSummary]]:
        """Return the first rounds, and the last ones."""
        first, last = (
            [
                RoundSummary(formed.round_id, formed.size, formed.cause, formed.took_s, formed.commits)
                for formed in rounds
            ]
            for rounds in (self._first, self._last)
        )
        return first, last

    def _summary(self) -> Summary:
        first, last = self._summaries()
        changes = [*first[1:], *last]
        if first:
            first[0] = replace(first[0], commit=None)
        return Summary(
            first,
            self._left_out,
            self._left_out_s,
            last,
            self._left_out_s + sum(change.took_s or 0.0 for change in changes),
            self._unknown + sum(change.took_s is None for change in changes),
            [*self._standstill_notes(), *self._goodput_notes(), *self._disk_notes()],
        )
