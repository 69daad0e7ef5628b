"""The driver with workers of other kinds, among fakes: restarted each round, and without rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.words import OnChange
from tests.support.fakes.driver_fakes import Job

pytestmark = pytest.mark.integration

A, B, C = Host("localhost", 1), Host("127.0.0.1", 1), Host("localhost.localdomain", 1)


class OtherDialect:
    """See Dialect: its workers are told their ranks, and ask for nothing."""

    def __init__(self, on_change: OnChange) -> None:
        self.on_change = on_change
        self.told: dict[WorkerId, str] = {}

    def environment(self, start: WorkerStart, *, job: JobAddress) -> dict[str, str]:
        planned = start.planned
        self.told[start.worker] = f"rank {planned.rank} of {planned.size} in round {start.round_id}"
        return {"RANK": str(planned.rank), "WORLD_SIZE": str(planned.size), "MASTER_ADDR": "127.0.0.1"}


def among_fakes(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: OtherDialect,
    test: Callable[[Job], Coroutine[Any, Any, None]],
    **settings: Any,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))

    async def main() -> None:
        await test(Job(folder, A, B, dialect=dialect, discovery_interval_s=0.001, **settings))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_workers_that_are_restarted_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = OtherDialect(OnChange.RESTART)

    async def test(job: Job) -> None:
        a, b = await job.started(2)
        await job.until(lambda: job.logged("round_formed"), "the first round")
        job.discovery.hosts = (A, B, C)
        await job.until(lambda: len(job.logged("round_formed")) == 2, "a round of three")
        assert job.world.started[a].exit_code == -15
        assert job.world.started[b].exit_code == -15
        first, second, third = job.living()
        assert (first.attempt, second.attempt, third.attempt) == (1, 1, 0)
        job.exits(second, -9)
        await job.until(lambda: len(job.logged("round_formed")) == 3, "a round without the host that was lost")
        for worker in job.living():
            job.exits(worker, 0)
        assert await job.end() == 0
        assert [(event["round_id"], event["size"]) for event in job.logged("round_formed")] == [(1, 2), (2, 3), (3, 2)]
        assert job.logged("worker_hung") == []

    # Nobody is heard of, so nobody is taken for silent.
    among_fakes(tmp_path, monkeypatch, dialect, test, heartbeat_timeout_s=0.001)
    assert sorted(dialect.told.values(), key=lambda told: told.split()[::-1]) == [
        "rank 0 of 2 in round 1",
        "rank 1 of 2 in round 1",
        "rank 0 of 3 in round 2",
        "rank 1 of 3 in round 2",
        "rank 2 of 3 in round 2",
        "rank 0 of 2 in round 3",
        "rank 1 of 2 in round 3",
    ]


def test_workers_without_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = OtherDialect(OnChange.NO_ROUNDS)

    async def test(job: Job) -> None:
        a, b = await job.started(2)
        job.discovery.hosts = (A, C)
        c = (await job.started(3))[-1]
        await job.until(lambda: b not in job.living(), "the end of the one whose host is gone")
        assert job.living() == [a, c]
        job.exits(c, -9)
        job.discovery.hosts = (A, B)
        again = (await job.started(4))[-1]
        assert (again.hostname, again.attempt) == (B.name, 1)
        for worker in (again, a):
            job.exits(worker, 0)
        assert await job.end() == 0
        assert job.logged("round_formed") == []

    among_fakes(tmp_path, monkeypatch, dialect, test)
