"""What agents are told is kept, by a driver among fakes whose disk the test plays."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.hosts import Host
from elastic_driver.rendezvous.agent_messages import Kill
from elastic_driver.system.job_clock import JobClock
from tests.support.fakes.driver_fakes import Job
from tests.support.fakes.played_disk import Disk
from tests.support.fakes.virtual_loop import VirtualLoop, run_virtually

pytestmark = pytest.mark.integration

A, B = Host("localhost", 1), Host("127.0.0.1", 1)


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def played(tmp_path: Path, main: Callable[[Job, Disk], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def inside(loop: VirtualLoop) -> None:
        disk = Disk()
        disk.answers_soon = True
        await main(Job(tmp_path, A, B, clock=JobClock(loop.time), disk=disk, **settings), disk)

    run_virtually(inside)


async def until(condition: Callable[[], object]) -> None:
    """Blocks until it holds. Time passes meanwhile: after a step the driver rests."""
    while not condition():
        await asyncio.sleep(0.1)


def thaw(disk: Disk) -> None:
    disk.answers_soon = True
    disk.answers()


def test_an_end_is_kept_when_it_is_on_disk_and_heartbeats_go_on_meanwhile(tmp_path: Path) -> None:
    """The disk hangs for a minute, and the connection breaks meanwhile."""

    async def main(job: Job, disk: Disk) -> None:
        stays, ends = await job.train(2)
        host = job.world.hosts[B.name]
        await until(lambda: host.link.kept == host.link.seen)
        before, disk.answers_soon = host.link.kept, False
        told, written = [], host.written

        def note() -> None:
            told.append((host.transport.frames[-1].seen, host.transport.frames[-1].kept))
            written()

        host.written = note  # type: ignore[method-assign] # from its next connection on
        job.exits(ends, 1)
        await until(lambda: disk.waiting)
        assert (host.link.seen, host.link.kept) == (before + 2, before)
        for second in range(60):
            job.lives(stays)
            if second % 20 == 10:
                host.hang_up()
                await asyncio.sleep(0.5)
                host.connect()
                host.beat()
            await asyncio.sleep(1)
            host.beat()
        assert set(told) == {(before + 2, before)}
        assert job.world.hosts[A.name].of(Kill) == []
        assert job.living() == [stays]
        assert "cannot write the journal" in job.text()
        thaw(disk)
        await asyncio.sleep(0.1)
        assert told[-1] == (before + 2, before + 2)
        assert "internal error" not in job.text()
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143

    played(tmp_path, main, heartbeat_timeout_s=10.0)


def test_at_the_end_of_the_job_nobody_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    async def main(job: Job, disk: Disk) -> None:
        _, ends = await job.train(2)
        host = job.world.hosts[B.name]
        disk.answers_soon = False
        job.exits(ends, 1)
        await until(lambda: disk.waiting)
        assert host.link.kept < host.link.seen
        job.interrupt(signal.SIGTERM)
        assert await job.end() == 143
        assert disk.given_up
        assert host.link.kept == host.link.seen

    played(tmp_path, main)
