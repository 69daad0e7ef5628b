"""Rounds of hundreds of simulated workers with the real driver: they complete, and cost each worker the same."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import Host
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.settings.settings import Settings
from tests.support import extent

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import scale
from simulated import SLOTS_PER_HOST, Simulation, Worker, simulation

pytestmark = pytest.mark.integration

# Bytes: ranks of more digits, a list of ranks with a gap, a notice that comes before the count or after it. One byte
# for each other worker would be more.
SLACK = 230
FEW = 32
# Beyond that slack, one byte for each.
MANY = 512 if extent.is_whole else 320
# Hundreds of hosts that connect at once take their time on a busy machine.
NEVER_S = 1000.0


def run(body: Callable[[Simulation], Coroutine[Any, Any, None]], size: int, **options: Any) -> None:
    async def main() -> None:
        async with simulation(size, agent_timeout_s=NEVER_S, host_timeout_s=NEVER_S, **options) as job:
            job.go()
            await body(job)

    uvloop.run(main())


def bytes_of_two_rounds(size: int, **options: Any) -> tuple[float, float]:
    """What the server sends to each worker for a start, and for a round after a death."""
    found: list[float] = []

    async def body(job: Simulation) -> None:
        assert await job.until_all_train(1) == size
        # Watches of the round may still be on their way; they are answered in the next one.
        before = job.received_bytes
        found.append(before / size)
        victim = sorted(job.workers)[size // 2]
        job.kill(victim)
        left = size - options.get("slots_per_host", SLOTS_PER_HOST)
        assert await job.until_all_train(2) == left
        assert len(job.workers) == left
        assert all(worker.hostname != victim.hostname for worker in job.workers)
        found.append((job.received_bytes - before) / left)

    run(body, size, **options)
    return found[0], found[1]


def test_a_worker_of_many_is_sent_no_more_than_one_of_few() -> None:
    few, many = bytes_of_two_rounds(FEW), bytes_of_two_rounds(MANY)
    assert many[0] < few[0] + SLACK
    assert many[1] < few[1] + SLACK


@pytest.mark.release  # what grows with the hosts, the test above finds with forty of them
def test_hosts_of_one_worker_each() -> None:
    few, many = bytes_of_two_rounds(FEW, slots_per_host=1), bytes_of_two_rounds(MANY, slots_per_host=1)
    assert many[0] < few[0] + SLACK
    assert many[1] < few[1] + SLACK


def test_each_column_of_the_benchmark_is_measured() -> None:
    """It speaks the engine's wire itself, which may change."""
    assert all(figure >= 0 for figure in uvloop.run(scale.one_run(32, None)))
    assert scale.link(20) > 0
    assert scale.http_threads(8) > 0


def test_rank_0_dies_before_it_has_said_where_it_listens() -> None:
    """All others wait for that; they are told at once, and the next round has another rank 0."""

    async def body(job: Simulation) -> None:
        held: list[Worker] = []

        def hold(worker: Worker) -> bool:
            assert worker.assignment is not None
            if worker.assignment.round_id > 1 or worker.assignment.slot.rank:
                return True
            held.append(worker)
            job.kill(worker.worker)
            return False

        job.on_assigned = hold
        assert await job.until_all_train(2) == 64 - SLOTS_PER_HOST
        assert held[0].worker not in job.workers

    run(body, 64)


def test_a_member_dies_while_the_others_connect() -> None:
    """In the middle of a round that forms, again and again."""

    async def body(job: Simulation) -> None:
        def kill_one(worker: Worker) -> bool:
            assert worker.assignment is not None
            if worker.assignment.round_id < 4 and worker.assignment.slot.rank == worker.assignment.slot.size - 1:
                job.kill(worker.worker)
                return False
            return True

        job.on_assigned = kill_one
        assert await job.until_all_train(4) == 64 - 3 * SLOTS_PER_HOST

    run(body, 64)


def test_too_few_open_files_are_said_at_the_start() -> None:
    async def main() -> None:
        server = RendezvousServer([])
        with pytest.raises(SettingsError, match=r"cannot serve 1000000000 workers: they need 8000000256 open files"):
            await server.start("127.0.0.1", 0, workers=1_000_000_000, descriptors_each=5)

    uvloop.run(main())


def test_too_few_open_files_for_as_many_as_there_may_come_to_be_are_told() -> None:
    """The job runs all the same: it may never grow so far."""
    told: list[str] = []

    async def main() -> None:
        server = RendezvousServer([], on_full=told.append)
        await server.start("127.0.0.1", 0, workers=4, at_most=1_000_000_000, descriptors_each=5)
        await server.close()

    uvloop.run(main())
    assert len(told) == 1
    assert re.match(r"there is room for only \d+ workers, and the job may grow to 1000000000: they need 8000", told[0])


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ({}, 4),
        ({"max_num_proc": 6}, 6),
        ({"max_num_proc": 6, "num_standby": 3}, 9),
        ({"hosts": (Host("localhost", 8),), "discovery_script": None}, 8),
        ({"hosts": (Host("localhost", 8),), "discovery_script": None, "max_num_proc": 6}, 6),
    ],
)
def test_how_many_workers_there_may_come_to_be(flags: dict[str, Any], most: int) -> None:
    given = {"command": ("true",), "num_proc": 4, "min_num_proc": 1, "discovery_script": "true", **flags}
    assert Settings(**given).most_workers == most
