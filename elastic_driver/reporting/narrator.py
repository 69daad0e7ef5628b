"""Words what happens to the job as lines for the user, for the console.

Owns the wording, and the line of a round, which is delayed until its workers have resumed. Streams, colors and levels
belong to the console.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_driver.core.explain import names
from elastic_driver.health.findings import (
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.sampler import Sampled
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.reporting import wording
from elastic_driver.reporting.console import Console
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
from elastic_driver.version import __version__
from elastic_driver.words import counted


@dataclass(frozen=True, slots=True)
class _PendingRound:
    """A round whose line is delayed until its workers resume."""

    round_id: int
    line: str


class Narrator:
    """A listener that writes to a console what happens.

    Args:
        console: the only writer of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending_round: _PendingRound | None = None
        # Workers that ended with the same error as a rank and are not yet reported; they share one line.
        self._alike: dict[tuple[str, str, bool], list[ProcessEnded]] = {}

    @property
    def live(self) -> bool:
        """Whether the console shows a live status (Listener)."""
        return self._console.live

    def hear(self, happening: Happening) -> None:
        """Write the lines for a happening (Listener)."""
        console = self._console
        if not isinstance(happening, ProcessEnded | Status):
            self._report_alike()
        match happening:
            case DiscoveryRan() | DiskReported() | LogCut():
                pass  # the chronicle warns of problems
            case Sampled():
                pass  # the status line shows the present
            case MomentPassed():
                console.look()
            case Status(text, figures):
                console.status(text, figures)
            case Remark(text, warning):
                (console.warning if warning else console.line)(text)
            case JobStarted(url, job_id):
                console.detail(f"elasticrun {__version__}, rendezvous at {url}, job {job_id}")
            case HostsChanged(hosts):
                console.detail(f"hosts: {', '.join(str(host) for host in hosts) or 'none'}")
            case HostReady(host, address, joined):
                if joined:
                    console.line(f"host {host} joins with {counted(joined, 'slot')}, from {address}")
                else:
                    console.detail(f"host {host} is ready: its agent connected from {address}")
            case HostUnready(host, reason, permanent):
                again = "" if permanent else "; retrying"
                console.warning(f"host {host} is not ready: {reason}{again}")
            case HostLost(host, reason):
                console.warning(f"host {host} is lost: {reason}")
            case NetworkChecked(slow=slow):
                console.detail(_said_of_check(happening))
                for text in slow:
                    console.warning(text)
            case ProcessStarted(worker, pid, again):
                console.detail(f"worker {worker} {'continues' if again else 'started'} (pid {pid})")
            case Warmed(pid, took_s):
                console.detail(f"forking workers from process {pid} from now on (warmed up in {took_s:.1f} s)")
            case ProcessDying(worker, pid, how):
                console.warning(f"worker {worker}{_process(pid)} {how}")
            case ProcessEnded():
                self._report_end_of_process(happening)
            case ServerAnswers(worker, None, address):
                console.line(f"worker {worker} listens at {address}")
            case ServerAnswers(worker, server, address):
                console.line(f"parameter server {server} ({worker}) listens at {address}")
            case ChiefStarted(number, pid, servers, size):
                again = "started" if number == 1 else "restarted"
                many = f"{counted(servers, 'parameter server')} and {size} "
                console.line(f"the chief {again} (pid {pid}) with {many}worker{'' if size == 1 else 's'}")
            case ChiefStopped(reason):
                console.line(f"stopping the chief: {reason}")
            case ChiefEnded(number, pid, returncode, how, expected):
                tell = console.warning if returncode and not expected else console.detail
                tell(f"the chief (pid {pid}) {how}")
            case WorkersStopped(stops):
                reasons: dict[str, list[WorkerId]] = {}
                for worker, reason in stops:
                    reasons.setdefault(reason, []).append(worker)
                for reason, workers in reasons.items():
                    console.line(f"stopping {names(workers)}: {reason}")
            case WorkerHung(worker, reason):
                console.warning(f"worker {worker} hangs ({reason}): dumping its stacks, then killing it")
            case WorkerSuspected():
                self._report_suspicion(happening)
            case WorkerCleared():
                console.line(wording.of_cleared(happening))
            case StragglerFound():
                console.warning(wording.of_straggler(happening))
            case StragglerGone():
                console.line(wording.of_straggler_gone(happening))
            case WorkerDismissed(worker, reason):
                console.detail(f"worker {worker} leaves: {reason}")
            case PhaseChanged() | WorkersReady() | WorkersDrained() | StoodStill() | TimeBooked() | WorkerTimeBooked():
                pass  # for accounts
            case TookOver():
                console.line(wording.of_takeover(happening))
            case Stalled():
                pass  # a wait like others: the chronicle reports it if it takes long
            case StallEnded(stood_s, waits_for, resumed):
                if resumed:
                    console.line(wording.of_stall(stood_s, waits_for) + "; it continues")
            case NoticeGiven(round_id, kind, reason):
                console.detail(f"round {round_id} {kind.told}: {reason}")
            case RoundFormed():
                self._report_round(happening)
            case RoundResumed(round_id, commits, took_s, stalled_s):
                if self._pending_round is not None and self._pending_round.round_id == round_id:
                    where = "" if commits is None else f" from commit {commits}"
                    stalled = f", including a stall of {stalled_s:.2f} s" if stalled_s else ""
                    console.line(f"{self._pending_round.line}, resumed{where} in {took_s:.2f} s{stalled}")
                    self._pending_round = None
            case FirstFailure():
                self._report_first_failure(happening)
            case InternalError(error, events):
                console.error(f"internal error of the driver (elasticrun {__version__}); please report the lines below")
                for line in (*error.splitlines(), f"the last {len(events)} events:", *events):
                    console.error(f"  {line}")
            case JobEnded(exit_code, message, summary):
                self._report_pending_round(broken=exit_code != 0)
                console.summary(summary, exit_code=exit_code, message=message)

    def _report_suspicion(self, suspected: WorkerSuspected) -> None:
        self._console.warning(wording.of_suspicion(suspected))
        for frame in suspected.frames:
            self._console.warning(f"  {frame}")

    def _report_end_of_process(self, ended: ProcessEnded) -> None:
        is_news = bool(not ended.expected and ended.returncode and not ended.foretold)
        same = self._console.worker_ended(ended.label, has_failed=bool(ended.returncode))
        if same:
            self._alike.setdefault((ended.how, same, is_news), []).append(ended)
            return
        self._report_alike()
        if ended.label.startswith("ps"):
            who = f"parameter server {ended.label.removeprefix('ps')} ({ended.worker}, pid {ended.pid})"
        else:
            who = f"worker {ended.worker}{_process(ended.pid)}"
        self._tell(is_news, f"{who} {ended.how}")

    def _report_alike(self) -> None:
        alike, self._alike = self._alike, {}
        for (how, same, is_news), ends in alike.items():
            who = names([ended.worker for ended in ends]) + (_process(ends[0].pid) if len(ends) == 1 else "")
            before = "as before" if [ended.label for ended in ends] == [same] else f"as rank {same}"
            self._tell(is_news, f"{who} {how}, with the same error {before}")

    def _tell(self, is_news: bool, text: str) -> None:  # noqa: FBT001 - says it all
        (self._console.warning if is_news else self._console.detail)(text)

    def _report_round(self, formed: RoundFormed) -> None:
        self._report_pending_round(broken=True)
        size = len(formed.members)
        workers = counted(size, "worker")
        counts: dict[str, int] = {}
        for member in formed.members:
            counts[member.worker.hostname] = counts.get(member.worker.hostname, 0) + 1
        places = ", ".join(str(Host(name, count)) for name, count in counts.items())
        if formed.old_size and formed.backend is None:
            change = f"round {formed.round_id}: {formed.old_size} -> {workers} on {places}, {formed.cause}"
            self._console.line(f"{change}, restarted in {formed.formed_in_s:.2f} s")
            return
        if formed.old_size:
            line = f"round {formed.round_id}: {formed.old_size} -> {workers}, {formed.cause}"
            self._pending_round = _PendingRound(formed.round_id, line)
            if formed.reinit or formed.backend is None:
                self._report_pending_round(broken=False)
            return
        word = "started" if formed.backend is None else "ready"
        line = f"round {formed.round_id}: {workers} on {places}, {word} after {formed.formed_in_s:.1f} s"
        if formed.cause != "start":
            line += f" ({formed.cause})"
        self._console.line(line)

    def _report_pending_round(self, *, broken: bool) -> None:
        """Write the delayed line of a round whose members did not all resume, without a time."""
        pending, self._pending_round = self._pending_round, None
        if pending is not None:
            self._console.line(pending.line + ("; it ended before all its workers had resumed" if broken else ""))

    def _report_first_failure(self, failure: FirstFailure) -> None:
        # Lines still visible are not printed again.
        if not failure.last_lines or self._console.shows(failure.last_lines):
            return
        also = f", and of {names(list(failure.alike))}" if failure.alike else ""
        self._console.error(f"last output of worker {failure.worker} ({failure.how}){also}:")
        for line in failure.last_lines:
            self._console.error(f"  {line}")


def _said_of_check(checked: NetworkChecked) -> str:
    """Return the check's result as a sentence."""
    hosts = [*checked.admitted, *checked.barred]
    text = (
        f"the network of host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)} was checked in {checked.took_s:.1f} s"
    )
    if checked.links:
        speeds = [link.speed * 8 / 1e6 for link in checked.links]
        rtts = [link.rtt_s * 1e3 for link in checked.links]
        text += (
            f": {counted(len(speeds), 'link')} of {min(speeds):.0f} to {max(speeds):.0f} Mbit/s, "
            f"round trips of {min(rtts):.2f} to {max(rtts):.2f} ms"
        )
    return text + (f"; no answer from: {', '.join(checked.unheard)}" if checked.unheard else "")


def _process(pid: int) -> str:
    """Return a mention of the process id, if it is known."""
    return f" (pid {pid})" if pid else ""
