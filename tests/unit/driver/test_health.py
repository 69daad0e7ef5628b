"""What is told and reported of workers that hang or are slow, and in which order, on a loop of the test's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_driver.core.events import (
    Command,
    DrainRequested,
    HostsDiscovered,
    WorkerDying,
    WorkerExited,
    WorkerHung,
    WorkerReady,
    WorkerRunning,
)
from elastic_driver.core.membership import Policy
from elastic_driver.core.state import record_of
from elastic_driver.driver.health import Health
from elastic_driver.driver.stepper import Stepper
from elastic_driver.health.drains import DRAIN_PAUSE_S, HOST_PAUSE_S
from elastic_driver.health.findings import (
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.survivors import why_spared
from elastic_driver.health.watch import Rules
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.happenings import Happening, Remark
from elastic_driver.system.tasks import Tasks
from elastic_driver.vitals import Vitals, Waiting
from elastic_driver.words import Backend, HangAction, OnChange, ReadyCause, StragglerAction
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

STACK = """Thread 0x01 (most recent call first):
  File "/x/train.py", line 12 in wait
  File "/x/train.py", line 3 in <module>
"""
AT_A_PROMPT = 'Thread 0x01 (most recent call first):\n  File "/usr/lib/python3.11/bdb.py", line 96 in user_line\n'
STEP_S = 0.1


class World:
    """A running job, its agents, and what is told of it. Each worker trains until a test says otherwise."""

    def __init__(
        self, loop: VirtualLoop, hosts: Sequence[Host], policy: Policy, rules: Rules, **of_health: Any
    ) -> None:
        self.loop = loop
        self.told: list[Happening] = []
        self.errors: list[dict[str, Any]] = []
        self.asked: list[WorkerId] = []
        self.stack: str | Exception | None = STACK
        self.stack_s = 0.1
        self.hung: set[int] = set()
        self.stopped: set[int] = set()
        self.silent: set[int] = set()
        self.slow: dict[int, float] = {}
        self.hosts = list(hosts)
        loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.stepper = Stepper(policy, clock=loop.time, carry_out=self._carry_out, on_error=self._fail)
        self.tasks = Tasks()
        self.health = Health(
            self.stepper,
            rules,
            chronicle=Chronicle(self),
            clock=loop.time,
            tasks=self.tasks,
            stacks=self._take_stack,
            **of_health,
        )
        self.looks: dict[WorkerId, Vitals] = {}
        self.stepper.post(HostsDiscovered(tuple(hosts)))
        self.train()
        self.tasks.start(self._look_at_workers())
        self.tasks.start(self.health.watch_over())

    def train(self) -> None:
        """All who are there come to the next round, and train in it."""
        for record in self.stepper.state.workers:
            self.stepper.report(WorkerReady(record.worker, record.round_id, 1, ReadyCause.START, "", (Backend.NATIVE,)))
        self.stepper.catch_up()
        for worker in self.workers:
            self.stepper.report(WorkerRunning(worker, self.stepper.state.round_id, 1))
        self.stepper.catch_up()

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return self.stepper.state.members

    # --- collaborators -----------------------------------------------------------------------------------------------

    live = False
    scripts = False  # that do not use this library, and do nothing

    def hear(self, happening: Happening) -> None:
        self.told.append(happening)

    def _carry_out(self, commands: Sequence[Command], now: float) -> None:
        """Workers are the test's."""
        if hasattr(self, "health"):
            self.health.note_step(now)

    def _fail(self, error: Exception) -> None:
        raise error

    async def _take_stack(self, worker: WorkerId) -> str | None:
        self.asked.append(worker)
        stack = self.stack
        await asyncio.sleep(self.stack_s)
        if isinstance(stack, Exception):
            raise stack
        return stack

    async def _look_at_workers(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            lacking = tuple(sorted(self.hung | self.stopped))
            for rank, worker in enumerate(self.workers):
                if rank not in self.silent:
                    look = self.looks[worker] = self._look(rank, worker, lacking)
                    self.health.on_vitals(worker, look, self.loop.time())

    def _look(self, rank: int, worker: WorkerId, lacking: tuple[int, ...]) -> Vitals:
        round_id = self.stepper.state.round_id
        last = self.looks.get(worker) or Vitals(self.loop.time() - 1, 100 + rank, "S", pulse_s=0.1, can_dump=True)
        is_new = last.round_id != round_id
        last = replace(last, round_id=round_id, rank=rank, at_s=last.at_s + 1)
        if self.scripts:
            return replace(last, round_id=0, rank=-1, pulse_s=None, pid=200 + rank, waits_s=0.0)
        if rank in self.stopped:
            return replace(last, state="T", waits_s=0.0)
        if rank in self.hung:
            return replace(last, state="S", waits_s=0.0)
        if lacking:
            waits_s = last.waits_s + 1
            waiting = (Waiting("allreduce 'loss'", waits_s, lacking),) if rank == 0 else ()
            return replace(last, waits_s=waits_s, waiting=waiting)
        own = self.slow.get(rank, 1.0) / max([1.0, *self.slow.values()])
        return replace(
            last,
            state="R",
            waits_s=0.0,
            waiting=(),
            steps=last.steps + round(1 / STEP_S),
            waited_s=last.waited_s + 1 - own,
            cpu_s=last.cpu_s + 1,
            own_s=None if is_new else own * STEP_S,
        )

    # --- what a test asks --------------------------------------------------------------------------------------------

    def of(self, *kinds: type[Happening]) -> list[Any]:
        return [one for one in self.told if isinstance(one, kinds)]

    @property
    def hangs(self) -> list[type]:
        """What was told of hangs, by kinds, in its order."""
        return [type(one) for one in self.of(WorkerSuspected, WorkerCleared)]

    def fed(self, kind: type) -> list[Any]:
        """What the core was fed."""
        found = []
        for _, event in self.stepper.history:
            found += [one for one in getattr(event, "reports", (event,)) if isinstance(one, kind)]
        return found

    @property
    def warnings(self) -> list[str]:
        return [one.text for one in self.of(Remark)]


FOUR = (Host("a", 2), Host("b", 2))
POLICY = Policy(num_proc=4, min_num_proc=2)


def play(
    test: Callable[[World], Coroutine[Any, Any, None]],
    *,
    hosts: Sequence[Host] = FOUR,
    policy: Policy = POLICY,
    rules: Rules = Rules(),  # noqa: B008
    **of_health: Any,
) -> World:
    worlds: list[World] = []

    async def main(loop: VirtualLoop) -> None:
        world = World(loop, hosts, policy, rules, **of_health)
        worlds.append(world)
        assert len(world.workers) == sum(host.slots for host in hosts)
        await asyncio.sleep(20)
        await test(world)
        world.stepper.close()
        await world.tasks.end()

    run_virtually(main)
    return worlds[0]


# --- stalls ----------------------------------------------------------------------------------------------------------


def test_a_stall_is_told_while_it_lasts_and_when_it_is_over() -> None:
    async def test(world: World) -> None:
        world.stopped = {3}
        await asyncio.sleep(10)
        [told] = world.of(Stalled)
        assert (list(told.waits_for), world.of(StallEnded)) == ([world.workers[3]], [])
        assert 2.0 <= told.stood_s < 4.0, "nobody need wait for the limit: it is stopped"
        status: Any = world.health.status()["stalled"]
        assert status["waits_for"] == [world.workers[3].key]
        assert 8.0 < status["since_s"] <= 10.0
        assert world.health.stall.endswith(f"no worker steps, waiting for worker {world.workers[3]}")
        world.stopped = set()
        await asyncio.sleep(3)
        [ended] = world.of(StallEnded)
        assert ended.resumed
        assert 9.0 < ended.stood_s < 12.0
        assert (world.health.stall, world.health.status()["stalled"]) == ("", None)

    play(test)


@pytest.mark.parametrize("silent", [False, True])
def test_a_stall_that_ends_its_round_is_told_before_the_round_is_over(*, silent: bool) -> None:
    """Also where nobody could know of it before: the member was not heard for a moment, and then lost."""

    async def test(world: World) -> None:
        victim = world.workers[3]
        world.hung, world.silent = {3}, {3} if silent else set()
        await asyncio.sleep(4.5 if silent else 30)
        assert bool(world.of(Stalled)) != silent
        world.stepper.report(WorkerDying(victim, -9, "killed by SIGKILL", 0.5))
        world.health.gone(victim)
        world.stepper.catch_up()
        assert [list(one.waits_for) for one in world.of(Stalled)] == [[victim]]
        [ended] = world.of(StallEnded)
        assert not ended.resumed
        assert abs(ended.stood_s - (4.0 if silent else 30.0)) < 1.5
        assert world.health.stall == ""

    play(test)


def test_a_worker_that_is_killed_at_work_makes_no_stall() -> None:
    async def test(world: World) -> None:
        world.stepper.report(WorkerDying(world.workers[3], -9, "killed by SIGKILL", 0.5))
        world.stepper.catch_up()
        await asyncio.sleep(5)

    assert play(test).of(Stalled, StallEnded) == []


# --- hangs -----------------------------------------------------------------------------------------------------------


def test_an_agent_that_says_nothing_is_told_without_a_stack() -> None:
    mute: dict[str, float] = {}

    async def test(world: World) -> None:
        world.silent = {2, 3}
        mute["b"] = 12.0
        await asyncio.sleep(4)
        (suspected,) = world.of(WorkerSuspected)
        assert (suspected.worker, suspected.kind, suspected.more) == (world.workers[2], "unheard", 1)
        assert (suspected.stack, world.asked) == ("", [])
        (listed,) = world.health.status()["suspected"]  # type: ignore[misc]
        assert (listed["rank"], world.health.suspected) == (2, 1)
        assert "may hang: nothing was heard of its host's agent" in world.health.remark()
        mute.clear()
        world.silent = set()
        await asyncio.sleep(4)
        assert world.hangs == [WorkerSuspected, WorkerCleared]

    play(test, unheard=lambda least_s: mute)


def test_a_script_that_stands_still_is_told_and_nobody_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "scripts", True)

    async def test(world: World) -> None:
        await asyncio.sleep(100)
        (suspected,) = world.of(WorkerSuspected)
        assert (suspected.kind, suspected.more, suspected.ends_s) == ("idle", 3, None)
        assert world.fed(WorkerHung) == []

    play(test)


def test_a_hung_worker_is_told_with_its_stack_and_reported_once() -> None:
    async def test(world: World) -> None:
        assert world.told == world.of(Remark) == []
        world.hung = {2}
        await asyncio.sleep(8)
        suspected = world.of(WorkerSuspected)[0]
        assert (suspected.worker, suspected.rank, suspected.kind) == (world.workers[2], 2, "awaited")
        assert (suspected.stack, suspected.frames) == (STACK, ("/x/train.py:12 in wait", "/x/train.py:3 in <module>"))
        assert (suspected.limit_s, suspected.ends_s) == (5.0, 60.0)
        await asyncio.sleep(56)
        assert world.fed(WorkerHung) == []
        await asyncio.sleep(10)
        hung = world.fed(WorkerHung)
        assert [(one.worker, one.silent) for one in hung] == [(world.workers[2], False)]
        await asyncio.sleep(300)  # it is killed, and that takes long
        assert world.fed(WorkerHung) == hung
        assert world.hangs == [WorkerSuspected]
        assert world.asked == [world.workers[2]] * 3

    play(test)


def test_a_stopped_worker_is_told_without_a_stack_and_reported_as_silent() -> None:
    async def test(world: World) -> None:
        world.stopped = {1}
        await asyncio.sleep(4)
        suspected = world.of(WorkerSuspected)[0]
        assert (suspected.kind, suspected.stack, suspected.frames) == ("stopped", "", ())
        assert 8.0 <= suspected.ends_s <= 10.0
        assert world.asked == []
        await asyncio.sleep(10)
        assert [(one.worker, one.silent) for one in world.fed(WorkerHung)] == [(world.workers[1], True)]

    play(test)


@pytest.mark.parametrize("victim", ["hung", "stopped"])
def test_with_warn_nobody_is_reported_and_the_stack_is_told_nevertheless(victim: str) -> None:
    async def test(world: World) -> None:
        setattr(world, victim, {2})
        await asyncio.sleep(600)
        assert world.fed(WorkerHung) == []
        (suspected,) = world.of(WorkerSuspected)
        assert suspected.ends_s is None
        assert suspected.stack == (STACK if victim == "hung" else "")
        assert world.hangs == [WorkerSuspected]

    play(test, rules=Rules(hang_action=HangAction.WARN))


ONE_HOST = (Host("a", 2),)


@pytest.mark.parametrize("victim", ["hung", "stopped"])
def test_who_would_take_the_only_state_with_it_is_warned_of_and_not_ended(victim: str) -> None:
    """Its host would be given up for it, and the other worker with it."""

    async def test(world: World) -> None:
        setattr(world, victim, {1})
        await asyncio.sleep(200)
        assert world.fed(WorkerHung) == []
        (suspected,) = world.of(WorkerSuspected)
        assert suspected.ends_s is None
        assert suspected.spared.startswith("nobody who would be left has the training's state")
        (warning,) = world.warnings
        assert warning.startswith(f"worker {world.workers[1]} hangs (")
        assert warning.endswith(f") and is not ended: {suspected.spared}")

    play(test, hosts=ONE_HOST, policy=Policy(num_proc=2, min_num_proc=1))


@pytest.mark.parametrize(
    ("policy", "on_disc", "ends"),
    [
        (Policy(num_proc=2, min_num_proc=1, durable=True), False, False),
        (Policy(num_proc=2, min_num_proc=1, durable=True), True, True),
        (Policy(num_proc=2, min_num_proc=1, blames_hosts=False), False, True),
    ],
)
def test_who_can_be_done_without_is_ended(policy: Policy, on_disc: bool, ends: bool) -> None:
    """There is a commit on disc, or the other worker of its host stays."""

    async def test(world: World) -> None:
        if on_disc:
            world.health.commit_found()
        world.stopped = {1}
        await asyncio.sleep(20)
        assert len(world.fed(WorkerHung)) == ends

    play(test, hosts=ONE_HOST, policy=policy)


def test_of_two_that_are_stopped_the_last_one_with_the_state_is_not_ended() -> None:
    async def test(world: World) -> None:
        world.stopped = {0, 1, 2, 3}
        await asyncio.sleep(20)
        assert {one.worker.hostname for one in world.fed(WorkerHung)} == {"a"}

    play(test)


def test_who_is_restarted_from_a_checkpoint_is_ended() -> None:
    async def test(world: World) -> None:
        state, worker = world.stepper.state, world.workers[0]
        assert why_spared(state, worker, (), is_on_disc=False)
        for on_change in (OnChange.RESTART, OnChange.NO_ROUNDS):
            other = replace(state, policy=replace(state.policy, on_change=on_change))
            assert why_spared(other, worker, (), is_on_disc=False) == ""

    play(test, hosts=ONE_HOST, policy=Policy(num_proc=2, min_num_proc=1))


@pytest.mark.parametrize("stack_s", [3.0, 1e6])
def test_what_becomes_of_a_suspicion_is_told_after_it_though_the_stack_takes_long(stack_s: float) -> None:
    async def test(world: World) -> None:
        world.stack_s = stack_s
        world.hung = {2}
        while not world.asked:
            await asyncio.sleep(0.1)
        began = world.loop.time()
        world.hung = set()
        while world.hangs != [WorkerSuspected, WorkerCleared]:
            assert world.hangs == []
            await asyncio.sleep(0.1)
        assert world.loop.time() - began == pytest.approx(min(stack_s, 6.0), abs=0.2)
        assert world.of(WorkerSuspected)[0].stack == (STACK if stack_s < 6 else "")
        await asyncio.sleep(30)
        assert len(world.hangs) == 2

    play(test)


def test_who_is_suspected_anew_before_it_was_told_is_told_of_both_times_in_order() -> None:
    async def test(world: World) -> None:
        world.stack_s = 1e6
        world.hung = {2}
        while not world.asked:
            await asyncio.sleep(0.1)
        world.hung = set()
        await asyncio.sleep(1)
        world.stopped = {2}
        while len(world.hangs) < 3:
            await asyncio.sleep(0.1)
        assert world.hangs == [WorkerSuspected, WorkerCleared, WorkerSuspected]
        assert [one.kind for one in world.of(WorkerSuspected)] == ["awaited", "stopped"]
        world.stopped = set()
        await asyncio.sleep(10)
        assert world.hangs == [WorkerSuspected, WorkerCleared, WorkerSuspected, WorkerCleared]
        assert world.health.suspected == 0

    play(test)


def test_a_worker_that_ends_while_its_stack_is_asked_for() -> None:
    async def test(world: World) -> None:
        world.stack_s = 2.0
        world.hung = {2}
        while not world.asked:
            await asyncio.sleep(0.1)
        gone = world.workers[2]
        world.silent = {2}
        world.stepper.report(WorkerExited(gone, 1, "exited with code 1", 0.5))
        world.health.gone(gone)
        await asyncio.sleep(1)
        assert world.hangs == []
        await asyncio.sleep(1.5)
        assert world.hangs == [WorkerSuspected, WorkerCleared]
        assert world.of(WorkerCleared)[0].why == "it has ended"
        assert world.health.status()["suspected"] == []

    play(test)


def test_an_error_in_taking_a_stack_is_the_drivers_and_the_suspicion_is_told() -> None:
    async def test(world: World) -> None:
        world.stack = ZeroDivisionError("a bug")
        world.hung = {2}
        await asyncio.sleep(8)
        assert world.hangs == [WorkerSuspected]
        assert [type(context["exception"]) for context in world.errors] == [ZeroDivisionError]

    play(test)


def test_who_is_at_a_debuggers_prompt_is_named_as_such_and_never_reported() -> None:
    async def test(world: World) -> None:
        world.stack = AT_A_PROMPT + STACK.partition("\n")[2]
        world.hung = {0}
        await asyncio.sleep(600)
        (suspected,) = world.of(WorkerSuspected)
        assert suspected.why.endswith("; it is in a debugger (pdb)")
        assert suspected.kind == "traced"
        assert suspected.ends_s is None
        assert world.fed(WorkerHung) == []

    play(test)


def test_a_new_round_clears_a_suspicion_and_learns_anew() -> None:
    async def test(world: World) -> None:
        world.hung = {3}
        await asyncio.sleep(8)
        assert world.hangs == [WorkerSuspected]
        gone = world.workers[3]
        world.hung = set()
        world.stepper.report(WorkerExited(gone, -9, "was killed by SIGKILL", 0.5))
        world.health.gone(gone)
        await asyncio.sleep(2)
        world.stepper.post(HostsDiscovered((Host("a", 2), Host("b", 1))))
        world.train()
        assert world.stepper.state.round_id == 2
        await asyncio.sleep(2)
        assert world.hangs == [WorkerSuspected, WorkerCleared]
        assert world.health.status()["hang_limits"]["suspected_s"] == 60.0  # type: ignore[index]
        await asyncio.sleep(20)
        assert world.health.status()["hang_limits"]["suspected_s"] == 5.0  # type: ignore[index]

    play(test)


def test_nobody_is_reported_for_a_member_that_is_being_killed_or_has_ended_with_success() -> None:
    async def test(world: World) -> None:
        world.hung = {3}
        world.stepper.report(WorkerHung(world.workers[3], "no heartbeat for 60.0 s", True))
        await asyncio.sleep(200)
        assert (world.hangs, len(world.fed(WorkerHung))) == ([], 1)

    async def finishes(world: World) -> None:
        done = world.workers[1]
        world.stepper.report(WorkerDying(done, 0, "exited with code 0", 0.5))
        world.stepper.report(WorkerExited(done, 0, "exited with code 0", 0.5))
        world.health.gone(done)
        world.silent, world.hung = {1}, {3}
        await asyncio.sleep(200)
        assert (world.hangs, world.fed(WorkerHung)) == ([], [])

    play(test)
    play(finishes)


def test_the_status_and_the_remark() -> None:
    async def test(world: World) -> None:
        assert world.health.remark() == ""
        assert world.health.status() == {
            "stalled": None,
            "suspected": [],
            "hang_limits": {
                "suspected_s": 5.0,
                "suspected_why": "5 s, the least; 10 times the slowest of the last 100 steps, 0.1 s, is less",
                "ended_s": 60.0,
                "ended_why": "the deadline is 60 s, the least",
            },
        }
        world.hung = {1, 2, 3}
        await asyncio.sleep(10)
        listed: Any = world.health.status()["suspected"]
        assert [(one["worker"], one["rank"], one["limit_s"]) for one in listed] == [
            (world.workers[rank].key, rank, 5.0) for rank in (1, 2, 3)
        ]
        assert all(5.0 <= one["since_s"] <= 10.0 and "allreduce 'loss'" in one["why"] for one in listed)
        assert world.health.suspected == 3
        remark = world.health.remark()
        assert remark.startswith(f"worker {world.workers[1]} (rank 1) may hang: it has not submitted allreduce 'loss'")
        assert remark.count("may hang") == 2
        assert remark.endswith("; and 1 more")
        # One that is in no round has no rank.
        world.health.gone(world.workers[1])

    play(test, policy=Policy(num_proc=4, min_num_proc=1))


def test_looks_at_strangers_leave_nothing_behind() -> None:
    async def test(world: World) -> None:
        for number in range(100):
            world.health.on_vitals(WorkerId("x", 0, number), Vitals(1.0 + number, 5, "T"), world.loop.time())
        await asyncio.sleep(30)
        assert world.hangs == []
        assert record_of(world.stepper.state, WorkerId("x", 0, 1)) is None

    play(test)


# --- slow workers ----------------------------------------------------------------------------------------------------


DRAINS = Rules(straggler_action=StragglerAction.DRAIN)


async def found(world: World, count: int) -> None:
    async with asyncio.timeout(150):
        while len(world.of(StragglerFound)) < count:
            await asyncio.sleep(0.5)
    await asyncio.sleep(0)


def drained(world: World) -> list[tuple[str, int | None]]:
    return [(event.hostname, event.slot) for event in world.fed(DrainRequested)]


def leave_and_train(world: World) -> None:
    """Who was told to leave does, and the others go on without it, as slow as they are."""
    for worker in world.workers:
        record = record_of(world.stepper.state, worker)
        if record is not None and record.leave_by is not None:
            world.stepper.report(WorkerExited(worker, 0, "exited with code 0", 0.5))
            world.health.gone(worker)
    world.stepper.catch_up()
    world.train()


def test_a_slow_worker_is_told_once_and_not_drained_unless_asked() -> None:
    async def test(world: World) -> None:
        world.slow = {2: 1.5}
        await asyncio.sleep(120)
        (slow,) = world.of(StragglerFound)
        assert (slow.worker, slow.rank) == (world.workers[2], 2)
        assert slow.against_others == pytest.approx(1 / 1.5, rel=0.02)
        assert world.of(StragglerGone) == []
        world.slow = {}
        await asyncio.sleep(30)
        assert len(world.of(StragglerGone)) == 1
        assert drained(world) == []
        assert world.warnings == []

    play(test)


def test_a_slow_workers_place_is_drained_and_the_next_after_a_minute() -> None:
    async def test(world: World) -> None:
        world.slow = {2: 1.5, 4: 1.4}
        await found(world, 2)
        first, second = world.workers[2], world.workers[4]
        assert drained(world) == [(first.hostname, first.slot)]
        assert "1.50 times slower" in world.fed(DrainRequested)[0].why
        began = world.loop.time()
        assert len(world.warnings) == 1
        assert world.warnings[0].startswith(f"worker {second} is slow, and is not drained: ")
        world.slow = {3: 1.4}  # ranks move up
        leave_and_train(world)
        assert world.workers[3] == second
        # It is found again in the next round, and has to wait; the reason is told once for each time it was found.
        await found(world, 3)
        while len(drained(world)) < 2:
            assert world.loop.time() - began < 200
            await asyncio.sleep(0.5)
        assert world.loop.time() - began >= DRAIN_PAUSE_S - 1
        assert drained(world)[1] == (second.hostname, second.slot)
        assert len(world.warnings) == 2
        assert "another slow worker was drained" in world.warnings[1]

    hosts = tuple(Host(name, 1) for name in "abcdef")
    play(test, hosts=hosts, policy=Policy(num_proc=6, min_num_proc=2), rules=DRAINS)


def test_a_host_gives_one_place_an_hour() -> None:
    async def test(world: World) -> None:
        world.slow = {4: 1.5}
        await found(world, 1)
        began = world.loop.time()
        assert drained(world) == [("b", 0)]
        world.slow = {4: 1.5}  # what was the host's second place
        leave_and_train(world)
        assert world.workers[4].hostname == "b"
        await found(world, 2)
        await asyncio.sleep(1800)
        assert drained(world) == [("b", 0)]
        assert len(world.warnings) <= 2
        await asyncio.sleep(HOST_PAUSE_S - 1800)
        assert drained(world) == [("b", 0), ("b", 1)]
        assert world.loop.time() - began >= HOST_PAUSE_S

    hosts = (Host("a", 4), Host("b", 4))
    play(test, hosts=hosts, policy=Policy(num_proc=8, min_num_proc=2), rules=DRAINS)


def test_who_cannot_be_spared_stays_and_that_is_told_once() -> None:
    async def test(world: World) -> None:
        world.slow = {1: 1.6}
        await found(world, 1)
        await asyncio.sleep(300)
        assert drained(world) == []
        assert world.warnings == [
            f"worker {world.workers[1]} is slow, and is not drained: that would leave 3 of the 4 slots that the job "
            "needs (--min-np)"
        ]

    play(test, policy=Policy(num_proc=4, min_num_proc=4), rules=DRAINS)


def test_who_is_not_slow_any_more_is_not_drained_when_it_could_be() -> None:
    async def test(world: World) -> None:
        world.slow = {1: 1.6, 3: 1.5}
        await found(world, 2)
        assert len(drained(world)) == 1
        world.slow = {}
        await asyncio.sleep(200)
        assert len(drained(world)) == 1

    hosts = tuple(Host(name, 1) for name in "abcdef")
    play(test, hosts=hosts, policy=Policy(num_proc=6, min_num_proc=2), rules=DRAINS)


def test_where_places_go_in_multiples_the_whole_host_is_drained() -> None:
    async def test(world: World) -> None:
        world.slow = {3: 1.5}
        await found(world, 1)
        assert drained(world) == [("b", None)]

    hosts = tuple(Host(name, 2) for name in "abc")
    play(test, hosts=hosts, policy=Policy(num_proc=6, min_num_proc=2, num_proc_multiple=2), rules=DRAINS)


def test_nobody_is_drained_once_the_job_is_about_to_end() -> None:
    async def test(world: World) -> None:
        done = world.workers[0]
        world.stepper.report(WorkerExited(done, 0, "exited with code 0", 0.5))
        world.health.gone(done)
        world.silent, world.slow = {0}, {2: 2.0}
        await asyncio.sleep(200)
        assert (drained(world), world.of(StragglerFound)) == ([], [])

    play(test, rules=DRAINS)
