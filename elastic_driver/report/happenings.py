"""What can happen to a job, as those who tell of it hear it: one frozen class each, of plain values.

Owns the words between the chronicle and its listeners, and the protocol of a listener. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from elastic_driver.core.standing import Doing
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
    """Hears what happens to the job: the terminal, the event log. Called on the driver's event loop; never blocks."""

    @property
    def live(self) -> bool:
        """Whether a user sees each :class:`Status` here as it changes; then waits are not reported beside it."""

    def hear(self, happening: Happening) -> None:
        """Takes what has happened. What is no business of this listener it leaves alone."""


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The rendezvous server listens; ``again`` where the job had another driver before."""

    url: str
    job_id: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class HostsChanged:
    """Discovery gave another answer than before."""

    hosts: Sequence[Host]


@dataclass(frozen=True, slots=True)
class HostReady:
    """A host has an agent.

    Attributes:
        host: its name.
        address: from where the agent has come.
        joined: with how many slots it has joined by itself; 0 when discovery has named it.
    """

    host: str
    address: str
    joined: int


@dataclass(frozen=True, slots=True)
class HostUnready:
    """A host has no agent yet: why, and whether somebody has to change something there."""

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
        hosts: its ends.
        rtt_s: the shortest round trip, seconds.
        speed: bytes a second, in the slower direction.
    """

    hosts: tuple[str, str]
    rtt_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class NetworkChecked:
    """The network between hosts was checked, before some of them are used for the first time.

    Attributes:
        admitted: hosts that may be used from now on.
        barred: hosts that may not, and why; :class:`HostUnready` tells of them, too.
        unheard: hosts in use that could not be asked.
        links: what was measured.
        slow: links that are slower than the others; one line each.
        took_s: seconds.
    """

    admitted: Sequence[str]
    barred: Mapping[str, str]
    unheard: Sequence[str]
    links: Sequence[LinkMeasured]
    slow: Sequence[str]
    took_s: float


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """A worker's process runs; ``again`` where another driver has had it started."""

    worker: WorkerId
    pid: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """A server of a job with a chief answers there; ``parameter_server`` is its number, None for a worker."""

    worker: WorkerId
    parameter_server: int | None
    address: str


@dataclass(frozen=True, slots=True)
class ChiefStarted:
    """The script of a job with parameter servers runs, with so many servers and workers that answer.

    Attributes:
        number: of its start, from 1.
        pid: of its process.
        servers, workers: how many it was told of.
    """

    number: int
    pid: int
    servers: int
    workers: int


@dataclass(frozen=True, slots=True)
class ChiefStopped:
    """It is told to end, to be started again: why, in words."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChiefEnded:
    """Its process has ended; ``expected`` when it was told to."""

    number: int
    pid: int
    returncode: int
    how: str
    expected: bool


@dataclass(frozen=True, slots=True)
class Warmed:
    """Workers can be forked from a process from now on, which took so long to get there."""

    pid: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ProcessDying:
    """A worker's process is about to end; it may take a while until the system has freed what it had."""

    worker: WorkerId
    pid: int
    how: str


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A worker's process has ended.

    Attributes:
        label: what stands before the lines of its output.
        how: its exit status in words.
        expected: it had been dismissed or stopped.
        foretold: there was a :class:`ProcessDying` of it, or a :class:`HostLost` of its host.
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
    """Workers are being stopped at a time, each for its reason."""

    stops: Sequence[tuple[WorkerId, str]]


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker is frozen or hangs, and is about to be killed."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDismissed:
    """A worker is told that it has no place any more."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The job stands elsewhere.

    Attributes:
        phase: see JobPhase.
        doing: what the job does.
        on_change: what a change means for its workers as they are now.
    """

    phase: JobPhase
    doing: Doing
    on_change: OnChange


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """Workers that have been started ask for their first round; those that ask for none run."""

    workers: Sequence[WorkerId]


@dataclass(frozen=True, slots=True)
class WorkersDrained:
    """Workers are to leave their places, which get no others; or ``undone``: they may stay after all."""

    workers: Sequence[WorkerId]
    undone: bool


@dataclass(frozen=True, slots=True)
class StoodStill:
    """The driver did nothing for a while: it was stopped, or starved.

    Attributes:
        stood_s: for so long.
        ended_s: how long ago it went on.
        trained: the workers were seen to have gone on meanwhile.
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
        workers: that run still.
        hosts: on which these are.
        round_id: the present round; 0 before the first.
        trained: whether all members of the round are among them, so that its training went on.
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
    """What the job's time has gone into so far: seconds by category, the whole, and the share of the training."""

    seconds: Mapping[str, float]
    wall_s: float
    share: float


@dataclass(frozen=True, slots=True)
class WorkerTimeBooked:
    """What the time of a worker that has ended had gone into: seconds by category, and the whole."""

    worker: WorkerId
    seconds: Mapping[str, float]
    wall_s: float


@dataclass(frozen=True, slots=True)
class NoticeGiven:
    """The members of a round are told something."""

    round_id: int
    kind: NoticeKind
    reason: str


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's place in a round; pid None where its process has ended already."""

    rank: int
    worker: WorkerId
    pid: int | None


@dataclass(frozen=True, slots=True)
class RoundFormed:
    """A round begins.

    Attributes:
        old_size: workers of the round before; 0 for none.
        commits: of the state that it goes on from.
        backend: what carries its collectives; None when that is the workers' own affair, and whether they train, too.
        formed_in_s: from the change (or the start) until now.
        reinit: all workers asked for it themselves; whether and when these train, nobody may ever say.
        lost_s: how long the round before had trained beyond the commit that this one goes back to; None where nobody
            knows.
        since_commit_s: from that commit until the round before was over, stalls included; None where nobody knows.
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
        commits: of the state that it goes on from; None where the workers tell of none.
        took_s: since the round before did something last.
        stalled_s: of that, how long that round had stalled before it was over.
    """

    round_id: int
    commits: int | None
    took_s: float
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Remark:
    """Something the user should know, in words."""

    text: str
    warning: bool


@dataclass(frozen=True, slots=True)
class LogCut:
    """A log that may not grow for ever has grown so large, bytes: of what comes only the job's end is in it."""

    size: int


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """Why the job ends badly: the first worker that failed, and what it said last.

    Attributes:
        rank: in the last round; None when it had none.
        how: its end in words.
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
    """A bug of the driver's: the traceback, and the events that led to it."""

    error: str
    events: Sequence[str]


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """A line of the summary.

    Attributes:
        round_id: the round.
        size: its workers.
        cause: what made it.
        took_s: time lost, seconds; None when not all members had resumed.
        commit: what it went on from; None for the first round, and for workers that have none.
    """

    round_id: int
    size: int
    cause: str
    took_s: float | None
    commit: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What the closing table tells.

    Attributes:
        first: the first rounds.
        left_out: how many between them and the last are not in the table.
        left_out_s: time lost in these, seconds.
        last: the last rounds.
        lost_s: time lost in all.
        unknown: changes of which nobody knows what they cost.
        notes: what else is to be said, and whether each is a warning.
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
    """The job is over and nothing of it runs."""

    exit_code: int
    message: str
    summary: Summary


@dataclass(frozen=True, slots=True)
class Status:
    """The present state of the job, in words, and its figures."""

    text: str
    figures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscoveryRan:
    """Whoever tells the hosts was asked, and has answered or failed after so long. It comes about each second."""

    took_s: float
    failed: bool


@dataclass(frozen=True, slots=True)
class DiscReported:
    """How far the commits in a folder are; it comes with heartbeats.

    Attributes:
        folder: the same for all workers that see the same folder.
        where: its name, for people.
        written: the newest commit there; -1 for none yet.
        commits: of the state.
        trouble: why the newest are not there; "" when there is nothing wrong.
    """

    folder: str
    where: str
    written: int
    commits: int
    trouble: str


@dataclass(frozen=True, slots=True)
class MomentPassed:
    """Nothing: it comes about twice a second, for those who hold something back for a moment."""


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
    | DiscReported
    | MomentPassed
    | Sampled
)
