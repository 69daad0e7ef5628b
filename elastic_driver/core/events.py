"""What happens to a job (events, facts in the past tense) and what is to be done about it (commands).

Values only. :mod:`elastic_driver.core.membership` turns events into commands; the driver turns the world into
events and commands into I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_driver.core.assignment import Placed
from elastic_driver.hosts import Departure, Host, SlotInfo, WorkerId
from elastic_driver.words import Backend, Ending, NoticeKind, ReadyCause


class Fault(StrEnum):
    """Whose doing the end of a process is."""

    OWN = "own"  # an exception, an exit code, a signal of its own making, a hang
    OUTSIDE = "outside"  # the machine, the scheduler, a person


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostsDiscovered:
    """These are all hosts now.

    Attributes:
        hosts: those that can be used: they are listed, and are up.
        departures: those of them that are about to go.
        down: names of those that are listed, and cannot be used for now: what is known of them stays.
        answered: whether discovery has answered; else it still fails, and the list is its last one.
        preparing: names of those of them where nobody runs, and which import now what workers import.
    """

    hosts: tuple[Host, ...]
    departures: tuple[Departure, ...] = ()
    down: frozenset[str] = frozenset()
    answered: bool = True
    preparing: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DiscoveryFailed:
    """Discovery gave no answer. The hosts known so far stay.

    Attributes:
        message: why.
        may_pass: whether that may pass by itself: else a job that knows no hosts yet ends.
    """

    message: str
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class HostsUnusable:
    """None of the hosts can be used before somebody changes something there: why, in words."""

    reasons: str


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker's process runs. News of workers that do not ask for their rounds."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker asks for the round after ``after_round``.

    Attributes:
        worker, after_round: who, and the last round that it was in; 0 for none.
        commits: of its state.
        cause, detail: why, and its error in words.
        backends: what it can use for collectives, best first.
        steps: operations that it has finished since its last commit.
        where: the line of code that raised the error; "" when that is not known.
        raised: whether its own code raised it, and not its collective.
        unreachable: ranks of that round that it could not reach, or that acknowledged nothing.
        uncommitted_s: how long it had trained in that round since its last commit; 0 where nothing of it is lost.
    """

    worker: WorkerId
    after_round: int
    commits: int
    cause: ReadyCause
    detail: str
    backends: tuple[Backend, ...]
    steps: int = 0
    where: str = ""
    raised: bool = False
    unreachable: tuple[int, ...] = ()
    uncommitted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerRunning:
    """A member has built its contexts and synced its state.

    Attributes:
        worker, round_id, commits: as it says.
        another: whether it is another training than the last one it told of, which has come to its end.
        synced: whether it has the others' state; who cannot tell says so later.
    """

    worker: WorkerId
    round_id: int
    commits: int
    another: bool = False
    synced: bool = True


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker's process has ended.

    Attributes:
        worker: whose.
        returncode: exit code; negative for a signal.
        how: in words, "killed by SIGKILL".
        draw: a random number from 0 to 1, for the host's cooldown.
        error: the last line that it wrote; "" for none.
        where: the line of code that it named last; "" for none.
        out_of_memory: whether the kernel's OOM killer took it.
        raised_s: how long before its end its code had raised an error, as it wrote down then; None for no such thing.
    """

    worker: WorkerId
    returncode: int
    how: str
    draw: float
    error: str = ""
    where: str = ""
    out_of_memory: bool = False
    raised_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerDying:
    """A worker's process is going to end, and not well: it runs no more, but holds its place until it has ended.

    Attributes:
        worker: whose.
        returncode: what it is going to end with; None when it dumps its core, and that is not known yet.
        how: in words, "killed by SIGKILL".
        draw: a random number from 0 to 1, for the host's cooldown.
        error, where, out_of_memory, raised_s: see WorkerExited.
    """

    worker: WorkerId
    returncode: int | None
    how: str
    draw: float
    error: str = ""
    where: str = ""
    out_of_memory: bool = False
    raised_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerExiting:
    """A worker says that its script is over and that it is about to end."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker was not heard, or did nothing, for too long.

    Attributes:
        worker: which.
        reason: in words, "no heartbeat for 60.0 s".
        silent: whether it was not heard at all. Who is stopped, or cannot be reached, is silent by no doing of its own;
            who says that it does nothing does so itself.
    """

    worker: WorkerId
    reason: str
    silent: bool


@dataclass(frozen=True, slots=True)
class WorkerSpared:
    """A worker was to be killed at its exit, but its script had ended: what runs on is the command around it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerServing:
    """A server, of a job with a chief, answers there: ``host:port``."""

    worker: WorkerId
    address: str


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """The chief says that it has taken a worker out, and gives it nothing any more."""

    worker: WorkerId


WorkerReport = (
    WorkerStarted
    | WorkerReady
    | WorkerRunning
    | WorkerDying
    | WorkerExited
    | WorkerExiting
    | WorkerHung
    | WorkerSpared
    | WorkerServing
    | WorkerReleased
)


@dataclass(frozen=True, slots=True)
class ChiefExited:
    """A chief's process has ended, or could not be started.

    Attributes:
        number: of its start.
        returncode: exit code; negative for a signal; None where there was no process.
        how: in words, "exited with code 1".
        error, where, out_of_memory: see WorkerExited.
        bad_command: whether the command itself cannot be run.
    """

    number: int
    returncode: int | None
    how: str
    error: str = ""
    where: str = ""
    bad_command: bool = False
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class HostLost:
    """A host is lost, and its workers with it: nobody has seen how they ended.

    Attributes:
        hostname: which.
        why: in words, "it was not heard for 5.0 s"; "" when that is not known.
        workers: those that ran there. One that is only being started may yet come up, or not.
        draw: a random number from 0 to 1, for the host's cooldown.
    """

    hostname: str
    why: str
    workers: tuple[WorkerId, ...]
    draw: float


@dataclass(frozen=True, slots=True)
class WorkersReported:
    """Several workers have reported, or ended, at about the same time: one decision for all of them."""

    reports: tuple[WorkerReport | HostLost, ...]


@dataclass(frozen=True, slots=True)
class HostSilent:
    """Nothing is heard of a host, and its machine acknowledges nothing.

    Attributes:
        hostname: which.
        silent_s: for how long.
        sure: whether that is as long as it takes. Otherwise another host has been silent for so long, and this one may
            be so for the same reason.
    """

    hostname: str
    silent_s: float
    sure: bool = True


@dataclass(frozen=True, slots=True)
class HostHeard:
    """A host that was silent is heard again, or begins anew."""

    hostname: str


HostReport = HostSilent | HostHeard


@dataclass(frozen=True, slots=True)
class HostsReported:
    """Several hosts are silent, or heard again, at about the same time: one decision for all of them."""

    reports: tuple[HostReport, ...]


@dataclass(frozen=True, slots=True)
class WorkerNotStarted:
    """A worker's process could not be started, or was there for a moment, and may have asked for a round in it."""

    worker: WorkerId
    message: str
    draw: float
    bad_command: bool  # the command itself is at fault, on whatever host


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Somebody wants workers to leave at their next commit, without any blame.

    Attributes:
        hostname: of which host.
        slot: of which slot; None for all of the host's.
        why: who asked, in words.
        undo: the opposite: the places may be used again.
        within_s: the seconds that are left until the host's machine is gone; None when nobody has said.
    """

    hostname: str
    slot: int | None
    why: str
    undo: bool = False
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user (or a signal) asks for the end of the job."""

    signal: int
    name: str


@dataclass(frozen=True, slots=True)
class DriverFailed:
    """The driver itself has a bug: an error that nobody expected."""

    error: str

    @property
    def message(self) -> str:
        """What is told of it, as the end of the job."""
        return f"internal error of the driver: {self.error}"


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """The time of next_deadline has come."""


Event = (
    HostsDiscovered
    | DiscoveryFailed
    | HostsUnusable
    | WorkerReport
    | HostLost
    | WorkersReported
    | HostReport
    | HostsReported
    | WorkerNotStarted
    | ChiefExited
    | DrainRequested
    | StopRequested
    | DriverFailed
    | TimerExpired
)

# --- commands -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process.

    Attributes:
        worker: its name.
        planned: the place it would have if the round were formed now.
        standby: whether it is to wait without a rank.
        hosts: those of all who are planned, in the order of their first ranks: rank 0 is on the first; none where
            workers do not meet by themselves.
        parameter_server: which of the parameter servers it is; None for a worker.
    """

    worker: WorkerId
    planned: SlotInfo
    standby: bool = False
    hosts: tuple[str, ...] = ()
    parameter_server: int | None = None


@dataclass(frozen=True, slots=True)
class StartChief:
    """Start the script, with the servers that answer now.

    Attributes:
        number: how often that was done, with this time.
        parameter_servers, workers: addresses of the servers, in the order in which the script is told of them.
    """

    number: int
    parameter_servers: tuple[str, ...]
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopChief:
    """TERM to the script's process tree, grace, KILL; another is started when it has ended.

    Attributes:
        number: of its start.
        reason: why, in words.
        grace_s: how long the grace is; None for what is usual.
    """

    number: int
    reason: str
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class StopWorker:
    """TERM to the process tree, grace, KILL.

    Attributes:
        worker: which.
        reason: why, in words.
        ending: how long the grace is, and what is done beside it.
    """

    worker: WorkerId
    reason: str
    ending: Ending = Ending.USUAL


@dataclass(frozen=True, slots=True)
class KillWorker:
    """KILL to the process tree of a worker that does not do what it has to.

    Attributes:
        worker: which.
        reason: what it did not do, in words, "did not leave within 300 s (--drain-timeout)".
        hangs: whether it hangs, and prints first where its threads are.
        exits: whether it is let be when its script has ended, though the command around it goes on (WorkerSpared).
    """

    worker: WorkerId
    reason: str
    hangs: bool = False
    exits: bool = False


@dataclass(frozen=True, slots=True)
class GiveUpHost:
    """Take a silent host for lost, and its workers with it, although they may live: why, in words."""

    hostname: str
    reason: str


@dataclass(frozen=True, slots=True)
class DismissWorker:
    """Tell a worker that is READY that there is no place for it: it ends by itself, with exit code 0."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class PublishRound:
    """Fence the past, and give the members their places.

    Attributes:
        round_id: the new round.
        placed: its members by rank.
        sync: whether the members broadcast rank 0's state first.
        commits: commits of rank 0's state.
        backend: what carries its collectives; None when that is the workers' own affair.
        cause: what made it, in words.
        old_size: members of the round before (0 for the first round).
        reinit: whether the members made it themselves, by ``shutdown()`` and ``init()``.
        lost_s: how long the round before had trained beyond the commit that this one goes back to; None where nobody
            knows.
    """

    round_id: int
    placed: tuple[Placed, ...]
    sync: bool
    commits: int
    backend: Backend | None
    cause: str
    old_size: int
    reinit: bool = False
    lost_s: float | None = None


@dataclass(frozen=True, slots=True)
class SetNotice:
    """Tell the members of the round."""

    version: int
    round_id: int
    kind: NoticeKind
    reason: str


@dataclass(frozen=True, slots=True)
class ReportResumed:
    """All members of the round train again.

    Attributes:
        round_id: the round.
        commits: what it went on from.
        took_s: seconds from the change (death seen, or first member at the commit) until now.
    """

    round_id: int
    commits: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ReportDying:
    """A worker is about to end, and not well: in words, how."""

    worker: WorkerId
    how: str


@dataclass(frozen=True, slots=True)
class ReportExit:
    """A worker has ended; ``expected`` when it had been told to, and had not failed before."""

    worker: WorkerId
    expected: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Something a user wants to read at once."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class EndJob:
    """Stop every worker and exit."""

    exit_code: int
    message: str


Command = (
    StartWorker
    | StartChief
    | StopChief
    | StopWorker
    | KillWorker
    | GiveUpHost
    | DismissWorker
    | PublishRound
    | SetNotice
    | ReportResumed
    | ReportDying
    | ReportExit
    | Report
    | EndJob
)
