"""One sentence for each place where a job can stand."""

from __future__ import annotations

import pytest
from membership_job import Job, worker_id

from elastic_driver.events import DiscoveryFailed
from elastic_driver.explain import explain, names

pytestmark = pytest.mark.unit


def said(job: Job, *, at: float | None = None) -> str:
    return explain(job.state, job.now if at is None else at)


def test_before_discovery_has_answered() -> None:
    assert said(Job()) == "waiting for host discovery to answer"


def test_too_few_slots_to_start() -> None:
    job = Job(num_proc=4, min_num_proc=2, elastic_timeout_s=100.0)
    job.hosts("a:2", "b:1", at=40.0)
    assert said(job) == "waiting for 4 slots (-np), slots: 3 (a:2, b:1); 60 s left"
    assert said(job, at=500.0).endswith("; 0 s left"), "no time is below nothing"


def test_who_has_not_called_init() -> None:
    job = Job(num_proc=3, start_timeout_s=30.0)
    job.hosts("a:3")
    job.ready("a[1]", at=10.0)
    assert said(job) == "waiting for workers a[0], a[2] to call hvd.init(); 20 s left"


def test_a_running_round() -> None:
    job = Job()
    job.train("a:1")
    assert said(job) == "round 1 runs with 1 worker"
    job.hosts("a:1", "b:1")
    assert said(job) == "round 1 runs with 1 worker; worker b[0] starting"
    job.ready("b[0]")
    assert said(job) == "round 1 runs with 1 worker; hosts changed, waiting for the next commit"


def test_a_round_that_some_have_finished() -> None:
    job = Job(num_proc=2)
    job.train("a:2")
    job.exit("a[0]", 0)
    assert said(job) == "round 1 runs with 1 worker; some have finished, waiting for the others"


def test_a_round_that_is_over() -> None:
    job = Job(num_proc=3, start_timeout_s=30.0)
    job.train("a:1", "b:1", "c:1")
    job.exit("c[0]", -9, at=10.0)
    job.ready("a[0]", at=15.0)
    assert said(job) == "round 1 is over; waiting for worker b[0] to leave it; 25 s left"


def test_too_few_workers_to_go_on_names_the_blacklisted() -> None:
    job = Job(num_proc=2, min_num_proc=2, elastic_timeout_s=60.0)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9)
    job.ready("a[0]")
    assert said(job) == "waiting for 2 workers (--min-np), ready: 1, slots: 1 (a:1), blacklisted: b; 60 s left"
    job.hosts("a:1", "b:1", "c:1", at=20.0)
    assert said(job).endswith("blacklisted: b; worker c[0] starting; 40 s left")


def test_enough_are_ready_but_others_are_on_their_way() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9)
    job.ready("a[0]")
    job.hosts("a:1", "c:1", "d:1")
    job.ready("c[0]")
    assert said(job) == "2 workers ready, giving others a moment; worker d[0] starting; 5 s left"


def test_an_ended_job() -> None:
    job = Job()
    job.feed(DiscoveryFailed("no such script"))
    assert said(job) == "the job has ended"


def test_many_names_are_cut() -> None:
    workers = [worker_id(f"a[{slot}]") for slot in range(9)]
    assert names([]) == ""
    assert names(workers[:1]) == "worker a[0]"
    assert names(workers[:2]) == "workers a[0], a[1]"
    assert names(workers) == "workers a[0], a[1], a[2], a[3], a[4], a[5] and 3 more"
    assert names([worker_id("a[0]#2")]) == "worker a[0]#2"
