"""Steps that are on disk before they are visible: the time is the test's, and so is the disk."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_driver.core.events import (
    DrainRequested,
    EndJob,
    HostsDiscovered,
    HostSilent,
    PublishRound,
    StartWorker,
    StopRequested,
    TimerExpired,
    WorkerExited,
    WorkerExiting,
    WorkerNotStarted,
    WorkersReported,
)
from elastic_driver.core.membership import step
from elastic_driver.core.state import State
from elastic_driver.driver.write_ahead import WriteAhead
from elastic_driver.journal.folder import JournalHeldError
from tests.support.fakes.played_disk import Disk
from tests.support.fakes.stepped_job import HOSTS, A, B, SteppedJob, ready
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

STOP = StopRequested(signal.SIGTERM, "SIGTERM")


def _ahead(disk: Any, loop: VirtualLoop, told: list[str], held: list[str]) -> WriteAhead:
    return WriteAhead(disk, 600.0, loop.call_later, told.append, on_held=held.append)


class World(SteppedJob):
    """A job with a journal, whose disk the test plays."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.disk = Disk()
        self.told: list[str] = []
        self.held: list[str] = []
        self.ahead = _ahead(self.disk, loop, self.told, self.held)
        super().__init__(loop, self.ahead)

    def _failed(self, error: Exception) -> None:
        super()._failed(error)
        self.stepper.fail(error)

    @property
    def counts(self) -> tuple[int, int]:
        """How much has come, and how much of that is kept."""
        return self.ahead.keeping.came, self.ahead.keeping.kept

    def replayed(self) -> State:
        """What the journal comes to."""
        state = self.disk.states[0]
        for each in self.disk.written:
            state, commands = step(state, each.event, each.clock)
            assert (state, commands) == (each.state, each.commands)
        return state


def play(test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(loop)
        world.stepper.begin()
        assert world.disk.writes == 1
        world.disk.answers()
        await test(world)
        world.stepper.close()

    run_virtually(main)


def test_nothing_is_visible_or_done_before_it_is_on_disk() -> None:
    async def test(world: World) -> None:
        before = world.stepper.state
        world.stepper.post(HOSTS)
        assert world.disk.events() == [HOSTS]
        assert world.stepper.state is before
        assert world.commands == []
        assert world.stepper.coming.hosts == HOSTS.hosts
        world.disk.answers()
        assert world.stepper.state is world.stepper.coming
        assert [command.worker for command in world.of(StartWorker)] == [A, B]
        assert world.disk.writes == 2

    play(test)


def test_before_the_journal_has_begun_nothing_is_done() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(loop)
        world.stepper.begin()
        world.stepper.post(HOSTS)
        settled = asyncio.ensure_future(world.stepper.settled())
        await asyncio.sleep(1)
        assert world.commands == []
        assert world.disk.events() == []
        world.disk.answers()
        assert world.disk.events() == [HOSTS]
        assert not settled.done()
        world.disk.answers()
        await settled
        assert world.of(StartWorker)
        world.stepper.close()

    run_virtually(main)


def test_what_comes_meanwhile_is_one_write_in_its_order_with_the_timer_behind_it() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.stepper.post(TimerExpired())
        world.stepper.report(ready(A))
        world.stepper.report(WorkerExiting(A))
        world.stepper.post(DrainRequested("b", None, "as asked"))
        world.stepper.report(ready(B))
        await asyncio.sleep(1)
        assert world.disk.writes == 2, "one is under way"
        # They are not known before the first step is visible.
        world.disk.answers()
        assert world.disk.writes == 3
        assert world.disk.events() == [
            HOSTS,
            WorkersReported((ready(A), WorkerExiting(A))),
            DrainRequested("b", None, "as asked"),
            ready(B),
            TimerExpired(),
        ]
        assert world.of(PublishRound) == []
        world.disk.answers()
        assert len(world.of(PublishRound)) == 1
        assert world.stepper.state == world.replayed()
        assert world.stepper.state.drained == {("b", None)}

    play(test)


def test_an_event_goes_with_the_reports_before_it() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers()
        world.stepper.report(ready(A))
        world.stepper.post(DrainRequested("b", None, "as asked"))
        assert world.disk.writes == 3
        assert world.disk.events()[1:] == [ready(A), DrainRequested("b", None, "as asked")]

    play(test)


def test_reports_alone_are_looked_for_when_the_write_is_done() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.stepper.report(ready(A))
        world.stepper.report_host(HostSilent("b", 5.0))
        await asyncio.sleep(1)
        world.stepper.catch_up()
        await asyncio.sleep(1)
        assert world.disk.writes == 2
        world.disk.answers()
        await asyncio.sleep(1)
        assert world.disk.events() == [HOSTS, ready(A), HostSilent("b", 5.0)]
        world.disk.answers()
        world.stepper.report(ready(B))
        await asyncio.sleep(1)
        assert world.disk.events()[-1] == ready(B)

    play(test)


def test_a_timer_that_fires_while_the_disk_hangs_is_behind_who_has_reported_in_time() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers()
        await asyncio.sleep(30)
        world.stepper.report(ready(A))
        await asyncio.sleep(1)
        await asyncio.sleep(40)  # the disk hangs, and the start's limit passes
        world.stepper.report(ready(B))
        world.disk.answers()
        await asyncio.sleep(0)
        world.disk.answers()
        assert world.disk.events()[-2:] == [ready(B), TimerExpired()]
        assert [[one.worker for one in each.placed] for each in world.of(PublishRound)] == [[A, B]]

    play(test)


def test_who_has_to_know_waits_until_nothing_is_under_way() -> None:
    async def test(world: World) -> None:
        await world.stepper.settled()  # nothing is
        world.stepper.post(HOSTS)
        world.stepper.post(DrainRequested("b", None, "as asked"))
        looks = [asyncio.ensure_future(world.stepper.settled()) for _ in range(2)]
        world.disk.answers()
        await asyncio.sleep(0)
        assert not any(look.done() for look in looks)
        world.disk.answers()
        await asyncio.gather(*looks)
        assert world.stepper.state.drained

    play(test)


def test_of_two_who_look_and_then_act_the_second_sees_what_the_first_has_done() -> None:
    async def test(world: World) -> None:
        seen = []

        async def act() -> None:
            await world.stepper.settled()
            seen.append(bool(world.stepper.state.drained))
            world.stepper.post(DrainRequested("b", None, "as asked"))

        world.stepper.post(HOSTS)
        acts = [asyncio.ensure_future(act()) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in range(3):
            world.disk.answers()
            for _ in range(3):
                await asyncio.sleep(0)
        await asyncio.gather(*acts)
        assert seen == [False, True]

    play(test)


def test_what_comes_of_a_command_is_another_write() -> None:
    async def test(world: World) -> None:
        event = world.comes_of[StartWorker] = WorkerNotStarted(A, "its agent disconnected", 0.5, bad_command=False)
        world.stepper.post(HOSTS)
        world.disk.answers()
        await asyncio.sleep(0)
        assert world.disk.events() == [HOSTS, event]

    play(test)


def test_a_step_that_raises_is_not_in_the_journal() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.stepper.post(HostsDiscovered(None))  # type: ignore[arg-type]
        world.disk.answers()
        assert world.disk.events() == [HOSTS]
        assert [type(error) for error in world.errors] == [TypeError]
        assert world.stepper.state.end is not None
        assert world.stepper.state.end.exit_code == 70

    play(test)


def test_after_a_command_that_fails_nothing_of_its_write_is_made() -> None:
    async def test(world: World) -> None:
        world.stepper.post(TimerExpired())
        world.stepper.post(HOSTS)
        world.stepper.post(DrainRequested("b", None, "as asked"))
        world.fails_at = StartWorker
        world.disk.answers()
        world.disk.answers()
        assert [str(error) for error in world.errors] == ["a bug"]
        assert not world.stepper.state.drained
        assert world.stepper.is_over
        await world.stepper.settled()

    play(test)


def test_of_a_job_that_has_ended_nothing_is_written() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers()
        world.stepper.post(STOP)
        assert world.of(EndJob) == []
        world.disk.answers()
        assert world.of(EndJob) == [EndJob(143, "interrupted by SIGTERM")]
        writes = world.disk.writes
        world.stepper.post(WorkerExited(A, -15, "killed by SIGTERM", 0.5))
        world.stepper.report(WorkerExited(B, -15, "killed by SIGTERM", 0.5))
        await asyncio.sleep(1)
        assert (world.disk.writes, len(world.stepper.state.workers)) == (writes, 0)

    play(test)


# --- what is kept --------------------------------------------------------------------------------------------------


def test_what_has_come_is_kept_when_it_is_on_disk_and_made() -> None:
    async def test(world: World) -> None:
        kept: list[int] = []
        world.stepper.post(HOSTS)
        for many in (1, 2, 4):
            world.ahead.keeping.when_kept(many, lambda many=many: kept.append(len(world.of(StartWorker))))  # type: ignore[misc]
        world.stepper.report(ready(A))
        world.stepper.report_host(HostSilent("b", 5.0))
        world.stepper.post(TimerExpired())  # nobody has said that
        world.stepper.post(DrainRequested("b", None, "as asked"))
        assert (world.counts, kept) == ((4, 0), [])
        world.disk.answers()
        assert (world.counts, kept) == ((4, 1), [2])
        world.stepper.report(ready(B))
        world.disk.answers()
        assert (world.counts, kept) == ((5, 4), [2, 2, 2])
        await asyncio.sleep(1)
        world.disk.answers()
        assert world.counts == (5, 5)

    play(test)


def test_when_the_journal_has_begun_what_came_before_is_kept() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(loop)
        world.stepper.report_host(HostSilent("b", 5.0))
        world.stepper.begin()
        assert world.disk.events() == [HostSilent("b", 5.0)]
        assert world.counts == (1, 0)
        world.disk.answers()
        assert world.counts == (1, 1)
        world.stepper.close()

    run_virtually(main)


async def ends_by_itself(world: World) -> None:
    world.stepper.post(STOP)
    world.stepper.report(ready(A))
    world.disk.answers()


async def is_ended_while_the_disk_hangs(world: World) -> None:
    world.stepper.post(TimerExpired())
    world.stepper.report(ready(A))
    world.stepper.post(STOP)
    await asyncio.sleep(3)


async def has_ended_while_the_disk_hangs(world: World) -> None:
    world.stepper.post(STOP)
    world.stepper.report(ready(A))
    await asyncio.sleep(3)


async def waits_for_too_long(world: World) -> None:
    world.stepper.report(ready(A))
    await asyncio.sleep(1000)


@pytest.mark.parametrize(
    "ends",
    [
        ends_by_itself,
        is_ended_while_the_disk_hangs,
        has_ended_while_the_disk_hangs,
        waits_for_too_long,
    ],
)
def test_of_a_job_that_has_ended_all_is_kept_at_once(ends: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Nobody comes after it who would have to know. Where agents waited for a disk that hangs it would not end."""

    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers()
        await ends(world)
        assert len(world.of(EndJob)) == 1
        came, kept = world.counts
        assert came == kept >= 2
        world.stepper.report(WorkerExited(A, -15, "killed by SIGTERM", 0.5))
        await asyncio.sleep(1)
        assert world.stepper.state.workers.find(A) is None
        came, kept = world.counts
        assert came == kept

    play(test)


def test_what_was_under_way_when_the_driver_failed_is_not_kept() -> None:
    """Whoever comes after it has to know of it."""

    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers()
        world.stepper.report(ready(A))
        await asyncio.sleep(1)
        world.stepper.fail(ZeroDivisionError("a bug"))
        world.disk.answers()
        world.stepper.report(ready(B))
        await asyncio.sleep(1)
        assert world.counts == (2, 1)

    play(test)


# --- a disk that does not answer -----------------------------------------------------------------------------------


def test_a_disk_that_does_not_answer_is_told_of_once_and_when_it_does_again() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        await asyncio.sleep(1)
        assert (world.told, world.stepper.trouble) == ([], "")
        world.disk.trouble = "No space left on device"
        await asyncio.sleep(500)
        assert world.stepper.trouble == "cannot write the journal /journal: No space left on device"
        assert len(world.told) == 1
        assert "the job ends after 600 s (--driver-timeout)" in world.told[0]
        world.disk.trouble = ""
        world.disk.answers()
        assert world.stepper.trouble == ""
        assert world.told[1:] == ["the journal can be written again"]
        assert world.of(StartWorker)
        world.stepper.post(TimerExpired())
        await asyncio.sleep(500)
        assert "the disk does not answer" in world.told[2]

    play(test)


def test_it_does_not_end_a_job_that_another_driver_may_have_by_then() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(loop)
        late: list[str] = []
        world.ahead._on_too_late = late.append
        world.stepper.begin()
        world.disk.answers()
        world.stepper.post(HOSTS)
        await asyncio.sleep(599)
        assert "this driver ends after 600 s (--driver-timeout)" in world.told[0]
        assert late == []
        await asyncio.sleep(2)
        assert late == ["cannot write the journal /journal for 600 s (--driver-timeout): the disk does not answer"]
        assert world.of(EndJob) == []
        world.stepper.close()

    run_virtually(main)


def test_an_event_that_has_waited_for_the_limit_ends_the_job() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        settled = asyncio.ensure_future(world.stepper.settled())
        await asyncio.sleep(599)
        assert world.commands == []
        await asyncio.sleep(2)
        (end,) = world.commands
        assert end == EndJob(
            70, "cannot write the journal /journal for 600 s (--driver-timeout): the disk does not answer"
        )
        assert world.stepper.state.end == end
        assert world.disk.given_up
        await settled
        world.disk.answers()
        assert world.commands == [end], "it is too late"
        assert world.stepper.state.workers.find(A) is None

    play(test)


@pytest.mark.parametrize("after_s", [0.5, 30.0])
def test_the_end_that_is_asked_for_needs_no_disk(after_s: float) -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        await asyncio.sleep(after_s)
        world.stepper.post(DrainRequested("b", None, "as asked"))
        world.stepper.post(STOP)
        settled = asyncio.ensure_future(world.stepper.settled())
        await asyncio.sleep(3)
        assert world.of(EndJob) == [EndJob(143, "interrupted by SIGTERM")]
        assert world.of(StartWorker) == []
        await settled
        assert world.disk.given_up

    play(test)


def test_a_job_that_has_ended_by_itself_does_not_wait_for_the_disk_to_say_so() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers()
        world.stepper.post(STOP)
        await asyncio.sleep(3)
        assert world.of(EndJob) == [EndJob(143, "interrupted by SIGTERM")]
        world.stepper.report(WorkerExited(A, -15, "killed by SIGTERM", 0.5))
        await asyncio.sleep(1)
        assert world.stepper.state.workers.find(A) is None

    play(test)


def test_a_driver_that_has_lost_its_journal_ends_and_decides_nothing_more() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers(JournalHeldError("another has it"))
        assert world.held == ["another has it"]
        world.stepper.abandon(EndJob(75, "another has it"))
        world.stepper.post(STOP)
        await asyncio.sleep(3)
        assert world.commands == []
        assert world.stepper.state.end == EndJob(75, "another has it")
        world.stepper.report(ready(A))
        await asyncio.sleep(1)
        came, kept = world.counts
        assert kept == 0 < came

    play(test)


def test_a_driver_that_leaves_a_job_that_is_ending_writes_no_more_of_it() -> None:
    """What becomes of its agents while it goes is not what has become of the job."""

    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers()
        world.stepper.post(STOP)
        world.disk.answers()
        assert world.stepper.is_over
        assert not world.disk.given_up
        world.stepper.abandon(EndJob(75, "its node is leaving"))
        assert world.disk.given_up

    play(test)


def test_an_error_of_the_journals_own_is_an_internal_one() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        world.disk.answers(ZeroDivisionError("a bug"))
        assert [str(error) for error in world.errors] == ["a bug"]
        assert world.commands == []
        assert world.stepper.is_over

    play(test)


def test_a_closed_one_waits_for_nothing() -> None:
    async def test(world: World) -> None:
        world.stepper.post(HOSTS)
        settled = asyncio.ensure_future(world.stepper.settled())
        await asyncio.sleep(0)
        world.stepper.close()
        await asyncio.sleep(1000)
        assert world.told == []
        world.disk.answers()
        assert world.commands == []
        await settled

    play(test)
