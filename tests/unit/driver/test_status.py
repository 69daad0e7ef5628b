"""What the status says of a job: its state as histories of the core make it, and looks at its workers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elastic_driver.core.events import DrainRequested, Event, HostHeard, HostSilent, WorkerReady
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.goodput import Booked
from elastic_driver.vitals import Traffic, Vitals, Waiting
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.membership_job import Job
from tests.support.fakes.status_parts import Parts, status_of

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 0)


class World:
    """A job of two workers that trains. In place of its stepper, too."""

    trouble = ""

    def __init__(self) -> None:
        self.job = Job(num_proc=2, min_num_proc=1)
        self.job.train("a", "b")
        self.reports: list[Event] = []
        self.parts = Parts()
        self.parts.pids = {A: 11, B: 12}
        self.status = status_of(self, lambda: self.job.now, self.parts)

    @property
    def state(self) -> Any:
        return self.job.state

    def catch_up(self) -> None:
        while self.reports:
            self.job.feed(self.reports.pop(0))

    def look(self, worker: WorkerId, vitals: Vitals) -> None:
        self.parts.table.take(worker, vitals, self.job.now)

    def asked(self) -> Any:
        """The status as it travels."""
        return json.loads(json.dumps(self.status.document()))


def test_a_journal_that_cannot_be_written_is_told() -> None:
    world = World()
    assert world.asked()["explain"] == "round 1 runs with 2 workers"
    world.trouble = "cannot write the journal /journal: No space left on device"
    assert world.asked()["explain"] == f"round 1 runs with 2 workers; {world.trouble}"


def test_the_status_is_of_now() -> None:
    world = World()
    world.reports.append(WorkerReady(B, 1, 0, ReadyCause.HOSTS_UPDATED, "", (Backend.NATIVE,)))
    status = world.asked()
    assert (status["job_id"], status["command"]) == ("1f", ["true"])
    assert (status["phase"], status["round_id"]) == ("resetting", 1)
    assert [(one["worker"], one["phase"], one["pid"]) for one in status["workers"]] == [
        ("a[0]#0", "member", 11),
        ("b[0]#0", "ready", 12),
    ]


def test_its_age_is_the_jobs_also_where_another_driver_had_begun_it() -> None:
    world = World()
    world.parts.booked = Booked({"training": 38.0, "start": 1.0}, 39.0)
    assert world.asked()["age_s"] == 39.0


def test_the_newest_commit_is_that_of_whoever_is_furthest() -> None:
    world = World()
    assert world.asked()["newest_commit"] == 0
    world.look(A, Vitals(1.0, 11, "S", commits=7))
    assert (world.asked()["newest_commit"], world.status.newest_commit()) == (7, 7)
    world.parts.table.forget(A)
    assert world.asked()["newest_commit"] == 7
    world.parts.progress.reached(8)
    assert world.asked()["newest_commit"] == 8


def test_a_drained_slot_is_no_drained_host() -> None:
    world = World()
    world.job.hosts("a:2", "b")

    def drained() -> tuple[object, object]:
        status = world.asked()
        return status["drained"], status["drained_slots"]

    assert drained() == ([], {})
    world.job.feed(DrainRequested("a", 1, "why"))
    assert drained() == ([], {"a": [1]})
    world.job.feed(DrainRequested("a", 0, "why"))
    assert drained() == (["a"], {})
    world.job.feed(DrainRequested("b", None, "why"))
    assert drained() == (["a", "b"], {})


def test_it_explains_what_only_discovery_knows() -> None:
    world = World()
    assert world.asked()["explain"] == "round 1 runs with 2 workers"
    world.parts.says = "host c is not ready: its agent has not connected yet"
    assert world.asked()["explain"] == f"round 1 runs with 2 workers; {world.parts.says}"
    for worker in (A, B):
        world.job.exit(str(worker), 0)
    assert world.parts.says not in world.asked()["explain"], "of a job that is over nobody waits for hosts"


def test_it_names_hosts_that_are_not_heard_or_left_out() -> None:
    world = World()
    job = world.job

    def named() -> tuple[object, object]:
        status = world.asked()
        return status["silent"], status["left_out"]

    job.feed(HostSilent("a", 5.0, sure=False))
    assert named() == ([], [])
    job.feed(HostSilent("a", 5.0))
    assert named() == (["a"], [])
    job.feed(HostHeard("a"))
    job.ready("a[0]", cause=ReadyCause.INTERNAL_ERROR, unreachable=(1,))
    job.ready("b[0]", cause=ReadyCause.INTERNAL_ERROR)
    assert named() == ([], ["b"])


def test_it_tells_how_the_workers_are() -> None:
    world = World()

    def told(worker: WorkerId) -> Any:
        (found,) = [one for one in world.asked()["workers"] if one["worker"] == worker.key]
        return found["vitals"]

    assert told(A) is None
    assert [world.asked()[name] for name in ("steps", "steps_per_s", "collectives")] == [0, None, []]
    lacks = Waiting("allreduce 'grad.3'", 4.0, (1,))
    first = Vitals(
        1.0,
        11,
        state="S",
        pulse_s=0.1,
        steps=10,
        cpu_s=1.0,
        submitted=9,
        finished=8,
        rank=0,
        commits=1,
        committed_s=0.5,
    )
    traffic = (Traffic("allreduce", 10, 400),)
    world.look(A, first)
    world.look(A, replace(first, at_s=2.0, steps=14, cpu_s=1.5, traffic=traffic, waiting=(lacks,)))
    world.look(B, Vitals(1.0, 12, state="T", pulse_s=3.0, rank=1, traffic=traffic, waited_s=2.5))
    assert told(A) == {
        "state": "S",
        "traced": False,
        "cpu": 0.5,
        "rss_bytes": 0,
        "steps": 14,
        "steps_per_s": 4.0,
        "waits_s": 0.0,
        "waited_s": 0.0,
        "commits": 1,
        "committed_s": 0.5,
        "pulse_s": 0.1,
        "can_dump": False,
    }
    assert (told(B)["state"], told(B)["steps_per_s"], told(B)["committed_s"]) == ("T", None, None)
    status = world.asked()
    assert (status["steps_per_s"], status["steps"]) == (4.0, 14)
    assert status["waiting"] == [{"name": lacks.name, "since_s": 4.0, "missing": [1]}]
    assert status["collectives"] == [{"kind": "allreduce", "operations": 20, "payload_bytes": 800}]
    world.parts.table.forget(B)
    world.job.exit("b[0]", -9)
    status = world.asked()
    assert status["collectives"] == [{"kind": "allreduce", "operations": 20, "payload_bytes": 800}]
    assert status["waited_s"] == 2.5
