"""What is told and reported of workers that hang or are slow, and in which order, on a loop of the test's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
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
from elastic_driver.driver.health import Health
from elastic_driver.driver.stepper import Stepper
from elastic_driver.health.findings import (
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.watch import Rules
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.happenings import Happening, Remark
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Backend, HangAction, ReadyCause, StragglerAction
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually
from tests.support.fakes.watched_workers import STACK, WatchedWorkers

pytestmark = pytest.mark.unit


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
        self.looks = WatchedWorkers()
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
            members, looks = self.workers, self.looks
            looks.does = {members[rank]: f"trains={slowness}" for rank, slowness in self.slow.items()}
            looks.does |= {members[rank]: "hangs" for rank in self.hung} | {
                members[rank]: "is-stopped" for rank in self.stopped
            }
            looks.unseen = {members[rank] for rank in self.silent}
            for worker, look in looks.look(members, self.stepper.state.round_id, self.loop.time()):
                self.health.seen(worker, look)

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
        assert 8.0 < status["since_s"] <= 11.0
        assert world.health.stall.endswith(f"no worker completes a step, waiting for worker {world.workers[3]}")
        world.stopped = set()
        await asyncio.sleep(3)
        [ended] = world.of(StallEnded)
        assert ended.resumed
        assert 9.0 < ended.stood_s < 13.0
        assert (world.health.stall, world.health.status()["stalled"]) == ("", None)

    play(test)


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
        assert "may hang: its host's agent has not reported" in world.health.remark()
        mute.clear()
        world.silent = set()
        await asyncio.sleep(4)
        assert world.hangs == [WorkerSuspected, WorkerCleared]

    play(test, unheard=lambda least_s: mute)


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
        assert suspected.spared.startswith("no remaining worker would have the training's state")
        (warning,) = world.warnings
        assert warning.startswith(f"worker {world.workers[1]} hangs (")
        assert warning.endswith(f") but is not killed: {suspected.spared}")

    play(test, hosts=ONE_HOST, policy=Policy(num_proc=2, min_num_proc=1))


def test_of_two_that_are_stopped_the_last_one_with_the_state_is_not_ended() -> None:
    async def test(world: World) -> None:
        world.stopped = {0, 1, 2, 3}
        await asyncio.sleep(20)
        assert {one.worker.hostname for one in world.fed(WorkerHung)} == {"a"}

    play(test)


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


def test_an_error_in_taking_a_stack_is_the_drivers_and_the_suspicion_is_told() -> None:
    async def test(world: World) -> None:
        world.stack = ZeroDivisionError("a bug")
        world.hung = {2}
        await asyncio.sleep(8)
        assert world.hangs == [WorkerSuspected]
        assert [type(context["exception"]) for context in world.errors] == [ZeroDivisionError]

    play(test)


def test_a_new_round_clears_a_suspicion_and_learns_anew() -> None:
    async def test(world: World) -> None:
        world.hung = {3}
        await asyncio.sleep(8)
        assert world.hangs == [WorkerSuspected]
        gone = world.workers[3]
        world.hung = set()
        world.stepper.report(WorkerExited(gone, -9, "was killed by SIGKILL", 0.5))
        world.stepper.catch_up()  # however long the last step took in real time
        world.health.gone(gone)
        await asyncio.sleep(2)
        world.stepper.post(HostsDiscovered((Host("a", 2), Host("b", 1))))
        world.train()
        assert world.stepper.state.round_id == 2
        await asyncio.sleep(0.5)  # one look at most: the second one shows steps enough
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
                "suspected_why": "5 s, the minimum; 10 times the slowest of the last 100 steps, 0.1 s, is less",
                "ended_s": 60.0,
                "ended_why": "the deadline is 60 s, the minimum",
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


# --- other rules -----------------------------------------------------------------------------------------------------


def test_a_slow_worker_is_drained_where_that_is_asked_for_and_the_next_one_is_warned_of() -> None:
    async def test(world: World) -> None:
        world.slow = {2: 1.5, 4: 1.4}
        async with asyncio.timeout(150):
            while len(world.of(StragglerFound)) < 2:
                await asyncio.sleep(0.5)
        first, second = world.workers[2], world.workers[4]
        [drain] = world.fed(DrainRequested)
        assert (drain.hostname, drain.slot) == (first.hostname, first.slot)
        assert "1.50 times slower" in drain.why
        [warning] = world.warnings
        assert warning.startswith(f"worker {second} is slow but is not drained: another slow worker was drained")
        world.slow = {}
        await asyncio.sleep(30)
        assert len(world.of(StragglerGone)) == 2

    hosts = tuple(Host(name, 1) for name in "abcdef")
    rules = Rules(straggler_action=StragglerAction.DRAIN)
    play(test, hosts=hosts, policy=Policy(num_proc=6, min_num_proc=2), rules=rules)


def test_workers_of_a_host_that_is_not_heard_are_not_blamed_for_their_silence() -> None:
    works_for_s = {"a": 1e6, "b": 0.0}

    async def test(world: World) -> None:
        world.silent = {1, 2}
        for worker in world.workers:
            world.health.heard(worker)
        await asyncio.sleep(60)
        assert [one.worker for one in world.fed(WorkerHung)] == [world.workers[1]]
        works_for_s["b"] = 1e6
        await asyncio.sleep(45)
        assert [one.worker for one in world.fed(WorkerHung)] == [world.workers[1], world.workers[2]]

    play(test, rules=Rules(heartbeat_timeout_s=40.0), works_for_s=works_for_s.__getitem__)
