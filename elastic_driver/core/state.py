"""The state of a job: one frozen value, and the questions that are asked of it.

Owns no decision: those are in :mod:`elastic_driver.core.membership`. Everything here is derived from fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastic_driver.core.assignment import Placed
from elastic_driver.core.attempts import Attempts
from elastic_driver.core.blacklist import Blacklist
from elastic_driver.core.registry import WorkerState, WorkerStateRegistry
from elastic_driver.core.roster import Roster
from elastic_driver.core.setbacks import Failure, Setbacks
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.words import Backend, NoticeKind, OnChange

# How long a dismissed worker may take to run its exit handlers before it is stopped (torchrun's grace for the same).
DISMISSED_GRACE_S = 30.0

# A discovery script that fails is warned of at most as often as this; its next answer is told of after a failure that
# lasted for some runs of it.
DISCOVERY_TOLD_S = 60.0
DISCOVERY_OUTAGE_S = 5.0


# How many setbacks in a row end the job, and the shortest and longest pause between two of them. With the pauses the
# ten take at least four minutes (2 + 4 + 8 + 16 + 32 + 60 + 60 + 60 s): a fault that is not the script's, such as a
# switch that boots, is over by then, and a script that fails at the same step each time has wasted little.
SETBACKS_LIMIT = 10
PAUSE_RANGE_S = (2.0, 60.0)

# Causes of one reset that are told one by one. A job of thousands may lose all of them at once, or its hosts again and
# again while it waits for slots.
_MOST_CRASHES_TOLD = 16


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of a job, from its settings. Durations in seconds.

    Attributes:
        num_proc: slots needed before the start.
        min_num_proc: fewest members of a round.
        max_num_proc: most members of a round; None for no bound.
        elastic_timeout_s: how long the job may lack slots (or discovery may fail) before it ends.
        start_timeout_s: how long a worker may take from its start, or from the break of its round, to be READY.
        reset_limit: unplanned resets allowed; None for no bound.
        reset_window_s: how long a reset counts for that; None for ever.
        cooldown_range_s: see :class:`elastic_driver.core.blacklist.Blacklist`.
        durable: whether commits are on disc, so that the job outlives all who have its state in memory.
        num_standby: booted workers to keep beyond these, in slots that no member needs.
        setbacks_limit: so many setbacks in a row end the job.
        pause_range_s: shortest and longest pause after a setback; none after the first, then twice as long each time.
        on_change: what a change means for the workers, which is their dialect's.
    """

    num_proc: int
    min_num_proc: int
    max_num_proc: int | None = None
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 300.0
    reset_limit: int | None = None
    reset_window_s: float | None = None
    cooldown_range_s: tuple[float, float] | None = None
    durable: bool = False
    num_standby: int = 0
    setbacks_limit: int = SETBACKS_LIMIT
    pause_range_s: tuple[float, float] = PAUSE_RANGE_S
    on_change: OnChange = OnChange.IN_PLACE


class JobPhase(StrEnum):
    """Where the job stands."""

    WAITING = "waiting"  # no worker yet: too few slots
    STARTING = "starting"  # the first round is being formed; of restarted workers, the processes of any round start
    RUNNING = "running"  # a round trains
    RESETTING = "resetting"  # a round is over, the next is being formed
    ENDED = "ended"


class WorkerPhase(StrEnum):
    """Where a living process stands."""

    BOOTING = "booting"  # started, has not asked for a round yet
    READY = "ready"  # its request for the next round is open; of restarted workers, its process runs
    MEMBER = "member"  # in the current round; of workers without rounds, its process runs
    LEAVING = "leaving"  # dismissed or being stopped: its end is no news


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A living process.

    Attributes:
        worker: its name.
        phase: where it stands.
        since: when it entered the phase.
        deadline: when it is stopped if it is still in this phase; None for no bound.
        round_id: the last round it was in; 0 for none.
        has_state: whether it holds the training's state: it has synced once, or was there before the first commit. A
            member whose first round broke before it had synced is as blank as a joiner.
        rank: its rank in that round.
        commits: commits of its state, as it said last.
        backends: what it can use for collectives, best first.
        running: whether it has said that it trains in its round.
        stopped: whether it is about to end in any case: StopWorker was given for it, or it is dying.
    """

    worker: WorkerId
    phase: WorkerPhase
    since: float
    deadline: float | None
    round_id: int = 0
    has_state: bool = False
    rank: int = 0
    commits: int = 0
    backends: tuple[Backend, ...] = ()
    running: bool = False
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A round of restarted workers whose processes are being started.

    Attributes:
        placed: its members by rank, as they are told when they start.
        cause: what made it, in words.
        old_size: members of the last round that has begun (0 for none).
    """

    placed: tuple[Placed, ...]
    cause: str
    old_size: int


@dataclass(frozen=True, slots=True)
class State:
    """Everything the membership core knows.

    Attributes:
        policy: the limits.
        phase: where the job stands.
        hosts: discovery's last answer, in rank order.
        host_order: names of all hosts that are listed or have living workers, in rank order.
        discovered: whether discovery has answered at all.
        discovery_failing_since: when discovery began to fail; None while it answers.
        discovery_error: what it said when it failed last.
        discovery_told_at: when its failing was last told of; None for never.
        blacklist: the failed hosts.
        drained: places that get no workers until their host has left the list: (hostname, slot), None for all slots.
        workers: living processes, in order of start.
        attempts: how many processes each place has had.
        round_id: the current or last round; 0 before the first.
        members: its workers by rank (also those that have ended).
        handing_over: the one whose place was gone already when the round was formed; None for no such member.
        registry: who has reported what in it.
        notice_kind, notice_version: what its members are told now.
        commits: the most commits any worker has had.
        unplanned: whether the reset under way is due to a failure.
        crashes: causes of the reset under way, in words, in order; at most so many as are told.
        more_crashes: how many there were beyond these.
        reinits: members that have called ``shutdown()`` and ``init()`` in the reset under way, in order of arrival.
        reset_began: when the reset under way (or the start) began.
        slots_deadline: when the wait for slots ends the job; None while there are enough.
        resets: unplanned resets so far.
        reset_times: when those were that still count for the limit.
        setbacks: how far the training has come, and how often in a row it has come no further.
        first_failure: the first failure since the last round was formed.
        standby_room: the fewest places for standbys that were told of, too few; None for none yet.
        ever_ready: whether any worker has ever asked for a round; where workers ask for none, whether one has started.
        launch: of restarted workers, the last round whose processes were started, until it begins; None at other times.
    """

    policy: Policy
    phase: JobPhase = JobPhase.WAITING
    hosts: tuple[Host, ...] = ()
    host_order: tuple[str, ...] = ()
    discovered: bool = False
    discovery_failing_since: float | None = None
    discovery_error: str = ""
    discovery_told_at: float | None = None
    blacklist: Blacklist = field(default_factory=Blacklist)
    drained: frozenset[tuple[str, int | None]] = frozenset()
    workers: Roster[WorkerRecord] = field(default_factory=Roster)
    attempts: Attempts = field(default_factory=Attempts)
    round_id: int = 0
    members: tuple[WorkerId, ...] = ()
    handing_over: WorkerId | None = None
    registry: WorkerStateRegistry = field(default_factory=lambda: WorkerStateRegistry(0, ()))
    notice_kind: NoticeKind = NoticeKind.NONE
    notice_version: int = 0
    commits: int = 0
    unplanned: bool = False
    crashes: tuple[str, ...] = ()
    more_crashes: int = 0
    reinits: tuple[WorkerId, ...] = ()
    reset_began: float = 0.0
    slots_deadline: float | None = None
    resets: int = 0
    reset_times: tuple[float, ...] = ()
    setbacks: Setbacks = field(default_factory=Setbacks)
    first_failure: Failure | None = None
    standby_room: int | None = None
    ever_ready: bool = False
    launch: Launch | None = None


def new_state(policy: Policy, now: float) -> State:
    """The state of a job that has not looked for hosts yet."""
    return State(
        policy,
        blacklist=Blacklist(policy.cooldown_range_s),
        slots_deadline=now + policy.elastic_timeout_s,
        reset_began=now,
    )


def record_of(state: State, worker: WorkerId) -> WorkerRecord | None:
    """The worker's record; None when its process is not alive."""
    return state.workers.find(worker)


def in_phase(state: State, *phases: WorkerPhase) -> tuple[WorkerRecord, ...]:
    """Living workers in one of these phases, in order of start."""
    return tuple(record for record in state.workers if record.phase in phases)


def finishing(state: State) -> bool:
    """Whether a member has ended with success: no growth, no planned change any more."""
    return any(reported is WorkerState.SUCCESS for _, reported in state.registry.records)


def causes(state: State) -> list[str]:
    """What has failed since the last round was formed, in words: who crashed, or who lost the round if nobody did."""
    more, complaint = state.more_crashes, state.setbacks.complaint
    if not state.crashes:
        return [] if complaint is None else [complaint.told]
    return [*state.crashes, *([f"and {more} more failure{'' if more == 1 else 's'}"] if more else [])]


def with_cause(state: State, text: str) -> State:
    """With one crash more."""
    if len(state.crashes) < _MOST_CRASHES_TOLD:
        return replace(state, crashes=(*state.crashes, text))
    return replace(state, more_crashes=state.more_crashes + 1)


def most_advanced(stateful: tuple[WorkerRecord, ...]) -> WorkerRecord:
    """Whose state the next round goes on from: the most commits, then the lowest rank so far."""
    return min(stateful, key=lambda record: (-record.commits, record.rank))
