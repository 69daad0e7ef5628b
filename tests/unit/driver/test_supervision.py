"""Who is reported as hung, and when, on a loop whose time is the test's."""

from __future__ import annotations

import asyncio

import pytest

from elastic_driver.core.events import WorkerHung
from elastic_driver.driver.supervision import Supervisor
from elastic_driver.health.heartbeats import Heartbeats
from elastic_driver.hosts import WorkerId
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 0)


def test_the_silent_and_the_idle_are_reported_once_each_and_others_are_not() -> None:
    found: list[tuple[float, WorkerHung]] = []

    async def main(loop: VirtualLoop) -> None:
        began = loop.time()
        watch = Supervisor(
            Heartbeats(40.0, 100.0), clock=loop.time, report=lambda hung: found.append((loop.time() - began, hung))
        )
        task = asyncio.ensure_future(watch.watch_over())
        watch.heard(A)
        for _ in range(15):
            watch.heard(B, 7, waiting=False)
            await asyncio.sleep(10)
        task.cancel()

    run_virtually(main)
    assert [(round(at), hung.worker, hung.silent) for at, hung in found] == [(40, A, True), (100, B, False)]
    assert found[0][1].reason == "no heartbeat for 40.0 s"


def test_who_is_forgotten_is_not_missed() -> None:
    found: list[WorkerHung] = []

    async def main(loop: VirtualLoop) -> None:
        watch = Supervisor(Heartbeats(40.0, 0.0), clock=loop.time, report=found.append)
        task = asyncio.ensure_future(watch.watch_over())
        watch.heard(A)
        watch.heard(B)
        watch.forget(A)
        watch.forget_all(but=[A])
        await asyncio.sleep(100)
        task.cancel()

    run_virtually(main)
    assert found == []


def test_workers_of_a_host_that_is_not_heard_are_not_blamed_for_their_silence() -> None:
    found: list[WorkerHung] = []
    works_for_s = {"a": 0.0, "b": 100.0}

    async def main(loop: VirtualLoop) -> None:
        watch = Supervisor(
            Heartbeats(40.0, 0.0), clock=loop.time, report=found.append, works_for_s=works_for_s.__getitem__
        )
        task = asyncio.ensure_future(watch.watch_over())
        watch.heard(A)
        watch.heard(B)
        await asyncio.sleep(60)
        assert [hung.worker for hung in found] == [B]
        works_for_s["a"] = 100.0
        await asyncio.sleep(15)
        assert len(found) == 1
        await asyncio.sleep(10)
        assert [hung.worker for hung in found] == [B, A]
        task.cancel()

    run_virtually(main)


def test_without_limits_nobody_is_watched() -> None:
    async def main(loop: VirtualLoop) -> None:
        watch = Supervisor(Heartbeats(0.0, 0.0), clock=loop.time, report=lambda _: None)
        await watch.watch_over()
        assert watch.interval_s == 0.0

    run_virtually(main)
