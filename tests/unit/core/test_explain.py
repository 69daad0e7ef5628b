"""One sentence for each place where a job can stand."""

from __future__ import annotations

import pytest

from elastic_driver.core.events import DiscoveryFailed, DismissWorker, DrainRequested, HostSilent, WorkerDying
from elastic_driver.core.explain import explain, names, why_no_place
from elastic_driver.words import ReadyCause, Sizing
from tests.support.fakes.membership_job import Job, worker_id

pytestmark = pytest.mark.unit


def said(job: Job, *, at: float | None = None) -> str:
    return explain(job.state, job.now if at is None else at)


def test_before_discovery_has_answered() -> None:
    assert said(Job()) == "waiting for the first hosts; 600 s left"


def test_too_few_slots_to_start() -> None:
    job = Job(num_proc=4, min_num_proc=2, elastic_timeout_s=100.0)
    job.hosts("a:2", "b:1", at=40.0)
    assert said(job) == "waiting for 4 slots (-np), slots: 3 (a:2, b:1); 60 s left"
    assert said(job, at=500.0).endswith("; 0 s left"), "no time is below nothing"


@pytest.mark.parametrize(
    ("sizing", "start", "least"),
    [
        (Sizing.NP, "-np", "--min-np"),
        (Sizing.NPROC, "--nproc-per-node", "--nproc-per-node"),
        (Sizing.NNODES, "--nnodes times --nproc-per-node", "--nnodes times --nproc-per-node"),
    ],
)
def test_the_flags_are_those_that_were_given(sizing: Sizing, start: str, least: str) -> None:
    job = Job(num_proc=2, min_num_proc=2, sizing=sizing)
    job.hosts("a:1")
    assert said(job).startswith(f"waiting for 2 slots ({start}), slots: 1")
    job.train("a:1", "b:1")
    job.exit("b[0]", -9)
    job.ready("a[0]")
    assert said(job).startswith(f"waiting for 2 workers ({least}), ready: 1")
    assert Job(num_proc=2, min_num_proc=1, sizing=sizing).policy.least_flag == "--min-np", "it was given beside them"


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
    assert said(job) == "round 1 runs with 1 worker; some have finished, waiting for the rest"


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
    assert (
        said(job)
        == "waiting for 2 workers (--min-np), ready: 1, slots: 1 (a:1), blacklisted: b (permanently); 60 s left"
    )
    job.hosts("a:1", "b:1", "c:1", at=20.0)
    assert said(job).endswith("blacklisted: b (permanently); worker c[0] starting; 40 s left")


def test_all_places_drained_names_who_and_how_to_undo_it() -> None:
    job = Job(num_proc=2, min_num_proc=1, elastic_timeout_s=60.0)
    job.train("a:1", "b:2")
    job.feed(DrainRequested("a", None, "by elasticrun drain"))
    job.feed(DrainRequested("b", 1, "it received SIGTERM"))
    job.feed(DrainRequested("b", 0, "it received SIGTERM"))
    for worker in ("a[0]", "b[0]", "b[1]"):
        job.ready(worker, commits=3, cause=ReadyCause.HOSTS_UPDATED)
    assert said(job) == (
        "waiting for 1 worker (--min-np), ready: 0, slots: 0, drained: a, b[0], b[1] "
        "(undo: elasticrun drain --undo HOST); 60 s left"
    )


def test_every_reason_for_which_a_listed_slot_is_not_used_is_named() -> None:
    job = Job(num_proc=3, min_num_proc=3, elastic_timeout_s=60.0, cooldown_range_s=(30.0, 30.0))
    job.train("a:2", "b:1", "c:1")
    job.exit("b[0]", -9)
    job.feed(DrainRequested("c", None, "by elasticrun drain"))
    job.feed(DrainRequested("a", 1, "it received SIGTERM"))
    for worker in ("a[0]", "a[1]", "c[0]"):
        job.ready(worker)
    assert said(job, at=10.0) == (
        "waiting for 3 workers (--min-np), ready: 1, slots: 1 (a:1), blacklisted: b (20 s left), drained: a[1], c "
        "(undo: elasticrun drain --undo HOST); 50 s left"
    )
    job.hosts(at=10.0)
    assert "slots: 0, no host is listed" in said(job)
    job.hosts(at=10.0, down=["b"])
    assert "slots: 0, no listed host is up" in said(job)


def test_a_place_that_a_dying_worker_still_holds_is_named() -> None:
    job = Job(num_proc=2, min_num_proc=2, elastic_timeout_s=60.0, cooldown_range_s=(1.0, 1.0))
    job.train("a:1", "b:1")
    job.feed(WorkerDying(worker_id("b[0]"), -9, "killed by SIGKILL", 0.5))
    job.ready("a[0]")
    job.timer(at=2.0)
    assert said(job).startswith(
        "waiting for 2 workers (--min-np), ready: 1, slots: 2 (a:1, b:1); worker b[0] still exiting"
    )


def test_a_running_job_says_who_is_out_and_that_discovery_fails() -> None:
    job = Job(num_proc=3, min_num_proc=1, elastic_timeout_s=60.0, cooldown_range_s=(30.0, 30.0))
    job.train("a:1", "b:1", "c:1")
    job.feed(DrainRequested("b", None, "by elasticrun drain"))
    job.exit("c[0]", -9)
    job.ready("a[0]")
    job.ready("b[0]")
    job.feed(DiscoveryFailed("no route"), at=10.0)
    assert said(job, at=15.0) == (
        "round 2 runs with 1 worker; blacklisted: c (15 s left); drained: b (undo: elasticrun drain --undo HOST); "
        "host discovery has failed for 5 s: no route"
    )


def test_long_lists_of_hosts_are_cut() -> None:
    job = Job(num_proc=40)
    job.hosts(*(f"h{number}:2" for number in range(12)))
    assert said(job).startswith("waiting for 40 slots (-np), slots: 24 (h0:2, h1:2, h2:2, h3:2, h4:2, h5:2 and 6 more)")


@pytest.mark.parametrize(
    ("hosts", "drained", "why"),
    [
        (("a:1",), None, "host b is no longer listed"),
        (("a:1", "b:1"), None, "host b has only 1 slot now"),
        (("a:1", "b:2"), DrainRequested("b", None, "as asked"), "host b is drained"),
        (("a:1", "b:2"), DrainRequested("b", 1, "as asked"), "slot 1 of host b is drained"),
    ],
)
def test_who_is_dismissed_is_told_why(hosts: tuple[str, ...], drained: DrainRequested | None, why: str) -> None:
    job = Job(num_proc=3, min_num_proc=1)
    job.train("a:1", "b:2")
    if drained:
        job.feed(drained)
    job.hosts(*hosts)
    for worker in ("a[0]", "b[0]", "b[1]"):
        job.ready(worker, commits=1, cause=ReadyCause.HOSTS_UPDATED)
    gone = next(c for c in job.commands if isinstance(c, DismissWorker) and c.worker == worker_id("b[1]"))
    assert gone.reason == why


def test_who_is_dismissed_for_max_np_is_told_so() -> None:
    job = Job(num_proc=2, min_num_proc=1, max_num_proc=2)
    job.train("a:1", "b:1")
    assert why_no_place(job.state, "b", 0) == "the job already has its maximum of 2 workers (--max-np)"


def test_enough_are_ready_but_others_are_on_their_way() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9)
    job.ready("a[0]")
    job.hosts("a:1", "c:1", "d:1")
    job.ready("c[0]")
    assert said(job) == "2 workers ready, waiting briefly for more; worker d[0] starting; 5 s left"


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


def test_hosts_that_are_not_heard_and_waited_for_are_named() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    job.train("a:1", "b:1")
    job.feed(HostSilent("b", 2.0, sure=False))
    assert said(job) == "round 1 runs with 2 workers"
    job.feed(HostSilent("b", 5.0), at=3.0)
    assert said(job) == "round 1 runs with 2 workers; not responding: b (5 s)"
    job.ready("a[0]", cause=ReadyCause.INTERNAL_ERROR)
    # It is waited for as long as its host is, and not until the time that is set to those who are heard.
    assert said(job) == "round 1 is over; waiting for worker b[0] to leave it; not responding: b (5 s)"


def test_hosts_that_are_left_out_are_named() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    job.train("a:1", "b:1")
    job.ready("a[0]", unreachable=(1,))
    job.ready("b[0]")
    assert said(job, at=4.0) == "round 2 runs with 1 worker; left out: b (6 s left)"
    assert why_no_place(job.state, "b", 0) == "host b is left out"
