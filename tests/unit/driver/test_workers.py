"""The keeper of processes among fakes: every order of starts, stops and deaths, on a loop whose time is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from elastic_driver.core.events import KillWorker, StartWorker
from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.driver.workers import BROKEN_S, Workers
from elastic_driver.errors import LaunchError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.launcher import ExitStatus, WorkerProcess
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Ending, OnChange
from tests.support.fakes.fake_process import FakeProcess
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 0)
GRACE_S, DRAIN_S = 5.0, 60.0
JOB = JobAddress("http://127.0.0.1:1", JobKey.new(), "j")


class Story:
    """See ProcessListener: keeps what it is told, and may have a bug."""

    def __init__(self) -> None:
        self.told: list[tuple[str, WorkerId, str]] = []
        self.fails_at = ""

    def _take(self, what: str, worker: WorkerId, how: object) -> None:
        self.told.append((what, worker, str(how)))
        if what == self.fails_at:
            raise ZeroDivisionError("a bug")

    def started(self, worker: WorkerId, process: WorkerProcess) -> None:
        self._take("started", worker, process.pid)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        self._take("not started", worker, error)

    def dying(self, worker: WorkerId, process: WorkerProcess, status: ExitStatus | str) -> None:
        self._take("dying", worker, status)

    def exited(self, worker: WorkerId, process: WorkerProcess, status: ExitStatus) -> None:
        self._take("exited", worker, status)

    def killed(self, order: KillWorker) -> None:
        self._take("killed", order.worker, order.reason)

    def spared(self, order: KillWorker) -> None:
        self._take("spared", order.worker, order.reason)


class ADialect:
    """See Dialect."""

    on_change = OnChange.IN_PLACE

    def environment(self, start: WorkerStart, *, job: JobAddress) -> dict[str, str]:
        place = f"{start.worker} has rank {start.planned.rank} after round {start.round_id} of job {job.job_id}"
        met = "" if start.meeting is None else f", at {start.meeting.address}:{start.meeting.port}"
        return {"PLACE": f"{place}, {start.cores} core{met}"}


class Kept:
    """A keeper, whose launches the test lets succeed or fail when it likes."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.story = Story()
        self.tasks = Tasks()
        self.errors: list[object] = []
        loop.set_exception_handler(lambda _, context: self.errors.append(context["exception"]))
        self.launches: dict[WorkerId, asyncio.Future[FakeProcess]] = {}
        self.given: dict[WorkerId, Mapping[str, str]] = {}
        self.holds: dict[tuple[str, int], asyncio.Future[int]] = {}
        self.gone: list[tuple[str, int]] = []
        self.workers = Workers(
            self,
            ADialect(),
            command=("true",),
            grace_s=GRACE_S,
            drain_s=DRAIN_S,
            tasks=self.tasks,
            listener=self.story,
        )

    def addresses(self, hostnames: Sequence[str]) -> Mapping[str, str]:
        """See Launcher."""
        return {name: f"10.0.0.{number}" for number, name in enumerate(hostnames, 1)}

    async def hold_port(self, hostname: str, generation: int) -> int:
        """See Launcher."""
        self.holds[hostname, generation] = self.loop.create_future()
        return await self.holds[hostname, generation]

    def let_go(self, hostname: str, generation: int) -> None:
        """See Launcher."""
        self.gone.append((hostname, generation))

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> FakeProcess:
        """See Launcher."""
        assert (command, label, rank_at_launch) == (("true",), "0", 0)
        self.given[worker] = env
        self.launches[worker] = self.loop.create_future()
        return await self.launches[worker]

    def cores(self, hostname: str) -> int:
        """See Launcher."""
        return len(hostname)

    def kill(self) -> None:
        """Nobody asks for it."""

    async def close(self) -> None:
        """Nobody asks for it."""

    async def order(self, worker: WorkerId) -> None:
        self.workers.start(StartWorker(worker, SlotInfo(0, 1, 0, 1, 0, 1)), JOB, 3)
        await settle()

    async def launched(self, worker: WorkerId) -> FakeProcess:
        """Its process is there."""
        process = FakeProcess(worker, len(self.launches))
        self.launches[worker].set_result(process)
        await settle()
        return process

    async def run(self, worker: WorkerId) -> FakeProcess:
        await self.order(worker)
        return await self.launched(worker)

    def told(self) -> list[tuple[str, WorkerId]]:
        return [(what, worker) for what, worker, _ in self.story.told]


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def among_fakes(test: Callable[[Kept], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        kept = Kept(loop)
        await test(kept)
        await kept.tasks.end()

    run_virtually(main)


def test_a_worker_from_its_start_to_its_end() -> None:
    async def test(kept: Kept) -> None:
        process = await kept.run(A)
        assert dict(kept.workers.living) == {A: process}
        assert (kept.workers.pid(A), kept.workers.pid(B)) == (process.pid, None)
        kept.workers.label(A, "3")
        kept.workers.label(B, "4")
        assert process.label == "3"
        assert kept.given == {A: {"PLACE": "a[0] has rank 0 after round 3 of job j, 1 core"}}
        process.end(1)
        await settle()
        assert kept.story.told == [("started", A, "1"), ("exited", A, "exited with code 1")]
        assert dict(kept.workers.living) == {}

    among_fakes(test)


def test_it_is_told_of_a_death_before_the_end() -> None:
    async def test(kept: Kept) -> None:
        process = await kept.run(A)
        process.dying.set_result("dumps its core")
        await settle()
        assert kept.workers.pid(A) == process.pid, "it holds its place"
        process.end(-6)
        await settle()
        assert kept.story.told[1:] == [("dying", A, "dumps its core"), ("exited", A, "killed by SIGABRT")]

    among_fakes(test)


def test_a_death_that_is_seen_with_the_end_is_told_as_the_end() -> None:
    async def test(kept: Kept) -> None:
        process = await kept.run(A)
        process.exited.set_result(ExitStatus(-9))
        process.dying.set_result("too late")
        await settle()
        assert kept.told() == [("started", A), ("exited", A)]

    among_fakes(test)


def test_it_is_dead_as_soon_as_it_is_there() -> None:
    async def test(kept: Kept) -> None:
        await kept.order(A)
        process = FakeProcess(A, 7)
        process.end(3)
        kept.launches[A].set_result(process)
        await settle()
        assert kept.told() == [("started", A), ("exited", A)]
        assert dict(kept.workers.living) == {}

    among_fakes(test)


def test_a_stop_while_it_is_being_started() -> None:
    async def test(kept: Kept) -> None:
        await kept.order(A)
        kept.workers.stop(A)
        kept.workers.stop(A)
        process = await kept.launched(A)
        assert kept.story.told == [("started", A, "1"), ("exited", A, "killed by SIGTERM")]
        assert process.exited.done()
        again = await kept.run(A)
        assert not again.exited.done(), "the stop was for the first one"

    among_fakes(test)


def test_a_stop_of_whom_nobody_knows_does_nothing() -> None:
    async def test(kept: Kept) -> None:
        kept.workers.stop(B)
        process = await kept.run(B)
        assert not process.exited.done()

    among_fakes(test)


def test_a_stop_twice() -> None:
    async def test(kept: Kept) -> None:
        await kept.run(A)
        kept.workers.stop(A)
        kept.workers.stop(A)
        await settle()
        kept.workers.stop(A)
        assert kept.told() == [("started", A), ("exited", A)]
        assert kept.errors == []

    among_fakes(test)


def test_a_launch_that_fails() -> None:
    async def test(kept: Kept) -> None:
        await kept.order(A)
        kept.workers.stop(A)
        kept.launches[A].set_exception(LaunchError("no room"))
        await settle()
        assert kept.story.told == [("not started", A, "no room")]
        process = await kept.run(A)
        assert not process.exited.done(), "nothing is left of the stop"

    among_fakes(test)


def test_a_launch_with_a_bug_reaches_the_net() -> None:
    async def test(kept: Kept) -> None:
        await kept.order(A)
        error = ZeroDivisionError("a bug")
        kept.launches[A].set_exception(error)
        await settle()
        assert kept.errors == [error]
        assert kept.told() == []
        await kept.workers.stop_all(1.0)

    among_fakes(test)


@pytest.mark.parametrize("where", ["started", "dying", "exited"])
def test_a_bug_of_the_listener_reaches_the_net_and_loses_no_process(where: str) -> None:
    async def test(kept: Kept) -> None:
        kept.story.fails_at = where
        process = await kept.run(A)
        if where == "dying":
            process.dying.set_result("dumps its core")
        if where == "exited":
            process.end(1)
        await settle()
        assert [type(error) for error in kept.errors] == [ZeroDivisionError]
        await kept.workers.stop_all(1.0)
        assert process.exited.done()
        assert dict(kept.workers.living) == {}

    among_fakes(test)


def test_after_the_jobs_end_nobody_is_started() -> None:
    async def test(kept: Kept) -> None:
        kept.workers.start(StartWorker(A, SlotInfo(0, 1, 0, 1, 0, 1)), JOB, 0)
        kept.workers.job_ends()
        await settle()
        assert kept.launches == {}
        await kept.workers.stop_all(1.0)

    among_fakes(test)


def test_a_process_that_comes_after_the_jobs_end_is_stopped() -> None:
    async def test(kept: Kept) -> None:
        await kept.order(A)
        stopping = asyncio.ensure_future(kept.workers.stop_all(10.0))
        await settle()
        assert not stopping.done()
        process = await kept.launched(A)
        await stopping
        assert process.exited.done()
        assert kept.told() == [("started", A), ("exited", A)]

    among_fakes(test)


def test_a_launch_that_fails_after_the_jobs_end() -> None:
    async def test(kept: Kept) -> None:
        await kept.order(A)
        stopping = asyncio.ensure_future(kept.workers.stop_all(10.0))
        await settle()
        kept.launches[A].set_exception(LaunchError("the job is ending"))
        await stopping
        assert kept.story.told == [("not started", A, "the job is ending")]
        assert kept.errors == []

    among_fakes(test)


def test_stopping_all_has_a_limit() -> None:
    async def test(kept: Kept) -> None:
        stubborn = await kept.run(A)
        stubborn.is_stubborn = True
        other = await kept.run(B)
        began = kept.loop.time()
        await kept.workers.stop_all(40.0)
        assert kept.loop.time() == began + 40.0
        assert (stubborn.exited.done(), other.exited.done()) == (False, True)

    among_fakes(test)


# --- killing -------------------------------------------------------------------------------------------------------


def test_a_kill_needs_a_process() -> None:
    async def test(kept: Kept) -> None:
        kept.workers.kill(KillWorker(A, "did not leave"))
        process = await kept.run(A)
        kept.workers.kill(KillWorker(A, "did not leave"))
        kept.workers.kill(KillWorker(A, "did not leave"))
        await settle()
        assert kept.told() == [("spared", A), ("started", A), ("killed", A), ("spared", A), ("exited", A)]
        assert process.exited.result().returncode == -9

    among_fakes(test)


def test_a_kill_while_it_is_being_started() -> None:
    async def test(kept: Kept) -> None:
        await kept.order(A)
        kept.workers.kill(KillWorker(A, "did not leave"))
        assert kept.told() == [("killed", A)]
        process = await kept.launched(A)
        assert process.exited.done()

    among_fakes(test)


def test_a_worker_that_exits_is_let_be_when_its_script_has_ended() -> None:
    async def test(kept: Kept) -> None:
        process = await kept.run(A)
        exits = KillWorker(A, "did not end", hangs=True, exits=True)
        kept.workers.kill(exits)
        await settle()
        assert kept.told()[1:] == [("spared", A)], "it has never called init()"
        assert not process.exited.done()
        process.runs_script = True
        kept.workers.kill(exits)
        await settle()
        assert sorted(kept.told()[2:]) == [("exited", A), ("killed", A)]
        assert (process.printed, process.exited.result().returncode) == (1, -6)

    among_fakes(test)


def test_one_that_hangs_has_two_seconds_for_its_stacks() -> None:
    async def test(kept: Kept) -> None:
        process = await kept.run(A)
        process.is_stubborn = True
        began = kept.loop.time()
        kept.workers.kill(KillWorker(A, "no heartbeat", hangs=True))
        assert kept.told()[-1] == ("killed", A)
        await process.exited
        assert process.exited.result().returncode == -9
        assert kept.loop.time() == began + 2.0

    among_fakes(test)


def together(kept: Kept, *workers: WorkerId, round_id: int) -> None:
    """They are started to meet each other."""
    hosts = tuple(worker.hostname for worker in workers)
    for worker in workers:
        kept.workers.start(StartWorker(worker, SlotInfo(0, 1, 0, 1, 0, 1), hosts=hosts), JOB, round_id)


def test_a_generation_meets_at_a_port_that_is_held_until_the_next() -> None:
    async def test(kept: Kept) -> None:
        together(kept, A, B, round_id=1)
        await settle()
        assert list(kept.holds) == [("a", 1)], "one for all"
        assert kept.launches == {}, "its environment is not known yet"
        kept.holds["a", 1].set_result(5000)
        await settle()
        assert {env["PLACE"].partition(" core")[2] for env in kept.given.values()} == {", at 10.0.0.1:5000"}
        assert len(kept.launches) == 2
        for worker in (A, B):
            await kept.launched(worker)
        together(kept, WorkerId("a", 1, 0), round_id=1)
        await settle()
        assert (list(kept.holds), kept.gone) == ([("a", 1)], []), "who comes later meets them there"
        kept.launches[WorkerId("a", 1, 0)].cancel()
        together(kept, WorkerId("b", 0, 1), WorkerId("a", 0, 1), round_id=2)
        await settle()
        assert (list(kept.holds), kept.gone) == ([("a", 1), ("b", 2)], [("a", 1)])
        kept.holds["b", 2].set_result(0)
        await settle()
        assert kept.given[WorkerId("a", 0, 1)]["PLACE"].endswith("core"), "the launcher says that there is no need"
        await kept.workers.stop_all(1.0)

    among_fakes(test)


def test_a_port_that_can_not_be_held_is_the_fault_of_its_host() -> None:
    async def test(kept: Kept) -> None:
        together(kept, A, B, round_id=1)
        await settle()
        kept.holds["a", 1].set_exception(LaunchError("all ports are taken"))
        await settle()
        assert kept.story.told == [("not started", A, "all ports are taken")]
        assert list(kept.launches) == [B]
        await kept.launched(B)
        await kept.workers.stop_all(1.0)

    among_fakes(test)


def test_nobody_is_started_where_the_job_ends_before_a_port_is_held() -> None:
    async def test(kept: Kept) -> None:
        together(kept, A, round_id=1)
        await settle()
        stopping = asyncio.ensure_future(kept.workers.stop_all(10.0))
        await settle()
        kept.holds["a", 1].set_result(5000)
        await stopping
        assert kept.launches == {}

    among_fakes(test)


@pytest.mark.parametrize(
    ("ending", "grace_s", "sever"),
    [(Ending.USUAL, GRACE_S, False), (Ending.PLANNED, DRAIN_S, False), (Ending.BROKEN, BROKEN_S, True)],
)
def test_how_a_worker_ends(ending: Ending, grace_s: float, sever: bool) -> None:
    async def test(kept: Kept) -> None:
        process = await kept.run(A)
        kept.workers.stop(A, ending)
        await settle()
        assert process.stops == [(grace_s, sever)]

    among_fakes(test)


def test_the_nearest_end_is_that_of_a_worker_which_is_being_started() -> None:
    async def test(kept: Kept) -> None:
        for worker, orders in ((A, (Ending.PLANNED, Ending.BROKEN)), (B, (Ending.BROKEN, Ending.PLANNED))):
            await kept.order(worker)
            for ending in orders:
                kept.workers.stop(worker, ending)
            process = await kept.launched(worker)
            assert process.stops == [(BROKEN_S, True)]

    among_fakes(test)
