"""Stories of workers that stand still: who is suspected, who is cleared, who is proven to hang."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_driver.core.events import WorkerHung
from elastic_driver.health.findings import Kind, Spared, StackWanted, WorkerCleared, WorkerSuspected
from elastic_driver.health.hangs import Finding, HangWatch
from elastic_driver.health.limits import limit_of, proof_of
from elastic_driver.health.seen import STALE_S
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals, Waiting

pytestmark = pytest.mark.unit

STACK = """Current thread 0x01 (most recent call first):
  File "/x/train.py", line 12 in wait
  File "/x/train.py", line 3 in <module>
"""


class World:
    """A round whose workers all do the same, until a test says otherwise; looks come once a second."""

    def __init__(self, size: int = 4, *, proves: bool = True, step_s: float = 0.25) -> None:
        self.now = 100.0
        self.workers = [WorkerId(f"h{rank}", 0, 0) for rank in range(size)]
        self.watch = HangWatch(proves=proves)
        self.spares: Callable[[WorkerId], str] = lambda worker: ""
        self.watch.begin(1, {worker: rank for rank, worker in enumerate(self.workers)})
        self.looks = {
            worker: Vitals(1000.0 * rank, pid=rank + 1, state="S", pulse_s=0.1, round_id=1, rank=rank, can_dump=True)
            for rank, worker in enumerate(self.workers)
        }
        self.step_s = step_s
        self.told: list[tuple[float, Finding]] = []
        self.stack: Callable[[int], str | None] = lambda rank: STACK
        self.trains = True
        self.told_to_end: WorkerId | None = None
        self.reversed = False

    def pass_s(
        self,
        seconds: float,
        *,
        culprits: tuple[int, ...] = (),
        others_wait: bool = True,
        all_stand: bool = False,
        cpu: float = 0.0,
        io: int = 0,
        known: bool = True,
        by_s: float = 1.0,
        wakes_each_s: float = 0.0,
        silent: tuple[int, ...] = (),
        **of_culprits: object,
    ) -> list[Finding]:
        """Lets time pass. Culprits stand still, others wait for them (or go on)."""
        end, told = self.now + seconds, len(self.told)
        while self.now < end - 1e-9:
            self.now += by_s
            order = list(enumerate(self.workers))
            for rank, worker in reversed(order) if self.reversed else order:
                look = self.looks[worker]
                look = replace(look, at_s=look.at_s + by_s)
                if rank in culprits:
                    more = {"waits_s": 0.0, "state": "S", **of_culprits}
                    look = replace(look, cpu_s=look.cpu_s + cpu * by_s, io_bytes=look.io_bytes + int(io * by_s), **more)  # type: ignore[arg-type]
                    if wakes_each_s and look.at_s % wakes_each_s < by_s:
                        look = replace(look, wakes=look.wakes + 1)
                elif (culprits and others_wait) or all_stand:
                    look = replace(look, waits_s=look.waits_s + by_s)
                    if rank == 0 and known:
                        look = replace(look, waiting=(Waiting("allreduce 'grad.3'", look.waits_s, culprits),))
                else:
                    done = by_s / self.step_s
                    look = replace(
                        look,
                        waits_s=0.0,
                        waiting=(),
                        state="R",
                        traced=False,
                        steps=look.steps + int(done),
                        submitted=look.submitted + 3 * int(done),
                        finished=look.finished + 3 * int(done),
                        cpu_s=look.cpu_s + by_s,
                    )
                self.looks[worker] = look
                if rank not in silent:
                    for _ in range(2):  # twice is once
                        self.watch.take(worker, look, self.now, peer_is_ours=look.peer == "10.0.0.1")
            found = self.watch.look(
                self.now,
                trains=lambda worker: self.trains,
                lives=lambda worker: worker != self.told_to_end,
                spares=lambda worker, ended: self.spares(worker),
            )
            self.told += [(self.now, finding) for finding in found]
            for finding in found:
                if isinstance(finding, StackWanted):
                    self.watch.answer(finding.worker, finding.number, self.stack(self.workers.index(finding.worker)))
        return [finding for _, finding in self.told[told:]]

    def train(self, seconds: float = 30.0) -> None:
        assert self.pass_s(seconds) == []


def kinds(found: list[Finding]) -> list[type[Finding]]:
    return [type(finding) for finding in found if not isinstance(finding, StackWanted)]


def only(found: list[Finding], kind: type) -> list[Finding]:
    return [finding for finding in found if isinstance(finding, kind)]


def test_the_limits_are_derived_in_words() -> None:
    assert limit_of(100, 0.8, "steps").seconds == 8.0
    assert limit_of(250, 0.8, "steps").told == "10 times the slowest of the last 100 steps, 0.8 s, is 8 s"
    assert limit_of(40, 0.01, "steps").seconds == 5.0
    assert limit_of(3, 0.01, "steps").seconds == 60.0
    assert limit_of(3, 20.0, "steps").seconds == 200.0
    assert proof_of(limit_of(100, 0.1, "steps")).seconds == 60.0
    assert proof_of(limit_of(100, 2.0, "steps")).seconds == 120.0


def test_a_rank_that_others_wait_for_is_suspected_by_name_and_cleared_when_it_goes_on() -> None:
    world = World()
    world.train()
    found = world.pass_s(15, culprits=(2,), cpu=0.9)
    assert kinds(found) == [WorkerSuspected]
    suspected = only(found, WorkerSuspected)[0]
    assert isinstance(suspected, WorkerSuspected)
    assert (suspected.worker, suspected.rank, suspected.kind) == (world.workers[2], 2, Kind.LACKS)
    assert "allreduce 'grad.3'" in suspected.why
    assert suspected.collective == "allreduce 'grad.3'"
    assert 5.0 <= suspected.still_s <= 7.0
    found = world.pass_s(3)
    assert kinds(found) == [WorkerCleared]
    cleared = only(found, WorkerCleared)[0]
    assert isinstance(cleared, WorkerCleared)
    assert 15.0 <= cleared.took_s <= 17.0
    world.train(15)
    # What it took is learned: the same once more is no news.
    assert world.pass_s(15, culprits=(2,), cpu=0.9) == []


def test_a_suspicion_that_is_not_confirmed_for_two_seconds_is_cleared() -> None:
    world = World()
    world.train()
    assert kinds(world.pass_s(8, culprits=(2,), cpu=0.9)) == [WorkerSuspected]
    assert kinds(world.pass_s(1, culprits=(2,), cpu=0.9, others_wait=False)) == []
    assert kinds(world.pass_s(1, culprits=(2,), cpu=0.9, others_wait=False)) == [WorkerCleared]


def test_before_the_first_steps_a_minute_is_given() -> None:
    world = World()
    assert world.pass_s(55, culprits=(1,)) == []
    assert kinds(world.pass_s(10, culprits=(1,))) == [WorkerSuspected]


def test_a_pause_is_learned_though_many_steps_are_seen_with_its_end() -> None:
    world = World(step_s=0.02)
    world.pass_s(20.0)
    assert world.watch.limit.seconds == 5.0
    world.pass_s(8.0, culprits=(1,))
    world.pass_s(1.0)
    assert world.watch.limit.seconds >= 70.0


def test_gaps_between_collectives_stand_in_for_steps() -> None:
    world = World()
    for _ in range(30):
        world.pass_s(1)
        for worker in world.workers:
            world.looks[worker] = replace(world.looks[worker], steps=0)
    assert world.watch.limit.seconds == pytest.approx(10.0)
    assert "gaps between collectives" in world.watch.limit.told


def test_a_slow_step_is_forgotten_after_a_hundred_also_where_a_look_has_seen_many() -> None:
    """A worker loads its data for 7 s; then it makes 50 steps a second."""
    world = World(step_s=0.02)
    world.pass_s(7.0, all_stand=True)
    world.pass_s(2.0)
    assert world.watch.limit.seconds >= 60.0, "its first step is one of the last 100"
    world.pass_s(1.0)
    assert world.watch.limit.seconds == 5.0


def test_who_does_nothing_at_all_is_proven_to_hang_after_the_whole_deadline() -> None:
    world = World()
    world.train()
    found = world.pass_s(64, culprits=(2,))
    assert kinds(found) == [WorkerSuspected]
    found += world.pass_s(6, culprits=(2,))
    assert kinds(found) == [WorkerSuspected, WorkerHung]
    assert len(only(found, StackWanted)) == 3
    proven = only(found, WorkerHung)[0]
    assert isinstance(proven, WorkerHung)
    assert (proven.worker, proven.silent) == (world.workers[2], False)
    assert "its stacks are the same" in proven.reason
    assert "have waited 66 s" in proven.reason
    at = next(at for at, finding in world.told if finding is proven)
    since = next(at for at, finding in world.told if isinstance(finding, WorkerSuspected))
    assert at - since >= 60.0


def test_ticks_of_the_clock_are_no_doing() -> None:
    for seed in range(30):
        draw, world = random.Random(seed), World()
        world.train()
        found, before = [], world.looks[world.workers[1]].cpu_s
        for _ in range(75):
            found += world.pass_s(1, culprits=(1,))
            look = world.looks[world.workers[1]]
            world.looks[world.workers[1]] = replace(look, cpu_s=before + 0.01 * draw.randrange(-1, 2))
        assert kinds(found)[:2] == [WorkerSuspected, WorkerHung]


def test_who_has_waited_for_an_hour_may_not_compute_the_sooner_for_it() -> None:
    """Of an hour, ten seconds are less than one percent."""
    world = World()
    world.train()
    found = world.pass_s(3600, culprits=(2,), cpu=1.0)
    found += world.pass_s(600, culprits=(1, 2), cpu=0.1)
    assert WorkerHung not in kinds(found)
    assert {finding.rank for finding in found if isinstance(finding, WorkerSuspected)} == {1, 2}


@pytest.mark.parametrize("moves", ["cpu", "io", "stack", "no stack", "warn only", "no pulse", "traced"])
def test_who_moves_is_named_and_never_ended(moves: str) -> None:
    world = World(proves=moves != "warn only")
    world.train()
    more: dict[str, object] = {}
    if moves == "stack":
        lines = iter(range(10**6))
        world.stack = lambda rank: STACK.replace("line 12", f"line {next(lines)}")
    elif moves == "no stack":
        world.stack = lambda rank: None
    elif moves == "no pulse":
        more = {"pulse_s": None}
    elif moves == "traced":
        more = {"traced": True}
    found = world.pass_s(
        600, culprits=(1,), cpu=0.02 if moves == "cpu" else 0.0, io=2048 if moves == "io" else 0, **more
    )  # type: ignore[arg-type]
    assert WorkerHung not in kinds(found)
    assert kinds(found) == ([] if moves == "no pulse" else [WorkerSuspected])
    # A question each few seconds at most.
    assert len(only(found, StackWanted)) <= 150


@pytest.mark.parametrize("each_s", [1.0, 32.0, 55.0])
def test_a_main_thread_that_wakes_is_named_and_never_ended(each_s: float) -> None:
    """It polls, or an object store has it back off: it sleeps for longer and longer, and tries again."""
    world = World()
    world.train()
    found = world.pass_s(600, culprits=(2,), wakes_each_s=each_s)
    assert kinds(found) == [WorkerSuspected]
    assert len(only(found, StackWanted)) <= 150
    assert kinds(world.pass_s(1, culprits=(2,), wakes_each_s=1.0)) == []
    assert kinds(world.pass_s(58, culprits=(2,))) == []
    assert kinds(world.pass_s(10, culprits=(2,))) == [WorkerHung], "it wakes no more"


@pytest.mark.parametrize(
    ("awaits", "peer", "ends"),
    [
        ("a file lock (flock) that process 7 holds", "", False),
        ("a child process", "", False),
        ("a connection to 10.9.9.9:443", "10.9.9.9", False),
        ("a connection to 10.0.0.1:29500", "10.0.0.1", True),
        ("", "", True),
    ],
)
def test_who_waits_for_something_outside_the_job_is_named_and_never_ended(awaits: str, peer: str, ends: bool) -> None:
    world = World()
    world.train()
    found = world.pass_s(600, culprits=(2,), awaits=awaits, peer=peer)
    assert kinds(found) == ([WorkerSuspected, WorkerHung] if ends else [WorkerSuspected])
    suspected = only(found, WorkerSuspected)[0]
    assert isinstance(suspected, WorkerSuspected)
    assert suspected.kind is Kind.LACKS
    assert suspected.ends_s == (60.0 if ends else None)
    assert suspected.spared == ("" if ends else f"its main thread waits for {awaits}")


def test_who_is_ready_to_run_and_gets_no_processor_is_never_ended() -> None:
    world = World()
    world.train()
    assert kinds(world.pass_s(600, culprits=(2,), state="R")) == [WorkerSuspected]


def test_who_comes_to_a_lock_of_its_own_after_one_outside_has_the_whole_deadline() -> None:
    world = World()
    world.train()
    found = world.pass_s(50, culprits=(2,))
    found += world.pass_s(30, culprits=(2,), awaits="a file lock (flock)")
    found += world.pass_s(58, culprits=(2,), awaits="")
    assert kinds(found) == [WorkerSuspected]
    assert kinds(world.pass_s(10, culprits=(2,))) == [WorkerHung]


@pytest.mark.parametrize("state", ["S", "T"])
def test_who_alone_has_the_state_is_warned_of_once_and_ended_when_others_have_it(state: str) -> None:
    world = World()
    world.train()
    world.spares = lambda worker: "nobody else has it"
    found = world.pass_s(100, culprits=(2,), state=state)
    assert kinds(found) == [WorkerSuspected, Spared]
    suspected, spared = only(found, WorkerSuspected)[0], only(found, Spared)[0]
    assert isinstance(suspected, WorkerSuspected)
    assert isinstance(spared, Spared)
    assert (suspected.ends_s, suspected.spared) == (None, "nobody else has it")
    assert spared.reason == "nobody else has it"
    assert "its stacks are the same" in spared.why if state == "S" else "state T" in spared.why
    world.spares = lambda worker: ""
    assert kinds(world.pass_s(2, culprits=(2,), state=state)) == [WorkerHung]


def test_a_stopped_process_is_suspected_at_the_second_look_and_ended_after_ten_seconds() -> None:
    world = World()
    world.train()
    began = world.now
    found = world.pass_s(14, culprits=(3,), state="T", pulse_s=5.0, by_s=0.5)
    assert kinds(found) == [WorkerSuspected, WorkerHung]
    times = [at - began for at, finding in world.told if not isinstance(finding, StackWanted)]
    assert times[0] <= 2.0
    assert 10.0 <= times[1] <= 11.0
    proven = only(found, WorkerHung)[0]
    assert isinstance(proven, WorkerHung)
    assert proven.silent


def test_a_stopped_process_that_is_continued_is_cleared() -> None:
    world = World()
    world.train()
    assert kinds(world.pass_s(9, culprits=(3,), state="T", by_s=0.5)) == [WorkerSuspected]
    assert kinds(world.pass_s(5)) == [WorkerCleared]


def test_a_script_that_is_stopped_and_continued_goes_on_though_it_never_says_that_it_trains() -> None:
    world = World()
    world.trains = False
    world.train()
    assert kinds(world.pass_s(9, culprits=(3,), state="T", by_s=0.5)) == [WorkerSuspected]
    [cleared] = only(world.pass_s(5), WorkerCleared)
    assert isinstance(cleared, WorkerCleared)
    assert cleared.why == "it makes progress again"


def test_a_round_stalls_while_one_is_stopped() -> None:
    world = World()
    world.train()
    assert world.watch.stall(world.now) is None
    began = world.now
    world.pass_s(9, culprits=(3,), state="T", by_s=0.5)
    stall = world.watch.stall(world.now)
    assert stall is not None
    assert stall.waits_for == (world.workers[3],)
    assert 0 <= stall.since - began <= 0.5
    world.pass_s(1)
    assert world.watch.stall(world.now) is None


@pytest.mark.parametrize("state", ["T", "t"])
def test_who_is_stopped_and_let_go_on_in_turn_is_not_stopped(state: str) -> None:
    """As cpulimit does it: most looks find it stopped, and it trains. strace has it stop likewise at each call."""
    world = World()
    world.train()
    for _ in range(60):
        victim = world.workers[1]
        look = world.looks[victim]
        world.looks[victim] = replace(look, cpu_s=look.cpu_s + 0.02)
        assert world.pass_s(0.5, culprits=(1,), others_wait=False, state=state, traced=state == "t", by_s=0.5) == []
    assert WorkerSuspected in kinds(world.pass_s(2, culprits=(1,), state=state, traced=state == "t", by_s=0.5))


def test_one_that_a_debugger_leaves_stopped_has_its_ten_seconds_from_then_on() -> None:
    world = World()
    world.train()
    found = world.pass_s(8, culprits=(1,), state="t", traced=True, by_s=0.5)
    found += world.pass_s(10, culprits=(1,), state="T", traced=False, by_s=0.5)
    assert kinds(found) == [WorkerSuspected]
    assert kinds(world.pass_s(1, culprits=(1,), state="T", by_s=0.5)) == [WorkerHung]


def test_who_waits_at_a_debuggers_prompt_is_named_and_never_ended() -> None:
    world = World()
    world.train()
    world.stack = lambda rank: STACK.replace("/x/train.py", "/usr/lib/python3.12/bdb.py")
    assert kinds(world.pass_s(600, culprits=(1,))) == [WorkerSuspected]
    world.stack = lambda rank: STACK
    assert kinds(world.pass_s(80, culprits=(1,))) == [WorkerHung]


def test_who_has_been_told_to_end_is_not_suspected() -> None:
    world = World()
    world.train()
    world.pass_s(4, culprits=(1,))
    for _ in range(3):
        world.now += 1
        for worker, look in world.looks.items():
            waits_s = 0.0 if worker == world.workers[1] else look.waits_s + 1
            world.looks[worker] = replace(look, at_s=look.at_s + 1, waits_s=waits_s, waiting=())
            world.watch.take(worker, world.looks[worker], world.now)
        assert world.watch.look(world.now, lives=lambda worker: worker != world.workers[1]) == []
    assert kinds(world.watch.look(world.now)) == [WorkerSuspected]


def test_a_process_in_a_debugger_is_named_only() -> None:
    world = World()
    world.train()
    found = world.pass_s(300, culprits=(3,), state="t", traced=True)
    assert kinds(found) == [WorkerSuspected]
    suspected = only(found, WorkerSuspected)[0]
    assert isinstance(suspected, WorkerSuspected)
    assert suspected.kind is Kind.TRACED
    assert suspected.ends_s is None


def test_who_was_told_to_end_is_not_suspected_again_while_it_does() -> None:
    world = World()
    world.train()
    assert kinds(world.pass_s(10, culprits=(3,), state="t", traced=True)) == [WorkerSuspected]
    world.told_to_end = world.workers[3]
    assert kinds(world.pass_s(10, culprits=(3,), state="t", traced=True)) == [WorkerCleared]


def test_ranks_that_wait_for_each_other_are_told_as_such() -> None:
    world = World()
    world.train()
    text = (Waiting("allreduce 'a'", 8.0, (1,)), Waiting("allreduce 'b'", 8.0, (0, 2, 3)))
    found: list[Finding] = []
    for second in range(1, 12):
        world.now += 1
        for worker in world.workers:
            look = world.looks[worker]
            waits = replace(look, at_s=look.at_s + 1, waits_s=look.waits_s + 1)
            if waits.rank == 0:
                waits = replace(waits, waiting=tuple(replace(one, since_s=float(second)) for one in text))
            world.looks[worker] = waits
            world.watch.take(worker, waits, world.now)
        found += world.watch.look(world.now)
    assert kinds(found) == [WorkerSuspected]
    suspected = only(found, WorkerSuspected)[0]
    assert isinstance(suspected, WorkerSuspected)
    assert (suspected.rank, suspected.kind, suspected.ends_s) == (1, Kind.DEADLOCK, None)


def test_without_rank_0s_word_it_is_who_does_not_wait() -> None:
    world = World()
    world.train()
    found = world.pass_s(20, culprits=(2,), cpu=1.0, known=False)
    assert [(finding.rank, finding.kind) for finding in found if isinstance(finding, WorkerSuspected)] == [
        (2, Kind.LACKS)
    ]


def test_those_who_wait_are_innocent_however_long() -> None:
    world = World()
    world.train()
    found = world.pass_s(2000, culprits=(0,), cpu=1.0, known=False)
    assert {finding.rank for finding in found if isinstance(finding, WorkerSuspected)} == {0}


def test_a_job_that_does_nothing_is_named_and_one_that_computes_is_not() -> None:
    world = World(1)
    world.train()
    found = world.pass_s(300, culprits=(0,), others_wait=False)
    assert [(finding.kind, finding.ends_s) for finding in found if isinstance(finding, WorkerSuspected)] == [
        (Kind.IDLE, None)
    ]
    world = World(1)
    world.train()
    assert world.pass_s(300, culprits=(0,), cpu=0.5) == []


def test_nobody_is_suspected_while_no_round_trains() -> None:
    world = World()
    world.train()
    world.trains = False
    assert world.pass_s(300, culprits=(2,)) == []


def test_a_suspicion_ends_with_the_round_and_with_the_worker() -> None:
    world = World()
    world.train()
    assert kinds(world.pass_s(8, culprits=(2,))) == [WorkerSuspected]
    world.watch.begin(2, {worker: rank for rank, worker in enumerate(world.workers)})
    assert kinds(world.watch.look(world.now)) == [WorkerCleared]
    world = World()
    world.train()
    assert kinds(world.pass_s(8, culprits=(2,))) == [WorkerSuspected]
    world.watch.forget(world.workers[2])
    assert kinds(world.watch.look(world.now)) == [WorkerCleared]
    assert world.watch.look(world.now) == []


def test_who_is_not_heard_is_excused_and_begins_anew() -> None:
    world = World()
    world.train()
    assert world.pass_s(30, culprits=(2,), silent=(2,)) == []
    # Heard again: what it did meanwhile nobody knows.
    assert world.pass_s(4, culprits=(2,)) == []
    assert kinds(world.pass_s(4, culprits=(2,))) == [WorkerSuspected]
    assert world.pass_s(20, culprits=(2,), silent=(2,)) == []
    (cleared,) = only(world.pass_s(1, culprits=(2,)), WorkerCleared)
    assert isinstance(cleared, WorkerCleared)
    assert cleared.why == "it did not report for 21 s"


@pytest.mark.parametrize("silent", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("known", [False, True])
def test_a_suspicion_outlasts_a_silence_of_those_who_know(silent: tuple[int, ...], known: bool) -> None:
    """The worker stands still all the time; who could say whether others wait for it is not heard."""
    world = World()
    world.train()
    found = world.pass_s(20, culprits=(2,), known=known)
    assert kinds(found) == [WorkerSuspected]
    found = world.pass_s(20, culprits=(2,), known=known, silent=silent)
    assert kinds(found) == []
    found = world.pass_s(100, culprits=(2,), known=known)
    # By what ranks say of themselves, who was not heard is not known to have waited.
    assert kinds(found) == [WorkerHung]
    if known and 0 not in silent:
        return  # rank 0 knows by itself
    at = next(at for at, finding in world.told if isinstance(finding, WorkerHung))
    since = next(at for at, finding in world.told if isinstance(finding, WorkerSuspected))
    assert at - since >= 60.0 + 20.0 - STALE_S, "what nobody could know is no evidence"


def test_of_two_the_one_that_is_heard_is_not_taken_for_idle_while_the_other_may_wait_for_it() -> None:
    world = World(2)
    world.train()
    assert kinds(world.pass_s(10, culprits=(1,))) == [WorkerSuspected]
    assert world.pass_s(20, culprits=(1,), silent=(0,)) == []
    assert [(rank, why.partition(",")[0]) for _, rank, why, _, _ in world.watch.suspects()] == [
        (1, "it has not submitted allreduce 'grad.3'")
    ]
    assert kinds(world.pass_s(70, culprits=(1,))) == [WorkerHung]


@pytest.mark.parametrize("known", [False, True])
def test_who_is_let_go_on_while_rank_0_is_not_heard_is_cleared(known: bool) -> None:
    world = World()
    world.train()
    assert kinds(world.pass_s(3, culprits=(2,), state="T", known=known)) == [WorkerSuspected]
    assert kinds(world.pass_s(10, culprits=(2,), state="S", known=known, silent=(0,))) == [WorkerCleared]


def test_a_suspicion_that_was_dropped_while_the_worker_stood_still_is_taken_up_again() -> None:
    world = World()
    world.train()
    assert kinds(world.pass_s(10, culprits=(2,))) == [WorkerSuspected]
    world.trains = False
    assert kinds(world.pass_s(5, culprits=(2,))) == [WorkerCleared]
    world.trains = True
    assert kinds(world.pass_s(80, culprits=(2,))) == [WorkerSuspected, WorkerHung]


@pytest.mark.parametrize("known", [False, True])
def test_what_the_waiting_have_slept_through_with_their_hosts_makes_nobody_look_late(known: bool) -> None:
    """The hosts of all others stood still for a minute; who they have waited for since then had nothing to do."""
    world = World()
    world.train()
    world.pass_s(6, culprits=(2,), others_wait=False, cpu=1.0)
    assert world.pass_s(60, culprits=(2,), cpu=1.0, known=known, silent=(0, 1, 3)) == []
    assert world.pass_s(4, culprits=(2,), cpu=1.0, known=known) == []
    assert kinds(world.pass_s(4, culprits=(2,), cpu=1.0, known=known)) == [WorkerSuspected]


@pytest.mark.parametrize("missed", [False, True])
def test_a_driver_that_stood_still_reads_what_came_meanwhile_and_blames_nobody(missed: bool) -> None:
    """Host by host, while no time has passed for it; where agents could not tell what they saw, there is a gap."""
    world = World()
    world.train()
    for rank, worker in enumerate(world.workers):
        for second in range(1, 31):
            look = world.looks[worker]
            waits_s = float(second % 4) if rank != 2 else 0.0
            waiting = (Waiting("allreduce 'grad.3'", waits_s, (2,)),) if rank == 0 and waits_s else ()
            done = second % 4 == 0
            look = replace(
                look,
                at_s=look.at_s + 1,
                waits_s=waits_s,
                waiting=waiting,
                steps=look.steps + done,
                submitted=look.submitted + done,
                finished=look.finished + done,
            )
            world.looks[worker] = look
            if not missed or second == 30:
                world.watch.take(worker, look, world.now)
            assert world.watch.look(world.now) == []
    assert world.pass_s(3) == []


def test_a_host_that_was_stopped_as_a_whole_has_its_ten_seconds_anew() -> None:
    world = World()
    world.train()
    assert kinds(world.pass_s(5, culprits=(3,), state="T", by_s=0.5)) == [WorkerSuspected]
    world.pass_s(20, culprits=(3,), state="T", silent=(3,))
    found = world.pass_s(9, culprits=(3,), state="T", by_s=0.5)
    assert WorkerHung not in kinds(found)
    assert WorkerHung in kinds(world.pass_s(3, culprits=(3,), state="T", by_s=0.5))


def test_of_thousands_some_are_told() -> None:
    world = World(40)
    world.train(15)
    found = world.pass_s(10, culprits=tuple(range(1, 40)))
    suspected = [finding for finding in found if isinstance(finding, WorkerSuspected)]
    assert [one.rank for one in suspected] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [one.more for one in suspected] == [0] * 7 + [31]
