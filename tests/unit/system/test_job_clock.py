"""The driver's own time, on a loop whose time the test moves."""

from __future__ import annotations

import asyncio

import pytest

from elastic_driver.system.job_clock import JobClock
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.unit


def test_it_takes_no_long_step() -> None:
    real = 100.0
    clock = JobClock(lambda: real, most_s=2.0)
    assert clock() == 100.0
    real = 101.5
    assert clock() == 101.5
    assert clock() == 101.5
    real = 1001.5  # stopped for 900 s
    assert clock() == 103.5
    assert clock.lost_s == 898.0
    real = 1002.0
    assert clock() == 104.0


def test_a_timer_waits_for_a_driver_that_stood_still() -> None:
    async def main(loop: VirtualLoop) -> None:
        clock = JobClock(loop.time)
        stood: list[float] = []
        keeping = loop.create_task(clock.keep(stood.append))
        began = loop.time()
        fired: list[float] = []
        clock.call_later(10.0, lambda: fired.append(loop.time() - began))
        cancelled = clock.call_later(5.0, lambda: fired.append(-1.0))
        await asyncio.sleep(3.0)
        cancelled.cancel()
        loop.stand_still(100.0)
        await asyncio.sleep(6.0)
        assert fired == [], "109 s of real time, and a little over 9 of the driver's"
        await asyncio.sleep(2.0)
        assert fired == [pytest.approx(109.0, abs=0.6)]
        assert stood == [pytest.approx(100.0, abs=1.0)]
        keeping.cancel()

    run_virtually(main)


def test_a_busy_machine_is_no_news() -> None:
    async def main(loop: VirtualLoop) -> None:
        clock = JobClock(loop.time)
        stood: list[float] = []
        keeping = loop.create_task(clock.keep(stood.append))
        for _ in range(20):
            await asyncio.sleep(1.0)
            loop.stand_still(4.0)
        assert stood == []
        assert clock.lost_s > 40.0
        keeping.cancel()

    run_virtually(main)
