"""Events (facts in the past tense about a job) and commands (what is to be done about them).

Values only. :mod:`elastic_driver.core.membership` turns events into commands; the driver turns what happens outside
into events and commands into I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_driver.core.assignment import Placed
from elastic_driver.hosts import Departure, Host, SlotInfo, WorkerId
from elastic_driver.words import Backend, Ending, NoticeKind, ReadyCause


class Fault(StrEnum):
    """Who caused the end of a process."""

    OWN = "own"  # an exception, an exit code, a signal of its own making, a hang
    OUTSIDE = "outside"  # the machine, the scheduler, a person


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostsDiscovered:
    """The complete list of hosts, as of now.

    Attributes:
        hosts: the usable ones: they are listed, and are up.
        departures: those of them that are about to go away.
        down: names of listed hosts that are not usable for now: what is known of them is kept.
        answered: whether discovery has answered; otherwise it still fails, and this is its last list.
        preparing: names of those without any worker that are importing the workers' modules now.
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
        may_pass: whether the failure may be temporary: if not, a job that knows no hosts yet ends.
    """

    message: str
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class HostsUnusable:
    """No host is usable until a user fixes a problem there; ``reasons`` says which."""

    reasons: str


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker's process runs. Reported for workers that do not ask for their rounds."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker asks for the round after ``after_round``.

    Attributes:
        worker, after_round: the worker, and the last round that it was in; 0 for none.
        commits: the number of commits of its state.
        cause, detail: why it asks, and its error in words.
        backends: the collective backends that it can use, best first.
        steps: operations that it has finished since its last commit.
        where: the line of code that raised the error; "" if unknown.
        raised: whether its own code raised the error, and not its collective.
        unreachable: ranks of that round that it could not reach, or that acknowledged nothing.
        uncommitted_s: how long it had trained in that round since its last commit; 0 if nothing of that is lost.
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
        worker, round_id, commits: as reported.
        another: whether it is in another training than at its last report; that one has ended.
        synced: whether it has the others' state; a worker that cannot know reports it later.
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
        worker: the worker.
        returncode: exit code; negative for a signal.
        how: in words: "killed by SIGKILL".
        draw: a random number from 0 to 1, for the host's cooldown.
        error: the last line that it wrote; "" for none.
        where: the last line of code that it named; "" for none.
        out_of_memory: whether the kernel's OOM killer killed it.
        raised_s: how long before its end its code had raised an error, by its own record; None for no such error.
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
    """A worker's process is ending with a failure: it runs no more, but holds its place until it has ended.

    Attributes:
        worker: the worker.
        returncode: its exit code to be; None while it dumps its core, as the code is not known yet.
        how: in words: "killed by SIGKILL".
        draw: a random number from 0 to 1, for the host's cooldown.
        error, where, out_of_memory, raised_s: as in WorkerExited.
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
    """A worker reports that its script is over and that it is about to end."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker has sent no heartbeat, or done nothing, for too long.

    Attributes:
        worker: the worker.
        reason: in words: "no heartbeat for 60.0 s".
        silent: whether it has sent no heartbeat at all. A worker that is stopped, or unreachable, is silent through no
            fault of its own; one that reports that it does nothing is at fault itself.
    """

    worker: WorkerId
    reason: str
    silent: bool


@dataclass(frozen=True, slots=True)
class WorkerSpared:
    """A worker was to be killed at its exit, but its script had ended: only the command around it still runs."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerServing:
    """A server, of a job with a chief, answers at ``address``, ``host:port``."""

    worker: WorkerId
    address: str


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """The chief reports that it has taken a worker out of use, and gives it no more work."""

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
        number: the number of its start.
        returncode: exit code; negative for a signal; None if there was no process.
        how: in words: "exited with code 1".
        error, where, out_of_memory: as in WorkerExited.
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
    """A host is lost, and its workers with it: how they ended is unknown.

    Attributes:
        hostname: the host.
        why: in words: "it was not heard for 5.0 s"; "" if unknown.
        workers: the workers that ran there. One that is just being started may or may not come up.
        draw: a random number from 0 to 1, for the host's cooldown.
    """

    hostname: str
    why: str
    workers: tuple[WorkerId, ...]
    draw: float


@dataclass(frozen=True, slots=True)
class WorkersReported:
    """Several workers have reported, or ended, at about the same time: one decision covers all of them."""

    reports: tuple[WorkerReport | HostLost, ...]


@dataclass(frozen=True, slots=True)
class HostSilent:
    """A host sends nothing, and its machine acknowledges nothing.

    Attributes:
        hostname: the host.
        silent_s: for how long.
        sure: whether that is long enough to be sure. Otherwise another host has been silent for that long, and this one
            may be silent for the same reason.
    """

    hostname: str
    silent_s: float
    sure: bool = True


@dataclass(frozen=True, slots=True)
class HostHeard:
    """A silent host responds again, or its agent starts over."""

    hostname: str


HostReport = HostSilent | HostHeard


@dataclass(frozen=True, slots=True)
class HostsReported:
    """Several hosts are silent, or heard again, at about the same time: one decision covers all of them."""

    reports: tuple[HostReport, ...]


@dataclass(frozen=True, slots=True)
class WorkerNotStarted:
    """A worker's process could not be started, or existed for a moment in which it may have asked for a round."""

    worker: WorkerId
    message: str
    draw: float
    bad_command: bool  # the command itself is at fault, on any host


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A request that workers leave at their next commit, without blame.

    Attributes:
        hostname: the host to drain.
        slot: its slot; None for all of them.
        why: who asked, in words.
        undo: the opposite: the places may be used again.
        within_s: the seconds left until the host's machine is gone; None if nobody has said.
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
    """The driver itself has a bug: an unexpected error."""

    error: str

    @property
    def message(self) -> str:
        """The message with which the job ends."""
        return f"internal error of the driver: {self.error}"


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """The time returned by next_deadline has been reached."""


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
        planned: the place that it would have if the round were formed now.
        standby: whether it is to wait without a rank.
        hosts: the hosts of all planned workers, in the order of their first ranks (rank 0 is on the first); empty if
            workers do not meet by themselves.
        parameter_server: the index of its parameter server; None for a worker.
    """

    worker: WorkerId
    planned: SlotInfo
    standby: bool = False
    hosts: tuple[str, ...] = ()
    parameter_server: int | None = None


@dataclass(frozen=True, slots=True)
class StartChief:
    """Start the chief's script, with the servers that answer now.

    Attributes:
        number: how many starts there have been, this one included.
        parameter_servers, workers: addresses of the servers, in the order in which the script gets them.
    """

    number: int
    parameter_servers: tuple[str, ...]
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopChief:
    """Send TERM to the script's process tree, wait for the grace period, send KILL; it is restarted once it has ended.

    Attributes:
        number: the number of its start.
        reason: why, in words.
        grace_s: the grace period; None for the usual one.
    """

    number: int
    reason: str
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Send TERM to the process tree, wait for the grace period, send KILL.

    Attributes:
        worker: the worker.
        reason: why, in words.
        ending: how long the grace period is, and what else is done.
    """

    worker: WorkerId
    reason: str
    ending: Ending = Ending.USUAL


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Send KILL to the process tree of a worker that does not do what it must.

    Attributes:
        worker: the worker.
        reason: what it did not do, in words: "did not leave within 300 s (--drain-timeout)".
        hangs: whether it hangs, and is to print the stacks of its threads first.
        exits: whether to spare it if its script has ended, though the command around it still runs (WorkerSpared).
    """

    worker: WorkerId
    reason: str
    hangs: bool = False
    exits: bool = False


@dataclass(frozen=True, slots=True)
class GiveUpHost:
    """Treat a silent host as lost, and its workers with it, although they may live; ``reason`` says why."""

    hostname: str
    reason: str


@dataclass(frozen=True, slots=True)
class DismissWorker:
    """Notify a READY worker that there is no place for it: it ends by itself, with exit code 0."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class PublishRound:
    """Fence off the past, and give the members their places.

    Attributes:
        round_id: the new round.
        placed: its members by rank.
        sync: whether the members broadcast rank 0's state first.
        commits: the number of commits of rank 0's state.
        backend: the backend of its collectives; None if the workers choose it themselves.
        cause: the cause of the round, in words.
        old_size: the number of members of the round before (0 for the first round).
        reinit: whether the members caused it themselves, by ``shutdown()`` and ``init()``.
        lost_s: how long the round before had trained since the commit from which this one resumes; None if unknown.
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
    """Send a notice to the members of the round."""

    version: int
    round_id: int
    kind: NoticeKind
    reason: str


@dataclass(frozen=True, slots=True)
class ReportResumed:
    """Report that all members of the round train again.

    Attributes:
        round_id: the round.
        commits: the commit from which it resumed.
        took_s: seconds from the change (death seen, or first member at the commit) until now.
    """

    round_id: int
    commits: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ReportDying:
    """Report that a worker is failing; ``how`` says how."""

    worker: WorkerId
    how: str


@dataclass(frozen=True, slots=True)
class ReportExit:
    """Report that a worker has ended; ``expected`` if it had been told to, and had not failed before."""

    worker: WorkerId
    expected: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Report something that a user wants to read at once."""

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
