"""What can happen to a job, as passed to its listeners: one frozen class for each, of plain values.

Owns the vocabulary between the chronicle and its listeners, and the protocol of a listener. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from elastic_driver.core.standing import JobActivity
from elastic_driver.core.state import JobPhase
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
from elastic_driver.words import Backend, NoticeKind, OnChange


class Listener(Protocol):
    """Receives what happens to the job: the terminal, the event log. Called on the driver's loop; never blocks."""

    @property
    def live(self) -> bool:
        """Whether it shows the user each :class:`Status` as it changes; then waits are not reported in addition."""

    def hear(self, happening: Happening) -> None:
        """Handle a happening, or ignore it."""


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The rendezvous server listens; ``again`` if the job had another driver before."""

    url: str
    job_id: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class HostsChanged:
    """Discovery returned other hosts than before."""

    hosts: Sequence[Host]


@dataclass(frozen=True, slots=True)
class HostReady:
    """A host has an agent.

    Attributes:
        host: its name.
        address: from which the agent has connected.
        joined: with how many slots it has joined by itself; 0 if discovery has found it.
    """

    host: str
    address: str
    joined: int


@dataclass(frozen=True, slots=True)
class HostUnready:
    """A host has no agent yet: why, and whether it will not have one until something is changed there."""

    host: str
    reason: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class HostLost:
    """A host's agent is lost, and its workers with it."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """A link between two hosts.

    Attributes:
        hosts: its two ends.
        rtt_s: the shortest round trip, seconds.
        speed: in the slower direction, bytes a second.
    """

    hosts: tuple[str, str]
    rtt_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class NetworkChecked:
    """The network between hosts was checked, before some of them are used for the first time.

    Attributes:
        admitted: hosts that may be used from now on.
        barred: hosts that may not, and why; each has a :class:`HostUnready`, too.
        unheard: hosts in use that did not answer.
        links: the measurements.
        slow: links that are slower than the others; one line each.
        took_s: the duration of the check.
    """

    admitted: Sequence[str]
    barred: Mapping[str, str]
    unheard: Sequence[str]
    links: Sequence[LinkMeasured]
    slow: Sequence[str]
    took_s: float


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """A worker's process runs; ``again`` if another driver has had it started."""

    worker: WorkerId
    pid: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """A server of a job with a chief answers at an address; ``parameter_server`` is its number, None for a worker."""

    worker: WorkerId
    parameter_server: int | None
    address: str


@dataclass(frozen=True, slots=True)
class ChiefStarted:
    """The script of a job with parameter servers, the chief, runs.

    Attributes:
        number: of its start, from 1.
        pid: of its process.
        servers, workers: how many answering servers and workers it was given.
    """

    number: int
    pid: int
    servers: int
    workers: int


@dataclass(frozen=True, slots=True)
class ChiefStopped:
    """The chief is being stopped, in order to be restarted, for a reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChiefEnded:
    """The chief's process has ended; ``expected`` if it was being stopped."""

    number: int
    pid: int
    returncode: int
    how: str
    expected: bool


@dataclass(frozen=True, slots=True)
class Warmed:
    """Workers can be forked from a warm process from now on; it took this long to start."""

    pid: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ProcessDying:
    """A worker's process is about to end; the system may take a while to free its resources."""

    worker: WorkerId
    pid: int
    how: str


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A worker's process has ended.

    Attributes:
        label: the prefix of its output lines.
        how: its exit status as text.
        expected: whether it had been dismissed or stopped.
        foretold: whether there was a :class:`ProcessDying` of it, or a :class:`HostLost` of its host.
    """

    worker: WorkerId
    pid: int
    label: str
    returncode: int
    how: str
    expected: bool
    foretold: bool


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """Workers are being stopped at the same time, each for its reason."""

    stops: Sequence[tuple[WorkerId, str]]


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker is frozen or hangs, and is about to be killed."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDismissed:
    """A worker is notified that it has no slot any more."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The job's standing has changed.

    Attributes:
        phase: see JobPhase.
        doing: the job's activity.
        on_change: the consequence of a change for its workers as they are now.
    """

    phase: JobPhase
    doing: JobActivity
    on_change: OnChange


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """Started workers ask for their first round; or, if they never ask for rounds, run."""

    workers: Sequence[WorkerId]


@dataclass(frozen=True, slots=True)
class WorkersDrained:
    """Workers are to leave their slots and get no others; or, if ``undone``, may stay after all."""

    workers: Sequence[WorkerId]
    undone: bool


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The driver did nothing for a while: it was stopped, or starved.

    Attributes:
        stood_s: for how long.
        ended_s: how long ago it resumed.
        trained: whether the workers are known to have trained meanwhile.
    """

    stood_s: float
    ended_s: float = 0.0
    trained: bool = False


@dataclass(frozen=True, slots=True)
class TookOver:
    """This driver has taken the job over from one that died, and knows which of its agents are left.

    Attributes:
        epoch: number of this driver, higher than those of all before it.
        away_s: for how long there was no driver.
        workers: the number still running.
        hosts: the number of hosts on which they run.
        round_id: the present round; 0 before the first.
        trained: whether all members of the round are among them, so that its training continued.
        pids: of their processes.
    """

    epoch: int
    away_s: float
    workers: int
    hosts: int
    round_id: int
    trained: bool
    pids: Mapping[WorkerId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimeBooked:
    """The job's time so far: seconds by category, the total, and the share of training."""

    seconds: Mapping[str, float]
    wall_s: float
    share: float


@dataclass(frozen=True, slots=True)
class WorkerTimeBooked:
    """The time of a worker that has ended: seconds by category, and the total."""

    worker: WorkerId
    seconds: Mapping[str, float]
    wall_s: float


@dataclass(frozen=True, slots=True)
class NoticeGiven:
    """The members of a round get a notice."""

    round_id: int
    kind: NoticeKind
    reason: str


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's rank in a round; pid None if its process has ended already."""

    rank: int
    worker: WorkerId
    pid: int | None


@dataclass(frozen=True, slots=True)
class RoundFormed:
    """A round begins.

    Attributes:
        old_size: number of workers in the round before; 0 for none.
        commits: the number of the commit from which it starts.
        backend: the library of its collectives; None if the workers choose it themselves and do not report whether they
            train.
        formed_in_s: from the change (or the start) until now.
        reinit: whether all workers asked for it themselves; whether and when these train may never be known.
        lost_s: how long the round before had trained since the commit to which this one returns; None if unknown.
        since_commit_s: from that commit until the end of the round before, including stalls; None if unknown.
    """

    round_id: int
    old_size: int
    cause: str
    commits: int
    sync: bool
    backend: Backend | None
    formed_in_s: float
    members: Sequence[Member]
    reinit: bool
    lost_s: float | None = None
    since_commit_s: float | None = None


@dataclass(frozen=True, slots=True)
class RoundResumed:
    """All members of the round train.

    Attributes:
        round_id: the round.
        commits: the number of the commit from which it starts; None if the workers report none.
        took_s: since the last activity of the round before.
        stalled_s: the part of that for which that round had stalled before it ended.
    """

    round_id: int
    commits: int | None
    took_s: float
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Remark:
    """A message for the user."""

    text: str
    warning: bool


@dataclass(frozen=True, slots=True)
class LogCut:
    """A log with a size limit has reached it, bytes: of the later events only the job's end is in it."""

    size: int


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """Why the job fails: the first worker that failed, and its last output.

    Attributes:
        rank: in the last round; None if it had none.
        how: its end as text.
        last_lines: of its output.
        alike: the workers whose last lines are the same.
    """

    worker: WorkerId
    rank: int | None
    how: str
    last_lines: Sequence[str]
    alike: Sequence[WorkerId]


@dataclass(frozen=True, slots=True)
class InternalError:
    """A bug of the driver: the traceback, and the events that led to it."""

    error: str
    events: Sequence[str]


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """A row of the summary.

    Attributes:
        round_id: the round.
        size: the number of its workers.
        cause: why it was formed.
        took_s: time lost, seconds; None if not all members had resumed.
        commit: from which it started; None for the first round, and for workers that have none.
    """

    round_id: int
    size: int
    cause: str
    took_s: float | None
    commit: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of the closing table.

    Attributes:
        first: the first rounds.
        left_out: how many rounds between these and the last ones are not in the table.
        left_out_s: time lost in these, seconds.
        last: the last rounds.
        lost_s: the total time lost.
        unknown: the number of changes whose cost is unknown.
        notes: further lines, each with whether it is a warning.
    """

    first: Sequence[RoundSummary] = ()
    left_out: int = 0
    left_out_s: float = 0.0
    last: Sequence[RoundSummary] = ()
    lost_s: float = 0.0
    unknown: int = 0
    notes: Sequence[tuple[str, bool]] = ()


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job has ended, and nothing of it runs any more."""

    exit_code: int
    message: str
    summary: Summary


@dataclass(frozen=True, slots=True)
class Status:
    """The present state of the job, as text, and its figures."""

    text: str
    figures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscoveryRan:
    """Discovery has run, and succeeded or failed after this time. Occurs about once a second."""

    took_s: float
    failed: bool


@dataclass(frozen=True, slots=True)
class DiskReported:
    """The state of the commits in a folder, which is reported with heartbeats.

    Attributes:
        folder: an identity, the same for all workers that see the same folder.
        where: its name, for messages.
        written: the newest commit there; -1 for none yet.
        commits: the newest commit of the state.
        trouble: why the newest commits are not there; "" if there is no trouble.
    """

    folder: str
    where: str
    written: int
    commits: int
    trouble: str


@dataclass(frozen=True, slots=True)
class MomentPassed:
    """Time passes: occurs about twice a second, for listeners that hold something back for a moment."""


Happening: TypeAlias = (
    JobStarted
    | HostsChanged
    | HostReady
    | HostUnready
    | HostLost
    | NetworkChecked
    | ProcessStarted
    | ServerAnswers
    | ChiefStarted
    | ChiefStopped
    | ChiefEnded
    | Warmed
    | ProcessDying
    | ProcessEnded
    | WorkersStopped
    | WorkerHung
    | WorkerSuspected
    | WorkerCleared
    | StragglerFound
    | StragglerGone
    | WorkerDismissed
    | PhaseChanged
    | WorkersReady
    | WorkersDrained
    | StoodStill
    | TookOver
    | Stalled
    | StallEnded
    | TimeBooked
    | WorkerTimeBooked
    | NoticeGiven
    | RoundFormed
    | RoundResumed
    | Remark
    | LogCut
    | FirstFailure
    | InternalError
    | JobEnded
    | Status
    | DiscoveryRan
    | DiskReported
    | MomentPassed
    | Sampled
)
