"""Workers of this library that meet and train through their agents, one agent a host, under a driver that only passes
on what they say.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic_driver.rendezvous.agent_messages import (
    Answer,
    Ask,
    Exited,
    Heard,
    Ready,
    Running,
)
from tests.support.processes.agents import act, scene
from tests.support.processes.hub import WORKERS, Hub

pytestmark = pytest.mark.integration

PROGRAM = """
import numpy, os, signal, sys, time
import elastic_driver as hvd
hvd.init()
print(hvd.rank(), hvd.size(), hvd.allreduce(numpy.ones(3), op=hvd.Sum).tolist(), flush=True)
time.sleep(float(sys.argv[1]))
"""


WRITTEN = [f"{rank} 3 [3.0, 3.0, 3.0]" for rank in range(3)]


def test_workers_of_two_hosts_meet_through_their_agents(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, kind=Hub) as one:
            hub = one.driver
            assert isinstance(hub, Hub)
            for host in ("a", "b"):
                await one.ready(hub.bootstrap(host))
            hub.launch(PROGRAM, "0.5")
            for worker in WORKERS:
                assert (await hub.hears(Exited, worker)).returncode == 0, hub.output(worker, "stderr")
            assert hub.lines() == WRITTEN
            assert sum(isinstance(said, Ready) for said in hub.said) == 3
            heard = {worker for said in hub.of(Heard) for worker in said.workers}
            assert heard == {worker.key for worker in WORKERS}
            exiting = [worker for said in hub.of(Heard) for worker in said.exiting]
            assert sorted(exiting) == sorted(worker.key for worker in WORKERS)
            assert hub.of(Running) == []

    act(main)


def test_connections_that_are_cut_while_workers_meet(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, kind=Hub) as one:
            hub = one.driver
            assert isinstance(hub, Hub)
            for host in ("a", "b"):
                await one.ready(hub.bootstrap(host))
            hub.launch(PROGRAM, "0")

            async def cut() -> None:
                pause_s = 0.1
                while True:
                    for link in hub.links.values():
                        hub.cut(link)
                    await asyncio.sleep(pause_s)
                    pause_s *= 1.2  # on a slow machine, too, they meet in the end

            cutting = asyncio.create_task(cut())
            for worker in WORKERS:
                assert (await hub.hears(Exited, worker)).returncode == 0, hub.output(worker, "stderr")
            cutting.cancel()
            assert hub.lines() == WRITTEN
            assert hub.lost == []

    act(main)


def test_a_worker_that_is_told_to_leave_asks_the_driver(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, kind=Hub) as one:
            hub = one.driver
            assert isinstance(hub, Hub)
            hub.answer = Answer(0, 410, b'{"error": "end now"}')
            for host in ("a", "b"):
                await one.ready(hub.bootstrap(host))
            hub.launch(PROGRAM, "100")
            await hub.until(lambda: hub.lines() == WRITTEN, "they have met")
            (await hub.runs(WORKERS[0])).terminate()
            asked = await hub.hears(Ask)
            assert (asked.worker, asked.what) == (WORKERS[0].key, "leave")
            assert (await hub.hears(Exited, WORKERS[0])).returncode != 0

    act(main)
