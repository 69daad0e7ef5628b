"""The state of a job: one frozen value, made of values that say what is known only while it means something.

Owns no decision: those are in :mod:`elastic_driver.core.membership`. A field belongs to the value that has the same
lifetime: what a reset collects is dropped with the reset. So the phase of the job is not stored; it follows from which
of these values exist.
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

# A worker that has not left a departing host is killed this long before its machine is gone: the others then break
# their round at a death that is seen, and not at a host that is silent.
LAST_MOMENT_S = 1.0

# A failing discovery script is reported at most this often; its next answer is reported if the failure was reported, or
# lasted for several of its runs.
DISCOVERY_TOLD_S = 60.0
DISCOVERY_OUTAGE_S = 5.0


# When one of the hosts that the job waits for is heard again, its network may be whole, and the others may be heard
# soon: their connections retry a few tenths of a second apart.
HEALING_S = 2.0


# How long the first new slots for restarted workers wait for others, so that hosts that appear together cost one
# restart and not one each. They may have an image to pull, or wait for sshd; a restart costs about as much.
LAST_CALL_S = 1.0

# How long a round of restarted workers is not ended for a host that still imports the workers' modules. An agent allows
# 60 s for its imports, and then starts its workers from scratch.
PREPARING_S = 75.0

# Causes of one reset that are listed one by one. A job of thousands of workers may lose all of them at once, or its
# hosts again and again while it waits for slots.
_MOST_CRASHES_TOLD = 16


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of a job, from its settings. Durations in seconds.

    Attributes:
        num_proc: slots needed before the start.
        min_num_proc: fewest members of a round.
        max_num_proc: most members of a round; None for no bound.
        elastic_timeout_s: how long the job may lack slots before it ends.
        start_timeout_s: how long a worker may take from its start, or from the break of its round, to be READY; and how
            long from announcing its exit to its end.
        drain_timeout_s: how long a worker whose place is drained may go on training.
        reset_limit: unplanned resets allowed; None for no bound.
        reset_window_s: how long a reset counts towards that limit; None for no limit.
        cooldown_range_s: as in :class:`elastic_driver.core.blacklist.Blacklist`.
        durable: whether commits are on disk, so that the job outlives all workers that have its state in memory.
        num_standby: booted workers to keep in addition, in slots that no member needs.
        num_proc_multiple: the number of a round's members is a multiple of this.
        ranks_per_host_multiple: the number of members on each host is a multiple of this.
        protect: names of hosts that are preferred for rank 0, in addition to those with the label.
        blames_hosts: whether a worker's failure blacklists its host; otherwise it is replaced there at once.
        setbacks_limit: the number of consecutive setbacks that ends the job.
        pause_range_s: shortest and longest pause after a setback; none after the first, then twice as long each time.
        on_change: what a change means for the workers. Of workers that may begin as one kind and become another: what
            they are now.
        becomes_in_place: whether restarted workers reset in place from their first ``init()`` on.
        retries_starts: whether restarted workers that fail before they have trained for a while are restarted if the
            job needs their hosts.
        must_init: whether it is a mistake if a worker in place ends with code 0 before ``init()``.
        last_call_s: how long a start or a growth of restarted workers waits for more slots; not at max-np.
        ends_at_start: whether a restarted worker's own failure, before the job has trained for a while, ends the job,
            if its host is needed, or is not blamed; on several hosts, two consecutive failures.
        sizing: which flags gave these numbers.
        num_parameter_servers: servers that get slots before the workers, and are counted separately; 0 for a job
            without a chief.
        restart_chief: whether the chief is restarted after its failure, or after the loss of a parameter server.
        fixed_hosts: whether the list of hosts can never change, and no host joins.
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
        """Whether the command is the script of a chief, which uses servers."""
        return self.num_parameter_servers > 0

    @property
    def start_flag(self) -> str:
        """The flag that sets ``num_proc``."""
        return _flag(self.sizing, "-np")

    @property
    def least_flag(self) -> str:
        """The flag that sets ``min_num_proc``. It may have been given in addition to torchrun's flags."""
        return "--min-np" if self.min_num_proc != self.num_proc else _flag(self.sizing, "--min-np")

    @property
    def most_flag(self) -> str:
        """The flag that sets ``max_num_proc``."""
        return _flag(self.sizing, "--max-np")

    @property
    def limit_flag(self) -> str:
        """The flag that sets ``reset_limit``."""
        return "--reset-limit" if self.sizing is Sizing.NP else "--max-restarts"

    @property
    def multiple(self) -> int:
        """The number of which a round's size must be a multiple, so that each host has a multiple too."""
        return lcm(self.num_proc_multiple, self.ranks_per_host_multiple)


def _flag(sizing: Sizing, usual: str) -> str:
    return {Sizing.NPROC: "--nproc-per-node", Sizing.NNODES: "--nnodes times --nproc-per-node"}.get(sizing, usual)


class JobPhase(StrEnum):
    """The phase of a job."""

    WAITING = "waiting"  # no worker yet: too few slots
    STARTING = "starting"  # the first round is being formed; of restarted workers, the processes of any round start
    RUNNING = "running"  # a round trains
    RESETTING = "resetting"  # a round is over, the next is being formed
    ENDED = "ended"


class WorkerPhase(StrEnum):
    """The phase of a living process."""

    BOOTING = "booting"  # started, has not asked for a round yet
    READY = "ready"  # it has asked for the next round; of restarted workers, its process runs
    MEMBER = "member"  # in the current round; of workers without rounds, its process runs
    LEAVING = "leaving"  # dismissed or being stopped: its end is ignored


class Leaving(StrEnum):
    """Why a worker is going to end, other than by itself. The table in the head of the core lists the actions."""

    DISMISSED = "dismissed"  # notified that it has no place: it ends by itself
    STOPPED = "stopped"  # ordered to end as usual
    CHECKPOINTS = "checkpoints"  # ordered to end, with time for a checkpoint
    BROKEN = "broken"  # ordered to end at once, as its peers are lost
    DYING = "dying"  # about to fail, without an order to end


# By the ending in StopWorker.
_TOLD = {
    Ending.USUAL: Leaving.STOPPED,
    Ending.PLANNED: Leaving.CHECKPOINTS,
    Ending.BROKEN: Leaving.BROKEN,
}
_ENDINGS = {why: ending for ending, why in _TOLD.items()}


@dataclass(frozen=True, slots=True)
class Server:
    """The role of a worker in a job with a chief, from its start to its end.

    Attributes:
        number: the index of the parameter server; None for a worker.
        address: its ``host:port``; "" until it has reported one, and once it is to end.
    """

    number: int | None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Kill:
    """The reason why a worker is being killed.

    Attributes:
        how: what it did, in words, as the cause of its end: "hung: no heartbeat for 60.0 s".
        fault: who caused it.
        hangs, exits: as in KillWorker.
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
        phase: its phase.
        since: when it entered the phase.
        round_id: the last round it was in; 0 for none.
        has_state: whether it holds the training's state: it has synced once, or was there before the first commit. A
            member whose first round broke before it had synced is as blank as a joiner.
        rank: its rank in that round.
        commits: the number of commits of its state, as last reported.
        committed_at: time of its last commit in the round that broke, or when it began to train there if it made none;
            None if its round did not break, or it had not trained there. Only of a READY worker.
        backends: the collective backends that it can use, best first.
        running: whether it has reported that it trains in its round. Only of a MEMBER.
        leaving: why it is LEAVING; None if it is not.
        killed: why it is being killed; None if it is not.
        leave_by: when it is killed if it still trains in a drained place; None for no bound.
        exit_by: when it is killed if it has not ended, though it announced its exit; None for no bound.
        server: its role for the chief; None in a job without one.
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
        """The index of its parameter server; None for a worker."""
        return None if self.server is None else self.server.number

    @property
    def address(self) -> str:
        """The address of its server; "" if it has none, or it does not answer."""
        return "" if self.server is None else self.server.address

    @property
    def who(self) -> str:
        """Its description, in words."""
        return f"worker {self.worker}" if self.parameter_server is None else self.server_name

    @property
    def server_name(self) -> str:
        """The name of a parameter server, in words."""
        return f"parameter server {self.parameter_server} ({self.worker})"


class ChiefPhase(StrEnum):
    """The phase of the chief, while there is one."""

    RUNNING = "running"
    STOPPING = "stopping"  # asked to end; another is started after that
    FAILED = "failed"  # it has failed: the consequence is decided in the same step


@dataclass(frozen=True, slots=True)
class Chief:
    """The script of a job with parameter servers, which gives the workers their work.

    Attributes:
        number: the number of its start, from 1.
        phase: its phase.
        since: when it entered the phase.
        lost: what happened to the first parameter server that it lost, in words; "" while it has all of them.
        failed: how the chief itself has failed, in words; "" if it has not.
        ends_by: when the job ends if the chief has not ended, since it cannot continue without that server; None for no
            bound.
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
        error: the message of its last failure.
    """

    since: Moment
    error: str


@dataclass(frozen=True, slots=True)
class Discovery:
    """The known hosts, and the condition of discovery.

    Attributes:
        hosts: those of the last answer that are up, in rank order; None before the first answer.
        down: names of the hosts that are listed, and not up.
        order: all hosts that are up or have living workers, and those that were up and are down, as last listed, in
            rank order.
        outage: the current failure of discovery; None while it answers.
        told_at: when a failure of discovery was last reported; None for never.
    """

    hosts: tuple[Host, ...] | None = None
    down: frozenset[str] = frozenset()
    order: tuple[Host, ...] = ()
    outage: Outage | None = None
    told_at: Moment | None = None
    # Slots by name of the hosts that are up, and their sum. Derived.
    slots: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    total_slots: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.slots.update((host.name, host.slots) for host in self.hosts or ())
        object.__setattr__(self, "total_slots", sum(self.slots.values()))


@dataclass(frozen=True, slots=True)
class Silence:
    """A host from which nothing is heard.

    Attributes:
        hostname: the host.
        since: when it was last heard.
        sure: as in HostSilent.
        told: whether the user was notified that the job waits for it.
        kept_until: it is not given up before this time, since another host has been heard again; None for at once.
        given_up: whether it was given up. Its workers count as dead; any that live are notified when the host is heard
            again.
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

    A round of restarted workers exists from its launch on. Workers without rounds are in a round without number and
    members, from the start of the job on.

    Attributes:
        round_id: its number, from 1.
        members: its workers by rank (also those that have ended).
        handing_over: the member whose place was already gone when the round was formed; None for no such member.
        reset_began: when the reset (or the start) that led to it began.
        sync: whether its members broadcast rank 0's state first.
        commits: the number of commits of rank 0's state when it was formed.
        backend: the backend of its collectives; None if the workers choose it themselves.
        notice: the current notice to its members.
    """

    round_id: int
    members: tuple[WorkerId, ...]
    handing_over: WorkerId | None
    reset_began: Moment
    sync: bool = False
    commits: int = 0
    backend: Backend | None = None
    notice: NoticeKind = NoticeKind.NONE
    # The set of members. Derived, and passed on, so that it is computed once for each round.
    _known: frozenset[WorkerId] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self._known is None:
            object.__setattr__(self, "_known", frozenset(self.members))

    def __contains__(self, worker: WorkerId) -> bool:
        return self._known is not None and worker in self._known


@dataclass(frozen=True, slots=True)
class Reset:
    """The transition between two rounds; the start is one too.

    Attributes:
        began: when it began.
        deadline: when silent members are voted out.
        slots_deadline: when the wait for slots ends the job; None while there are enough, or that is not known yet.
        unplanned: whether a failure caused it.
        crashes: its causes in words, in order; at most as many as are listed to the user.
        more_crashes: how many more causes there were.
        first_failure: the earliest of its failures; None for none yet.
        accusers: its members that cannot reach others, until that is judged.
        reinits: members that have called ``shutdown()`` and ``init()``, in order of arrival.
        waits_for_ends: whether the next round of restarted workers waits for the ends of the last round's workers, at
            most until the deadline.
        peers_lost: whether a restarted worker was lost in its time for a checkpoint: the others may wait for it.
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
        """Return the reset with a deadline for the wait for slots, unless it has one."""
        return self if self.slots_deadline is not None else replace(self, slots_deadline=until)

    def with_cause(self, text: str, failure: Failure) -> Reset:
        """Return the reset with another crash as a cause."""
        first = self.first_failure
        if first is None or failure.is_before(first):
            first = failure
        if len(self.crashes) < _MOST_CRASHES_TOLD:
            return replace(self, crashes=(*self.crashes, text), first_failure=first)
        return replace(self, more_crashes=self.more_crashes + 1, first_failure=first)


@dataclass(frozen=True, slots=True)
class Launch:
    """A round of restarted workers whose processes are being started, or could not all be started.

    Attributes:
        placed: its members by rank; each gets its place at its start.
        cause: the cause of the round, in words.
        old_size: the number of members of the last round that has begun (0 for none).
        broken: whether a member has failed before all ran: the round will never begin.
    """

    placed: tuple[Placed, ...]
    cause: str
    old_size: int
    broken: bool = False


@dataclass(frozen=True, slots=True)
class ResetTally:
    """The unplanned resets of a job.

    Attributes:
        count: how many there have been so far.
        times: the times of those that still count towards the limit; empty without a window.
    """

    count: int = 0
    times: tuple[Moment, ...] = ()

    def one_more(self, now: float, window_s: float | None) -> ResetTally:
        """Return the tally with another reset, which ends now."""
        times = () if window_s is None else (*(at for at in self.times if now - at < window_s), now)
        return ResetTally(self.count + 1, times)

    def that_count(self, now: float, window_s: float | None) -> int:
        """Return how many resets count towards the limit."""
        return self.count if window_s is None else sum(1 for at in self.times if now - at < window_s)


@dataclass(frozen=True, slots=True)
class Departing:
    """A drained host that is about to go away, or whose lister announces that.

    Attributes:
        hostname: the host.
        why: in words.
        by: when its machine is gone; None if nobody has said.
        listed: whether the lister announced it: it may withdraw that.
        by_hand: whether somebody has also drained it: then it stays drained after its machine has gone.
    """

    hostname: str
    why: str
    by: Moment | None
    listed: bool
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Preparing:
    """A host without workers that imports the workers' modules, so that workers can be forked there.

    Attributes:
        hostname: the host.
        until: when the job stops waiting for it.
        late: whether that time is over, and the host has not reported that it is ready.
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
        end: the one command that ends the job; None while it continues.
        discovery: the hosts, and the condition of discovery.
        blacklist: the failed hosts.
        cuts: hosts that are left out, since others cannot reach them.
        silent: hosts that are not heard, in the order in which that was seen.
        drained: places that get no workers until their host has left the list: (hostname, slot), None for all slots.
        departing: the drained hosts that are about to go away, in the order of the announcements.
        preparing: hosts for which no round of restarted workers is ended yet, in the order of their names.
        workers: living processes, in order of start.
        attempts: how many processes each place has had.
        round: the current or last round; None before the first.
        reset: the reset (or start) under way; None while a round runs, and before there were slots for a start.
        registry: the workers' reports in the round, or in the start.
        notice_version: how many notices were sent.
        commits: the most commits of any worker so far.
        tally: the unplanned resets so far.
        setbacks: how far the training has come, and how many consecutive rounds made no progress.
        standby_room: the smallest insufficient number of places for standbys that was reported; None for none yet.
        unused: the last report of slots that a multiple leaves unused; "" for none.
        ever_ready: whether any worker has ever asked for a round; if workers ask for none, whether one has started.
        launch: of restarted workers, the current round until it has begun; None when it has.
        rounds_before: how many rounds restarted workers had before the job's workers began to reset in place; round
            numbers continue from there.
        last_call: until when new slots for restarted workers wait for others; None when nothing waits.
        chief: of a job with parameter servers; None before its start, and between two starts.
        chiefs: how many starts of a chief there have been.
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
        """Whether the job is over."""
        return self.end is not None

    @property
    def phase(self) -> JobPhase:
        """The phase of the job."""
        if self.ended:
            return JobPhase.ENDED
        if self.launch is not None and not self.launch.broken:
            return JobPhase.STARTING
        if self.round is None:
            return JobPhase.WAITING if self.reset is None else JobPhase.STARTING
        return JobPhase.RUNNING if self.reset is None else JobPhase.RESETTING

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that are listed and up, in rank order."""
        return self.discovery.hosts or ()

    @property
    def listed(self) -> tuple[str, ...]:
        """Names of the listed hosts: those that are up, in rank order, then the others."""
        return *self.discovery.slots, *sorted(self.discovery.down)

    def is_listed(self, hostname: str) -> bool:
        """Return whether a host is listed, up or not."""
        return hostname in self.discovery.slots or hostname in self.discovery.down

    def is_member(self, worker: WorkerId) -> bool:
        """Return whether a worker is in the current round; in a reset, in the one that is over."""
        return self.round is not None and worker in self.round

    @property
    def round_id(self) -> int:
        """The number of the current or last round; 0 before the first."""
        return 0 if self.round is None else self.round.round_id

    @property
    def next_round_id(self) -> int:
        """The number of the next round."""
        return (self.round_id or self.rounds_before) + 1

    @property
    def members(self) -> tuple[WorkerId, ...]:
        """The workers of the current or last round by rank, including those that have ended."""
        return () if self.round is None else self.round.members

    @property
    def notice_kind(self) -> NoticeKind:
        """The current notice to the members."""
        return NoticeKind.NONE if self.round is None else self.round.notice

    @property
    def resets(self) -> int:
        """The number of unplanned resets so far."""
        return self.tally.count

    @property
    def reset_began(self) -> float:
        """When the reset (or start) under way began; while a round runs, the reset that led to it."""
        if self.reset is not None:
            return self.reset.began
        return self.began if self.round is None else self.round.reset_began

    @property
    def first_failure(self) -> Failure | None:
        """The first failure since the last round was formed."""
        return None if self.reset is None else self.reset.first_failure

    @property
    def slots_deadline(self) -> float | None:
        """When the wait for slots ends the job; None while it does not wait for slots."""
        if self.reset is not None:
            return self.reset.slots_deadline
        return self.began + self.policy.elastic_timeout_s if self.round is None else None


def new_state(policy: Policy, now: float) -> State:
    """Return the state of a job that has not looked for hosts yet."""
    return State(policy, began=now, blacklist=Blacklist(policy.cooldown_range_s))


def deadline_of(state: State, record: WorkerRecord) -> float | None:
    """Return when the worker is stopped if it is still in its phase; None for no bound."""
    match record.phase:
        case WorkerPhase.BOOTING:
            return record.since + state.policy.start_timeout_s
        case WorkerPhase.LEAVING if record.leaving is Leaving.DISMISSED:
            return record.since + DISMISSED_GRACE_S
        case WorkerPhase.LEAVING | WorkerPhase.READY | WorkerPhase.MEMBER:
            return None


def leaving(record: WorkerRecord, now: float, why: Leaving) -> WorkerRecord:
    """Return the record of a worker from the moment on when it begins to leave."""
    server = None if record.server is None else replace(record.server, address="")
    return replace(
        record, phase=WorkerPhase.LEAVING, since=now, running=False, leaving=why, leave_by=None, server=server
    )


def told_to_end(record: WorkerRecord, now: float, ending: Ending) -> WorkerRecord:
    """Return the record of a worker from the moment on when StopWorker is issued for it."""
    return leaving(record, now, _TOLD[ending])


def told_ending(record: WorkerRecord) -> Ending | None:
    """Return the ending of the StopWorker that a worker was given; None if it was given none."""
    return None if record.leaving is None else _ENDINGS.get(record.leaving)


def gives_time(state: State, record: WorkerRecord) -> Moment | None:
    """Return until when a restarted worker that was told to end may checkpoint; None if it may not."""
    return record.since + state.policy.drain_timeout_s if record.leaving is Leaving.CHECKPOINTS else None


def leaves_by(state: State, hostname: str) -> Moment | None:
    """Return when a host's workers must be gone, so that the others see their ends before its machine is gone.

    None for a host that stays, or whose time is unknown.
    """
    for departing_host in state.departing:
        if departing_host.hostname == hostname and departing_host.by is not None:
            return departing_host.by - LAST_MOMENT_S
    return None


def record_of(state: State, worker: WorkerId) -> WorkerRecord | None:
    """Return the worker's record; None if its process is not alive."""
    return state.workers.find(worker)


def in_phase(state: State, *phases: WorkerPhase) -> tuple[WorkerRecord, ...]:
    """Return the living workers in one of these phases, in order of start."""
    return tuple(record for record in state.workers if record.phase in phases)


def parameter_servers(state: State) -> dict[int, WorkerRecord]:
    """Return the parameter servers that run, or are being started, by index, in this order."""
    there = [r for r in state.workers if r.parameter_server is not None and r.phase is not WorkerPhase.LEAVING]
    return {r.parameter_server: r for r in sorted(there, key=_number) if r.parameter_server is not None}


def _number(record: WorkerRecord) -> int:
    return -1 if record.parameter_server is None else record.parameter_server


def serving_workers(state: State) -> tuple[WorkerRecord, ...]:
    """Return the running workers without rounds, in order of start; with a chief, those that answer."""
    return tuple(r for r in state.workers if r.phase is WorkerPhase.MEMBER and r.parameter_server is None)


def lacks_servers(state: State) -> bool:
    """Return whether a job has no chief, and some parameter servers that it needs do not answer."""
    number = state.policy.num_parameter_servers
    there = parameter_servers(state).values() if number and state.chief is None else ()
    return state.chief is None and sum(record.phase is WorkerPhase.MEMBER for record in there) < number


def still_preparing(state: State) -> frozenset[str]:
    """Return the hosts for which a round is not to be ended now, as they still prepare."""
    return frozenset(preparing_host.hostname for preparing_host in state.preparing if not preparing_host.late)


def concerning(state: State) -> tuple[Silence, ...]:
    """Return the silent hosts that matter to the job: they are listed, or have living workers."""
    if not state.silent:
        return ()
    names = {host.name for host in state.hosts} | {record.worker.hostname for record in state.workers}
    return tuple(silence for silence in state.silent if silence.hostname in names)


def silent_hosts(state: State) -> frozenset[str]:
    """Return the hosts that are surely silent."""
    return frozenset(silence.hostname for silence in state.silent if silence.sure)


def finishing(state: State) -> bool:
    """Return whether a member has ended with success: then there is no growth and no planned change any more."""
    return any(reported is WorkerState.SUCCESS for _, reported in state.registry.records)


def is_on_one_host(state: State) -> bool:
    """Return whether all members of the round are on one host."""
    return len({worker.hostname for worker in state.members}) == 1


def chief_of(state: State) -> WorkerId | None:
    """Return the name of the chief's process; None while there is no chief."""
    return None if state.chief is None else WorkerId(CHIEF, 0, state.chief.number - 1)


def causes(state: State) -> list[str]:
    """Describe what has failed since the last round was formed: crashes; without one, the loss of the round."""
    complaint = state.setbacks.present.complaint
    if state.reset is None or not state.reset.crashes:
        return [] if complaint is None else [complaint.told]
    more = state.reset.more_crashes
    return [*state.reset.crashes, *([f"and {counted(more, 'more failure')}"] if more else [])]


def protected_hosts(state: State) -> frozenset[str]:
    """Return the hosts that are preferred for rank 0."""
    return frozenset((*state.policy.protect, *(host.name for host in state.discovery.order if host.protected)))


def most_advanced(state: State, stateful: Sequence[WorkerRecord]) -> WorkerRecord:
    """Return the member whose state the next round uses: most commits, then on a protected host, then lowest rank."""
    protected = protected_hosts(state)
    return min(stateful, key=lambda one: (-one.commits, one.worker.hostname not in protected, one.rank))
