"""What the job does, in a word; and how much of the training a new round takes back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elastic_driver.core.document import read, write
from elastic_driver.core.events import EndJob, PublishRound, StopRequested, WorkerReady
from elastic_driver.core.past import why_impossible
from elastic_driver.core.standing import JobActivity, standing_of
from elastic_driver.core.state import ChiefPhase, record_of
from elastic_driver.words import OnChange, ReadyCause
from tests.support.fakes.membership_job import BOTH, Job, worker_id

pytestmark = pytest.mark.unit


def doing(job: Job) -> JobActivity:
    return standing_of(job.state).doing


def fails(job: Job, worker: str, uncommitted_s: float, *, commits: int = 4) -> None:
    """A member leaves its round by an internal error."""
    cause = ReadyCause.INTERNAL_ERROR
    event = WorkerReady(worker_id(worker), 1, commits, cause, "a peer is gone", BOTH, uncommitted_s=uncommitted_s)
    job.feed(event)


def lost_s(job: Job) -> float | None:
    published = job.last(PublishRound)
    assert isinstance(published, PublishRound)
    return published.lost_s


def test_from_the_start_to_the_end() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    assert doing(job) is JobActivity.FORMING, "nobody knows yet whether there are slots"
    job.hosts("a:1")
    assert doing(job) is JobActivity.WAITING_FOR_SLOTS
    job.hosts("a:1", "b:1")
    assert doing(job) is JobActivity.FORMING
    job.ready("a[0]")
    job.ready("b[0]")
    assert doing(job) is JobActivity.FORMING, "the round is there, and its members do not train yet"
    job.running("a[0]")
    assert doing(job) is JobActivity.FORMING
    job.running("b[0]")
    assert doing(job) is JobActivity.TRAINING
    job.exit("a[0]", 0)
    assert doing(job) is JobActivity.FINISHING
    job.exit("b[0]", 0)
    assert doing(job) is JobActivity.ENDED


def test_a_loss_and_a_wait_for_slots() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9)
    assert doing(job) is JobActivity.FORMING, "its round is over, and the other has not left it"
    fails(job, "a[0]", 0.0)
    assert doing(job) is JobActivity.WAITING_FOR_SLOTS
    job.hosts("a:1", "c:1")
    assert doing(job) is JobActivity.FORMING, "there is a slot: its worker comes up"
    job.ready("c[0]")
    job.running("a[0]")
    job.running("c[0]")
    assert doing(job) is JobActivity.TRAINING


def test_a_job_with_parameter_servers_trains_while_its_chief_runs_and_has_lost_none() -> None:
    job = Job(num_proc=1, min_num_proc=1, num_parameter_servers=1, restart_chief=True, on_change=OnChange.NO_ROUNDS)
    job.hosts("a:1", "b:1")
    assert doing(job) is JobActivity.FORMING
    for worker in ("a[0]", "b[0]"):
        job.begin(worker_id(worker))
    assert doing(job) is JobActivity.TRAINING
    for changed in ({"phase": ChiefPhase.STOPPING}, {"lost": "parameter server 0 is lost"}):
        state = replace(job.state, chief=replace(job.state.chief, **changed))
        assert standing_of(state).doing is not JobActivity.TRAINING


def test_one_restart_of_the_chief_is_told_as_one() -> None:
    job = Job(
        num_proc=1,
        min_num_proc=1,
        num_parameter_servers=1,
        restart_chief=True,
        reset_limit=1,
        on_change=OnChange.NO_ROUNDS,
    )
    job.hosts("a:1", "b:1")
    for worker in ("a[0]", "b[0]"):
        job.begin(worker_id(worker))
    job.end_chief(1)
    job.end_chief(1)
    end = job.last(EndJob)
    assert isinstance(end, EndJob)
    assert end.message.startswith("the limit of 1 unplanned restart of the chief")


def test_a_planned_change_trains_until_the_first_has_left() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    job.train("a:1", "b:1")
    job.hosts("a:1")
    assert doing(job) is JobActivity.TRAINING, "they are asked to leave at their next commit"
    job.ready("a[0]")
    assert doing(job) is JobActivity.FORMING
    job.ready("b[0]")
    assert lost_s(job) == 0.0


def test_an_end_that_was_asked_for() -> None:
    job = Job()
    job.train("a:1")
    job.feed(StopRequested(15, "SIGTERM"))
    assert doing(job) is JobActivity.ENDED


def test_workers_that_are_restarted_train_as_far_as_is_known() -> None:
    job = Job(num_proc=2, min_num_proc=1, on_change=OnChange.RESTART, last_call_s=0.0)
    job.hosts("a:2")
    assert doing(job) is JobActivity.FORMING
    for record in job.state.workers:
        job.begin(record.worker)
    assert doing(job) is JobActivity.TRAINING
    assert lost_s(job) is None, "nobody knows"


def test_workers_without_rounds() -> None:
    job = Job(num_proc=2, min_num_proc=2, on_change=OnChange.NO_ROUNDS)
    job.hosts("a:1")
    assert doing(job) is JobActivity.WAITING_FOR_SLOTS
    job.hosts("a:2")
    assert doing(job) is JobActivity.FORMING
    job.begin(worker_id("a[0]"))
    assert doing(job) is JobActivity.TRAINING, "each works for itself"


def test_what_is_lost_counts_to_the_break_and_not_to_the_worker_s_word() -> None:
    """A worker hears of a death a while after it; what it did meanwhile was no training."""
    job = Job(num_proc=2, min_num_proc=1)
    job.train("a:1", "b:1", commits=4)
    job.exit("b[0]", -9, at=64.0)
    job.now = 66.0
    fails(job, "a[0]", 18.0)
    assert lost_s(job) == 16.0
    assert record_of(job.state, worker_id("a[0]")).committed_at is None  # type: ignore[union-attr]


def test_what_is_lost_is_the_root_s() -> None:
    job = Job(num_proc=3, min_num_proc=1)
    job.train("a:1", "b:1", "c:1", commits=3)
    job.exit("c[0]", -9, at=64.0)
    fails(job, "a[0]", 32.0, commits=3)
    fails(job, "b[0]", 8.0, commits=4)
    assert lost_s(job) == 8.0, "b has one commit more"


@pytest.mark.parametrize(("said_s", "lost"), [(0.0, 0.0), (1e9, 64.0)])
def test_no_more_is_lost_than_the_round_has_lasted(said_s: float, lost: float) -> None:
    job = Job(num_proc=2, min_num_proc=1)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9, at=64.0)
    fails(job, "a[0]", said_s)
    assert lost_s(job) == lost


def test_a_driver_that_comes_back_knows_it_still() -> None:
    job = Job(num_proc=3, min_num_proc=1)
    job.train("a:1", "b:1", "c:1")
    job.exit("c[0]", -9, at=64.0)
    fails(job, "a[0]", 16.0)
    state = read(write(job.state, 64.0), 1064.0)
    record = record_of(state, worker_id("a[0]"))
    assert record is not None
    assert record.committed_at == 1048.0


@pytest.mark.parametrize("said_s", [-0.5, math.inf, math.nan])
def test_a_time_that_cannot_be_is_refused(said_s: float) -> None:
    job = Job()
    job.train("a:1")
    event = WorkerReady(worker_id("a[0]"), 1, 0, ReadyCause.INTERNAL_ERROR, "", BOTH)
    assert why_impossible(job.state, event) == ""
    assert "since its last commit" in why_impossible(job.state, replace(event, uncommitted_s=said_s))
