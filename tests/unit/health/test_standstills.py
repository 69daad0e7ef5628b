"""Stories of agents that say nothing, and of scripts that stand still without telling anybody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_driver.health.findings import Kind, WorkerCleared, WorkerSuspected
from elastic_driver.health.standstills import UNHEARD_S, Finding, StandstillWatch
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals

pytestmark = pytest.mark.unit


class World:
    """A round of scripts that compute, until a test says otherwise; looks come once a second."""

    def __init__(self, size: int = 3, *, steps: bool = False) -> None:
        self.now = 100.0
        self.workers = [WorkerId(f"h{rank}", 0, 0) for rank in range(size)]
        self.watch = StandstillWatch()
        self.watch.begin(1, {worker: rank for rank, worker in enumerate(self.workers)})
        self.looks = {worker: Vitals(1000.0 * rank, rank + 1, "S") for rank, worker in enumerate(self.workers)}
        self.steps: dict[WorkerId, int | None] = dict.fromkeys(self.workers, 0 if steps else None)
        self.unheard: dict[str, float] = {}
        self.told: list[tuple[float, Finding]] = []

    def pass_s(
        self,
        seconds: float,
        *,
        idle: tuple[int, ...] = (),
        stuck: tuple[int, ...] = (),
        mute: tuple[int, ...] = (),
        is_known: bool = False,
        sleeps: int = -1,
        **of_idle: object,
    ) -> list[Finding]:
        """Lets time pass. Who is idle does nothing, who is stuck makes no step, and of a mute one nothing is heard."""
        end, told = self.now + seconds, len(self.told)
        while self.now < end:
            self.now += 1.0
            for rank, worker in enumerate(self.workers):
                step = self.steps[worker]
                if step is not None and rank not in (*idle, *stuck):
                    self.steps[worker] = step + 4
                look = replace(self.looks[worker], at_s=self.looks[worker].at_s + 1.0, awaits="", state="S")
                more = of_idle if rank in idle else {"cpu_s": look.cpu_s + 0.8}
                look = replace(look, **more)  # type: ignore[arg-type]
                if rank == sleeps:
                    look = replace(look, awaits="a sleep to end")
                self.looks[worker] = look
                if rank in mute:
                    self.unheard[worker.hostname] = self.unheard.get(worker.hostname, 0.0) + 1.0
                else:
                    self.unheard[worker.hostname] = 0.0
                    self.watch.take(worker, look, self.now)
            for finding in self.watch.look(
                self.now, step_of=self.steps.__getitem__, unheard=self.unheard, is_known=lambda worker: is_known
            ):
                self.told.append((self.now, finding))
        return [finding for _, finding in self.told[told:]]


def test_who_computes_is_left_alone() -> None:
    for steps in (False, True):
        assert World(steps=steps).pass_s(3600) == []


def test_an_agent_that_says_nothing_is_named_once_and_again_when_it_is_heard() -> None:
    world = World()
    world.pass_s(30)
    (found,) = world.pass_s(UNHEARD_S + 2, mute=(1,))
    assert isinstance(found, WorkerSuspected)
    assert (found.worker, found.rank, found.kind, found.ends_s) == (world.workers[1], 1, Kind.UNHEARD, None)
    assert "its host's agent has not reported for 11 s, although the machine responds" in found.why
    assert world.pass_s(200, mute=(1,), idle=(0, 2)) == [], "one word is enough"
    assert [(worker, rank) for worker, rank, *_ in world.watch.suspects(world.now)] == [(world.workers[1], 1)]
    (cleared,) = world.pass_s(2)
    assert isinstance(cleared, WorkerCleared)
    assert cleared.why == "its host's agent reports again"
    assert cleared.took_s > 200
    (again,) = world.pass_s(UNHEARD_S + 2, mute=(1,))
    assert isinstance(again, WorkerSuspected)
    (cleared,) = world.watch.look(world.now, silent=["h1"])
    assert cleared.why == "its host does not respond at all"  # type: ignore[union-attr]
    assert world.watch.suspects(world.now) == []


def test_a_driver_that_was_stopped_has_not_read_what_has_come() -> None:
    world = World()
    world.unheard = {"h1": 90.0}
    assert world.watch.look(world.now, unheard=world.unheard) == []
    assert world.watch.look(world.now, unheard={"h1": 0.1}) == []


def test_a_rank_that_is_behind_in_steps() -> None:
    world = World(steps=True)
    world.pass_s(60)
    world.pass_s(1, stuck=(1,))
    world.pass_s(9, idle=(0, 1, 2))
    (found,) = world.pass_s(10, idle=(0, 1, 2))
    assert isinstance(found, WorkerSuspected)
    assert (found.worker, found.kind) == (world.workers[1], Kind.LACKS)
    assert "it is at step 240 and is idle; others have been at step 244 for 10 s" in found.why
    assert found.limit_s == 10.0
    (cleared,) = world.pass_s(5)
    assert (cleared.worker, cleared.why) == (world.workers[1], "it makes progress again")


def test_a_rank_that_computes_while_the_others_wait_for_the_same_step() -> None:
    world = World(steps=True)
    world.pass_s(60)
    (found,) = world.pass_s(15, idle=(0, 2), stuck=(1,))
    assert isinstance(found, WorkerSuspected)
    assert (found.rank, found.kind) == (1, Kind.LACKS)
    assert "it is computing or doing I/O; 2 others have been idle for 10 s" in found.why


def test_ranks_that_all_do_nothing_and_one_that_sleeps() -> None:
    """In the kernel a rank that waits in a collective waits for a thread of its own."""
    world = World(steps=True)
    world.pass_s(60)
    (found,) = world.pass_s(15, idle=(0, 1, 2))
    assert isinstance(found, WorkerSuspected)
    assert (found.rank, found.kind, found.more) == (0, Kind.IDLE, 2)
    assert "which of them the others wait for is not visible" in found.why
    world = World()
    world.pass_s(10)
    (found,) = world.pass_s(70, idle=(0, 1, 2), sleeps=2)
    assert isinstance(found, WorkerSuspected)
    assert (found.rank, found.kind) == (2, Kind.LACKS)
    assert found.why == "its main thread waits for a sleep to end, and others are idle"


@pytest.mark.parametrize(("idle", "named"), [((0, 2), 1), ((1,), 1)])
def test_without_steps_who_does_otherwise_than_most_is_named(idle: tuple[int, ...], named: int) -> None:
    world = World()
    world.pass_s(10)
    assert world.pass_s(58, idle=idle) == []
    (found,) = world.pass_s(10, idle=idle)
    assert isinstance(found, WorkerSuspected)
    assert (found.rank, found.kind, found.limit_s) == (named, Kind.LACKS, 60.0)


def test_a_standstill_that_was_usual_is_told_later_the_next_time() -> None:
    world = World()
    world.pass_s(10)
    for expected in (WorkerSuspected, WorkerCleared):
        (found,) = world.pass_s(200, idle=(0, 1, 2)) if expected is WorkerSuspected else world.pass_s(10)
        assert isinstance(found, expected)
    assert world.pass_s(300, idle=(0, 1, 2)) == []
    assert len(world.pass_s(200, idle=(0, 1, 2))) == 1


def test_an_evaluation_is_taken_for_a_standstill_once_in_a_job() -> None:
    world = World(4, steps=True)
    world.pass_s(60)
    suspected, cleared = world.pass_s(40, idle=(1, 2, 3), stuck=(0,)) + world.pass_s(10)
    assert isinstance(suspected, WorkerSuspected)
    assert isinstance(cleared, WorkerCleared)
    world.watch.begin(2, {worker: rank for rank, worker in enumerate(world.workers)})
    assert world.pass_s(60) + world.pass_s(40, idle=(1, 2, 3), stuck=(0,)) + world.pass_s(10) == []
    (found,) = world.pass_s(600, idle=(1, 2, 3), stuck=(0,))
    assert isinstance(found, WorkerSuspected)


def test_what_others_tell_of_is_not_told_again() -> None:
    world = World()
    world.pass_s(10)
    assert world.pass_s(100, idle=(0, 2), is_known=True) == []
    world = World()
    world.pass_s(10)
    assert world.pass_s(100, idle=(1,), state="T") == [], "it is stopped, which is told at once"
    world = World()
    world.pass_s(10)
    assert world.pass_s(100, idle=(0, 1, 2), pulse_s=0.1) == [], "workers of this library tell themselves"


def test_the_end_of_a_round_and_of_a_worker_end_what_was_told() -> None:
    world = World()
    world.pass_s(10)
    world.pass_s(70, idle=(0, 1, 2))
    world.watch.begin(2, {worker: rank for rank, worker in enumerate(world.workers)})
    (cleared,) = world.pass_s(1)
    assert cleared.why == "a new round began"  # type: ignore[union-attr]
    world.pass_s(30)
    (found,) = world.pass_s(70 + 140, idle=(0, 1, 2))
    world.watch.forget(found.worker)
    (cleared,) = world.watch.look(world.now)
    assert cleared.why == "it has ended"  # type: ignore[union-attr]
