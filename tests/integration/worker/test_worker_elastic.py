"""elastic.run between real processes: deaths, joiners, removals, aborts; the numpy API."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.words import Backend, NoticeKind, ReadyCause
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.processes.backends import EACH, FIRST

pytestmark = pytest.mark.integration


def entries(job: FakeJob, worker: WorkerId) -> list[dict[str, object]]:
    return [line for line in job.processes[worker].lines if "entered" in line]


@pytest.mark.parametrize("backend", EACH)
def test_killed_peer_costs_the_steps_since_the_last_commit(backend: Backend) -> None:
    workers = workers_on(a=3)
    with FakeJob(backend=backend) as job:
        job.start(workers, "train", "60", "5", hold={workers[1]: "22"})
        job.wait_held(workers[1], 22)
        os.kill(job.processes[workers[0]].popen.pid, signal.SIGKILL)  # rank 0, so that another becomes the root
        job.release(workers[1])
        job.wait_for(lambda: len(job.rounds) == 2, "the second round")  # by the death, not by a time limit
        lines = [job.wait_end(worker).lines for worker in workers[1:]]
        again = [request for request in job.requests if request.after_round == 1]
    assert {request.cause for request in again} == {ReadyCause.INTERNAL_ERROR}
    resumed = [entries(job, worker)[1] for worker in workers[1:]]
    assert resumed[0]["entered"] == resumed[1]["entered"]
    assert resumed[0]["entered"] == 5 * max(request.commits for request in again)
    assert resumed[0]["weights"] == resumed[1]["weights"]
    assert lines[0][-1]["weights"] == lines[1][-1]["weights"]
    for each in lines:
        assert len({line["pid"] for line in each if "pid" in line}) == 1
        assert each[-1]["resets"] == [2]


@pytest.mark.parametrize("backend", FIRST)
def test_planned_growth_and_removal_lose_and_repeat_no_step(backend: Backend) -> None:
    first, late = workers_on(a=2), WorkerId("b", 0, 0)
    with FakeJob(backend=backend) as job:
        job.start(first, "train", "100", "1", hold={first[0]: "10,60"})
        job.wait_held(first[0], 10)
        job.spawn(late, "train", "100", "1")
        job.wait_for(lambda: any(request.worker == late for request in job.requests), "the joiner")
        job.plan([*first, late])
        job.notify(NoticeKind.HOSTS_UPDATED, "host b added")
        job.release(first[0])
        job.wait_held(first[0], 60)
        assert len(job.rounds) == 2
        job.plan([first[0], late], sync=False, removed=[first[1]])
        job.notify(NoticeKind.HOSTS_UPDATED, "slot a[1] removed")
        job.release(first[0])
        removed = job.wait_end(first[1])
        lines = {worker: job.wait_end(worker).lines for worker in (first[0], late)}
    assert removed.lines[-1].get("done") is None
    steps = [line["step"] for line in lines[first[0]] if "step" in line]
    assert steps == list(range(1, 101))
    joined = [line["step"] for line in lines[late] if "step" in line]
    assert joined == list(range(joined[0], 101))
    by_entry = {worker: entries(job, worker) for worker in (*first, late)}
    assert by_entry[late][0]["weights"] == by_entry[first[0]][1]["weights"]
    assert by_entry[late][0]["commits"] == by_entry[first[0]][1]["commits"]
    assert by_entry[late][0]["rank"] == 2
    assert len(by_entry[first[0]]) == 3
    assert lines[first[0]][-1]["weights"] == lines[late][-1]["weights"]
    causes = [request.cause for request in job.requests]
    assert ReadyCause.INTERNAL_ERROR not in causes


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("stopped", [False, True], ids=["idle-peer", "stopped-peer"])
def test_abort_ends_a_blocked_collective(backend: Backend, stopped: bool) -> None:
    workers = workers_on(a=3)
    with FakeJob(backend=backend, auto=False) as job:
        job.start(workers, "blocked")
        for worker in workers:
            job.wait_for(
                lambda worker=worker: any("entering" in line for line in job.processes[worker].lines), "the collective"
            )
        if stopped:
            os.kill(job.processes[workers[0]].popen.pid, signal.SIGSTOP)
        job.plan(workers[1:])
        job.notify(NoticeKind.ABORT, "host a lost")  # which ends it, not a time limit
        ended = [job.wait_end(worker).lines for worker in workers[1:]]
    errors = [next(line for line in lines if "error" in line) for lines in ended]
    # Who was quicker closes its connections, which the others may see before they read the notice.
    assert all("host a lost" in error["error"] or "clos" in error["error"] for error in errors), errors
    assert [lines[-1] for lines in ended] == [{"total": 2}] * 2


@pytest.mark.parametrize("backend", EACH)
def test_peer_that_dies_before_the_contexts_stand(backend: Backend) -> None:
    workers = workers_on(a=3)
    with FakeJob(backend=backend, auto=False) as job:
        for worker in workers[:2]:
            job.spawn(worker, "train", "5")
        # The third is READY, gets its place, and never comes to the exchange.
        ghost = job.spawn(workers[2], "end", "well", env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "never"})
        job.wait_end(ghost.worker, 1)
        job.wait_for(lambda: len(job.requests) == 2, "two READY")
        import asyncio

        from elastic_driver.rendezvous.messages import NextRoundRequest

        request = NextRoundRequest(workers[2], 0, 0, ReadyCause.START, "", (backend,), 1)
        asyncio.run_coroutine_threadsafe(job.next_round(request), job._loop)
        job.plan(workers)
        job.wait_for(lambda: len(job.rounds) == 1, "the round with the ghost")
        job.plan(workers[:2])
        job.notify(NoticeKind.ABORT, "worker a[2] ended")
        for worker in workers[:2]:
            assert job.wait_end(worker).lines[-1]["done"]
        assert {r.cause for r in job.requests if r.after_round == 1} == {ReadyCause.INTERNAL_ERROR}


def test_notice_that_is_taken_back_changes_nothing() -> None:
    workers = workers_on(a=1)
    with FakeJob() as job:
        job.start(workers, "train", "200", "1", "0.005", hold={workers[0]: "3"})
        job.wait_held(workers[0], 3)
        job.plan([])
        job.notify(NoticeKind.HOSTS_UPDATED, "host b added")
        job.release(workers[0])
        job.wait_for(lambda: len(job.requests) == 2, "the worker that leaves")
        job.notify(NoticeKind.NONE, "")
        job.plan(workers)
        job.wait_end(workers[0])
        assert len(job.rounds) == 2


def test_size_one_round_under_a_driver_grows() -> None:
    first, late = workers_on(a=1)[0], WorkerId("b", 0, 0)
    with FakeJob() as job:
        job.start([first], "train", "60", "1", hold={first: "5"})
        job.wait_held(first, 5)
        job.spawn(late, "train", "60", "1")
        job.wait_for(lambda: any(request.worker == late for request in job.requests), "the joiner")
        job.plan([first, late])
        job.notify(NoticeKind.HOSTS_UPDATED, "host b added")
        job.release(first)
        ends = [job.wait_end(worker).lines[-1] for worker in (first, late)]
    assert ends[0]["weights"] == ends[1]["weights"]
    steps = [line["step"] for line in job.processes[first].lines if "step" in line]
    assert steps == list(range(1, 61))


def _wait_blocked(job: FakeJob, workers: list[WorkerId]) -> None:
    for worker in workers:
        job.wait_for(
            lambda worker=worker: any("entering" in line for line in job.processes[worker].lines), "the collective"
        )


@pytest.mark.parametrize("backend", EACH)
def test_first_error_spreads_to_ranks_that_are_no_neighbors(backend: Backend) -> None:
    workers = workers_on(a=4)
    with FakeJob(backend=backend, auto=False) as job:  # nobody is told of the death
        job.start(workers, "blocked")
        _wait_blocked(job, workers)
        job.processes[workers[0]].popen.kill()
        job.wait_for(
            lambda: {r.worker for r in job.requests if r.after_round == 1} == set(workers[1:]), "all survivors"
        )
        job.plan(workers[1:2])
        assert job.wait_end(workers[1]).lines[-1] == {"total": 1}


@pytest.mark.parametrize("backend", FIRST)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_process_that_is_blocked_in_a_collective(backend: Backend, number: signal.Signals) -> None:
    workers = workers_on(a=3)
    with FakeJob(backend=backend, auto=False) as job:
        job.start(workers, "blocked")
        _wait_blocked(job, workers)
        waiting = psutil.Process(job.processes[workers[1]].popen.pid)
        while waiting.status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        job.processes[workers[1]].popen.send_signal(number)
        job.wait_end(workers[1], -number)
