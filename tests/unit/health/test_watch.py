"""One step of health: in which order findings come, and the time limits. Whole histories are in tests/scenarios."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from elastic_driver.core.events import WorkerDying, WorkerExited, WorkerHung
from elastic_driver.core.state import Leaving, record_of
from elastic_driver.health.events import (
    StackTaken,
    TimePassed,
    VitalsSeen,
    WorkerGone,
    WorkerHeard,
)
from elastic_driver.health.findings import StackWanted, Stalled, StallEnded, WorkerCleared, WorkerSuspected
from elastic_driver.health.watch import Finding, HealthWatch, Rules
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals
from tests.support.fakes.membership_job import Job
from tests.support.fakes.watched_workers import STACK, WatchedJob

pytestmark = pytest.mark.unit

A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 0)


def trained(*hosts: str, rules: Rules | None = None, **limits: object) -> WatchedJob:
    """A job that has trained for a while."""
    job = Job(**{"num_proc": len(hosts), "min_num_proc": 1, **limits})
    watched = WatchedJob(job, rules or Rules())
    job.train(*hosts)
    watched.follow(job.commands)
    watched.pass_until(20.0)
    assert watched.found == []
    return watched


def told(watched: WatchedJob, *kinds: type) -> list[Finding]:
    return [one for _, one in watched.found if isinstance(one, kinds)]  # type: ignore[misc]


# --- time limits -----------------------------------------------------------------------------------------------------


def watch_of(rules: Rules) -> HealthWatch:
    return HealthWatch(rules, Job().state, 0.0)


def follow(
    watch: HealthWatch,
    until: float,
    *,
    each_10_s: Sequence[WorkerHeard] = (),
    audible_s: Callable[[str, float], float | None] = lambda host, now: None,
) -> list[tuple[float, WorkerHung]]:
    """Lets time pass from 0 on, as the driver does. What is found of workers that hang."""
    now, beat, found = 0.0, 0.0, []
    while now < until:
        now = min(watch.next_deadline, beat)
        if now == beat:
            beat += 10.0
            for event in each_10_s:
                assert watch.step(event, now) == []
        known = {host: audible_s(host, now) for host in watch.overdue_hosts(now)}
        event = TimePassed(audible_s={host: seconds for host, seconds in known.items() if seconds is not None})
        found += [(now, one) for one in watch.step(event, now) if isinstance(one, WorkerHung)]
    return found


def test_the_silent_and_the_idle_are_found_once_each_when_they_are_due() -> None:
    watch = watch_of(Rules(heartbeat_timeout_s=40.0, hang_timeout_s=100.0))
    watch.step(WorkerHeard(A), 0.0)
    found = follow(watch, 150.0, each_10_s=[WorkerHeard(B, 7, waiting=False)])
    assert [(round(at, 1), hung.worker, hung.silent) for at, hung in found] == [(40.0, A, True), (100.0, B, False)]
    assert found[0][1].reason == "no heartbeat for 40.0 s"


def test_who_says_that_it_leaves_or_has_ended_is_not_missed() -> None:
    watch = watch_of(Rules(heartbeat_timeout_s=40.0))
    for worker in (A, B):
        watch.step(WorkerHeard(worker), 0.0)
    watch.step(WorkerHeard(A, leaving=True), 0.0)
    watch.step(WorkerGone(B), 0.0)
    assert (watch.overdue_hosts(1000.0), follow(watch, 100.0)) == ([], [])


@pytest.mark.parametrize("comes", [True, False], ids=["dismissed", "late"])
def test_who_has_no_place_in_the_new_round_is_not_missed(*, comes: bool) -> None:
    watched = trained("a:1", "b:1", rules=Rules(heartbeat_timeout_s=40.0))
    job = watched.job
    watched.follow(job.hosts("a:1"))
    watched.follow(job.ready("a[0]"))
    if comes:
        watched.follow(job.ready("b[0]"))
    while job.round_id == 1:
        watched.pass_until(job.now + 1)
    began = job.now
    assert record_of(job.state, B).leaving is (Leaving.DISMISSED if comes else Leaving.STOPPED)  # type: ignore[union-attr]
    watched.pass_until(began + 200.0)
    assert told(watched, WorkerHung) == []


def test_who_stands_by_is_missed_until_it_is_dismissed() -> None:
    missed = []
    for is_dismissed in (False, True):
        watched = trained("a:1", rules=Rules(heartbeat_timeout_s=40.0), max_num_proc=1, num_standby=1)
        watched.follow(watched.job.hosts("a:1", "b:1"))
        watched.follow(watched.job.ready("b[0]"))
        if is_dismissed:
            watched.follow(watched.job.hosts("a:1"))
        watched.pass_until(90.0)
        missed.append([at for at, hung in watched.found if isinstance(hung, WorkerHung)])
        assert watched.job.round_id == 1, "it is in no round's way"
    assert missed == [[60.0], []]


def test_workers_of_a_host_that_could_not_be_heard_have_their_time_anew() -> None:
    watch = watch_of(Rules(heartbeat_timeout_s=40.0))
    for worker in (A, B):
        watch.step(WorkerHeard(worker), 0.0)
    found = follow(watch, 200.0, audible_s=lambda host, now: max(0.0, now - 60.0) if host == "a" else None)
    assert [hung.worker for _, hung in found] == [B, A]
    assert 100.0 <= found[1][0] < 111.0


def test_without_limits_nobody_is_missed() -> None:
    watch = watch_of(Rules())
    watch.step(WorkerHeard(A), 0.0)
    assert (watch.overdue_hosts(1e6), follow(watch, 1000.0)) == ([], [])


def test_a_pulse_is_a_heartbeat_but_no_progress() -> None:
    watched = trained("a:1", "b:1", rules=Rules(hang_action="warn", heartbeat_timeout_s=40.0, hang_timeout_s=100.0))
    watched.workers.does[B] = "computes"
    watched.pass_until(130.0)
    assert [(hung.worker, hung.silent) for hung in told(watched, WorkerHung)] == [(B, False)]  # type: ignore[union-attr]


# --- what is told, and when ------------------------------------------------------------------------------------------


def suspect(watched: WatchedJob, worker: WorkerId) -> StackWanted:
    """Brings a worker to be suspected; its stack is wanted, and nobody answers."""
    watched.step = lambda event: watched.found.extend(  # type: ignore[method-assign]
        (watched.job.now, one) for one in watched.watch.step(event, watched.job.now)
    )
    watched.workers.does[worker] = "hangs"
    watched.pass_until(watched.job.now + 8)
    wanted = told(watched, StackWanted)
    assert [type(one) for _, one in watched.found if not isinstance(one, Stalled)] == [StackWanted]
    assert isinstance(wanted[0], StackWanted)
    return wanted[0]


HANGS = (WorkerSuspected, WorkerCleared, WorkerHung)


def test_what_becomes_of_a_suspicion_comes_after_it_is_told() -> None:
    watched = trained("a:1", "b:1", "c:1")
    wanted = suspect(watched, B)
    watched.workers.does[B] = "trains"
    watched.pass_until(watched.job.now + 5)
    assert told(watched, *HANGS) == [], "its stack is not there yet"
    watched.step(StackTaken(B, wanted.number + 1000, STACK))
    assert told(watched, *HANGS) == [], "that is another's"
    watched.step(StackTaken(B, wanted.number, STACK))
    suspected, cleared = told(watched, *HANGS)
    assert isinstance(suspected, WorkerSuspected)
    assert isinstance(cleared, WorkerCleared)
    assert (suspected.stack, suspected.frames[0]) == (STACK, "/x/train.py:12 in wait")


def test_who_is_suspected_anew_before_it_was_told_is_told_of_both_times_in_order() -> None:
    watched = trained("a:1", "b:1", "c:1")
    wanted = suspect(watched, B)
    watched.workers.does[B] = "trains"
    watched.pass_until(watched.job.now + 2)
    watched.workers.does[B] = "is-stopped"
    watched.pass_until(watched.job.now + 3)
    assert [(type(one), one.kind) for one in told(watched, WorkerSuspected)] == [  # type: ignore[union-attr]
        (WorkerSuspected, "awaited"),
        (WorkerSuspected, "stopped"),
    ]
    assert [type(one) for one in told(watched, *HANGS)] == [WorkerSuspected, WorkerCleared, WorkerSuspected]
    watched.step(StackTaken(B, wanted.number, STACK))
    assert len(told(watched, *HANGS)) == 3, "it comes too late"


def test_a_worker_that_ends_while_its_stack_is_asked_for() -> None:
    watched = trained("a:1", "b:1", "c:1")
    wanted = suspect(watched, B)
    watched.follow(watched.job.feed(WorkerExited(B, 1, "exited with code 1", 0.5)))
    watched.pass_until(watched.job.now + 1)
    assert told(watched, *HANGS) == []
    watched.step(StackTaken(B, wanted.number, None))
    suspected, cleared = told(watched, *HANGS)
    assert isinstance(suspected, WorkerSuspected)
    assert isinstance(cleared, WorkerCleared)
    assert (suspected.stack, cleared.why) == ("", "it has ended")
    assert watched.watch.suspects(watched.job.now) == []


@pytest.mark.parametrize("silent", [False, True])
def test_a_stall_that_ends_its_round_is_told_before_the_round_is_over(*, silent: bool) -> None:
    """Also where nobody could know of it before: the member was not heard for a moment, and then lost."""
    watched = trained("a:1", "b:1", "c:1")
    watched.workers.does[B] = "hangs"
    if silent:
        watched.workers.unseen.add(B)
    watched.pass_until(24.5 if silent else 50.0)
    assert bool(told(watched, Stalled)) != silent
    watched.follow(watched.job.feed(WorkerDying(B, -9, "killed by SIGKILL", 0.5)))
    [stalled] = told(watched, Stalled)
    [ended] = told(watched, StallEnded)
    assert isinstance(stalled, Stalled)
    assert isinstance(ended, StallEnded)
    assert (list(stalled.waits_for), ended.resumed, watched.watch.stall) == ([B], False, None)
    assert abs(ended.stood_s - (4.0 if silent else 30.0)) < 1.5


def test_a_worker_that_is_killed_at_work_makes_no_stall() -> None:
    watched = trained("a:1", "b:1", "c:1")
    watched.follow(watched.job.feed(WorkerDying(B, -9, "killed by SIGKILL", 0.5)))
    watched.pass_until(25.0)
    assert told(watched, Stalled, StallEnded) == []


def test_who_has_not_said_that_it_trains_is_not_suspected() -> None:
    """It loads, or synchronizes; what comes of that is the core's."""
    job = Job(num_proc=2, min_num_proc=1)
    watched = WatchedJob(job, Rules())
    job.hosts("a:1", "b:1")
    for record in job.state.workers:
        job.begin(record.worker)
    job.running(str(A))
    watched.follow(job.commands)
    watched.workers.does[B] = "hangs"
    watched.pass_until(200.0)
    assert told(watched, WorkerSuspected) == []
    watched.follow(job.running(str(B)))
    watched.pass_until(202.0)
    [suspected] = told(watched, WorkerSuspected)
    assert isinstance(suspected, WorkerSuspected)
    assert suspected.worker == B


def test_looks_at_strangers_leave_nothing_behind() -> None:
    watched = trained("a:1", "b:1")
    for number in range(100):
        watched.step(VitalsSeen(WorkerId("x", 0, number), Vitals(1.0 + number, 5, "T")))
    watched.pass_until(60.0)
    assert watched.found == []
