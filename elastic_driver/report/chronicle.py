"""The job's story: turns what the driver sees into lines for the user, records for the event log, and the summary.

Owns no decision and no I/O of its own; the console and the event log do that.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_driver.core.events import Event, PublishRound, Report, ReportResumed, SetNotice, StopWorker
from elastic_driver.core.explain import names
from elastic_driver.core.setbacks import Failure
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.launch.launcher import ExitStatus, WorkerProcess
from elastic_driver.rendezvous.messages import DiscReport
from elastic_driver.report.console import Console, RoundSummary, Summary
from elastic_driver.report.event_log import EventLog
from elastic_driver.words import NoticeKind

# Rounds in the closing table. A job of weeks has hundreds.
_FIRST_ROUNDS, _LAST_ROUNDS = 5, 15
# A wait is told of after so many seconds, and again after twice as many more each time; from the second bound on it is
# a warning.
_WAIT_S, _LONGEST_WAIT_S, _WORRY_S = 5.0, 300.0, 30.0
# Workers whose last words are kept, of those that failed since the last round was formed.
_MOST_LAST_WORDS = 1024
# Folders of commits that are kept track of, and named in the end. New hosts may bring new ones for ever.
_MOST_FOLDERS, _NAMED_FOLDERS = 64, 6


@dataclass(slots=True)
class _Folder:
    """Commits on disc, as the worker that writes them said last."""

    report: DiscReport
    troubled: int = 0  # reports of trouble without one of none between

    def __str__(self) -> str:
        one = self.report
        newest = f"commit {one.written}" if one.written >= 0 else "no commit"
        behind = f" of {one.commits}" if one.written < one.commits else ""
        return f"{newest}{behind} in {one.where}" + (f" ({one.trouble})" if one.trouble else "")


@dataclass(slots=True)
class _Round:
    """A round as it is told: open until all its members have resumed or the next one begins."""

    round_id: int
    size: int
    cause: str
    commits: int
    line: str
    took_s: float | None = None
    told: bool = False


class Chronicle:
    """Tells the user and the event log what happens to the job.

    Args:
        console: for the user.
        event_log: one JSON object for each event.
    """

    def __init__(self, console: Console, event_log: EventLog) -> None:
        self._console = console
        self._log = event_log
        self._first: list[_Round] = []
        self._last: deque[_Round] = deque()
        self._left_out = 0
        self._left_out_s = 0.0
        self._unknown = 0
        self._open: _Round | None = None
        self._last_words: dict[WorkerId, Sequence[str]] = {}
        self._folders: dict[str, _Folder] = {}
        self._waiting_since: float | None = None
        self._stood_still_s = 0.0
        self._has_trained = False
        self._waits_for = ""
        self._wait_step_s = self._told_after_s = _WAIT_S

    def started(self, url: str, job_id: str) -> None:
        """The rendezvous server listens."""
        self._log.write("job_started", rendezvous=url, job_id=job_id)
        self._console.detail(f"rendezvous at {url}, job {job_id}")

    def hosts(self, hosts: Sequence[Host]) -> None:
        """Discovery gave another answer than before."""
        text = ", ".join(str(host) for host in hosts) or "none"
        self._log.write("hosts_discovered", hosts={host.name: host.slots for host in hosts})
        self._console.detail(f"hosts: {text}")

    def worker_started(self, worker: WorkerId, pid: int) -> None:
        """A process runs."""
        self._log.write("worker_started", worker=worker.key, pid=pid)
        self._console.detail(f"worker {worker} started (pid {pid})")

    def warmed(self, pid: int, took_s: float) -> None:
        """Workers can be forked from a process from now on."""
        self._log.write("warmed", pid=pid, took_s=round(took_s, 4))
        self._console.detail(f"workers are forked from process {pid} from now on, warm after {took_s:.1f} s")

    def worker_dying(self, worker: WorkerId, process: WorkerProcess, how: str) -> None:
        """A process is about to end; it may take a while until the system has freed what it had."""
        self._log.write("worker_dying", worker=worker.key, pid=process.pid, how=how)
        self._note_last_words(worker, process)
        self._console.warning(f"worker {worker} (pid {process.pid}) {how}")

    def worker_exited(self, worker: WorkerId, process: WorkerProcess, status: ExitStatus, *, expected: bool) -> None:
        """A process has ended; ``expected`` when it had been dismissed or stopped."""
        self._log.write(
            "worker_exited", worker=worker.key, pid=process.pid, returncode=status.returncode, expected=expected
        )
        told = process.dying.done() and not process.dying.cancelled()
        same = self._console.worker_ended(process.label)
        how = f"{status}, with the same traceback as rank {same}" if same else str(status)
        if not expected and status.returncode:
            self._note_last_words(worker, process)
        if not expected and status.returncode and not told:
            self._console.warning(f"worker {worker} (pid {process.pid}) {how}")
        else:
            self._console.detail(f"worker {worker} (pid {process.pid}) {how}")

    def _note_last_words(self, worker: WorkerId, process: WorkerProcess) -> None:
        # The first to fail is asked for. Hosts of always new names may fail as long as the job waits for slots.
        if worker in self._last_words or len(self._last_words) < _MOST_LAST_WORDS:
            self._last_words[worker] = tuple(process.last_lines)

    def worker_stopped(self, worker: WorkerId, reason: str) -> None:
        """A worker is being stopped."""
        self.workers_stopped([StopWorker(worker, reason)])

    def workers_stopped(self, commands: Sequence[StopWorker]) -> None:
        """Workers are being stopped, for one reason or several."""
        reasons: dict[str, list[WorkerId]] = {}
        for command in commands:
            self._log.write("worker_stopped", worker=command.worker.key, reason=command.reason)
            reasons.setdefault(command.reason, []).append(command.worker)
        for reason, workers in reasons.items():
            self._console.line(f"stopping {names(workers)}: {reason}")

    def worker_hung(self, worker: WorkerId, reason: str) -> None:
        """A worker is frozen or hangs, and is about to be killed."""
        self._log.write("worker_hung", worker=worker.key, reason=reason)
        self._console.warning(f"worker {worker} hangs ({reason}): it prints its stacks, and is killed")

    def worker_dismissed(self, worker: WorkerId, reason: str) -> None:
        """A worker is told that it has no place any more."""
        self._log.write("worker_dismissed", worker=worker.key, reason=reason)
        self._console.detail(f"worker {worker} leaves: {reason}")

    def notice(self, command: SetNotice) -> None:
        """The members are told something."""
        if command.kind is not NoticeKind.NONE:
            self._log.write("notice", round_id=command.round_id, kind=command.kind, reason=command.reason)
            self._console.detail(f"round {command.round_id}: {command.kind} ({command.reason})")

    def round_formed(self, command: PublishRound, pids: Mapping[WorkerId, int], since_s: float) -> None:
        """A round begins.

        Args:
            command: the round.
            pids: of its members.
            since_s: seconds from the change (or the start) until now.
        """
        self._tell_open_round(broken=True)
        self._console.training_began()
        self._last_words.clear()
        size = len(command.placed)
        members = [
            {"rank": one.slot.rank, "worker": one.worker.key, "pid": pids.get(one.worker)} for one in command.placed
        ]
        self._log.write(
            "round_formed",
            round_id=command.round_id,
            size=size,
            old_size=command.old_size,
            cause=command.cause,
            commits=command.commits,
            sync=command.sync,
            backend=command.backend,
            formed_in_s=round(since_s, 4),
            members=members,
        )
        workers = f"{size} worker{'' if size == 1 else 's'}"
        if command.old_size:
            line = f"round {command.round_id}: {command.old_size} -> {workers}, {command.cause}"
            self._begin(_Round(command.round_id, size, command.cause, command.commits, line))
            # Whether and when these train, nobody may ever say.
            if command.reinit:
                self._tell_open_round(broken=False)
        else:
            counts: dict[str, int] = {}
            for one in command.placed:
                counts[one.worker.hostname] = counts.get(one.worker.hostname, 0) + 1
            places = ", ".join(str(Host(name, count)) for name, count in counts.items())
            line = f"round {command.round_id}: {workers} on {places}, ready after {since_s:.1f} s"
            if command.cause != "start":
                line += f" ({command.cause})"
            self._console.line(line)
            self._begin(_Round(command.round_id, size, command.cause, command.commits, line, told=True))

    def _begin(self, new: _Round) -> None:
        """Keeps a round for the summary: the first ones, the last ones, and sums of those between."""
        self._open = new
        if len(self._first) < _FIRST_ROUNDS:
            self._first.append(new)
            return
        self._last.append(new)
        if len(self._last) > _LAST_ROUNDS:
            old = self._last.popleft()
            self._left_out += 1
            self._left_out_s += old.took_s or 0.0
            self._unknown += old.took_s is None

    def round_resumed(self, command: ReportResumed) -> None:
        """All members of the round train."""
        self._has_trained = True
        self._log.write(
            "round_resumed", round_id=command.round_id, commits=command.commits, took_s=round(command.took_s, 4)
        )
        last = self._open
        if last is None or last.round_id != command.round_id:
            return
        last.took_s, last.commits = command.took_s, command.commits
        if not last.told:
            last.told = True
            self._console.line(f"{last.line}, resumed from commit {command.commits} in {command.took_s:.2f} s")

    def _tell_open_round(self, *, broken: bool) -> None:
        """A round that never had all its members training is told without its time."""
        if self._open is not None and not self._open.told:
            self._open.told = True
            self._console.line(self._open.line + ("; it ended before all its workers had resumed" if broken else ""))

    def report(self, command: Report) -> None:
        """The core has something to say."""
        self._log.write("report", text=command.text, warning=command.warning)
        if command.warning:
            self._console.warning(command.text)
        else:
            self._console.line(command.text)

    def warning(self, text: str) -> None:
        """Something the user should know."""
        self._log.write("report", text=text, warning=True)
        self._console.warning(text)

    def on_disc(self, report: DiscReport) -> None:
        """How far the commits in a folder are: for the summary, and a warning now and then while they do not get there.

        What is wrong a worker says at once itself; a warning is for what stays wrong over several heartbeats.
        """
        known = self._folders.pop(report.folder, None) or _Folder(report)
        # Another worker has become the folder's writer, and has written nothing yet.
        known.report = replace(report, written=max(report.written, known.report.written))
        known.troubled = known.troubled + 1 if report.trouble else 0
        self._folders[report.folder] = known
        if len(self._folders) > _MOST_FOLDERS:
            del self._folders[next(iter(self._folders))]
        if known.troubled >= 2 and known.troubled.bit_count() == 1:
            self.warning(f"commits do not reach the disc: the newest is {known}")

    def stood_still(self, stood_s: float) -> None:
        """The driver was stopped, or starved, for so long. What changes cost is measured without that."""
        self._stood_still_s += stood_s

    def found_on_disc(self, where: str, newest: int) -> None:
        """The newest commit in the driver's own folder, when nobody writes any more, going by its name."""
        if not self._folders and not self._has_trained:
            return  # it may be one that could not be read
        if not self._folders:
            self._folders[""] = _Folder(DiscReport("", where, newest, newest, "", drivers=True))
        for known in self._folders.values():
            one = known.report
            if one.drivers:
                known.report = replace(one, written=max(one.written, newest), commits=max(one.commits, newest))

    def _standstill_notes(self) -> list[tuple[str, bool]]:
        if not self._stood_still_s:
            return []
        return [(f"the driver stood still for {self._stood_still_s:.0f} s in all, which is not counted above", False)]

    def _disc_notes(self) -> list[tuple[str, bool]]:
        """What the summary says of commits on disc, and which of it is a warning."""
        folders = sorted(self._folders.values(), key=lambda one: -one.report.written)
        notes = [(f"on disc: {one}", bool(one.report.trouble)) for one in folders[:_NAMED_FOLDERS]]
        more = len(folders) - len(notes)
        return notes + ([(f"on disc: {more} folders more, none of them further", False)] if more else [])

    @property
    def live(self) -> bool:
        """Whether anybody sees the status."""
        return self._console.live

    def status(self, text: str) -> None:
        """The present, for the live line."""
        self._console.status(text)

    def look(self, now: float) -> bool:
        """To be called about each second. Returns whether a job that waits is to be told of now."""
        self._console.look()
        since = self._waiting_since
        return since is not None and not self._console.live and now - since >= self._told_after_s

    def waits(self, now: float, what: str, *, patience: float = 1.0) -> None:
        """What the job waits for, or is about to end of; "" for nothing. Of a wait that goes on is told at times.

        Args:
            now: the present, seconds.
            what: tells one wait from the next.
            patience: how much longer than others this one usually takes.
        """
        if what != self._waits_for:
            self._waits_for = what
            self._waiting_since = now if what else None
            self._wait_step_s = self._told_after_s = patience * _WAIT_S

    def still_waiting(self, text: str, now: float) -> None:
        """Tells of a wait, and when to tell of it next."""
        waited_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        self._wait_step_s = min(2 * self._wait_step_s, _LONGEST_WAIT_S)
        self._told_after_s = waited_s + self._wait_step_s
        (self.warning if waited_s >= _WORRY_S else self._line)(f"for {waited_s:.0f} s now: {text}")

    def _line(self, text: str) -> None:
        self._log.write("report", text=text, warning=False)
        self._console.line(text)

    def first_failure(self, failure: Failure) -> None:
        """What the first worker that failed said last: the message that ends the job follows."""
        lines = self._last_words.get(failure.worker, ())
        alike = [one for one, words in self._last_words.items() if words == lines and one != failure.worker]
        self._log.write(
            "first_failure",
            worker=failure.worker.key,
            rank=failure.rank,
            how=failure.how,
            last_lines=list(lines),
            alike=[one.key for one in alike],
        )
        # What can still be seen is not printed again.
        if not lines or self._console.shows(lines):
            return
        also = f", and of {names(alike)}" if alike else ""
        self._console.error(f"last output of worker {failure.worker} ({failure.how}){also}:")
        for line in lines:
            self._console.error(f"  {line}")

    def internal_error(self, error: BaseException, history: Sequence[tuple[float, Event]]) -> None:
        """A bug: everything a report needs."""
        text = "".join(traceback.format_exception(error)).rstrip()
        began = history[0][0] if history else 0.0
        events = [f"{at - began:10.3f} {event!r}" for at, event in history]
        self._log.write("internal_error", error=text, events=events)
        self._console.error("internal error of the driver; please report the lines below")
        for line in (*text.splitlines(), f"the last {len(events)} events:", *events):
            self._console.error(f"  {line}")

    def ended(self, exit_code: int, message: str) -> None:
        """The job is over and nothing of it runs."""
        self._tell_open_round(broken=exit_code != 0)
        self._log.write("job_ended", exit_code=exit_code, message=message)
        self._console.summary(self._summary(), exit_code=exit_code, message=message)

    def _summary(self) -> Summary:
        first, last = (
            [RoundSummary(one.round_id, one.size, one.cause, one.took_s, one.commits) for one in rounds]
            for rounds in (self._first, self._last)
        )
        changes = [*first[1:], *last]
        if first:
            first[0] = replace(first[0], commit=None)
        return Summary(
            first,
            self._left_out,
            self._left_out_s,
            last,
            self._left_out_s + sum(one.took_s or 0.0 for one in changes),
            self._unknown + sum(one.took_s is None for one in changes),
            [*self._standstill_notes(), *self._disc_notes()],
        )
