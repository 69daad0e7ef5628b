"""The state of a job: one frozen value, and the questions that are asked of it.

Owns no decision: those are in :mod:`elastic_driver.membership`. Everything here is derived from fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastic_driver.attempts import Attempts
from elastic_driver.blacklist import Blacklist
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.registry import WorkerState, WorkerStateRegistry
from elastic_driver.rendezvous.messages import Backend, NoticeKind
from elastic_driver.roster import Roster
from elastic_driver.setbacks import Failure, Setbacks

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
        cooldown_range_s: see :class:`elastic_driver.blacklist.Blacklist`.
        durable: whether commits are on disc, so that the job outlives all who have its state in memory.
        num_standby: booted workers to keep beyond these, in slots that no member needs.
        setbacks_limit: so many setbacks in a row end the job.
        pause_range_s: shortest and longest pause after a setback; none after the first, then twice as long each time.
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
        ever_ready: whether any worker has ever asked for a round.
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


def all_offered(state: State, workers: Sequence[WorkerId]) -> bool:
    """Whether discovery lists all these workers' places, and nobody has drained one of them."""
    slots = {host.name: host.slots for host in state.hosts}
    return all(
        worker.slot < slots.get(worker.hostname, 0) and not is_drained(state, worker.hostname, worker.slot)
        for worker in workers
    )


def keeps_its_places(state: State) -> bool:
    """Whether all places of the round's members are offered as they were when it was formed."""
    return all_offered(state, [worker for worker in state.members if worker != state.handing_over])


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
    closed = (
        {host.name for host in state.hosts if state.blacklist.is_blacklisted(host.name)}
        if state.blacklist.entries
        else set()
    )
    kept = {
        (record.worker.hostname, record.worker.slot)
        for record in (state.workers if closed else ())
        if record.worker.hostname in closed and record.phase is not WorkerPhase.LEAVING
    }
    places = [(host.name, slot) for host in state.hosts for slot in range(host.slots)]
    if closed or state.drained:
        places = [
            place for place in places if (place[0] not in closed or place in kept) and not is_drained(state, *place)
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


def next_members(state: State) -> tuple[WorkerRecord, ...]:
    """Who would be in a round that was formed now: the READY workers with a place.

    If all who hold the state are on hosts that left, one of them stays a round to hand it to the newcomers.
    """
    targets = target_places(state)
    ready = in_phase(state, WorkerPhase.READY)
    members = tuple(record for record in ready if in_target(record, targets))
    stateful = tuple(record for record in ready if record.has_state)
    if not members or not stateful or any(record.has_state for record in members):
        return members
    limit = state.policy.max_num_proc
    # With max-np 1 there is no other way to hand over than to be two for this one round.
    kept = members if limit is None else members[: max(1, limit - 1)]
    return (most_advanced(stateful), *kept)


def most_advanced(stateful: tuple[WorkerRecord, ...]) -> WorkerRecord:
    """Whose state the next round goes on from: the most commits, then the lowest rank so far."""
    return min(stateful, key=lambda record: (-record.commits, record.rank))


def pause_until(state: State) -> float | None:
    """Until when no round is formed, since the last one was a setback; None when nothing is put off.

    It is not for a round in other places than the one that failed: a host that is new, drained or removed may be what
    makes the difference. Processes that were started again in the same places do not.
    """
    if state.phase is not JobPhase.RESETTING or state.setbacks.count < 2 or not keeps_its_places(state):
        return None
    failed = dict.fromkeys((worker.hostname, worker.slot) for worker in state.members)
    return state.setbacks.until if all(in_target(record, failed) for record in next_members(state)) else None


def held_until(state: State) -> float | None:
    """Until when a round that could be formed waits: for the end of a pause, or for joiners. None: for nothing."""
    if state.phase not in (JobPhase.STARTING, JobPhase.RESETTING) or not state.registry.complete:
        return None
    waits, pause = joiners_wait_until(state), pause_until(state)
    if waits is None and pause is None:
        return None
    members = next_members(state)
    if len(members) < state.policy.min_num_proc:
        return None
    # Survivors that suffice never wait for joiners, nor does a start that has all it asked for.
    survivors = sum(1 for record in members if record.round_id)
    if survivors >= state.policy.min_num_proc or (
        state.phase is JobPhase.STARTING and len(members) >= state.policy.num_proc
    ):
        waits = None
    return max((time for time in (waits, pause) if time is not None), default=None)


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
    joiners = joiners_wait_until(state) if state.phase is JobPhase.RUNNING else held_until(state)
    times += [state.slots_deadline, state.blacklist.next_expiry(), joiners]
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
    assert state.setbacks.until is None or state.registry.complete, "a round is judged before it is over"
    if state.phase is JobPhase.RUNNING:
        assert in_phase(state, WorkerPhase.MEMBER), "a round runs without a living member"
    elif state.phase is not JobPhase.ENDED:
        assert next_deadline(state) is not None, f"{state.phase} without a deadline"
    for record in in_phase(state, WorkerPhase.BOOTING, WorkerPhase.LEAVING):
        assert record.deadline is not None or record.stopped, "a worker without a deadline"
