"""The real driver on hosts of always new names, whose agents are fakes: what it keeps does not grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from elastic_driver.core.state import WorkerPhase, in_phase
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.rendezvous.messages import NextRoundReply, RoundAssignment
from tests.support.fakes.driver_fakes import FakeWorker, Job

pytestmark = pytest.mark.integration

PODS = 60
STAYS = "localhost"


def sizes(job: Job) -> dict[str, int]:
    """Of everything that the driver's side keeps in a collection. What is bounded or told at the end is left out."""
    fleet = job.world.fleet
    watch = job.driver.health.watch
    watches = (watch._hangs, watch._suspicions, watch._standstills, watch._stragglers, watch._heartbeats)
    inside = job.driver.workers._around.meetings, job.driver.requests._keys, job.driver.requests._keys.store
    owners = (*vars(job.driver).values(), *watches, fleet.fleet, *inside)
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in owners
        for name, value in getattr(owner, "__dict__", {}).items()
        if isinstance(value, dict | list | set) and name not in ("_rounds", "_routes")
    }


async def lead_a_life(job: Job) -> int:
    """Pods come, are drained and let off again, join, fail in one way or another, and never come back.

    Returns:
        How many could not start their worker: each fourth.
    """
    world, driver = job.world, job.driver
    refused: list[WorkerId] = []

    def why_not(worker: WorkerId) -> str:
        if not worker.hostname.endswith(("0", "4", "8")):
            return ""
        refused.append(worker)
        return "no such machine"

    def has_words(worker: FakeWorker) -> None:
        worker.last_lines = ("Traceback", "RuntimeError: a bug")

    world.why_not_started = why_not  # type: ignore[method-assign]
    world.on_start = has_words

    async def until(what: str, found: Callable[[], object]) -> None:
        for _ in range(5000):
            if found():
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"{what}: not seen; {job.status()['explain']}")

    async def trains(worker: WorkerId, reply: asyncio.Future[NextRoundReply]) -> None:
        assignment = await reply
        assert isinstance(assignment, RoundAssignment)
        job.running(worker, assignment.round_id, assignment.round_id)

    (stays,) = await job.started(1)
    await trains(stays, job.ready(stays))
    for number in range(PODS):
        pod = f"pod-{number}"
        job.discovery.hosts = (Host(STAYS, 1), Host(pod, 1))

        def started(pod: str = pod) -> list[WorkerId]:
            return [worker for worker in world.started if worker.hostname == pod]

        def is_out(pod: str = pod) -> bool:
            return driver.stepper.state.blacklist.is_blacklisted(pod)

        await until("the pod", lambda started=started, is_out=is_out: started() or is_out())  # type: ignore[misc]
        for undo in (False, True, False, bool(number % 2)) if number % 3 else ():
            await job.drain(pod, undo=undo)
        for worker in started():
            job.ready(worker)
            job.exits(worker, (1, -9)[number % 2])
        job.discovery.hosts = (Host(STAYS, 1),)
        seen = job.discovery.asked
        await until(
            "its end",
            lambda seen=seen: (  # type: ignore[misc]
                job.discovery.asked > seen + 1
                and len(driver.stepper.state.workers) == 1
                and len(world.fleet.fleet.links()) == 1
            ),
        )
        assert len(in_phase(driver.stepper.state, WorkerPhase.MEMBER)) == 1
    grown = {name: size for name, size in sizes(job).items() if size > 4}
    assert grown.pop("Chronicle._last_words", 0) <= PODS  # bounded by a number; cleared by each round
    assert not grown
    job.exits(stays, 0)
    return len(refused)


def test_hosts_of_always_new_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def main() -> None:
        job = Job(tmp_path, Host(STAYS, 1), discovery_interval_s=0.002)
        assert await lead_a_life(job) >= PODS / 4
        assert await job.end() == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
