"""What is late, what is impossible, and what is forgotten when."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elastic_driver.core.attempts import Attempts
from elastic_driver.core.events import (
    EndJob,
    Event,
    HostLost,
    HostsDiscovered,
    StopRequested,
    WorkerDying,
    WorkerExited,
    WorkerExiting,
    WorkerHung,
    WorkerNotStarted,
    WorkerReady,
    WorkerRunning,
    WorkerSpared,
    WorkersReported,
)
from elastic_driver.core.membership import step
from elastic_driver.core.past import IllegalEventError, forget_round, forget_worker, is_known
from elastic_driver.core.setbacks import RoundSoFar
from elastic_driver.core.state import JobPhase, Round
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.words import ReadyCause
from tests.support.fakes.membership_job import BOTH, Job, worker_id

pytestmark = pytest.mark.unit

A, B, STRANGER, NEXT = (worker_id(text) for text in ("a[0]", "b[0]", "z[0]", "a[0]#1"))


def ready(worker: WorkerId, after: int) -> WorkerReady:
    return WorkerReady(worker, after, 0, ReadyCause.HOSTS_UPDATED, "", BOTH)


def trained() -> Job:
    """Round 2 runs on a and c: b has ended, c has come for it and was not in round 1."""
    job = Job(num_proc=2)
    job.train("a:1", "b:1")
    job.exit("b[0]", -9)
    job.hosts("a:1", "c:1")
    job.ready("c[0]")
    job.ready("a[0]", commits=3)
    assert (job.ranks(), job.round_id) == (["a[0]", "c[0]"], 2)
    return job


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (ready(STRANGER, 0), r"worker z\[0\] was never started"),
        (ready(NEXT, 0), "was never started"),
        (WorkerExited(STRANGER, 0, "exited with code 0", 0.0), "was never started"),
        (WorkerDying(STRANGER, -9, "killed by SIGKILL", 0.0), "was never started"),
        (WorkerNotStarted(STRANGER, "no such host", 0.0, False), "was never started"),
        (WorkerRunning(STRANGER, 2, 0), "was never started"),
        (WorkerExiting(STRANGER), "was never started"),
        (WorkerHung(STRANGER, "no heartbeat for 60.0 s", True), "was never started"),
        (WorkerSpared(STRANGER), "was never started"),
        (ready(A, 3), r"worker a\[0\] refers to round 3; the last one that it can know is 2"),
        (ready(A, -1), "refers to round -1"),
        (ready(B, 3), "refers to round 3"),
        (WorkerRunning(A, 3, 0), "refers to round 3"),
        (WorkerExited(A, 1, "exited with code 1", 1.5), "1.5 is not a random number from 0 to 1"),
        (WorkerExited(A, 1, "exited with code 1", -0.5), "-0.5 is not a random number"),
        (WorkerExited(A, 1, "exited with code 1", 0.5, raised_s=-1.0), "raised an error -1.0 s before its end"),
        (WorkerDying(A, -6, "killed by SIGABRT", 0.5, raised_s=math.inf), "raised an error inf s before its end"),
        (HostLost("a", "gone", (A, B), 0.5), "a worker of another host is lost with host a"),
        (HostLost("z", "gone", (STRANGER,), 0.5), "was never started"),
        (HostLost("a", "gone", (A,), 1.5), "1.5 is not a random number"),
        (HostsDiscovered((Host("a", 1), Host("a", 2))), "a host is listed twice"),
        (HostsDiscovered((Host("a", 1), Host("b", 0))), "host b has 0 slots"),
        (WorkersReported((WorkerRunning(A, 2, 0), ready(STRANGER, 0))), "was never started"),
    ],
)
def test_what_cannot_have_been_raises_and_leaves_the_state_as_it_was(event: Event, why: str) -> None:
    job = trained()
    before = job.state
    with pytest.raises(IllegalEventError, match=why):
        step(job.state, event, job.now)
    assert job.state == before


@pytest.mark.parametrize(
    "event",
    [
        ready(B, 1),
        ready(B, 0),
        ready(A, 1),
        ready(A, 0),
        WorkerRunning(B, 2, 0),
        WorkerRunning(A, 1, 50),
        WorkerExited(B, 1, "exited with code 1", 0.5),
        WorkerDying(B, -9, "killed by SIGKILL", 1.0),
        HostLost("b", "gone", (B,), 0.5),
        HostLost("z", "gone", (), 0.5),
        WorkerNotStarted(B, "no such host", 0.0, False),
        WorkerExiting(B),
        WorkerHung(B, "no heartbeat for 60.0 s", True),
        WorkerSpared(B),
        WorkerSpared(A),
    ],
)
def test_what_comes_late_changes_nothing(event: Event) -> None:
    job = trained()
    assert step(job.state, event, job.now) == (job.state, [])


def test_a_worker_whose_start_fails_after_it_has_asked_is_one_that_has_failed() -> None:
    job = trained()
    job.hosts("a:1", "c:1", "d:1")
    commands = job.feed(WorkerNotStarted(A, "no descriptor is free", 0.0, False))
    assert [command for command in commands if isinstance(command, EndJob)] == []
    assert job.state.blacklist.is_blacklisted("a")
    assert job.state.phase is JobPhase.RESETTING


def test_who_boots_cannot_tell_of_the_round_that_it_is_not_in() -> None:
    job = Job(num_proc=1)
    job.train("a:1")
    job.hosts("a:1", "b:1")
    with pytest.raises(IllegalEventError, match="refers to round 1; the last one that it can know is 0"):
        step(job.state, WorkerRunning(B, 1, 0), job.now)


@pytest.mark.parametrize(
    ("said", "is_news"),
    [
        ({}, False),
        ({"commits": 2}, False),
        ({"commits": 4}, True),
        ({"another": True}, True),
        ({"worker": B}, True),
        ({"round_id": 1}, True),
    ],
    ids=["again", "an older one", "it has come further", "another training", "of one that has ended", "of the past"],
)
def test_what_a_member_has_said_before_is_known_and_changes_nothing(said: dict[str, object], *, is_news: bool) -> None:
    job = trained()
    job.running("a[0]", commits=3)
    event = replace(WorkerRunning(A, 2, 3), **said)  # type: ignore[arg-type]
    assert is_known(job.state, event) is not is_news
    if not is_news:
        assert step(job.state, event, job.now) == (job.state, [])


def test_of_whom_nobody_knows_that_it_trains_the_first_word_is_news() -> None:
    assert not is_known(trained().state, WorkerRunning(A, 2, 3))


def test_that_a_member_has_the_state_is_news_once() -> None:
    job, c = trained(), worker_id("c[0]")
    for event in (WorkerRunning(c, 2, 3, synced=False), WorkerRunning(c, 2, 3)):
        assert not is_known(job.state, event)
        job.feed(event)
        assert is_known(job.state, event)


def test_after_the_end_everything_is_late() -> None:
    job = trained()
    job.feed(StopRequested(15, "SIGTERM"))
    assert step(job.state, ready(STRANGER, 9), job.now) == (job.state, [])


def test_a_name_that_was_given_is_known_although_its_place_is_forgotten() -> None:
    books = Attempts(((("a", 0), 2),), first=1)
    assert [books.has_given(("a", 0), attempt) for attempt in (-1, 0, 1, 2)] == [False, True, True, False]
    assert [books.has_given(("b", 0), attempt) for attempt in (0, 1)] == [True, False]


def test_the_end_of_a_worker_forgets_its_record_only() -> None:
    state = trained().state
    assert forget_worker(state, A) == replace(state, workers=state.workers.without(A))
    assert A in forget_worker(state, A).members


def test_a_new_round_forgets_the_one_before_and_what_led_to_it() -> None:
    job = trained()
    job.exit("c[0]", 1, error="ValueError: x")
    assert job.state.phase is JobPhase.RESETTING
    after = forget_round(job.state, Round(3, (A,), None, 0.0))
    assert (after.phase, after.reset, after.first_failure) == (JobPhase.RUNNING, None, None)
    assert (after.registry.expected, len(after.registry.records)) == ((A,), 0)
    assert after.setbacks.present == RoundSoFar()
    kept = ("policy", "discovery", "blacklist", "workers", "attempts", "commits", "tally", "notice_version")
    assert all(getattr(after, name) == getattr(job.state, name) for name in kept)
