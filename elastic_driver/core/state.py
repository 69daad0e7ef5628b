"""The state of a job: one frozen value, made of values that say what is known only while it means something.

Owns no decision: those are in :mod:`elastic_driver.core.membership`. A field stands in the value whose life it shares:
what a reset collects is gone with the reset. So the phase of the job is not stored, it is which of them there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import lcm

from elastic_driver.core.assignment import Placed
from elastic_driver.core.attempts import Attempts
from elastic_driver.core.blacklist import Blacklist
from elastic_driver.core.cuts import Accuser, Cuts
from elastic_driver.core.events import EndJob, Fault
from elastic_driver.core.moments import Moment
from elastic_driver.core.registry import WorkerState, WorkerStateRegistry
from elastic_driver.core.roster import Roster
from elastic_driver.core.setbacks import Failure, Setbacks
from elastic_driver.hosts import CHIEF, Host, WorkerId
from elastic_driver.words import PAUSE_RANGE_S, SETBACKS_LIMIT, Backend, Ending, NoticeKind, OnChange, Sizing, counted

# How long a dismissed worker may take to run its exit handlers before it is stopped (torchrun's grace for the same).
DISMISSED_GRACE_S = 30.0

# So long before its machine is gone a worker that has not left a departing host is killed: the others then break their
# round at a death that is seen, and not at a host that is silent.
LAST_MOMENT_S = 1.0

# A discovery script that fails is warned of at most as often as this; its next answer is told of after a failure that
# was told of, or lasted for some runs of it.
DISCOVERY_TOLD_S = 60.0
DISCOVERY_OUTAGE_S = 5.0


# When one of the hosts that the job waits for is heard again, its network may be whole, and the others be heard soon:
# their connections try again at times that lie a few tenths of a second apart.
HEALING_S = 2.0


# How long the first new slots for restarted workers wait for others, so that hosts which come together cost one restart
# and not one each. They may have an image to pull, or ssh to answer; a restart costs about as much.
LAST_CALL_S = 1.0

# How long a round of restarted workers is not ended for a host that still imports what they import. An agent gives its
# imports 60 s, and then has its workers started afresh.
PREPARING_S = 75.0

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
        elastic_timeout_s: how long the job may lack slots before it ends.
        start_timeout_s: how long a worker may take from its start, or from the break of its round, to be READY; and
            from when it says that it exits until it has ended.
        drain_timeout_s: how long a worker whose place is drained may go on training.
        reset_limit: unplanned resets allowed; None for no bound.
        reset_window_s: how long a reset counts for that; None for ever.
        cooldown_range_s: see :class:`elastic_driver.core.blacklist.Blacklist`.
        durable: whether commits are on disc, so that the job outlives all who have its state in memory.
        num_standby: booted workers to keep beyond these, in slots that no member needs.
        num_proc_multiple: a round's members are a multiple of this.
        ranks_per_host_multiple: those on each host are a multiple of this.
        protect: names of hosts that are the better place for rank 0; so are those with the label.
        blames_hosts: whether a worker's failure puts its host out; else another is started in its place at once.
        setbacks_limit: so many setbacks in a row end the job.
        pause_range_s: shortest and longest pause after a setback; none after the first, then twice as long each time.
        on_change: what a change means for the workers. Of workers that may begin as one kind and become another, what
            they are now.
        becomes_in_place: whether workers that are restarted reset in place from their first ``init()`` on.
        retries_starts: whether restarted workers that fail before they have trained for a while are started again where
            the job cannot do without their hosts.
        must_init: whether a worker in place that ends with code 0 before ``init()`` cannot have been meant.
        last_call_s: how long a start or a growth of restarted workers waits for more slots; not at max-np.
        ends_at_start: whether a restarted worker's own failure, before the job has trained for a while, ends the job,
            where its host cannot be done without, or is not blamed; on several hosts, two of them in a row.
        sizing: by which flags these numbers were given.
        num_parameter_servers: servers that have slots before the workers, and are counted beside them; 0 for a job that
            has no chief.
        restart_chief: whether the chief is started again when it has failed, or a parameter server is lost.
        fixed_hosts: whether the list of hosts can never change, and none joins.
    """

    num_proc: int
    min_num_proc: int
    max_num_proc: int | None = None
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 300.0
    drain_timeout_s: float = 300.0
    reset_limit: int | None = None
    reset_window_s: float | None = None
    cooldown_range_s: tuple[float, float] | None = None
    durable: bool = False
    num_standby: int = 0
    num_proc_multiple: int = 1
    ranks_per_host_multiple: int = 1
    protect: tuple[str, ...] = ()
    blames_hosts: bool = True
    setbacks_limit: int = SETBACKS_LIMIT
    pause_range_s: tuple[float, float] = PAUSE_RANGE_S
    on_change: OnChange = OnChange.IN_PLACE
    becomes_in_place: bool = False
    must_init: bool = True
    retries_starts: bool = False
    last_call_s: float = LAST_CALL_S
    ends_at_start: bool = False
    sizing: Sizing = Sizing.NP
    num_parameter_servers: int = 0
    restart_chief: bool = False
    fixed_hosts: bool = False

    @property
    def has_chief(self) -> bool:
        """Whether the command is the script of a chief, which works with servers."""
        return self.num_parameter_servers > 0

    @property
    def start_flag(self) -> str:
        """What says ``num_proc``."""
        return _flag(self.sizing, "-np")

    @property
    def least_flag(self) -> str:
        """What says ``min_num_proc``. It may have been given beside torchrun's flags."""
        return "--min-np" if self.min_num_proc != self.num_proc else _flag(self.sizing, "--min-np")

    @property
    def most_flag(self) -> str:
        """What says ``max_num_proc``."""
        return _flag(self.sizing, "--max-np")

    @property
    def limit_flag(self) -> str:
        """What says ``reset_limit``."""
        return "--reset-limit" if self.sizing is Sizing.NP else "--max-restarts"

    @property
    def multiple(self) -> int:
        """What the number of a round's members is a multiple of, of which each host has a multiple too."""
        return lcm(self.num_proc_multiple, self.ranks_per_host_multiple)


def _flag(sizing: Sizing, usual: str) -> str:
    return {Sizing.NPROC: "--nproc-per-node", Sizing.NNODES: "--nnodes times --nproc-per-node"}.get(sizing, usual)


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
    READY = "ready"  # it has asked for the next round; of restarted workers, its process runs
    MEMBER = "member"  # in the current round; of workers without rounds, its process runs
    LEAVING = "leaving"  # dismissed or being stopped: its end is no news


class Leaving(StrEnum):
    """Why a worker is going to end, other than by itself. The table in the head of the core has what is done for it."""

    DISMISSED = "dismissed"  # told that there is no place for it: it ends by itself
    STOPPED = "stopped"  # told to end as usual
    CHECKPOINTS = "checkpoints"  # told to end, with time for a checkpoint
    BROKEN = "broken"  # told to end at once, as its peers are lost
    DYING = "dying"  # it was seen that it is about to end, and nobody had told it to: it has failed


# By what StopWorker says.
_TOLD = {
    Ending.USUAL: Leaving.STOPPED,
    Ending.PLANNED: Leaving.CHECKPOINTS,
    Ending.BROKEN: Leaving.BROKEN,
}
_ENDINGS = {why: ending for ending, why in _TOLD.items()}


@dataclass(frozen=True, slots=True)
class Server:
    """What a worker of a job with a chief is to the chief, from its start to its end.

    Attributes:
        number: which of the parameter servers it is; None for a worker.
        address: where it answers, ``host:port``; "" as long as it has not said so, and when it is to end.
    """

    number: int | None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Kill:
    """That a worker is being killed.

    Attributes:
        how: what it did, in words, as the cause of its end: "hung: no heartbeat for 60.0 s".
        fault: whose doing that is.
        hangs, exits: see KillWorker.
    """

    how: str
    fault: Fault
    hangs: bool = False
    exits: bool = False


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A living process.

    Attributes:
        worker: its name.
        phase: where it stands.
        since: when it entered the phase.
        round_id: the last round it was in; 0 for none.
        has_state: whether it holds the training's state: it has synced once, or was there before the first commit. A
            member whose first round broke before it had synced is as blank as a joiner.
        rank: its rank in that round.
        commits: commits of its state, as it said last.
        committed_at: since when it had made no commit when its round broke, or had trained in it, if it made none
            there; None where its round did not break, or it had not trained there. Of one that is READY only.
        backends: what it can use for collectives, best first.
        running: whether it has said that it trains in its round. Of a MEMBER only.
        leaving: why it is LEAVING; None for one that is not.
        killed: why it is being killed; None when it is not.
        leave_by: when it is killed if it still trains in a drained place; None for no bound.
        exit_by: when it is killed if it has not ended, though it said that it exits; None for no bound.
        server: what it is to the chief; None in a job that has none.
    """

    worker: WorkerId
    phase: WorkerPhase
    since: Moment
    round_id: int = 0
    has_state: bool = False
    rank: int = 0
    commits: int = 0
    committed_at: Moment | None = None
    backends: tuple[Backend, ...] = ()
    running: bool = False
    leaving: Leaving | None = None
    killed: Kill | None = None
    leave_by: Moment | None = None
    exit_by: Moment | None = None
    server: Server | None = None

    @property
    def parameter_server(self) -> int | None:
        """Which of the parameter servers it is; None for a worker."""
        return None if self.server is None else self.server.number

    @property
    def address(self) -> str:
        """Where its server answers; "" for one that has none, or does not."""
        return "" if self.server is None else self.server.address

    @property
    def who(self) -> str:
        """What it is, in words."""
        return f"worker {self.worker}" if self.parameter_server is None else self.server_name

    @property
    def server_name(self) -> str:
        """The name of a parameter server, in words."""
        return f"parameter server {self.parameter_server} ({self.worker})"


class ChiefPhase(StrEnum):
    """Where the chief stands, while there is one."""

    RUNNING = "running"
    STOPPING = "stopping"  # it is told to end, and another is started then
    FAILED = "failed"  # it has ended, and not well: what comes of that is decided in the same step


@dataclass(frozen=True, slots=True)
class Chief:
    """The script of a job with parameter servers, which gives their work to the workers.

    Attributes:
        number: of its start, from 1.
        phase: where it stands.
        since: when it entered the phase.
        lost: what has become of the first parameter server that it lost, in words; "" while it has all of them.
        failed: how it has failed itself, in words; "" for not.
        ends_by: when the job ends if the chief has not, since it cannot go on without that one; None for no bound.
    """

    number: int
    phase: ChiefPhase
    since: Moment
    lost: str = ""
    failed: str = ""
    ends_by: Moment | None = None


@dataclass(frozen=True, slots=True)
class Outage:
    """Discovery has answered before, and fails now.

    Attributes:
        since: its first failure since its last answer.
        error: what it said when it failed last.
    """

    since: Moment
    error: str


@dataclass(frozen=True, slots=True)
class Discovery:
    """What is known of the hosts.

    Attributes:
        hosts: those of the last answer that are up, in rank order; None before the first.
        down: names of those that are listed, and not up.
        order: all hosts that are up or have living workers, and those that were and are down, as they were listed last,
            in rank order.
        outage: None while it answers.
        told_at: when its failing was last told of; None for never.
    """

    hosts: tuple[Host, ...] | None = None
    down: frozenset[str] = frozenset()
    order: tuple[Host, ...] = ()
    outage: Outage | None = None
    told_at: Moment | None = None
    # By name, of the hosts that are up; and of all of them. Derived.
    slots: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    total_slots: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.slots.update((host.name, host.slots) for host in self.hosts or ())
        object.__setattr__(self, "total_slots", sum(self.slots.values()))


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing is heard of a host.

    Attributes:
        hostname: which.
        since: when something was heard last.
        sure: see HostSilent.
        told: whether it was told that the job waits for it.
        kept_until: it is not given up before, since another host has been heard again; None for at once.
        given_up: whether it was given up. Its workers are as good as dead; what lives of them is told so when it is
            heard again.
    """

    hostname: str
    since: Moment
    sure: bool
    told: bool = False
    kept_until: Moment | None = None
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """The current round; in a reset, the one that is over.

    That of restarted workers is here from its launch on. Workers without rounds are in one that has no number and no
    members, from the start of the job on.

    Attributes:
        round_id: its number, from 1.
        members: its workers by rank (also those that have ended).
        handing_over: the one whose place was gone already when the round was formed; None for no such member.
        reset_began: when the reset that it came of (or the start) began.
        sync: whether its members broadcast rank 0's state first.
        commits: commits of rank 0's state when it was formed.
        backend: what carries its collectives; None where that is the workers' own affair.
        notice: what its members are told now.
    """

    round_id: int
    members: tuple[WorkerId, ...]
    handing_over: WorkerId | None
    reset_began: Moment
    sync: bool = False
    commits: int = 0
    backend: Backend | None = None
    notice: NoticeKind = NoticeKind.NONE
    # Of members. Derived, and handed on: it is made once for each round.
    _known: frozenset[WorkerId] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self._known is None:
            object.__setattr__(self, "_known", frozenset(self.members))

    def __contains__(self, worker: WorkerId) -> bool:
        return self._known is not None and worker in self._known


@dataclass(frozen=True, slots=True)
class Reset:
    """What happens between two rounds; the start is one too.

    Attributes:
        began: when.
        deadline: when the silent are voted out.
        slots_deadline: when the wait for slots ends the job; None while there are enough, or that is not known yet.
        unplanned: whether it is due to a failure.
        crashes: its causes in words, in order; at most so many as are told.
        more_crashes: how many there were beyond these.
        first_failure: the first of them, by when it was; None for none yet.
        accusers: its members that cannot reach others, until that is judged.
        reinits: members that have called ``shutdown()`` and ``init()``, in order of arrival.
        waits_for_ends: whether the next round of restarted workers waits for the ends of those of the last one, at most
            until the deadline.
        peers_lost: whether a restarted worker was lost while it was given time to end: the others may wait for it.
        lacks_slots: whether the next round of restarted workers had too few slots, and has not been launched since.
    """

    began: Moment
    deadline: Moment
    slots_deadline: Moment | None = None
    unplanned: bool = False
    crashes: tuple[str, ...] = ()
    more_crashes: int = 0
    first_failure: Failure | None = None
    accusers: Roster[Accuser] = field(default_factory=Roster)
    reinits: tuple[WorkerId, ...] = ()
    waits_for_ends: bool = True
    peers_lost: bool = False
    lacks_slots: bool = False

    def waiting_for_slots(self, until: float) -> Reset:
        """With a bound for the wait for slots, unless it has one."""
        return self if self.slots_deadline is not None else replace(self, slots_deadline=until)

    def with_cause(self, text: str, failure: Failure) -> Reset:
        """With one crash more."""
        first = self.first_failure
        if first is None or failure.is_before(first):
            first = failure
        if len(self.crashes) < _MOST_CRASHES_TOLD:
            return replace(self, crashes=(*self.crashes, text), first_failure=first)
        return replace(self, more_crashes=self.more_crashes + 1, first_failure=first)


@dataclass(frozen=True, slots=True)
class Launch:
    """A round of restarted workers whose processes are being started, or could not all be.

    Attributes:
        placed: its members by rank, as they are told when they start.
        cause: what made it, in words.
        old_size: members of the last round that has begun (0 for none).
        broken: whether one has failed before all ran: it will never begin.
    """

    placed: tuple[Placed, ...]
    cause: str
    old_size: int
    broken: bool = False


@dataclass(frozen=True, slots=True)
class ResetTally:
    """The unplanned resets of a job.

    Attributes:
        count: so far.
        times: when those were that still count for the limit; empty without a window.
    """

    count: int = 0
    times: tuple[Moment, ...] = ()

    def one_more(self, now: float, window_s: float | None) -> ResetTally:
        """With one that ends now."""
        times = () if window_s is None else (*(at for at in self.times if now - at < window_s), now)
        return ResetTally(self.count + 1, times)

    def that_count(self, now: float, window_s: float | None) -> int:
        """How many count for the limit."""
        return self.count if window_s is None else sum(1 for at in self.times if now - at < window_s)


@dataclass(frozen=True, slots=True)
class Departing:
    """A drained host that is about to go, or whose lister says so.

    Attributes:
        hostname: which.
        why: in words.
        by: when its machine is gone; None when nobody has said.
        listed: whether it was the lister who said so: it may have the host stay after all.
        by_hand: whether somebody has drained it, besides: then it stays so when its machine has gone.
    """

    hostname: str
    why: str
    by: Moment | None
    listed: bool
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Preparing:
    """A host where nobody runs imports what workers import, so that they can be forked there.

    Attributes:
        hostname: which.
        until: when it is no longer waited for.
        late: whether that is over, and it has not said that it is ready.
    """

    hostname: str
    until: Moment
    late: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Everything the membership core knows.

    Attributes:
        policy: the limits.
        began: when the job began.
        end: the one command that ends the job; None while it goes on.
        discovery: the hosts, and how discovery does.
        blacklist: the failed hosts.
        cuts: hosts that are left out, since others cannot reach them.
        silent: hosts that are not heard, in the order in which that was seen.
        drained: places that get no workers until their host has left the list: (hostname, slot), None for all slots.
        departing: of the drained hosts those that are about to go, in the order in which that was said.
        preparing: hosts for which no round of restarted workers is ended yet, in the order of their names.
        workers: living processes, in order of start.
        attempts: how many processes each place has had.
        round: the current or last round; None before the first.
        reset: the reset (or start) under way; None while a round runs, and before there were slots for a start.
        registry: who has reported what in the round, or in the start.
        notice_version: how many notices were given.
        commits: the most commits any worker has had.
        tally: the unplanned resets so far.
        setbacks: how far the training has come, and how often in a row it has come no further.
        standby_room: the fewest places for standbys that were told of, too few; None for none yet.
        unused: what was told last of slots that are not used because of a multiple; "" for nothing.
        ever_ready: whether any worker has ever asked for a round; where workers ask for none, whether one has started.
        launch: of restarted workers, the current round until it has begun; None when it has.
        rounds_before: how many rounds restarted workers had before the job's workers became such that reset in place;
            the numbers of rounds go on from there.
        last_call: until when new slots for restarted workers wait for others; None when nothing waits for that.
        chief: of a job with parameter servers; None before its start, and between two of them.
        chiefs: how many were started.
    """

    policy: Policy
    began: Moment
    end: EndJob | None = None
    discovery: Discovery = field(default_factory=Discovery)
    blacklist: Blacklist = field(default_factory=Blacklist)
    cuts: Cuts = field(default_factory=Cuts)
    silent: tuple[Silence, ...] = ()
    drained: frozenset[tuple[str, int | None]] = frozenset()
    departing: tuple[Departing, ...] = ()
    preparing: tuple[Preparing, ...] = ()
    workers: Roster[WorkerRecord] = field(default_factory=Roster)
    attempts: Attempts = field(default_factory=Attempts)
    round: Round | None = None
    reset: Reset | None = None
    registry: WorkerStateRegistry = field(default_factory=lambda: WorkerStateRegistry(()))
    notice_version: int = 0
    commits: int = 0
    tally: ResetTally = field(default_factory=ResetTally)
    setbacks: Setbacks = field(default_factory=Setbacks)
    standby_room: int | None = None
    unused: str = ""
    ever_ready: bool = False
    launch: Launch | None = None
    rounds_before: int = 0
    last_call: Moment | None = None
    chief: Chief | None = None
    chiefs: int = 0

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.end is not None

    @property
    def phase(self) -> JobPhase:
        """Where the job stands."""
        if self.ended:
            return JobPhase.ENDED
        if self.launch is not None and not self.launch.broken:
            return JobPhase.STARTING
        if self.round is None:
            return JobPhase.WAITING if self.reset is None else JobPhase.STARTING
        return JobPhase.RUNNING if self.reset is None else JobPhase.RESETTING

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Those that are listed and up, in rank order."""
        return self.discovery.hosts or ()

    @property
    def listed(self) -> tuple[str, ...]:
        """Names of the hosts that are listed: those that are up, in rank order, and then the others."""
        return *self.discovery.slots, *sorted(self.discovery.down)

    def is_listed(self, hostname: str) -> bool:
        """Whether a host is listed, up or not."""
        return hostname in self.discovery.slots or hostname in self.discovery.down

    def is_member(self, worker: WorkerId) -> bool:
        """Whether a worker is in the current round, or in a reset in the one that is over."""
        return self.round is not None and worker in self.round

    @property
    def round_id(self) -> int:
        """The current or last round; 0 before the first."""
        return 0 if self.round is None else self.round.round_id

    @property
    def next_round_id(self) -> int:
        """The number of the next round."""
        return (self.round_id or self.rounds_before) + 1

    @property
    def members(self) -> tuple[WorkerId, ...]:
        """The workers of that round by rank, also those that have ended."""
        return () if self.round is None else self.round.members

    @property
    def notice_kind(self) -> NoticeKind:
        """What they are told now."""
        return NoticeKind.NONE if self.round is None else self.round.notice

    @property
    def resets(self) -> int:
        """Unplanned resets so far."""
        return self.tally.count

    @property
    def reset_began(self) -> float:
        """When the reset under way (or the start) began; while a round runs, the one that it came of."""
        if self.reset is not None:
            return self.reset.began
        return self.began if self.round is None else self.round.reset_began

    @property
    def first_failure(self) -> Failure | None:
        """The first failure since the last round was formed."""
        return None if self.reset is None else self.reset.first_failure

    @property
    def slots_deadline(self) -> float | None:
        """When the wait for slots ends the job; None while it does not wait for them."""
        if self.reset is not None:
            return self.reset.slots_deadline
        return self.began + self.policy.elastic_timeout_s if self.round is None else None


def new_state(policy: Policy, now: float) -> State:
    """The state of a job that has not looked for hosts yet."""
    return State(policy, began=now, blacklist=Blacklist(policy.cooldown_range_s))


def deadline_of(state: State, record: WorkerRecord) -> float | None:
    """When the worker is stopped if it is still in its phase; None for no bound."""
    match record.phase:
        case WorkerPhase.BOOTING:
            return record.since + state.policy.start_timeout_s
        case WorkerPhase.LEAVING if record.leaving is Leaving.DISMISSED:
            return record.since + DISMISSED_GRACE_S
        case WorkerPhase.LEAVING | WorkerPhase.READY | WorkerPhase.MEMBER:
            return None


def leaving(record: WorkerRecord, now: float, why: Leaving) -> WorkerRecord:
    """As it is from the moment on at which it is going to end."""
    server = None if record.server is None else replace(record.server, address="")
    return replace(
        record, phase=WorkerPhase.LEAVING, since=now, running=False, leaving=why, leave_by=None, server=server
    )


def told_to_end(record: WorkerRecord, now: float, ending: Ending) -> WorkerRecord:
    """As it is from the moment on at which StopWorker is given for it."""
    return leaving(record, now, _TOLD[ending])


def told_ending(record: WorkerRecord) -> Ending | None:
    """What StopWorker has said, for a worker that it was given for; None for others."""
    return None if record.leaving is None else _ENDINGS.get(record.leaving)


def gives_time(state: State, record: WorkerRecord) -> Moment | None:
    """Until when a restarted worker that was told to end may checkpoint; None when it is given no time for that."""
    return record.since + state.policy.drain_timeout_s if record.leaving is Leaving.CHECKPOINTS else None


def leaves_by(state: State, hostname: str) -> Moment | None:
    """When workers of a host have to be gone, so that the others hear of their end before its machine is gone; None for
    one that stays, or of which nobody knows.
    """
    for one in state.departing:
        if one.hostname == hostname and one.by is not None:
            return one.by - LAST_MOMENT_S
    return None


def record_of(state: State, worker: WorkerId) -> WorkerRecord | None:
    """The worker's record; None when its process is not alive."""
    return state.workers.find(worker)


def in_phase(state: State, *phases: WorkerPhase) -> tuple[WorkerRecord, ...]:
    """Living workers in one of these phases, in order of start."""
    return tuple(record for record in state.workers if record.phase in phases)


def parameter_servers(state: State) -> dict[int, WorkerRecord]:
    """The parameter servers that run, or are being started, by their numbers, in this order."""
    there = [r for r in state.workers if r.parameter_server is not None and r.phase is not WorkerPhase.LEAVING]
    return {r.parameter_server: r for r in sorted(there, key=_number) if r.parameter_server is not None}


def _number(record: WorkerRecord) -> int:
    return -1 if record.parameter_server is None else record.parameter_server


def serving_workers(state: State) -> tuple[WorkerRecord, ...]:
    """The workers without rounds that run, in order of start; those of a chief answer."""
    return tuple(r for r in state.workers if r.phase is WorkerPhase.MEMBER and r.parameter_server is None)


def lacks_servers(state: State) -> bool:
    """Whether a job has no chief, and some of the parameter servers do not answer that it needs."""
    number = state.policy.num_parameter_servers
    there = parameter_servers(state).values() if number and state.chief is None else ()
    return state.chief is None and sum(record.phase is WorkerPhase.MEMBER for record in there) < number


def still_preparing(state: State) -> frozenset[str]:
    """The hosts that a round may have without being ended for them now."""
    return frozenset(one.hostname for one in state.preparing if not one.late)


def concerning(state: State) -> tuple[Silence, ...]:
    """The silent hosts that matter to the job: they are listed, or workers live there."""
    if not state.silent:
        return ()
    names = {host.name for host in state.hosts} | {record.worker.hostname for record in state.workers}
    return tuple(one for one in state.silent if one.hostname in names)


def silent_hosts(state: State) -> frozenset[str]:
    """The hosts that are surely silent."""
    return frozenset(one.hostname for one in state.silent if one.sure)


def finishing(state: State) -> bool:
    """Whether a member has ended with success: no growth, no planned change any more."""
    return any(reported is WorkerState.SUCCESS for _, reported in state.registry.records)


def is_on_one_host(state: State) -> bool:
    """Whether all members of the round are on one host."""
    return len({worker.hostname for worker in state.members}) == 1


def chief_of(state: State) -> WorkerId | None:
    """The name of the chief's process; None while there is no chief."""
    return None if state.chief is None else WorkerId(CHIEF, 0, state.chief.number - 1)


def causes(state: State) -> list[str]:
    """What has failed since the last round was formed, in words: who crashed, or who lost the round if nobody did."""
    complaint = state.setbacks.present.complaint
    if state.reset is None or not state.reset.crashes:
        return [] if complaint is None else [complaint.told]
    more = state.reset.more_crashes
    return [*state.reset.crashes, *([f"and {counted(more, 'more failure')}"] if more else [])]


def protected_hosts(state: State) -> frozenset[str]:
    """Where rank 0 is better than elsewhere."""
    return frozenset((*state.policy.protect, *(host.name for host in state.discovery.order if host.protected)))


def most_advanced(state: State, stateful: Sequence[WorkerRecord]) -> WorkerRecord:
    """Whose state the next round goes on from: the most commits, then on a protected host, then the lowest rank."""
    protected = protected_hosts(state)
    return min(stateful, key=lambda one: (-one.commits, one.worker.hostname not in protected, one.rank))
