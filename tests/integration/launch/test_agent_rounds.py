"""Workers of this library that meet and train through their agents, one agent a host, under a driver that only passes
on what they say.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import (
    Answer,
    Ask,
    Exited,
    Heard,
    NoticeSet,
    Put,
    Ready,
    Reply,
    Round,
    Running,
    Said,
    Start,
    Value,
    Values,
    Want,
)
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY, JobKey
from elastic_driver.rendezvous.environment import ENV_HEARTBEAT
from elastic_driver.rendezvous.messages import Notice, RoundAssignment
from elastic_driver.rendezvous.server.store import RoundStore
from elastic_driver.words import Backend, NoticeKind
from tests.support.processes.agents import FakeDriver, act, scene

pytestmark = pytest.mark.integration

WORKERS = (WorkerId("a", 0, 0), WorkerId("a", 1, 0), WorkerId("b", 0, 0))
PROGRAM = """
import numpy, os, signal, sys, time
import elastic_driver as hvd
hvd.init()
print(hvd.rank(), hvd.size(), hvd.allreduce(numpy.ones(3), op=hvd.Sum).tolist(), flush=True)
time.sleep(float(sys.argv[1]))
"""


class Hub(FakeDriver):
    """Forms one round of all workers, keeps its keys, and passes them on."""

    def __init__(self, folder: Path, **options: object) -> None:
        super().__init__(folder, **options)
        self.store = RoundStore()
        self.ready: dict[WorkerId, AgentLink] = {}
        self.wants: list[tuple[AgentLink, Want]] = []
        self.answer = Answer(0, 200, b"{}")

    def take(self, link: AgentLink, message: Said) -> None:
        match message:
            case Ready(request):
                self.ready[request.worker] = link
                if len(self.ready) == len(WORKERS):
                    self._form()
            case Put(round_id, scope, key, value):
                self.store.put(round_id, scope, key, value)
                for waiting, want in tuple(self.wants):
                    self._give(waiting, want)
            case Want():
                self.wants.append((link, message))
                self._give(link, message)
            case Ask(number):
                link.send(Answer(number, self.answer.status, self.answer.blob))
        super().take(link, message)

    def _give(self, link: AgentLink, want: Want) -> None:
        round_id, scope = want.round_id, want.scope
        if want.count:
            if self.store.count(round_id, scope) >= want.count:
                link.send(Values(round_id, scope, self.store.packed(round_id, scope)))
                self.wants.remove((link, want))
        elif (value := self.store.get(round_id, scope, want.key)) is not None:
            link.send(Value(round_id, scope, want.key, value))
            self.wants.remove((link, want))

    def _form(self) -> None:
        self.store.begin_round(1)
        for link in self.links.values():
            link.send(Round(1))
            link.send(NoticeSet(Notice(1, 1, NoticeKind.NONE, "")))
        local = {"a": 2, "b": 1}
        for rank, worker in enumerate(WORKERS):
            slot = SlotInfo(rank, 3, worker.slot, local[worker.hostname], int(worker.hostname == "b"), 2 - worker.slot)
            place = RoundAssignment(1, slot, sync=True, commits=0, backend=Backend.NATIVE)
            self.ready[worker].send(Reply(worker.key, place))

    def launch(self, keep_s: float) -> None:
        env = {
            **os.environ,
            ENV_RANKS_KEY: JobKey.new().of_ranks().hex(),
            ENV_HEARTBEAT: "0.2",
            "OMP_NUM_THREADS": "1",
        }
        of = {link.facts.host: link for link in self.links.values()}
        for worker in WORKERS:
            of[worker.hostname].send(
                Start(worker.key, [sys.executable, "-c", PROGRAM, str(keep_s)], env, str(worker), 0)
            )

    def lines(self) -> list[str]:
        return [self.output(worker).decode().partition(">:")[2].strip() for worker in WORKERS]


WRITTEN = [f"{rank} 3 [3.0, 3.0, 3.0]" for rank in range(3)]


def test_workers_of_two_hosts_meet_through_their_agents(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, kind=Hub) as one:
            hub = one.driver
            assert isinstance(hub, Hub)
            for host in ("a", "b"):
                await one.ready(hub.bootstrap(host))
            hub.launch(0.5)
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
            hub.launch(0.0)

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
            hub.launch(100.0)
            await hub.until(lambda: hub.lines() == WRITTEN, "they have met")
            (await hub.runs(WORKERS[0])).terminate()
            asked = await hub.hears(Ask)
            assert (asked.worker, asked.what) == (WORKERS[0].key, "leave")
            assert (await hub.hears(Exited, WORKERS[0])).returncode != 0

    act(main)
