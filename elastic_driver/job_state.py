"""The state of a job: one frozen value, and the questions that are asked of it.

Owns no decision: those are in :mod:`elastic_driver.membership`. Everything here is derived from fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elastic_driver.blacklist import Blacklist
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.registry import WorkerState, WorkerStateRegistry
from elastic_driver.rendezvous.messages import Backend, NoticeKind
from elastic_driver.roster import Roster

# How long the first READY joiner waits for others that are still booting, so that hosts which appear together cost
# one reset and not one each. Imports of one machine's workers end within a few seconds of each other.
JOINERS_WINDOW_S = 5.0

# How long a dismissed worker may take to run its exit handlers before it is stopped (torchrun's grace for the same).
DISMISSED_GRACE_S = 30.0

# A discovery script that fails is warned of at most as often as this; its next answer is told of after a failure that
# lasted for some runs of it.
DISCOVERY_TOLD_S = 60.0
DISCOVERY_OUTAGE_S = 5.0

# Places (hostname, slot) in rank order. A mapping, because what is asked of it most is whether a place is among them.
Places = Mapping[tuple[str, int], None]

# How often a job whose commits are on disc may lose all workers without a commit more on disc than the time before: a
# script that fails at the same step each time does so for ever.
FRUITLESS_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of a job, from its settings. Durations in seconds.

    Attributes:
        num_proc: slots needed before the start.
        min_num_proc: fewest members of a round.
        max_num_proc: most members of a round; None for no bound.
        num_standby: booted workers to keep beyond these, in slots that no member needs.
        elastic_timeout_s: how long the job may lack slots (or discovery may fail) before it ends.
        start_timeout_s: how long a worker may take from its start, or from the break of its round, to be READY.
        reset_limit: unplanned resets allowed; None for no bound.
        reset_window_s: how long a reset counts for that; None for ever.
        cooldown_range_s: see :class:`elastic_driver.blacklist.Blacklist`.
        durable: whether commits are on disc, so that the job outlives all who have its state in memory.
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


class JobPhase(StrEnum):
    """Where the job stands."""

    WAITING = "waiting"  # no worker yet: too few slots
    STARTING = "starting"  # the first round is being formed
    RUNNING = "running"  # a round trains
    RESETTING = "resetting"  # a round is over, the next is being formed
    ENDED = "ended"


class WorkerPhase(StrEnum):
    """Where a living process stands."""

    BOOTING = "booting"  # started, has not asked for a round yet
    READY = "ready"  # its request for the next round is open
    MEMBER = "member"  # in the current round
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
class Failure:
    """The first failure of a reset, for the message that ends the job."""

    worker: WorkerId
    rank: int | None
    how: str


@dataclass(frozen=True, slots=True)
class State:
    """Everything the membership core knows.

    Attributes:
        policy: the limits.
        phase: where the job stands.
        began: when the job began.
        hosts: discovery's last answer, in rank order.
        host_order: names of all hosts that are listed or have living workers, in rank order.
        discovered: whether discovery has answered at all.
        discovery_failing_since: when discovery began to fail; None while it answers.
        discovery_error: what it said when it failed last.
        discovery_told_at: when its failing was last told of; None for never.
        blacklist: the failed hosts.
        drained: places that get no workers until their host has left the list: (hostname, slot), None for all slots.
        workers: living processes, in order of start.
        attempts: how many processes each place has had: ((hostname, slot), count).
        round_id: the current or last round; 0 before the first.
        members: its workers by rank (also those that have ended).
        registry: who has reported what in it.
        notice_kind, notice_version: what its members are told now.
        commits: the most commits any worker has had.
        unplanned: whether the reset under way is due to a failure.
        crashes: causes of the reset under way, in words, in order.
        lost: what the first member said whose collective failed; "" for none.
        reinits: members that have called ``shutdown()`` and ``init()`` in the reset under way, in order of arrival.
        reset_began: when the reset under way (or the start) began.
        slots_deadline: when the wait for slots ends the job; None while there are enough.
        resets: unplanned resets so far.
        reset_times: when those were that still count for the limit.
        trained_from: the most commits that a round has begun to train from; counted for durable jobs only.
        fruitless: rounds since, after a failure, of which no member had any commits in memory; of these jobs, too.
        first_failure: the first failure since the last round was formed.
        standby_room: the fewest places for standbys that were told of, too few; None for none yet.
        ever_ready: whether any worker has ever asked for a round.
    """

    policy: Policy
    began: float
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
    attempts: tuple[tuple[tuple[str, int], int], ...] = ()
    round_id: int = 0
    members: tuple[WorkerId, ...] = ()
    registry: WorkerStateRegistry = field(default_factory=lambda: WorkerStateRegistry(0, ()))
    notice_kind: NoticeKind = NoticeKind.NONE
    notice_version: int = 0
    commits: int = 0
    unplanned: bool = False
    crashes: tuple[str, ...] = ()
    lost: str = ""
    reinits: tuple[WorkerId, ...] = ()
    reset_began: float = 0.0
    slots_deadline: float | None = None
    resets: int = 0
    reset_times: tuple[float, ...] = ()
    trained_from: int = 0
    fruitless: int = 0
    first_failure: Failure | None = None
    standby_room: int | None = None
    ever_ready: bool = False


def new_state(policy: Policy, now: float) -> State:
    """The state of a job that has not looked for hosts yet."""
    return State(
        policy,
        began=now,
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
    return bool(state.registry.workers_in(WorkerState.SUCCESS))


def usable_slots(state: State) -> int:
    """Slots of all listed hosts that are not blacklisted, at most max-np."""
    slots = sum(
        not is_drained(state, host.name, slot)
        for host in state.hosts
        if not state.blacklist.is_blacklisted(host.name)
        for slot in range(host.slots)
    )
    limit = state.policy.max_num_proc
    return slots if limit is None else min(slots, limit)


def is_drained(state: State, hostname: str, slot: int) -> bool:
    """Whether this place is to be left free."""
    return bool(state.drained) and not state.drained.isdisjoint(((hostname, None), (hostname, slot)))


def target_places(state: State) -> Places:
    """The places (hostname, slot) that are to have a rank, in rank order.

    A blacklisted host keeps the places where a worker still lives (siblings of a joiner that failed to boot), and
    gets no others. When max-np leaves too little room, places of members go before READY ones, those before booting
    ones, occupied before free, and free before those whose last worker is still leaving (it may never be gone). So a
    standby that is READY takes the place of a lost member without a decision of its own.
    """
    return _choose_places(state)[0]


def standby_places(state: State) -> Places:
    """The places beyond those that are to have a booted worker all the same, in rank order.

    None before the first round, whose start they would slow down. Who stands by already goes on; otherwise hosts
    without ranks come first, since a host is lost as a whole.
    """
    return _choose_places(state)[1] if state.policy.num_standby else {}


def wanted_places(state: State) -> Places:
    """The places that are to have a worker, with a rank or standing by."""
    targets, standbys = _choose_places(state)
    return {**targets, **standbys} if standbys else targets


def _choose_places(state: State) -> tuple[Places, Places]:
    closed = {host.name for host in state.hosts if state.blacklist.is_blacklisted(host.name)}
    kept = {
        (record.worker.hostname, record.worker.slot)
        for record in (state.workers if closed else ())
        if record.worker.hostname in closed and record.phase is not WorkerPhase.LEAVING
    }
    places = [
        place
        for host in state.hosts
        for place in ((host.name, slot) for slot in range(host.slots))
        if (host.name not in closed or place in kept) and not (state.drained and is_drained(state, *place))
    ]
    limit = state.policy.max_num_proc
    if limit is None or len(places) <= limit:
        return dict.fromkeys(places), {}
    alive: dict[tuple[str, int], int] = {}
    leaving: set[tuple[str, int]] = set()
    for record in state.workers:
        place = (record.worker.hostname, record.worker.slot)
        if record.phase is WorkerPhase.LEAVING:
            leaving.add(place)
        else:
            alive[place] = 0 if record.round_id else 1 if record.phase is WorkerPhase.READY else 2
    urgency = [alive.get(place, 4 if place in leaving else 3) for place in places]
    by_urgency = sorted(range(len(places)), key=lambda index: (urgency[index], index))
    targets = dict.fromkeys(places[index] for index in sorted(by_urgency[:limit]))
    if not state.policy.num_standby or not state.round_id:
        return targets, {}
    busy = {hostname for hostname, _ in targets}
    rest = sorted(by_urgency[limit:], key=lambda index: (urgency[index], places[index][0] in busy, index))
    return targets, dict.fromkeys(places[index] for index in sorted(rest[: state.policy.num_standby]))


def standing_by(state: State) -> tuple[WorkerRecord, ...]:
    """Workers that are READY, have no rank, and are to get one when a member is lost; in order of start."""
    standbys = standby_places(state)
    return tuple(record for record in in_phase(state, WorkerPhase.READY) if in_target(record, standbys))


def in_target(record: WorkerRecord, targets: Places) -> bool:
    """Whether the worker's place is one of these."""
    return (record.worker.hostname, record.worker.slot) in targets


def joiners_wait_until(state: State) -> float | None:
    """Until when READY joiners wait for others that still boot, before the round is closed for them.

    A worker that leaves a place counts as one that boots there: its successor is started as soon as it is gone. None
    when nothing waits for this: no joiner is READY or none boots, the notice is out already, or the job lacks workers
    (then their number decides, not the window).
    """
    joiners = any(record.phase is WorkerPhase.READY and not record.round_id for record in state.workers)
    if not joiners or not in_phase(state, WorkerPhase.BOOTING, WorkerPhase.LEAVING):
        return None
    targets = target_places(state)
    ready = [record for record in in_phase(state, WorkerPhase.READY) if in_target(record, targets)]
    joined = [record.since for record in ready if not record.round_id]
    alive = {(r.worker.hostname, r.worker.slot) for r in state.workers if r.phase is not WorkerPhase.LEAVING}
    free = dict.fromkeys(place for place in targets if place not in alive)
    booting = [record for record in in_phase(state, WorkerPhase.BOOTING) if in_target(record, targets)]
    booting += [record for record in in_phase(state, WorkerPhase.LEAVING) if in_target(record, free)]
    if not joined or not booting:
        return None
    if state.phase is JobPhase.RUNNING:
        waiting = state.notice_kind is NoticeKind.NONE and not finishing(state)
    else:
        waiting = state.registry.complete and len(ready) >= state.policy.min_num_proc
    return min(joined) + JOINERS_WINDOW_S if waiting else None


def next_deadline(state: State) -> float | None:
    """When the driver is to feed TimerExpired next (seconds, the clock of ``now``); None for never.

    May be in the past: then at once. The step that takes it moves the deadline on.
    """
    if state.phase is JobPhase.ENDED:
        return None
    times = [record.deadline for record in state.workers]
    if state.phase in (JobPhase.STARTING, JobPhase.RESETTING) and not state.registry.complete:
        times.append(state.registry.deadline)
    if state.discovery_failing_since is not None:
        times.append(state.discovery_failing_since + state.policy.elastic_timeout_s)
    times += [state.slots_deadline, state.blacklist.next_expiry(), joiners_wait_until(state)]
    return min((time for time in times if time is not None), default=None)


def check_invariants(state: State) -> None:
    """Raises AssertionError when the state is one that must not be. For tests, and for the driver's debug mode."""
    policy = state.policy
    places = [
        (record.worker.hostname, record.worker.slot)
        for record in state.workers
        if record.phase is not WorkerPhase.LEAVING
    ]
    assert len(places) == len(set(places)), "two living workers in one place"
    assert len(state.members) == len(set(state.members)), "a member twice"
    if state.phase in (JobPhase.RUNNING, JobPhase.RESETTING):
        assert state.round_id > 0
        assert state.registry.round_id == state.round_id
        limit = policy.max_num_proc
        # The one round in which a job of one worker moves to another host has two.
        assert limit is None or len(state.members) <= max(2, limit), "more members than max-np"
        assert len(state.members) >= policy.min_num_proc, "fewer members than min-np"
    for record in in_phase(state, WorkerPhase.MEMBER):
        assert record.worker in state.members, "a member that the round does not know"
        assert record.round_id == state.round_id
    if state.phase is JobPhase.RUNNING:
        assert in_phase(state, WorkerPhase.MEMBER), "a round runs without a living member"
    elif state.phase is not JobPhase.ENDED:
        assert next_deadline(state) is not None, f"{state.phase} without a deadline"
    for record in in_phase(state, WorkerPhase.BOOTING, WorkerPhase.LEAVING):
        assert record.deadline is not None or record.stopped, "a worker without a deadline"
