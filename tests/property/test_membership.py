"""The membership core under any order of events.

Every step is audited (``membership_job.Job``): rounds never overlap, ranks are dense and sizes agree, the state is
never lost in silence, no blacklisted host gets a worker, no timer spins, no event is news twice. At any moment two
promises hold: workers that do as they are told bring the job to rest or to its end, and so does silence.
"""

from __future__ import annotations

import os
from math import lcm

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from elastic_driver.core.deadlines import next_deadline
from elastic_driver.core.events import (
    ChiefExited,
    DiscoveryFailed,
    DrainRequested,
    Event,
    HostHeard,
    HostLost,
    HostsDiscovered,
    HostSilent,
    HostsReported,
    StopRequested,
    WorkerDying,
    WorkerExited,
    WorkerExiting,
    WorkerHung,
    WorkerNotStarted,
    WorkerReady,
    WorkerReleased,
    WorkerRunning,
    WorkerServing,
    WorkerSpared,
    WorkerStarted,
)
from elastic_driver.core.state import WorkerPhase, record_of
from elastic_driver.hosts import Departure, Host, WorkerId
from elastic_driver.words import Backend, NoticeKind, OnChange, ReadyCause
from tests.support.extent import examples
from tests.support.fakes.membership_job import BOTH, Job, worker_id

pytestmark = pytest.mark.property

# scripts/mutate asks for fewer.
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "150"))
HOSTNAMES = ("a", "b", "c")

draws = st.integers(0, 1024).map(lambda number: number / 1024)

labels = st.sampled_from(((), (), ("rack=1",), ("rack=2",), ("rack=1", "spot"), ("protected",)))

host_lists = st.lists(
    st.builds(Host, st.sampled_from(HOSTNAMES), st.integers(1, 2), labels, st.sampled_from((0, 0, 0, 1))),
    max_size=3,
    unique_by=lambda host: host.name,
).map(tuple)


@st.composite
def limits(draw: st.DrawFn) -> dict[str, object]:
    """Limits that settings would accept."""
    of_world, of_hosts = draw(st.sampled_from(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 2))))
    multiple = lcm(of_world, of_hosts)
    least = draw(st.integers(1, max(1, 3 // multiple)))
    wanted = draw(st.integers(least, max(1, 4 // multiple)))
    most = draw(st.one_of(st.none(), st.integers(wanted, max(wanted, 5 // multiple))))
    return {
        "num_proc": wanted * multiple,
        "min_num_proc": least * multiple,
        "max_num_proc": None if most is None else most * multiple,
        "num_proc_multiple": of_world,
        "ranks_per_host_multiple": of_hosts,
        "protect": draw(st.sampled_from(((), (), ("b",), ("c", "z")))),
        "elastic_timeout_s": 40.0,
        "start_timeout_s": 15.0,
        "drain_timeout_s": 10.0,
        "reset_limit": draw(st.one_of(st.none(), st.integers(0, 2))),
        "cooldown_range_s": draw(st.sampled_from((None, (1.0, 8.0)))),
        "blames_hosts": draw(st.sampled_from((True, True, False))),
        "ends_at_start": draw(st.sampled_from((False, False, True))),
        "num_standby": draw(st.integers(0, 2)),
        "durable": draw(st.booleans()),
        "setbacks_limit": draw(st.integers(1, 4)),
        "pause_range_s": (1.0, 4.0),
        "must_init": draw(st.booleans()),
        "last_call_s": draw(st.sampled_from((0.0, 1.0))),
    }


class Membership(RuleBasedStateMachine):
    """Random worlds: workers that obey, that fail, that lie about the round, and a discovery that flaps."""

    backends: tuple[Backend, ...] = BOTH
    job_of = Job

    def __init__(self) -> None:
        super().__init__()
        self.job = self.job_of()

    @initialize(given_limits=limits(), hosts=host_lists, trains=st.integers(0, 5))
    def begin(self, given_limits: dict[str, object], hosts: tuple[Host, ...], trains: int) -> None:
        self.job = self.job_of(**given_limits)
        if trains:
            hosts = tuple(Host(name, 2) for name in HOSTNAMES[: 1 + trains // 2])
        self.job.feed(HostsDiscovered(hosts))
        if trains:
            self.some_obey(12)
            self.all_train(1)

    def a_worker(self, data: st.DataObject) -> WorkerId:
        """One that lives, mostly; else one of the past."""
        alive = [record.worker for record in self.job.state.workers]
        if alive and data.draw(st.integers(0, 9)):
            return data.draw(st.sampled_from(alive))
        return data.draw(st.sampled_from(sorted(self.job.started)))

    @rule(
        hosts=host_lists,
        ups=st.sets(st.sampled_from(HOSTNAMES)),
        unready=st.sets(st.sampled_from(HOSTNAMES), max_size=2),
        all_up=st.booleans(),
        answered=st.booleans(),
    )
    def discovered(
        self, hosts: tuple[Host, ...], ups: set[str], unready: set[str], *, all_up: bool, answered: bool
    ) -> None:
        up = tuple(host for host in hosts if all_up or host.name in ups)
        down = frozenset(host.name for host in hosts if host not in up)
        preparing = frozenset(host.name for host in up if host.name in unready)
        self.job.feed(HostsDiscovered(up, (), down, answered, preparing))

    @rule()
    def discovery_failed(self) -> None:
        self.job.feed(DiscoveryFailed("the script failed"))

    @precondition(lambda self: self.job.started)
    @rule(
        data=st.data(),
        late=st.integers(0, 9),
        commits=st.integers(0, 2),
        steps=st.sampled_from((0, 0, 0, 1, 7)),
        cause=st.sampled_from(ReadyCause),
        backends=st.sampled_from((BOTH, BOTH, (Backend.TORCH,), (Backend.NATIVE,))),
    )
    def ready(
        self, data: st.DataObject, late: int, commits: int, steps: int, cause: ReadyCause, backends: tuple[Backend, ...]
    ) -> None:
        worker = self.a_worker(data)
        after = self.job.last_round.get(worker, 0)
        if not late:
            after = data.draw(st.integers(0, self.job.round_id + 1))
        commits = commits + self.job.commits.get(worker, 0) if after else 0
        self.job.feed(WorkerReady(worker, after, commits, cause, "detail", backends, steps))

    @precondition(lambda self: self.job.state.workers)
    @rule(actions=st.integers(1, 12))
    def some_obey(self, actions: int) -> None:
        """Workers do what they are asked, one after the other: how a job gets anywhere."""
        for _ in range(actions):
            booting = self.job.of(WorkerPhase.BOOTING)
            asked = self.job.of(WorkerPhase.MEMBER) if self.job.state.notice_kind is not NoticeKind.NONE else []
            if booting or asked:
                self.job.ready((asked or booting)[0], backends=self.backends)

    @precondition(lambda self: self.job.members)
    @rule(data=st.data(), commits=st.integers(0, 3), late=st.integers(0, 9))
    def running(self, data: st.DataObject, commits: int, late: int) -> None:
        round_id = self.job.round_id if late else data.draw(st.integers(0, self.job.round_id + 1))
        worker = data.draw(st.sampled_from(self.job.members))
        self.job.feed(WorkerRunning(worker, round_id, self.job.round_commits + commits))

    @precondition(lambda self: self.job.of(WorkerPhase.MEMBER))
    @rule(rounds=st.integers(1, 3))
    def all_lose_their_rounds(self, rounds: int) -> None:
        """Again and again, and nobody dies."""
        for _ in range(rounds):
            for name in self.job.of(WorkerPhase.MEMBER):
                self.job.ready(name, cause=ReadyCause.INTERNAL_ERROR, backends=self.backends)

    @precondition(lambda self: self.job.members)
    @rule(commits=st.integers(1, 3))
    def all_train(self, commits: int) -> None:
        for worker in self.job.members:
            self.job.running(str(worker), commits=self.job.round_commits + commits)

    @precondition(lambda self: self.job.started)
    @rule(
        data=st.data(),
        returncode=st.sampled_from((1, -9)),
        draw=draws,
        raised_s=st.sampled_from((None, 0.0, 5.0, 90.0)),
    )
    def crashed(self, data: st.DataObject, returncode: int, draw: float, raised_s: float | None) -> None:
        how, starved = f"ended with {returncode}", returncode == -9 and draw < 0.25
        self.job.feed(WorkerExited(self.a_worker(data), returncode, how, draw, "", "", starved, raised_s))

    @precondition(lambda self: self.job.started)
    @rule(data=st.data(), number=st.integers(1, 3), draw=draws)
    def host_lost(self, data: st.DataObject, number: int, draw: float) -> None:
        """With some of its workers, or all of them; others may be known to have ended already."""
        name = self.a_worker(data).hostname
        there = [worker for worker in sorted(self.job.started) if worker.hostname == name]
        self.job.feed(HostLost(name, "gone", tuple(there[-number:]), draw))

    @precondition(lambda self: self.job.started)
    @rule(data=st.data(), returncode=st.sampled_from((1, -9, None)), draw=draws)
    def dying(self, data: st.DataObject, returncode: int | None, draw: float) -> None:
        self.job.feed(WorkerDying(self.a_worker(data), returncode, "ends", draw))

    @precondition(lambda self: self.job.started)
    @rule(data=st.data(), silent=st.booleans())
    def hung(self, data: st.DataObject, *, silent: bool) -> None:
        self.job.feed(WorkerHung(self.a_worker(data), "no news", silent))

    @precondition(lambda self: self.job.started)
    @rule(data=st.data())
    def exiting(self, data: st.DataObject) -> None:
        self.job.feed(WorkerExiting(self.a_worker(data)))

    @precondition(lambda self: any(record.killed for record in self.job.state.workers))
    @rule(data=st.data())
    def spared(self, data: st.DataObject) -> None:
        killed = [record.worker for record in self.job.state.workers if record.killed]
        self.job.feed(WorkerSpared(data.draw(st.sampled_from(killed))))

    @precondition(lambda self: self.job.of(WorkerPhase.MEMBER))
    @rule(data=st.data(), silent=st.integers(0, 4))
    def members_cannot_reach_others(self, data: st.DataObject, silent: int) -> None:
        """A network between workers is cut, one way or both, or they accuse at random."""
        ranks = st.lists(st.integers(0, len(self.job.members)), max_size=3)
        accusers = data.draw(st.lists(st.sampled_from(self.job.of(WorkerPhase.MEMBER)), min_size=1, unique=True))
        for name in accusers:
            self.job.ready(name, cause=ReadyCause.INTERNAL_ERROR, unreachable=tuple(data.draw(ranks)))
        if silent:
            for name in self.job.of(WorkerPhase.MEMBER):
                self.job.ready(name, cause=ReadyCause.INTERNAL_ERROR, backends=self.backends)

    @rule(hosts=st.sets(st.sampled_from(HOSTNAMES), min_size=1), sure=st.integers(0, 3), long=st.booleans())
    def hosts_are_silent(self, hosts: set[str], sure: int, *, long: bool) -> None:
        """Agents that are mute, or on the other side of a split; late ones are in doubt only."""
        silent_s = 5.0 if sure else 2.0
        self.job.feed(HostsReported(tuple(HostSilent(name, silent_s + long, bool(sure)) for name in sorted(hosts))))

    @precondition(lambda self: self.job.state.silent)
    @rule(data=st.data())
    def a_host_is_heard_again(self, data: st.DataObject) -> None:
        self.job.feed(HostHeard(data.draw(st.sampled_from(self.job.state.silent)).hostname))

    @precondition(lambda self: any(one.given_up for one in self.job.state.silent))
    @rule(resurrected=st.booleans())
    def those_given_up_are_gone(self, *, resurrected: bool) -> None:
        """Their agents' verdicts are carried out; another agent may come at once."""
        for one in self.job.state.silent:
            if one.given_up:
                for record in [r for r in self.job.state.workers if r.worker.hostname == one.hostname]:
                    self.job.exit(str(record.worker), -9)
                if resurrected:
                    self.job.feed(HostHeard(one.hostname))

    @rule()
    def those_told_to_go_are_gone(self) -> None:
        for name in self.job.of(WorkerPhase.LEAVING):
            self.job.exit(name, -15)

    @precondition(lambda self: self.job.started and len(self.job.history) > 25)
    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        self.job.exit(str(self.a_worker(data)), 0)

    @precondition(lambda self: len(self.job.history) > 35 and self.job.members)
    @rule()
    def all_members_finish(self) -> None:
        for worker in self.job.members:
            self.job.exit(str(worker), 0)

    @precondition(lambda self: self.job.of(WorkerPhase.BOOTING))
    @rule(data=st.data(), bad_command=st.booleans())
    def not_started(self, data: st.DataObject, bad_command: bool) -> None:
        booting = [r.worker for r in self.job.state.workers if r.phase is WorkerPhase.BOOTING]
        self.job.feed(WorkerNotStarted(data.draw(st.sampled_from(booting)), "no such host", 0.5, bad_command))

    @precondition(lambda self: next_deadline(self.job.state) is not None)
    @rule()
    def the_timer_fires(self) -> None:
        deadline = next_deadline(self.job.state)
        assert deadline is not None
        self.job.timer(at=max(deadline, self.job.now))

    @rule(seconds=st.sampled_from((0.0, 0.5, 3.0, 12.0)))
    def time_passes(self, seconds: float) -> None:
        """Past a deadline, too: a busy loop feeds its timer late, and other events before it."""
        self.job.now += seconds

    @precondition(lambda self: self.job.history)
    @rule(data=st.data())
    def an_old_event_comes_again(self, data: st.DataObject) -> None:
        event: Event = data.draw(st.sampled_from(self.job.history))
        if not isinstance(event, StopRequested):
            self.job.feed(event)

    @precondition(lambda self: len(self.job.history) > 50)
    @rule(hosts=host_lists, slot=st.sampled_from((None, 0, 1)), undo=st.booleans())
    def drained(self, hosts: tuple[Host, ...], slot: int | None, *, undo: bool) -> None:
        for host in hosts[:1]:
            self.job.feed(DrainRequested(host.name, slot, "as asked", undo))

    @precondition(lambda self: len(self.job.history) > 30)
    @rule(hosts=host_lists, left_s=st.sampled_from((None, 0.0, 0.5, 3.0, 20.0)), by_lister=st.booleans())
    def departs(self, hosts: tuple[Host, ...], left_s: float | None, *, by_lister: bool) -> None:
        if by_lister:
            going = tuple(Departure(host.name, "a notice", left_s) for host in hosts[-1:])
            self.job.feed(HostsDiscovered(hosts, going))
        else:
            for host in hosts[:1]:
                self.job.feed(DrainRequested(host.name, None, "a notice", within_s=left_s))

    @rule()
    def interrupted(self) -> None:
        self.job.feed(StopRequested(15, "SIGTERM"))
        assert self.job.ended is not None

    def teardown(self) -> None:
        # It is called after a rule that has failed, too, and another failure would be told instead of that.
        if self.job.audited:
            self.job.fork().cooperate()
            self.job.fall_silent()


@st.composite
def limits_of_others(draw: st.DrawFn) -> dict[str, object]:
    """Limits for workers that do not ask for their rounds."""
    kind = draw(st.sampled_from((OnChange.RESTART, OnChange.NO_ROUNDS)))
    becomes = kind is OnChange.RESTART and draw(st.booleans())
    own = {"on_change": kind, "becomes_in_place": becomes}
    # Of those that may become others, standbys and commits are these others'.
    return {**draw(limits()), **({} if becomes else {"num_standby": 0, "durable": False}), **own}


class HorovodsOwn(Membership):
    """Likewise, with workers that run Horovod's own library: they tell of no commits, and of their state later."""

    backends = (Backend.HOROVOD,)

    @precondition(lambda self: self.job.members)
    @rule(data=st.data(), commits=st.just(0), late=st.integers(0, 9))
    def running(self, data: st.DataObject, commits: int, late: int) -> None:
        round_id = self.job.round_id if late else data.draw(st.integers(0, self.job.round_id + 1))
        worker = data.draw(st.sampled_from(self.job.members))
        self.job.feed(WorkerRunning(worker, round_id, 0, synced=data.draw(st.booleans())))

    @precondition(lambda self: self.job.started)
    @rule(
        data=st.data(),
        late=st.integers(0, 9),
        commits=st.just(0),
        steps=st.just(0),
        cause=st.sampled_from(ReadyCause),
        backends=st.just((Backend.HOROVOD,)),
    )
    def ready(
        self, data: st.DataObject, late: int, commits: int, steps: int, cause: ReadyCause, backends: tuple[Backend, ...]
    ) -> None:
        after = self.job.last_round.get(worker := self.a_worker(data), 0)
        if not late:
            after = data.draw(st.integers(0, self.job.round_id + 1))
        self.job.feed(WorkerReady(worker, after, 0, cause, "detail", backends))

    @precondition(lambda self: self.job.state.workers)
    @rule(data=st.data(), dying=st.booleans())
    def aborts(self, data: st.DataObject, dying: bool) -> None:
        worker = self.a_worker(data)
        if dying:
            self.job.feed(WorkerDying(worker, None, "is dumping core", 0.5, "", ""))
        self.job.feed(WorkerExited(worker, -6, "killed by SIGABRT", 0.5))


class OtherWorkers(Membership):
    """Likewise, with workers that are restarted each round, or have none: they start, and say nothing.

    Of the former some may call ``init()`` at any time: from then on they reset in place.
    """

    @initialize(given_limits=limits_of_others(), hosts=host_lists, starts=st.booleans())
    def begin(self, given_limits: dict[str, object], hosts: tuple[Host, ...], *, starts: bool) -> None:  # type: ignore[override]
        self.of_these(given_limits, hosts, starts=starts)

    def of_these(self, given_limits: dict[str, object], hosts: tuple[Host, ...], *, starts: bool) -> None:
        self.job = self.job_of(**given_limits)
        if starts:
            hosts = tuple(Host(name, 2) for name in HOSTNAMES)
        self.job.feed(HostsDiscovered(hosts))
        if starts:
            self.some_obey(6)

    @precondition(lambda self: self.job.state.workers)
    @rule(actions=st.integers(1, 6))
    def some_obey(self, actions: int) -> None:
        """Processes start, and those that are told to end do so."""
        for _ in range(actions):
            for name in (self.job.of(WorkerPhase.LEAVING) or self.job.of(WorkerPhase.BOOTING))[:1]:
                record = record_of(self.job.state, worker_id(name))
                assert record is not None
                if record.phase is WorkerPhase.BOOTING:
                    self.job.begin(record.worker)
                else:
                    self.job.exit(name, -15)

    @precondition(lambda self: self.job.started)
    @rule(data=st.data())
    def started(self, data: st.DataObject) -> None:
        self.job.feed(WorkerStarted(self.a_worker(data)))

    @precondition(lambda self: self.job.policy.becomes_in_place and self.job.state.workers)
    @rule(data=st.data(), number=st.integers(1, 3))
    def call_init(self, data: st.DataObject, number: int) -> None:
        for _ in range(number):
            self.job.feed(WorkerReady(self.a_worker(data), 0, 0, ReadyCause.START, "", BOTH))

    @precondition(lambda self: self.job.kind is OnChange.RESTART and self.job.members)
    @rule(seconds=st.sampled_from((5.0, 700.0)))
    def they_run_for_a_while(self, seconds: float) -> None:
        """For long enough to have come further, though nobody says so."""
        if next_deadline(self.job.state) is None:
            self.job.now += seconds


@st.composite
def limits_with_a_chief(draw: st.DrawFn) -> dict[str, object]:
    """Limits for servers, and a chief that uses them."""
    given = draw(limits())
    alone = {"num_proc_multiple": 1, "ranks_per_host_multiple": 1, "num_standby": 0, "durable": False}
    least = draw(st.integers(1, 2))
    wanted = draw(st.integers(least, 3))
    numbers = {
        "num_parameter_servers": draw(st.integers(1, 2)),
        "min_num_proc": least,
        "num_proc": wanted,
        "max_num_proc": draw(st.one_of(st.none(), st.integers(wanted, 4))),
        "restart_chief": draw(st.booleans()),
        "on_change": OnChange.NO_ROUNDS,
    }
    return {**given, **alone, **numbers}


class WithChief(OtherWorkers):
    """Servers that answer or not, and a chief that ends well or badly, takes workers out, and says so late."""

    @initialize(given_limits=limits_with_a_chief(), hosts=host_lists, starts=st.integers(0, 5))
    def begin(self, given_limits: dict[str, object], hosts: tuple[Host, ...], *, starts: int) -> None:  # type: ignore[override]
        self.job = Job(**given_limits)
        if starts:
            hosts = tuple(Host(name, 2) for name in HOSTNAMES)
        self.job.feed(HostsDiscovered(hosts))
        if starts > 1:
            self.some_obey(6)

    @precondition(lambda self: self.job.started)
    @rule(data=st.data())
    def serving(self, data: st.DataObject) -> None:
        worker = self.a_worker(data)
        self.job.feed(WorkerServing(worker, self.job.address(worker)))

    @precondition(lambda self: self.job.started)
    @rule(data=st.data())
    def released(self, data: st.DataObject) -> None:
        self.job.feed(WorkerReleased(self.a_worker(data)))

    @precondition(lambda self: any(record.leave_by is not None for record in self.job.state.workers))
    @rule()
    def all_who_leave_are_released(self) -> None:
        for record in self.job.state.workers:
            if record.leave_by is not None:
                self.job.feed(WorkerReleased(record.worker))

    @precondition(lambda self: self.job.chiefs)
    @rule(data=st.data(), returncode=st.sampled_from((1, -9, -15, None)), bad_command=st.integers(0, 9))
    def chief_ended(self, data: st.DataObject, returncode: int | None, bad_command: int) -> None:
        number = data.draw(st.sampled_from((*self.job.chiefs, *[self.job.state.chiefs] * 3)))
        bad = returncode is None and not bad_command
        self.job.feed(ChiefExited(number, returncode, f"ended with {returncode}", bad_command=bad))

    @precondition(lambda self: self.job.chiefs and len(self.job.history) > 30)
    @rule()
    def chief_finished(self) -> None:
        self.job.end_chief(0)

    @precondition(lambda self: self.job.chief)
    @rule(seconds=st.sampled_from((5.0, 700.0)))
    def it_runs_for_a_while(self, seconds: float) -> None:
        if next_deadline(self.job.state) is None:
            self.job.now += seconds


TestWithChief = WithChief.TestCase
TestWithChief.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)

TestHorovodsOwn = HorovodsOwn.TestCase
TestHorovodsOwn.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)

TestOtherWorkers = OtherWorkers.TestCase
TestOtherWorkers.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)

TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=examples(EXAMPLES), stateful_step_count=40, deadline=None)
