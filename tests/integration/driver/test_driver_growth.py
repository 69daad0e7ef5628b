"""The real driver with workers in its own process, on hosts of always new names: what it keeps does not grow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elastic_driver.core.state import WorkerPhase, in_phase
from elastic_driver.dialects.ours import OurDialect
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.errors import LaunchError
from elastic_driver.hosts import Departure, Host, WorkerId
from elastic_driver.rendezvous.messages import (
    DrainHostRequest,
    NextRoundReply,
    NextRoundRequest,
    RoundAssignment,
    RunningReport,
)
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.report.console import Console
from elastic_driver.report.event_log import EventLog
from elastic_driver.report.narrator import Narrator
from elastic_driver.settings.settings import Settings
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.driver_fakes import FakeProcess

pytestmark = pytest.mark.integration

PODS = 60
STAYS = "localhost"


class World:
    """Discovery and launcher in one. Each fourth pod cannot start its worker."""

    descriptors_each = 1

    def __init__(self) -> None:
        self.hosts: tuple[Host, ...] = (Host(STAYS, 1),)
        self.asked = 0
        self.processes: dict[str, FakeProcess] = {}
        self.refused = 0

    async def find_hosts(self) -> tuple[Host, ...]:
        self.asked += 1
        return self.hosts

    async def wait_change(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)

    def departures(self) -> tuple[Departure, ...]:
        """None."""
        return ()

    def down(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def answers(self) -> bool:
        """It does."""
        return True

    def remark(self) -> str:
        return ""

    def check_hosts(self, hosts: Sequence[Host]) -> None:
        """Any will do."""

    def addresses(self, hostnames: Sequence[str]) -> Mapping[str, str]:
        return dict.fromkeys(hostnames, "127.0.0.1")

    async def hold_port(self, hostname: str, generation: int) -> int:
        return 1

    def let_go(self, hostname: str, generation: int) -> None:
        """Ports are plenty here."""

    def cores(self, hostname: str) -> int:
        return 1

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> FakeProcess:
        if worker.hostname.endswith(("0", "4", "8")):
            self.refused += 1
            raise LaunchError("no such machine")
        process = self.processes[worker.hostname] = FakeProcess(worker, 1_000_000 + len(self.processes))
        process.last_lines = ("Traceback", "RuntimeError: a bug")
        return process

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()

    async def close(self) -> None:
        self.kill()


def sizes(driver: ElasticDriver, chronicle: Chronicle) -> dict[str, int]:
    """Of everything that the driver's side keeps in a collection. What is bounded or told at the end is left out."""
    watch = driver.health.watch
    watches = (watch._hangs, watch._suspicions, watch._standstills, watch._stragglers, watch._heartbeats)
    owners = (driver, driver._stepper, driver._workers, driver.rounds, *watches, chronicle)
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, dict | list | set) and name != "_rounds"
    }


async def lead_a_life(driver: ElasticDriver, world: World, chronicle: Chronicle) -> None:
    """Pods come, are drained and let off again, join, fail in one way or another, and never come back."""

    async def until(what: str, found: object) -> None:
        assert callable(found)
        for _ in range(5000):
            if found():
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{what}: not seen; {driver.rounds.status()['explain']}")

    def ask(host: str, cause: ReadyCause) -> asyncio.Future[NextRoundReply]:
        process = world.processes[host]
        after = next(r.round_id for r in driver._stepper.state.workers if r.worker == process.worker)
        request = NextRoundRequest(process.worker, after, 0, cause, "", (Backend.NATIVE,), process.pid)
        return asyncio.ensure_future(driver.rounds.next_round(request))

    async def trains(host: str, reply: asyncio.Future[NextRoundReply]) -> None:
        assignment = await reply
        assert isinstance(assignment, RoundAssignment)
        driver.rounds.running(RunningReport(world.processes[host].worker, assignment.round_id, assignment.round_id))

    await until("the first worker", lambda: STAYS in world.processes)
    await until("its process", lambda: driver._workers.living)
    await trains(STAYS, ask(STAYS, ReadyCause.START))
    for number in range(PODS):
        pod = f"pod-{number}"
        world.hosts = (Host(STAYS, 1), Host(pod, 1))

        def is_out(pod: str = pod) -> bool:
            return driver._stepper.state.blacklist.is_blacklisted(pod)

        await until("the pod", lambda pod=pod, is_out=is_out: pod in world.processes or is_out())
        driver.rounds.drain(DrainHostRequest(pod, undo=False))
        driver.rounds.drain(DrainHostRequest(pod, undo=True))
        driver.rounds.drain(DrainHostRequest(pod, undo=False))
        driver.rounds.drain(DrainHostRequest(pod, undo=bool(number % 2)))
        if pod in world.processes:
            world.processes[pod].end((1, -9)[number % 2])
        world.hosts = (Host(STAYS, 1),)
        seen = world.asked
        await until("its end", lambda seen=seen: world.asked > seen + 1 and len(driver._stepper.state.workers) == 1)
        assert len(in_phase(driver._stepper.state, WorkerPhase.MEMBER)) == 1
    grown = {name: size for name, size in sizes(driver, chronicle).items() if size > 4}
    assert grown.pop("Chronicle._last_words", 0) <= PODS  # bounded by a number; cleared by each round
    assert not grown
    assert world.refused >= PODS / 4
    world.processes[STAYS].end(0)


def test_hosts_of_always_new_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    settings = Settings(
        command=("true",),
        num_proc=1,
        min_num_proc=1,
        hosts=(Host(STAYS, 1),),
        discovery_interval_s=0.002,
        log_level="FATAL",
        elastic=True,
    )

    async def main() -> int:
        world = World()
        with Console(log_level=settings.log_level) as console, EventLog(None) as log:
            chronicle = Chronicle(log, Narrator(console))
            dialect = OurDialect({}, exported={})
            driver = ElasticDriver(
                settings, discovery=world, launcher=world, chronicle=chronicle, dialect=dialect, job_id="growth"
            )
            running = asyncio.ensure_future(driver.run())
            life = asyncio.ensure_future(lead_a_life(driver, world, chronicle))
            await asyncio.wait((running, life), return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
            return await asyncio.wait_for(running, 150)

    assert asyncio.run(main()) == 0
