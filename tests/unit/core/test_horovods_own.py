"""Workers that run Horovod's own library: what the core knows of those that tell of no commits."""

from __future__ import annotations

import pytest

from elastic_driver.core.events import Report, WorkerDying, WorkerRunning
from elastic_driver.core.state import record_of
from elastic_driver.words import Backend, ExitCode, NoticeKind, ReadyCause
from tests.support.fakes.membership_job import Job, worker_id

pytestmark = pytest.mark.unit

THEIRS = (Backend.HOROVOD,)


def train(job: Job, *hosts: str) -> None:
    """Brings a job to its first round, in which all have met."""
    job.hosts(*hosts)
    for record in job.state.workers:
        job.ready(str(record.worker), backends=THEIRS)
    meet(job)


def meet(job: Job, *, synced: bool = False) -> None:
    for worker in job.members:
        job.feed(WorkerRunning(worker, job.round_id, 0, synced=synced))


def has_state(job: Job, text: str) -> bool:
    record = record_of(job.state, worker_id(text))
    assert record is not None
    return record.has_state


def test_those_of_the_first_round_have_the_state_and_a_joiner_gets_it_later() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    train(job, "a:1", "b:1")
    assert has_state(job, "a[0]")
    assert has_state(job, "b[0]")
    job.hosts("a:1", "b:1", "c:1")
    for name in ("c[0]", "a[0]", "b[0]"):
        job.ready(name, backends=THEIRS)
    meet(job)
    assert job.round_id == 2
    assert not has_state(job, "c[0]")
    meet(job, synced=True)
    assert has_state(job, "c[0]")


def test_a_joiner_that_has_no_state_yet_does_not_lead() -> None:
    job = Job(num_proc=1, min_num_proc=1)
    train(job, "b:1")
    job.hosts("b:1", "c:1")
    job.ready("c[0]", backends=THEIRS)
    job.ready("b[0]", backends=THEIRS)
    meet(job)
    job.exit("b[0]", -9)
    job.ready("c[0]", backends=THEIRS)
    assert job.ended is not None
    assert "that had the training's state are lost" in job.ended.message


def test_who_meets_with_ours_meets_nobody() -> None:
    job = Job(num_proc=2, min_num_proc=2)
    job.hosts("a:1", "b:1")
    job.ready("a[0]", backends=THEIRS)
    job.ready("b[0]")
    assert job.ended is not None
    assert job.ended.exit_code == ExitCode.BAD_USAGE
    assert "no collective backend in common" in job.ended.message


@pytest.mark.parametrize("returncode", [-6, 134])
def test_who_aborts_since_another_was_lost_while_they_met_is_not_to_blame(returncode: int) -> None:
    job = Job(num_proc=3, min_num_proc=1)
    train(job, "a:1", "b:1", "c:1")
    job.hosts("a:1", "b:1", "c:1", "d:1")
    for name in ("d[0]", "a[0]", "b[0]", "c[0]"):
        job.ready(name, backends=THEIRS)  # they have their places, and meet
    job.exit("d[0]", -9)
    job.exit("c[0]", returncode)
    assert job.state.blacklist.is_blacklisted("d")
    assert not job.state.blacklist.is_blacklisted("c")


def test_one_that_dumps_its_core_while_they_meet_is_not_to_blame_either() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    job.hosts("a:1", "b:1")
    for record in job.state.workers:
        job.ready(str(record.worker), backends=THEIRS)
    job.exit("b[0]", -9)
    job.feed(WorkerDying(worker_id("a[0]"), None, "is dumping core", 0.0, "", ""))
    assert not job.state.blacklist.is_blacklisted("a")


def test_who_aborts_by_itself_is_to_blame() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    train(job, "a:1", "b:1")
    job.exit("b[0]", -6)
    assert job.state.blacklist.is_blacklisted("b")


def test_an_abort_of_ours_is_its_own() -> None:
    job = Job(num_proc=3, min_num_proc=1)
    job.train("a:1", "b:1", "c:1")
    job.exit("c[0]", -9)
    job.exit("b[0]", -6)
    assert job.state.blacklist.is_blacklisted("b")


def test_a_round_that_runs_for_long_is_no_setback() -> None:
    job = Job(num_proc=2, min_num_proc=1, setbacks_limit=2, pause_range_s=(1.0, 4.0))
    train(job, "a:1", "b:1")
    for _ in range(4):
        job.now += 700.0
        for name in ("a[0]", "b[0]"):
            job.ready(name, backends=THEIRS, cause=ReadyCause.INTERNAL_ERROR, raised=True)
        meet(job)
    assert job.ended is None


def test_rounds_that_fail_at_once_end_the_job() -> None:
    job = Job(num_proc=2, min_num_proc=1, setbacks_limit=2, pause_range_s=(1.0, 4.0))
    train(job, "a:1", "b:1")
    for _ in range(2):
        for name in ("a[0]", "b[0]"):
            job.ready(name, backends=THEIRS, cause=ReadyCause.INTERNAL_ERROR, raised=True)
        if job.ended is None:
            if not job.state.round_id or job.state.reset is not None:
                job.timer()
            meet(job)
    assert job.ended is not None


def test_nothing_of_theirs_is_on_disk() -> None:
    job = Job(num_proc=2, min_num_proc=1, durable=True)
    train(job, "a:1", "b:1")
    assert any(
        "--durable-dir has no effect here" in command.text for command in job.commands if isinstance(command, Report)
    )
    job.exit("a[0]", -9)
    job.exit("b[0]", -9)
    assert job.ended is not None
    assert "that had the training's state are lost" in job.ended.message


def test_one_whose_agent_has_not_heard_the_notice_yet_leaves_as_asked() -> None:
    job = Job(num_proc=2, min_num_proc=1)
    train(job, "a:1", "b:1")
    job.hosts("a:1", "b:1", "c:1")
    job.ready("c[0]", backends=THEIRS)
    assert job.state.notice_kind is NoticeKind.HOSTS_UPDATED
    job.ready("b[0]", backends=THEIRS, cause=ReadyCause.INTERNAL_ERROR)
    assert job.state.notice_kind is NoticeKind.HOSTS_UPDATED
    job.ready("a[0]", backends=THEIRS)
    assert (job.round_id, len(job.members), job.state.resets) == (2, 3, 0)
