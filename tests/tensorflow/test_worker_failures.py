"""Workers that are killed or stopped under the elastic coordinator, and parameter servers that are."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import psutil
import pytest
import tensorflow as tf

from elastic_driver.tensorflow import WorkerInfo, WorkerState, private
from tests.support.processes.tensorflow_job import Job, aside, current_worker, until
from tests.support.processes.tensorflow_servers import Servers

pytestmark = [pytest.mark.faults, pytest.mark.tensorflow]


def test_a_killed_workers_closure_runs_on_another(servers: Servers) -> None:
    job = Job(servers, 2)
    held = job.hold(times=2)
    job.workers[0].kill()
    until(lambda: job.begun.numpy() == 2 and job.states()[0] == "lost", "it is lost")
    job.let_go()
    job.coordinator.join()
    assert [int(value.fetch()) for value in held] == [1, 1]
    assert (job.begun.numpy(), job.done) == (3, 2)
    assert job.run(20) == {1}


def test_a_killed_worker_is_back_when_its_address_answers(servers: Servers) -> None:
    job = Job(servers, 2)
    iterator = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(1_000_000)))

    @tf.function
    def step(iterator: Any) -> Any:
        return current_worker(), next(iterator)

    def run() -> list[tuple[int, int]]:
        values = [job.coordinator.schedule(step, args=(iterator,)) for _ in range(40)]
        job.coordinator.join()
        return [tuple(int(part) for part in value.fetch()) for value in values]

    ones = {number for index, number in run() if index == 1}
    job.workers[0].kill()
    ones |= {number for index, number in run() if index == 1}
    until(lambda: job.states() == {0: "lost", 1: "running"}, "it is lost")
    job.workers[0].start_again()
    until(lambda: job.states() == {0: "running", 1: "running"}, "it is back")
    zeros: set[int] = set()
    while not zeros:
        there = run()
        ones |= {number for index, number in there if index == 1}
        zeros |= {number for index, number in there if index == 0}
    # Its iterator begins again, and the other's has gone on.
    assert zeros == set(range(len(zeros)))
    assert ones == set(range(len(ones)))


def test_the_runtime_is_told_of_who_is_back_when_it_can_connect(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that it is told in vain leaves threads, and it connects again only a second after it was refused."""
    job = Job(servers, 2)
    job.run(10)
    failures: list[BaseException] = []
    update = private.update_server_def

    def noted(new: Any) -> None:
        try:
            update(new)
        except BaseException as error:
            failures.append(error)
            raise

    monkeypatch.setattr(private, "update_server_def", noted)
    for _ in range(3):
        job.workers[0].kill()
        until(lambda: job.run(4) and job.states()[0] == "lost", "it is lost")
        job.workers[0].start_again()
        until(lambda: job.states()[0] == "running", "it is back")
    assert len(failures) <= 3 + 1, failures


def test_a_killed_worker_is_replaced_at_a_new_address(servers: Servers) -> None:
    job = Job(servers, 2, spares=1)
    job.hold(times=2)
    job.workers[0].kill()
    new = job.coordinator.add_worker(job.spares[0].address)
    assert new == WorkerInfo(2, job.spares[0].address, WorkerState.RUNNING)
    # What the dead one had in hand runs there.
    until(lambda: job.begun.numpy() == 3, "it has begun again")
    assert job.coordinator.remove_worker(job.workers[0].address).state is WorkerState.STOPPED
    job.let_go()
    job.coordinator.join()
    assert job.done == 2
    job.until_taken_by(2)
    assert {worker.index for worker in job.coordinator.workers() if worker.state is WorkerState.RUNNING} == {1, 2}


def test_a_worker_joins_while_another_is_dead(servers: Servers) -> None:
    job = Job(servers, 2, spares=2)
    job.workers[0].kill()
    assert job.run(10) == {1}
    until(lambda: job.states()[0] == "lost", "it is lost")
    # Nobody waits behind the thread that asks for the dead one.
    began = time.monotonic()
    new = job.coordinator.add_worker(job.spares[0].address)
    took_s = time.monotonic() - began
    job.until_taken_by(new.index)
    assert took_s < 10
    # One is killed in the middle of another's join.
    join = aside(job.coordinator.add_worker, job.spares[1].address)
    job.workers[1].kill()
    third = join.result(60)
    job.until_taken_by(third.index)
    assert job.run(20) <= {new.index, third.index}
    assert job.done > 0


def test_a_newcomer_is_killed_while_it_joins(servers: Servers) -> None:
    job = Job(servers, 1, spares=1)
    join = aside(job.coordinator.add_worker, job.spares[0].address, timeout_s=3)
    job.spares[0].kill()
    try:
        info = join.result(40)
    except TimeoutError:
        pass
    else:
        assert info.index == 1
    assert job.run(30) <= {0, 1}
    job.spares[0].start_again()
    new = job.coordinator.add_worker(job.spares[0].address)
    job.until_taken_by(new.index)


def test_a_worker_that_stops_answering_loses_its_closure(servers: Servers) -> None:
    job = Job(servers, 2, worker_timeout_s=2.0)
    job.hold(times=2)
    job.workers[0].stop()
    until(lambda: job.states()[0] == "lost", "it is lost")
    until(lambda: job.coordinator._cluster._schedule.member(1).is_idle is False, "the other goes on")
    job.let_go()
    job.coordinator.join()
    assert job.done == 2
    assert job.run(10) == {1}
    job.workers[0].cont()
    until(lambda: job.states()[0] == "running", "it is back")
    job.until_taken_by(0)


def test_a_stopped_server_holds_up_nobodys_join(servers: Servers) -> None:
    job = Job(servers, 2, spares=1)
    job.hold(times=1)
    idle = next(i for i in (0, 1) if job.coordinator._cluster._schedule.member(i).is_idle)
    job.workers[idle].stop()
    began = time.monotonic()
    new = job.coordinator.add_worker(job.spares[0].address, timeout_s=60)
    assert time.monotonic() - began < 30
    job.let_go()
    job.coordinator.join()
    job.until_taken_by(new.index)
    # It can be removed as it is.
    info = job.coordinator.remove_worker(job.workers[idle].address, timeout_s=1)
    assert info.state is WorkerState.STOPPED


def test_a_removed_worker_that_does_not_answer_has_left_after_its_time(servers: Servers) -> None:
    job = Job(servers, 2)
    job.hold(times=2)
    job.workers[0].stop()
    began = time.monotonic()
    info = job.coordinator.remove_worker(job.workers[0].address, timeout_s=0.5)
    assert info.state is WorkerState.STOPPED
    assert time.monotonic() - began < 30
    job.let_go()
    job.coordinator.join()
    assert job.done == 2


def test_sums_with_kills_are_at_least_what_was_scheduled(servers: Servers) -> None:
    job = Job(servers, 3)
    scheduled = 0
    for server in (job.workers[0], job.workers[1], job.workers[0]):
        job.schedule(200)
        scheduled += 200
        until(lambda enough=scheduled - 150: job.done > enough, "closures run")
        server.kill()
        job.coordinator.join()
        server.start_again()
    until(lambda: set(job.states().values()) == {"running"}, "all are back")
    job.schedule(200)
    job.coordinator.join()
    # For each kill the closure in hand may have been counted already.
    assert scheduled + 200 <= job.done <= scheduled + 200 + 3


def test_all_workers_are_killed(servers: Servers) -> None:
    job = Job(servers, 2, spares=1)
    job.hold(times=2)
    for server in job.workers:
        server.kill()
    until(lambda: set(job.states().values()) == {"lost"}, "all are lost")
    job.let_go()
    join = aside(job.coordinator.join)
    assert not job.coordinator.done()
    job.coordinator.add_worker(job.spares[0].address)
    join.result(40)
    assert job.done == 2


@pytest.mark.parametrize("ask", ["join", "schedule", "done"])
def test_a_lost_parameter_server_is_told(servers: Servers, ask: str) -> None:
    job = Job(servers, 2)
    job.hold(times=2)
    job.parameter_servers[0].kill()

    def raised() -> BaseException | None:
        try:
            {"join": job.coordinator.join, "schedule": job.schedule, "done": job.coordinator.done}[ask]()
        except tf.errors.OpError as error:
            return error
        return None

    error = until(raised, "it is told")
    assert isinstance(error, (tf.errors.UnavailableError, tf.errors.NotFoundError, tf.errors.FailedPreconditionError))
    assert "/job:ps" in str(error)


# The runtime keeps so many threads for each time that it is told of another cluster, also of the same one.
THREADS_OF_RUNTIME = 4


@pytest.mark.parametrize("spares", [0, 1])
def test_nothing_is_left_of_fifty_changes(servers: Servers, spares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(servers, 2, spares=spares)
    process = psutil.Process()
    told: list[Any] = []
    update = private.update_server_def
    monkeypatch.setattr(private, "update_server_def", lambda new: (told.append(new), update(new)))
    iterator = iter(job.coordinator.create_per_worker_dataset(tf.data.Dataset.range(1_000_000)))
    # One leaves, and then another comes: one at least is there always.
    order = [job.workers[0], *job.spares, job.workers[1]] if spares else [job.workers[0]]

    @tf.function
    def step(iterator: Any) -> Any:
        job.counter.assign_add(1)
        return next(iterator)

    def change(times: int) -> None:
        for number in range(times):
            server = order[number % len(order)]
            for _ in range(5):
                job.coordinator.schedule(step, args=(iterator,))
            if server.address in {one.address for one in job.coordinator.workers() if one.state == "running"}:
                job.coordinator.remove_worker(server.address)
            else:
                job.coordinator.add_worker(server.address)
            job.coordinator.join()

    change(12)
    assert len(job.coordinator.workers()) <= 3
    gc.collect()
    threads, files, all_threads = threading.active_count(), process.num_fds(), process.num_threads()
    memory = process.memory_info().rss
    in_server = [psutil.Process(server.pid).memory_info().rss for server in job.workers]
    told.clear()
    change(48)
    gc.collect()
    assert job.done == 5 * 60
    assert bool(told) == bool(spares)
    until(lambda: threading.active_count() <= threads, "threads have ended")
    assert process.num_fds() <= files + 4
    assert process.num_threads() <= all_threads + THREADS_OF_RUNTIME * len(told) + 4
    assert process.memory_info().rss < memory + 40e6
    for server, before in zip(job.workers, in_server, strict=True):
        assert psutil.Process(server.pid).memory_info().rss < before + 40e6


def test_a_coordinator_that_is_let_go_ends_its_threads(servers: Servers) -> None:
    job = Job(servers, 2)
    job.run(10)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("elastic-tf")]
    job.strategy = None
    job.coordinator = None
    del job
    gc.collect()
    until(
        lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("elastic-tf")],
        f"threads of {os.getpid()} have ended",
    )
