"""A job for the tests of the membership core: keeps the time, feeds events, and audits each step.

The audit keeps books of its own, from events and commands alone (who lives, who waits, who has left the round, who
holds the state), and compares every command with them. It is the twin that the core's own state is checked against.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from itertools import count

import pytest

from elastic_driver.core.assignment import places_of
from elastic_driver.core.document import read, read_command, read_event, write, write_command, write_event
from elastic_driver.core.events import (
    ChiefExited,
    Command,
    DismissWorker,
    EndJob,
    Event,
    GiveUpHost,
    HostHeard,
    HostLost,
    HostsDiscovered,
    HostSilent,
    HostsReported,
    KillWorker,
    PublishRound,
    Report,
    ReportDying,
    ReportExit,
    ReportResumed,
    SetNotice,
    StartChief,
    StartWorker,
    StopChief,
    StopWorker,
    TimerExpired,
    WorkerDying,
    WorkerExited,
    WorkerNotStarted,
    WorkerReady,
    WorkerReleased,
    WorkerRunning,
    WorkerServing,
    WorkerSpared,
    WorkersReported,
    WorkerStarted,
)
from elastic_driver.core.membership import Policy, State, check_invariants, explain, new_state, next_deadline, step
from elastic_driver.core.past import IllegalEventError
from elastic_driver.core.placement import usable_slots, wanted_places
from elastic_driver.core.redo import redo, unknown
from elastic_driver.core.state import LAST_MOMENT_S, JobPhase, Leaving, WorkerPhase, WorkerRecord, finishing, record_of
from elastic_driver.hosts import SlotInfo, WorkerId, parse_host
from elastic_driver.words import Backend, Ending, NoticeKind, OnChange, ReadyCause
from tests.support.fakes.agents import Agents

# Where the clock of a driver that came back begins. Times in tests are multiples of 1/1024 s: moved there and back,
# they are what they were.
OTHER_ORIGIN = 2.0**20

BOTH = (Backend.NATIVE, Backend.TORCH)


def worker_id(text: str) -> WorkerId:
    """Reads ``host[slot]`` or ``host[slot]#attempt``."""
    return WorkerId.parse(text if "#" in text else f"{text}#0")


def naive_slots(by_rank: Sequence[WorkerId]) -> list[SlotInfo]:
    """Horovod's six numbers for workers in rank order, counted in the dumbest way."""
    hosts: list[str] = []
    for worker in by_rank:
        if worker.hostname not in hosts:
            hosts.append(worker.hostname)
    local = {}
    for worker in by_rank:
        local[worker] = 0
        for other in by_rank:
            if other.hostname == worker.hostname and (other.slot, other.attempt) < (worker.slot, worker.attempt):
                local[worker] += 1
    slots = []
    for rank, worker in enumerate(by_rank):
        peers = [host for host in hosts if any(w.hostname == host and local[w] == local[worker] for w in by_rank)]
        local_size = sum(1 for other in by_rank if other.hostname == worker.hostname)
        cross_rank = peers.index(worker.hostname)
        slots.append(SlotInfo(rank, len(by_rank), local[worker], local_size, cross_rank, len(peers)))
    return slots


class Job:
    """One job under test.

    Attributes:
        state, now: the core's state, and the present.
        kind: what its workers are now.
        history: every event that was fed.
        commands: every command that was given.
        audited: whether the last step has passed its audit. After one that has not, the books are not what they were.
        rereads_each: one of so many steps is taken from a written state, too.
        agents: what agents know that were told each command.
        dies_each: after one of so many steps, and each of its commands, the driver dies.
    """

    rereads_each = 1
    dies_each = 1

    def __init__(self, **limits: object) -> None:
        given: dict[str, object] = {"num_proc": 1, "min_num_proc": 1, **limits}
        self.policy = Policy(**given)  # type: ignore[arg-type]
        self.kind = self.policy.on_change
        self.now = 0.0
        self.state: State = new_state(self.policy, 0.0)
        self.history: list[Event] = []
        self.commands: list[Command] = []
        self.audited = True
        self.agents = Agents()
        self.incarnations: dict[str, int] = {}
        self.round_id = 0
        self.round_commits = 0
        self.members: tuple[WorkerId, ...] = ()
        self.started: set[WorkerId] = set()
        self.alive: set[WorkerId] = set()
        self.told_to_go: set[WorkerId] = set()
        self.endings: dict[WorkerId, Ending] = {}  # of those that were stopped
        self.killed: set[WorkerId] = set()
        self.failed: set[WorkerId] = set()
        self.not_there: set[WorkerId] = set()  # who was told to end as usual: it was late, or its place is gone
        self.waiting: set[WorkerId] = set()
        self.left: set[WorkerId] = set()
        self.asked: set[WorkerId] = set()  # of these, who has said so itself, and not only been told
        self.silent: dict[str, bool] = {}  # hosts, and whether that is sure
        self.given_up: set[str] = set()
        self.holders: set[WorkerId] = set()
        self.last_round: dict[WorkerId, int] = {}
        self.commits: dict[WorkerId, int] = {}
        self.exits: dict[WorkerId, int] = {}
        self.chiefs: dict[int, tuple[str, ...]] = {}  # those that were started, and with which parameter servers
        self.chief = 0  # the one that lives; 0 for none
        self.chief_told = False
        self.chief_failures = 0
        self.launched = 0  # the last round of restarted workers whose processes were started
        self.orders: dict[WorkerId, StartWorker] = {}  # of restarted workers
        self.broken = False
        self.furthest = (0, 0)
        self.idle = 1  # rounds in a row, with the present one, that came no further than any before
        self.notice_version = 0
        self._notice_before = NoticeKind.NONE
        self.ended: EndJob | None = None
        self._steps = count()  # with those of all forks
        self._deaths = count()

    def fork(self) -> Job:
        """An independent copy: the same job, to be driven another way from here."""
        twin = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | set | dict):
                setattr(twin, name, value.copy())
        twin.agents = self.agents.copy()
        return twin

    # --- feeding ---------------------------------------------------------------------------------------------------

    def feed(self, event: Event, *, at: float | None = None) -> list[Command]:
        """One step, audited. Gives its commands."""
        if at is not None:
            assert at >= self.now, "a clock that goes back"
            self.now = at
        before = self.state
        self.audited = False
        if not self._is_possible(event):
            with pytest.raises(IllegalEventError):
                step(before, event, self.now)
            self.audited = True
            return []
        self.state, commands = step(before, event, self.now)
        if next(self._steps) % self.rereads_each == 0:
            self._compare_with_one_that_came_back(before, event, commands)
        self.history.append(event)
        self.commands += commands
        check_invariants(self.state)
        deadline = next_deadline(self.state)
        assert deadline is None or deadline > self.now, f"fed at {self.now}, the next deadline is {deadline}: busy"
        assert self.state.phase is JobPhase.ENDED or deadline is not None or self.state.workers, "nothing to wait for"
        sentence = explain(self.state, self.now)
        assert sentence
        assert "\n" not in sentence
        again, more = step(self.state, event, self.now)
        assert (more, again) == ([], self.state), f"{event} a second time is news: {more}"
        self._notice_before = before.notice_kind
        self._audit(event, commands)
        self._carry_out(before, event, commands)
        self.audited = True
        return commands

    def hosts(
        self,
        *texts: str,
        at: float | None = None,
        down: Iterable[str] = (),
        answered: bool = True,
        preparing: Iterable[str] = (),
        anew: Iterable[str] = (),
    ) -> list[Command]:
        """Discovery lists these hosts ("a:2", or "a:2,rack=r1,spot" with labels), and those that are down.

        Those that are named in ``anew`` are other machines than those that had their names.
        """
        self.incarnations.update({name: self.incarnations.get(name, 0) + 1 for name in anew})
        listed = (parse_host(text.replace(",", " "), default_slots=1) for text in texts)
        hosts = tuple(replace(host, incarnation=self.incarnations.get(host.name, 0)) for host in listed)
        return self.feed(HostsDiscovered(hosts, (), frozenset(down), answered, frozenset(preparing)), at=at)

    def ready(
        self,
        text: str,
        *,
        at: float | None = None,
        after: int | None = None,
        commits: int | None = None,
        cause: ReadyCause | None = None,
        detail: str = "",
        backends: tuple[Backend, ...] = BOTH,
        steps: int = 0,
        where: str = "",
        raised: bool = False,
        unreachable: tuple[int, ...] = (),
    ) -> list[Command]:
        """A worker asks for its next round; by default as a worker in its place would."""
        worker = worker_id(text)
        record = record_of(self.state, worker)
        last = record.round_id if record is not None and self.kind is OnChange.IN_PLACE else 0
        if cause is None:
            aborted = self.state.notice_kind is NoticeKind.ABORT or bool(unreachable)
            cause = ReadyCause.INTERNAL_ERROR if aborted else ReadyCause.HOSTS_UPDATED
            cause = cause if last else ReadyCause.START
        event = WorkerReady(
            worker,
            last if after is None else after,
            (record.commits if record is not None else 0) if commits is None else commits,
            cause,
            detail,
            backends,
            steps,
            where,
            raised,
            unreachable,
        )
        return self.feed(event, at=at)

    def running(self, text: str, *, at: float | None = None, commits: int | None = None) -> list[Command]:
        """A member has synced and trains."""
        told = self.round_commits if commits is None else commits
        return self.feed(WorkerRunning(worker_id(text), self.round_id, told), at=at)

    def exit(
        self,
        text: str,
        returncode: int,
        *,
        at: float | None = None,
        draw: float = 0.0,
        error: str = "",
        where: str = "",
        out_of_memory: bool = False,
        raised_s: float | None = None,
    ) -> list[Command]:
        """A process ends."""
        how = "killed by SIGKILL" if returncode == -9 else f"exited with code {returncode}"
        event = WorkerExited(worker_id(text), returncode, how, draw, error, where, out_of_memory, raised_s)
        return self.feed(event, at=at)

    def lose(self, hostname: str, *, at: float | None = None) -> list[Command]:
        """A host is lost, and its workers with it."""
        workers = sorted(record.worker for record in self.state.workers if record.worker.hostname == hostname)
        return self.feed(HostLost(hostname, "its agent is gone", tuple(workers), 0.0), at=at)

    def timer(self, *, at: float | None = None) -> list[Command]:
        """The time of next_deadline comes (or another, when given)."""
        deadline = next_deadline(self.state)
        assert at is not None or deadline is not None, "no timer is set"
        return self.feed(TimerExpired(), at=max(deadline or 0.0, self.now) if at is None else at)

    def begin(self, worker: WorkerId) -> list[Command]:
        """A worker's process runs, or asks for its first round, according to its kind."""
        if self.policy.num_parameter_servers:
            return self.feed(WorkerServing(worker, self.address(worker)))
        asks = self.kind is OnChange.IN_PLACE
        return self.ready(str(worker)) if asks else self.feed(WorkerStarted(worker))

    @staticmethod
    def address(worker: WorkerId) -> str:
        """Where a server answers."""
        return f"{worker.hostname}:{7000 + 100 * worker.slot + worker.attempt}"

    def end_chief(self, returncode: int) -> list[Command]:
        """The chief's process ends."""
        how = "killed by SIGKILL" if returncode == -9 else f"exited with code {returncode}"
        return self.feed(ChiefExited(self.state.chiefs, returncode, how))

    def train(self, *hosts: str, commits: int = 0) -> None:
        """Brings a new job to a running first round on these hosts, and its members to so many commits."""
        self.hosts(*hosts)
        if self.state.last_call is not None:
            self.timer(at=self.state.last_call)
        for record in self.state.workers:
            self.begin(record.worker)
        for worker in self.members if self.kind is OnChange.IN_PLACE else ():
            self.running(str(worker), commits=commits)
        assert self.state.phase is JobPhase.RUNNING

    def _is_possible(self, event: Event) -> bool:
        """Whether anybody could say this without lying, after the books that are kept here."""
        match event:
            case WorkersReported():
                return all(self._is_possible(report) for report in event.reports)
            case WorkerReady() | WorkerRunning():
                named = event.after_round if isinstance(event, WorkerReady) else event.round_id
                alive = event.worker in self.alive
                # A launch is a round whether it begins or not, and its workers are in it from then on.
                restarts = self.kind is OnChange.RESTART
                record = record_of(self.state, event.worker)
                last = self.state.round_id if restarts else self.round_id
                if record is not None and restarts:
                    last = record.round_id
                elif alive:
                    last = self.last_round.get(event.worker, 0)
                last = max(last, self.state.rounds_before)
                return self.ended is not None or (event.worker in self.started and named <= last)
            case WorkerDying() | WorkerExited() | WorkerNotStarted():
                return self.ended is not None or event.worker in self.started
            case HostLost():
                return self.ended is not None or self.started.issuperset(event.workers)
            case ChiefExited():
                return self.ended is not None or event.number in self.chiefs
            case _:
                return True

    def _compare_with_one_that_came_back(self, before: State, event: Event, commands: list[Command]) -> None:
        """A driver that stopped before this event, and came back to it on another clock, does the same.

        Its state is the same too, so that by induction it does not matter how often it stops.
        """
        now = self.now + OTHER_ORIGIN
        logged = read_event(json.loads(json.dumps(write_event(event, self.now))), now)
        there, given = step(read(json.loads(json.dumps(write(before, self.now))), now), logged, now)
        assert [read_command(write_command(command, now), self.now) for command in given] == commands
        assert read(write(there, now), self.now) == self.state
        assert explain(there, now) == explain(self.state, self.now)
        deadline, later = next_deadline(self.state), next_deadline(there)
        assert later == (None if deadline is None else deadline + OTHER_ORIGIN)

    def _carry_out(self, before: State, event: Event, commands: list[Command]) -> None:
        """Has the agents do what they are told. Wherever the driver dies meanwhile, the next one brings them there."""
        if self.state.policy.has_chief:
            return  # it is no worker, and agents have it all the same
        self.agents.happened(event, self.state)
        dies = next(self._deaths) % self.dies_each == 0
        if dies and isinstance(event, WorkerExited | WorkerNotStarted):
            # Before it has written this down: the agent reports it once more, and nothing is due of who has ended.
            levels = self.agents.levels(event.worker.hostname)
            assert event.worker not in unknown(before, levels)
            assert event.worker not in [one.worker for one in redo(before, levels) if isinstance(one, StartWorker)]
        cuts = []
        for command in commands:
            if dies and not isinstance(command, Report | ReportDying | ReportExit | ReportResumed):
                cuts.append(self.agents.copy())
            self.agents.carry_out(command)
        if not dies:
            return
        cuts.append(self.agents.copy())
        names = sorted({worker.hostname for worker in (*self.agents.living, *self.alive)})
        for met in cuts:
            for name in names:
                if self.kind is OnChange.RESTART:
                    self._audit_redone(redo(self.state, met.levels(name)))
                never_started = met.come_back(name, self.state)
                assert all(self.agents.living[worker].stop for worker in never_started), "lost, and nobody knows"
                met.check_like(self.agents, name, but=never_started)

    def _audit_redone(self, commands: Iterable[Command]) -> None:
        """Restarted workers get the ranks that they were to have, and meet where they were to."""
        for command in commands:
            if isinstance(command, StartWorker):
                assert command == self.orders[command.worker], "another place than in the launch"

    # --- asking ----------------------------------------------------------------------------------------------------

    def of(self, phase: WorkerPhase) -> list[str]:
        """Living workers in a phase, as text."""
        return [str(record.worker) for record in self.state.workers if record.phase is phase]

    def ranks(self) -> list[str]:
        """The members of the current round by rank, as text."""
        return [str(worker) for worker in self.members]

    def last(self, kind: type) -> Command:
        """The last command of a kind."""
        return next(command for command in reversed(self.commands) if isinstance(command, kind))

    # --- the audit -------------------------------------------------------------------------------------------------

    def _audit(self, event: Event, commands: list[Command]) -> None:
        self._note(event)
        launches = any(isinstance(command, StartWorker) for command in commands)
        self.idle += self.kind is OnChange.RESTART and launches  # a launch is a round, whether it begins or not
        for command in commands:
            assert self.ended is None or isinstance(command, ReportExit), "a command after EndJob"
            match command:
                case StartWorker():
                    self._audit_start(command)
                case StopWorker() | DismissWorker():
                    assert command.reason
                    assert command.worker in self.alive, "one that does not live is told to go"
                    if isinstance(command, DismissWorker):
                        assert command.worker in self.waiting, "no request to answer"
                        assert command.worker not in self.told_to_go, "told to go twice"
                    else:
                        self._audit_ending(command)
                    self.told_to_go.add(command.worker)
                    self.waiting.discard(command.worker)
                    self.left.add(command.worker)
                case StartChief():
                    self._audit_chief(command)
                case StopChief():
                    assert command.reason
                    assert command.number == self.chief, "a chief that does not live is told to go"
                    assert not self.chief_told, "told to go twice"
                    self.chief_told = True
                case GiveUpHost():
                    self._audit_verdict(command)
                case KillWorker():
                    assert command.reason
                    assert command.worker in self.alive - self.killed, "one that does not live, or is killed already"
                    self.killed.add(command.worker)
                case PublishRound():
                    self._audit_round(command)
                case SetNotice():
                    assert command.version == self.notice_version + 1, "a notice that watchers would miss"
                    assert command.round_id == self.round_id
                    self.notice_version = command.version
                case ReportResumed():
                    assert command.round_id == self.round_id
                    assert command.took_s >= 0
                case ReportDying():
                    assert command.worker in self.alive
                    self.failed.add(command.worker)
                case ReportExit():
                    assert command.worker in self.exits
                    ordered = (
                        self.ended is not None or command.worker in self.told_to_go
                    ) and command.worker not in self.failed
                    assert command.expected is ordered, "a failure that is told as an order, or the other way round"
                case EndJob():
                    assert command == self.state.end
                    assert command.message
                    if command.message.startswith("the training failed"):
                        roundless = self.kind is OnChange.NO_ROUNDS
                        setbacks = sum(code != 0 for code in self.exits.values()) if roundless else self.idle
                        if self.policy.num_parameter_servers:  # a server may not end with 0 either
                            setbacks = len(self.exits) + self.chief_failures
                        at_start = self.policy.ends_at_start and "of the training; " in command.message
                        limit = 2 if at_start else self.policy.setbacks_limit
                        assert setbacks >= limit, "given up too early"
                    if command.exit_code == 0 and self.policy.num_parameter_servers:
                        assert self.chiefs, "a false success"
                        assert not self.chief, "an early success"
                        assert isinstance(event, ChiefExited), "a success that nobody told of"
                        assert event.returncode == 0, "a false success"
                    elif command.exit_code == 0 and self.kind is OnChange.NO_ROUNDS:
                        assert 0 in self.exits.values(), "a false success"
                        assert self.alive <= self.told_to_go, "an early success"
                    elif command.exit_code == 0 and command.message.endswith("without calling hvd.init()"):
                        assert not self.policy.must_init
                        assert not self.round_id
                        assert all(self.exits.get(worker) == 0 for worker in self.started - self.told_to_go), (
                            "a failure"
                        )
                    elif command.exit_code == 0:
                        assert self.members
                        assert all(self.exits.get(worker) == 0 for worker in self.members), "a false success"
                    self.ended = command
                case Report():
                    assert command.text
        assert (self.state.phase is JobPhase.ENDED) == (self.ended is not None)
        assert {record.worker for record in self.state.workers} == self.alive
        assert self.state.policy.on_change is self.kind

    def _audit_ending(self, command: StopWorker) -> None:
        """Nobody is stopped twice, but who is given no more time. Time to checkpoint is for who can: all members live,
        nobody knows of one that does not, and their machines do not go away at once.
        """
        before = self.endings.get(command.worker)
        assert before is None or (before, command.ending) == (Ending.PLANNED, Ending.BROKEN), "stopped twice"
        self.endings[command.worker] = command.ending
        if command.ending is Ending.USUAL:
            self.not_there.add(command.worker)
            return
        assert self.kind is OnChange.RESTART
        gone = self.failed | self.not_there
        lost = [worker for worker in self.state.members if worker not in self.alive or worker in gone]
        at_once = {
            one.hostname for one in self.state.departing if one.by is not None and one.by - LAST_MOMENT_S <= self.now
        }
        late = [worker for worker in self.state.members if worker in self.alive and worker.hostname in at_once]
        if command.ending is Ending.PLANNED:
            assert not lost, "one that hangs is given time to checkpoint"
            assert not late, "one is given time to checkpoint that its machine does not have"
            assert command.worker not in self.told_to_go, "told to go twice"
        else:
            assert lost or late, "one that could checkpoint is given no time for that"

    def _note_becoming(self, worker: WorkerId, commits: int) -> None:
        """Restarted workers become such that reset in place: a job that has just begun, with those who live."""
        self.kind = OnChange.IN_PLACE
        self.round_id = max(self.round_id, self.launched)
        self.members, self.round_commits, self.broken = (), 0, False
        self.waiting, self.left, self.asked, self.holders = {worker}, set(), {worker}, set()
        self.last_round, self.commits = {}, {worker: commits}
        self.furthest, self.idle = (0, 0), 1

    def _note(self, event: Event) -> None:
        match event:
            case WorkerExited() | WorkerNotStarted():
                if event.worker in self.alive:
                    code = event.returncode if isinstance(event, WorkerExited) else 127
                    self.exits[event.worker] = code
                    self.broken |= code != 0 and event.worker in self.members and event.worker not in self.told_to_go
                    self.alive.discard(event.worker)
                    self.waiting.discard(event.worker)
                    self.left.add(event.worker)
            case HostLost():
                for worker in event.workers:
                    self._note(WorkerExited(worker, -9, "lost", 0.0))
            case WorkerDying():
                if event.worker in self.alive - self.told_to_go and self.ended is None:
                    self.exits[event.worker] = -9
                    self.broken |= event.worker in self.members
                    self.told_to_go.add(event.worker)
                    self.waiting.discard(event.worker)
                    self.left.add(event.worker)
            case WorkerStarted():
                if self.kind is not OnChange.IN_PLACE and event.worker in self.alive - self.told_to_go:
                    self.waiting.add(event.worker)
            case ChiefExited():
                if event.number == self.chief:
                    self.chief = 0
                    self.chief_failures += 1
            case WorkerReady():
                worker = event.worker
                if self.kind is not OnChange.IN_PLACE:
                    first = self.policy.becomes_in_place and event.after_round == 0 and self.ended is None
                    if first and worker in self.alive - self.told_to_go:
                        self._note_becoming(worker, event.commits)
                    return
                known = worker in self.alive - self.told_to_go - self.waiting and self.ended is None
                if known and event.after_round == self.last_round.get(worker, 0):
                    member = worker in self.members
                    # One of Horovod's own cannot say why it leaves: if it was asked to, then since it was.
                    tells = Backend.HOROVOD not in event.backends
                    left_by_itself = event.cause is not ReadyCause.INTERNAL_ERROR
                    left_by_itself |= not tells and self._notice_before is NoticeKind.HOSTS_UPDATED
                    self.broken |= member and not left_by_itself
                    if member and (event.commits or left_by_itself):
                        self.holders.add(worker)
                    if member:
                        self._came_to(max(event.commits, self.commits.get(worker, 0)), event.steps)
                    self.commits[worker] = max(event.commits, self.commits.get(worker, 0) if member else 0)
                    self.waiting.add(worker)
                    self.left.add(worker)
                    self.asked.add(worker)
            case WorkerRunning():
                inside = event.worker in self.members and event.worker in self.alive - self.left
                if inside and event.round_id == self.round_id and self.ended is None:
                    record = record_of(self.state, event.worker)
                    assert record is not None
                    # Past the deadline of the reset it is told to go in the same step.
                    assert record.running or record.phase is WorkerPhase.LEAVING
                    self.holders.add(event.worker)
                    self.commits[event.worker] = record.commits
                    self._came_to(record.commits, 0)
            case WorkerSpared():
                self.killed.discard(event.worker)
            case WorkersReported() | HostsReported():
                for report in event.reports:
                    self._note(report)
            case HostSilent():
                self.silent[event.hostname] = event.sure or self.silent.get(event.hostname, False)
            case HostHeard():
                self.silent.pop(event.hostname, None)
                self.given_up.discard(event.hostname)
            case _:
                pass

    def _came_to(self, commits: int, steps: int) -> None:
        if (commits, steps) > self.furthest:
            self.furthest, self.idle = (commits, steps), 0

    def _audit_verdict(self, command: GiveUpHost) -> None:
        """Who is given up may live: the job must not have a second life there, and no less than it needs here."""
        assert command.reason
        assert self.silent.get(command.hostname), "a host that is heard, or in doubt, is given up"
        assert command.hostname not in self.given_up, "given up twice"
        self.given_up.add(command.hostname)
        if not any(worker.hostname == command.hostname for worker in self.alive):
            return
        heard = {worker for worker in self.alive if worker.hostname not in self.silent}
        if self.kind is OnChange.IN_PLACE:
            assert len(heard - self.told_to_go) >= self.policy.min_num_proc, "given up, and too few are left"
        # Restarted workers that do not end in time are not waited for: a later round is being started already.
        if self.round_id and self.round_id == self.state.round_id:
            there = {worker for worker in self.members if worker in self.alive and worker.hostname in self.silent}
            assert not there or not heard.isdisjoint(self.members), "given up, and it may train alone"
        if self.kind is OnChange.NO_ROUNDS and self.state.round is not None:
            assert heard, "given up, and nobody is left"

    def _audit_chief(self, command: StartChief) -> None:
        """The servers that it is told of answer, and nobody has told them to go."""
        assert not self.chief, "two chiefs"
        assert command.number == len(self.chiefs) + 1
        there = {self.address(worker) for worker in self.alive - self.told_to_go}
        assert len(command.parameter_servers) == self.policy.num_parameter_servers
        assert len(command.workers) >= self.policy.min_num_proc
        named = [*command.parameter_servers, *command.workers]
        assert len(named) == len(set(named)), "a server twice"
        assert there.issuperset(named), "a server that is gone"
        self.chiefs[command.number] = command.parameter_servers
        self.chief, self.chief_told = command.number, False

    def _audit_start(self, command: StartWorker) -> None:
        worker = command.worker
        assert worker not in self.started, "the same worker twice"
        places = {(other.hostname, other.slot) for other in self.alive}
        assert (worker.hostname, worker.slot) not in places, "two processes in one slot"
        listed = {host.name: host.slots for host in self.state.hosts}
        assert worker.slot < listed.get(worker.hostname, 0), "a slot that discovery does not list"
        assert not self.state.blacklist.is_blacklisted(worker.hostname), "a blacklisted host gets a worker"
        assert worker.hostname not in self.state.cuts.out, "a host that is left out gets a worker"
        assert 0 <= command.planned.rank < command.planned.size
        if self.kind is OnChange.RESTART:
            assert all(worker in self.left for worker in self.members), "a start beside the last round"
            self.orders[worker] = command
            self.launched = self.state.round_id
            self.last_round[worker] = self.state.round_id
        self.started.add(worker)
        self.alive.add(worker)

    def _audit_what_is_kept(self, command: PublishRound) -> None:
        """A member that asks again is answered from the state."""
        kept = self.state.round
        assert kept is not None
        assert places_of(kept.members) == command.placed
        told = command.round_id, command.sync, command.commits, command.backend
        assert (kept.round_id, kept.sync, kept.commits, kept.backend) == told

    def _audit_round(self, command: PublishRound) -> None:
        workers = tuple(one.worker for one in command.placed)
        assert command.old_size == len(self.members)
        assert len(set(workers)) == len(workers)
        self._audit_what_is_kept(command)
        if self.kind is OnChange.RESTART:
            self._audit_restart(command, workers)
            return
        assert command.round_id == self.round_id + 1, "rounds grow by one"
        assert set(workers) <= self.waiting, "a member that has not asked for the round"
        assert all(worker in self.left for worker in self.members), "two rounds overlap"
        # Who was told to go, and is not heard, may train on with others of whom that is true.
        may_train = [worker for worker in self.members if worker in self.alive - self.asked]
        together = len(may_train) == len(self.members) > 0
        assert not together or any(worker.hostname not in self.silent for worker in may_train), "two rounds live"
        assert not any(self.silent.get(worker.hostname) for worker in workers), "a member that is not heard"
        assert self.state.cuts.out.isdisjoint(worker.hostname for worker in workers), "a member that is left out"
        assert [one.slot for one in command.placed] == naive_slots(workers)
        self._audit_places(workers)
        limit, group = self.policy.max_num_proc, self.policy.multiple
        assert self.policy.min_num_proc <= len(workers)
        assert limit is None or len(workers) <= limit or (limit == group and len(workers) == 2 * group)
        if self.members:
            holders = [worker for worker in workers if worker in self.holders]
            assert holders or self.policy.durable, "the state is lost, and the job goes on in silence"
            assert not holders or workers[0] in holders, "a blank process is the root"
            most = max((self.commits[worker] for worker in holders), default=0)
            assert most == command.commits, "a root that is behind"
            assert not holders or self.commits[workers[0]] == most, "a root that is behind"
            self._audit_protected(workers[0], [worker for worker in holders if self.commits[worker] == most])
            assert command.sync or set(workers) == set(holders), "a newcomer without sync"
        else:
            assert command.commits == 0
            self._audit_protected(workers[0], workers)
        assert command.sync or not self.broken, "no sync after a failure"
        self.round_id, self.members, self.round_commits = command.round_id, workers, command.commits
        self.broken = False
        self.idle += 1
        assert self.state.setbacks.count < self.idle, "more setbacks than rounds without progress"
        self.waiting -= set(workers)
        self.left, self.asked = set(), set()
        for worker in workers:
            self.last_round[worker] = command.round_id
        if not command.commits:
            self.holders.update(workers)

    def _audit_places(self, workers: Sequence[WorkerId]) -> None:
        """The multiples, and hosts of one rack next to each other."""
        assert len(workers) % self.policy.num_proc_multiple == 0, "no multiple of --np-multiple"
        for name in {worker.hostname for worker in workers}:
            ranks = sum(worker.hostname == name for worker in workers)
            assert ranks % self.policy.ranks_per_host_multiple == 0, "no multiple of --ranks-per-host-multiple"
        if self.kind is OnChange.IN_PLACE:  # others were placed when they were started
            racks = {host.name: host.rack or f"of {host.name} alone" for host in self.state.discovery.order}
            by_rank = [racks[worker.hostname] for worker in workers]
            blocks = [rack for index, rack in enumerate(by_rank) if index == 0 or by_rank[index - 1] != rack]
            assert len(set(blocks)) == len(blocks), "a rack that is torn apart"

    def _audit_protected(self, root: WorkerId, equals: Sequence[WorkerId]) -> None:
        """Of those who could lead the round, one on a protected host does."""
        labeled = [host.name for host in self.state.discovery.order if "protected" in host.labels]
        protected = {*labeled, *self.policy.protect}
        if any(worker.hostname in protected for worker in equals):
            assert root.hostname in protected, "rank 0 is on a host that is not protected"

    def _audit_restart(self, command: PublishRound, workers: tuple[WorkerId, ...]) -> None:
        assert command.round_id > self.round_id, "rounds grow"
        assert all(worker in self.waiting or self.exits.get(worker) == 0 for worker in workers), "one that does not run"
        assert all(worker in self.left for worker in self.members), "two rounds overlap"
        assert [one.slot for one in command.placed] == naive_slots(workers)
        started_as = [self.orders[worker].planned for worker in workers]
        assert started_as == naive_slots(workers), "other ranks than at the start"
        self._audit_places(workers)
        limit = self.policy.max_num_proc
        assert self.policy.min_num_proc <= len(workers)
        assert limit is None or len(workers) <= limit
        assert command.backend is None
        self.round_id, self.members, self.left = command.round_id, workers, set(workers) - self.alive
        self.waiting -= set(workers)
        self.last_round.update(dict.fromkeys(workers, command.round_id))

    # --- ends ------------------------------------------------------------------------------------------------------

    def cooperate(self, known: set[tuple[State, float]] | None = None) -> None:
        """From here on every worker does what it is asked: the job must come to rest, complete, or to an end.

        Args:
            known: where that has been seen already; added to.
        """
        for _ in range(300):
            if self.ended is not None or self._is_known(known):
                return
            if self.state.silent:
                self._hear_all()
                continue
            if self.chief and self.chief_told:
                self.end_chief(-15)
                continue
            if not any(self._act_for(record) for record in self.state.workers):
                if next_deadline(self.state) is None:
                    break
                self.timer()
        else:
            raise AssertionError(f"the job never comes to rest: {explain(self.state, self.now)}")
        assert self.state.phase is JobPhase.RUNNING
        assert self.state.notice_kind is NoticeKind.NONE
        # Members that cannot be replaced train on as long as their machines live.
        going = {one.hostname for one in self.state.departing if one.by is not None}
        is_short = self.kind is OnChange.IN_PLACE and usable_slots(self.state) < self.policy.min_num_proc
        stay = {worker for worker in self.members if is_short and worker.hostname in going}
        there = {(worker.hostname, worker.slot) for worker in self.alive - stay}
        assert there == set(wanted_places(self.state)), "a place without its worker, or a worker without a place"

    def _hear_all(self) -> None:
        """The networks are whole again. Who was given up hears it, and begins anew."""
        given_up = {one.hostname for one in self.state.silent if one.given_up}
        for record in [record for record in self.state.workers if record.worker.hostname in given_up]:
            self.exit(str(record.worker), -9)
        for one in self.state.silent:
            self.feed(HostHeard(one.hostname))

    def _act_for(self, record: WorkerRecord) -> bool:
        name = str(record.worker)
        match record.phase:
            case _ if record.killed is not None:
                self.exit(name, -9)
            case WorkerPhase.LEAVING:
                self.exit(name, 0 if record.leaving is Leaving.DISMISSED else -15)
            case WorkerPhase.BOOTING:
                self.begin(record.worker)
            case WorkerPhase.MEMBER if record.address and record.leave_by is not None:
                self.feed(WorkerReleased(record.worker))
            case WorkerPhase.MEMBER if finishing(self.state):
                self.exit(name, 0)
            case WorkerPhase.MEMBER if self.kind is not OnChange.IN_PLACE:
                return False
            case WorkerPhase.MEMBER if not record.running and self.state.phase is JobPhase.RUNNING:
                self.running(name)
            case WorkerPhase.MEMBER if self.state.notice_kind is not NoticeKind.NONE:
                self.ready(name)
            case _:
                return False
        return True

    def _is_known(self, known: set[tuple[State, float]] | None) -> bool:
        if known is None:
            return False
        here = (self.state, self.now)
        if here in known:
            return True
        known.add(here)
        return False

    def fall_silent(self, known: set[tuple[State, float]] | None = None) -> None:
        """From here on no worker says anything, and ends only when it is told to: every wait must have an end.

        Args:
            known: where that has been seen already; added to.
        """
        policy = self.policy
        horizon = self.now + 2 * (policy.start_timeout_s + policy.elastic_timeout_s + policy.drain_timeout_s) + 10
        while self.ended is None:
            if self._is_known(known):
                return
            lost = {one.hostname for one in self.state.silent if one.given_up}
            going = [
                r
                for r in self.state.workers
                if r.phase is WorkerPhase.LEAVING or r.killed is not None or r.worker.hostname in lost
            ]
            if self.chief and self.chief_told:
                self.end_chief(-9)
                continue
            if going:
                self.exit(str(going[0].worker), -9 if going[0].worker.hostname in lost else -15)
                continue
            deadline = next_deadline(self.state)
            if deadline is None or deadline > horizon:
                break
            self.timer()
        runs = self.state.phase is JobPhase.RUNNING
        if self.kind is OnChange.NO_ROUNDS:
            runs = bool(self.of(WorkerPhase.MEMBER))
        assert runs or self.state.phase is JobPhase.ENDED, explain(self.state, self.now)
