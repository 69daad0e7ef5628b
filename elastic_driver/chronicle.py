"""The job's story: turns what the driver sees into lines for the user, records for the event log, and the summary.

Owns no decision and no I/O of its own; the console and the event log do that.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_driver.console import Console, RoundSummary
from elastic_driver.event_log import EventLog
from elastic_driver.events import Event, PublishRound, Report, ReportResumed, SetNotice
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.launch import ExitStatus, WorkerProcess
from elastic_driver.rendezvous.messages import NoticeKind
from elastic_driver.setbacks import Failure

# Workers whose last lines are kept.
_MOST_LAST_WORDS = 1024


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
        self._rounds: list[_Round] = []
        self._last_words: dict[WorkerId, Sequence[str]] = {}  # of those that failed since the last round was formed

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
        if not expected and status.returncode:
            self._note_last_words(worker, process)
        if not expected and status.returncode and not told:
            self._console.warning(f"worker {worker} (pid {process.pid}) {status}")
        else:
            self._console.detail(f"worker {worker} (pid {process.pid}) {status}")

    def _note_last_words(self, worker: WorkerId, process: WorkerProcess) -> None:
        # The first to fail is asked for. Hosts of always new names may fail as long as the job waits for slots.
        if worker in self._last_words or len(self._last_words) < _MOST_LAST_WORDS:
            self._last_words[worker] = tuple(process.last_lines)

    def worker_stopped(self, worker: WorkerId, reason: str) -> None:
        """A worker is being stopped."""
        self._log.write("worker_stopped", worker=worker.key, reason=reason)
        self._console.line(f"stopping worker {worker}: {reason}")

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
        self._tell_open_round()
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
            self._rounds.append(_Round(command.round_id, size, command.cause, command.commits, line))
        else:
            counts: dict[str, int] = {}
            for one in command.placed:
                counts[one.worker.hostname] = counts.get(one.worker.hostname, 0) + 1
            places = ", ".join(str(Host(name, count)) for name, count in counts.items())
            line = f"round {command.round_id}: {workers} on {places}, ready after {since_s:.1f} s"
            if command.cause != "start":
                line += f" ({command.cause})"
            self._console.line(line)
            self._rounds.append(_Round(command.round_id, size, command.cause, command.commits, line, told=True))

    def round_resumed(self, command: ReportResumed) -> None:
        """All members of the round train."""
        self._log.write(
            "round_resumed", round_id=command.round_id, commits=command.commits, took_s=round(command.took_s, 4)
        )
        if not self._rounds or self._rounds[-1].round_id != command.round_id:
            return
        last = self._rounds[-1]
        last.took_s, last.commits = command.took_s, command.commits
        if not last.told:
            last.told = True
            self._console.line(f"{last.line}, resumed from commit {command.commits} in {command.took_s:.2f} s")

    def _tell_open_round(self) -> None:
        """A round that never had all its members training is told without its time."""
        if self._rounds and not self._rounds[-1].told:
            self._rounds[-1].told = True
            self._console.line(f"{self._rounds[-1].line}; it ended before all its workers had resumed")

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

    @property
    def live(self) -> bool:
        """Whether anybody sees the status."""
        return self._console.live

    def status(self, text: str) -> None:
        """The present, for the live line."""
        self._console.status(text)

    def first_failure(self, failure: Failure) -> None:
        """What the first worker that failed said last: the message that ends the job follows."""
        lines = self._last_words.get(failure.worker, ())
        self._log.write(
            "first_failure", worker=failure.worker.key, rank=failure.rank, how=failure.how, last_lines=list(lines)
        )
        if lines:
            self._console.error(f"last output of worker {failure.worker} ({failure.how}):")
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
        self._tell_open_round()
        self._log.write("job_ended", exit_code=exit_code, message=message)
        self._console.summary(
            [
                RoundSummary(one.round_id, one.size, one.cause, one.took_s, one.commits if index else None)
                for index, one in enumerate(self._rounds)
            ],
            exit_code=exit_code,
            message=message,
        )
