"""Events in, commands out, on a loop whose time is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_driver.core.events import (
    EndJob,
    GiveUpHost,
    HostHeard,
    HostsDiscovered,
    HostSilent,
    HostsReported,
    PublishRound,
    StartWorker,
    TimerExpired,
    WorkerNotStarted,
    WorkersReported,
)
from elastic_driver.driver import stepper
from tests.support.fakes.stepped_job import HOSTS, A, B, SteppedJob, ready
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit


def play(test: Callable[[SteppedJob], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        world = SteppedJob(loop)
        await test(world)
        world.stepper.close()

    run_virtually(main)


def test_reports_that_come_together_are_one_step() -> None:
    async def test(world: SteppedJob) -> None:
        world.stepper.post(HOSTS)
        assert [command.worker for command in world.of(StartWorker)] == [A, B]
        world.stepper.report(ready(A))
        world.stepper.report(ready(B))
        assert world.of(PublishRound) == [], "not before the loop has come round"
        await asyncio.sleep(10)
        assert len(world.of(PublishRound)) == 1
        assert world.stepper.history[-1][1] == WorkersReported((ready(A), ready(B)))

    play(test)


def test_an_event_comes_after_the_reports_before_it() -> None:
    async def test(world: SteppedJob) -> None:
        world.stepper.post(HOSTS)
        world.stepper.report(ready(A))
        world.stepper.post(TimerExpired())
        assert [event for _, event in world.stepper.history] == [HOSTS, ready(A), TimerExpired()]
        await asyncio.sleep(10)
        assert len(world.stepper.history) == 3, "it was fed once"

    play(test)


def test_hosts_that_are_silent_together_are_one_step_after_what_workers_have_said() -> None:
    async def test(world: SteppedJob) -> None:
        world.stepper.post(HOSTS)
        world.stepper.report_host(HostSilent("a", 5.0))
        world.stepper.report_host(HostSilent("b", 4.9, sure=False))
        world.stepper.report(ready(A))
        await asyncio.sleep(1)
        together = HostsReported((HostSilent("a", 5.0), HostSilent("b", 4.9, sure=False)))
        assert [event for _, event in world.stepper.history] == [HOSTS, ready(A), together]
        assert world.of(GiveUpHost) == [], "too few would be left"
        world.stepper.report_host(HostHeard("b"))
        await asyncio.sleep(1)
        assert world.stepper.history[-1][1] == HostHeard("b")
        assert [command.hostname for command in world.of(GiveUpHost)] == ["a"]

    play(test)


def test_after_a_step_the_loop_has_as_much_time_for_other_things() -> None:
    async def test(world: SteppedJob) -> None:
        world.takes_s = 2.0
        world.stepper.post(HOSTS)
        world.stepper.report(ready(A))
        await asyncio.sleep(0)
        ended = world.loop.time()
        assert [event for _, event in world.stepper.history] == [HOSTS, ready(A)]
        world.stepper.report(ready(B))
        await asyncio.sleep(10)
        assert world.stepper.history[-1] == (pytest.approx(ended + 2.0), ready(B))

    play(test)


def test_catching_up_with_nothing_is_no_step() -> None:
    async def test(world: SteppedJob) -> None:
        world.stepper.catch_up()
        assert not world.stepper.history

    play(test)


def test_the_timer_fires_at_the_next_deadline() -> None:
    async def test(world: SteppedJob) -> None:
        world.stepper.set_timer()
        began = world.loop.time()
        world.stepper.post(HOSTS)
        await asyncio.sleep(59)
        assert not world.stepper.is_over
        await asyncio.sleep(2)
        assert [type(event) for _, event in world.stepper.history] == [HostsDiscovered, TimerExpired]
        assert world.stepper.history[-1][0] == pytest.approx(began + 60)
        assert world.stepper.is_over
        assert len(world.of(EndJob)) == 1

    play(test)


def test_what_comes_of_a_command_is_fed_after_the_others_of_its_step() -> None:
    """A host that is given up is lost at once, with a worker that is being started there."""

    async def test(world: SteppedJob) -> None:
        event = world.comes_of[StartWorker] = WorkerNotStarted(A, "its agent disconnected", 0.5, bad_command=False)
        world.stepper.post(HOSTS)
        assert [command.worker for command in world.of(StartWorker)] == [A, B]
        assert [event for _, event in world.stepper.history] == [HOSTS]
        world.stepper.report(ready(B))
        await asyncio.sleep(1)
        assert [event for _, event in world.stepper.history][:3] == [HOSTS, ready(B), event]

    play(test)


def test_a_command_that_fails_is_told_and_its_step_is_made() -> None:
    async def test(world: SteppedJob) -> None:
        world.fails_at = StartWorker
        world.stepper.post(HOSTS)
        assert [str(error) for error in world.errors] == ["a bug"]
        assert len(world.stepper.state.workers) == 2

    play(test)


def test_an_event_that_is_no_event_is_told_and_changes_nothing() -> None:
    async def test(world: SteppedJob) -> None:
        before = world.stepper.state
        world.stepper.post(HostsDiscovered(None))  # type: ignore[arg-type]
        assert [type(error) for error in world.errors] == [TypeError]
        assert world.stepper.state is before

    play(test)


def test_a_closed_one_feeds_nothing_by_itself() -> None:
    async def test(world: SteppedJob) -> None:
        world.stepper.post(HOSTS)
        world.stepper.report(ready(A))
        world.stepper.close()
        await asyncio.sleep(1000)
        assert len(world.stepper.history) == 1

    play(test)


def test_a_core_that_fails_at_an_error_of_the_drivers_own_is_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise ZeroDivisionError("a bug of the core")

    async def test(world: SteppedJob) -> None:
        monkeypatch.setattr(stepper, "step", fail)
        end = world.stepper.fail(ValueError("a bug"))
        assert end == EndJob(70, "internal error of the driver: ValueError('a bug')") == world.stepper.state.end
        assert world.stepper.is_over

    play(test)


def test_after_an_error_of_the_drivers_own_nothing_follows() -> None:
    async def test(world: SteppedJob) -> None:
        world.stepper.post(HOSTS)
        world.commands.clear()
        end = world.stepper.fail(ZeroDivisionError("a bug"))
        assert end == EndJob(70, "internal error of the driver: ZeroDivisionError('a bug')")
        assert world.stepper.fail(ZeroDivisionError("another")) is None
        world.stepper.report(ready(A))
        world.stepper.post(ready(B))
        await asyncio.sleep(1000)
        assert world.commands == []

    play(test)
