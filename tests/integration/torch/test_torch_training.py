"""The PyTorch API between real processes: gradients, states, samplers, across changes of membership."""

from __future__ import annotations

import os
import signal
from itertools import groupby

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.words import Backend, NoticeKind
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.processes.backends import FIRST

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("backend", FIRST)
def test_gradients_are_those_of_the_whole_batch(backend: Backend) -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=backend) as job:
        job.start(workers, "gradients")
        for worker in workers:
            assert job.wait_end(worker).lines[-1] == {"ok": True}


def test_too_many_backward_passes_are_an_error() -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=Backend.TORCH) as job:
        job.start(workers, "bad_gradient")
        for worker in workers:
            assert "backward_passes_per_step" in job.wait_end(worker).lines[-1]["error"]


@pytest.mark.parametrize("backend", FIRST)
def test_killed_peer_and_joiner_end_bitwise_equal(backend: Backend) -> None:
    workers, late = workers_on(a=3), WorkerId("a", 0, 1)
    with FakeJob(backend=backend) as job:
        job.spawn(late, "torch_train", "150")
        job.wait_for(lambda: any(request.worker == late for request in job.requests), "the joiner")
        job.start(workers, "torch_train", "150", hold={workers[1]: "15,60"})
        job.wait_held(workers[1], 15)
        os.kill(job.processes[workers[0]].popen.pid, signal.SIGKILL)
        job.release(workers[1])
        job.wait_for(lambda: len(job.rounds) == 2, "the second round")
        job.wait_held(workers[1], 60)
        job.plan([*workers[1:], late])
        job.notify(NoticeKind.HOSTS_UPDATED, "slot a[0] is back")
        job.release(workers[1])
        ends = [job.wait_end(worker).lines for worker in (*workers[1:], late)]
    assert len({lines[-1]["weights"] for lines in ends}) == 1
    entered = [[line for line in lines if "entered" in line] for lines in ends]
    # All of it: weights, Adam's moments and step counts, learning rate; on the survivors and on the blank joiner.
    assert len({lines[1]["state"] for lines in entered[:2]}) == 1
    third = [entered[0][2], entered[1][2], entered[2][0]]
    assert len({line["state"] for line in third}) == 1
    assert {line["size"] for line in third} == {3}
    assert third[0]["entered"] > 0


def _used(job: FakeJob, epoch: int) -> list[int]:
    used: list[int] = []
    for process in job.processes.values():
        for line in process.lines:
            if line.get("epoch") == epoch and "used" in line:
                used += line["used"]
    return used


def test_each_sample_once_across_planned_changes_with_a_loader_that_fetches_ahead() -> None:
    """3 -> 2 -> 3 workers within one epoch. Where what is left of it cannot be divided, the sampler fills up with some
    that were used before, fewer than there are workers."""
    workers, late = workers_on(a=3), WorkerId("b", 0, 0)
    samples = 400
    with FakeJob(backend=Backend.TORCH) as job:
        args = ("100000", str(samples), "1", "sgd", "1")
        job.spawn(late, "torch_train", *args)
        job.wait_for(lambda: late in {request.worker for request in job.requests}, "the joiner")
        job.start(workers, "torch_train", *args, hold={workers[0]: "5,30"})
        job.wait_held(workers[0], 5)
        job.plan(workers[:2], removed=workers[2:])
        job.notify(NoticeKind.HOSTS_UPDATED, "a slot removed")
        job.release(workers[0])
        job.wait_end(workers[2])
        job.wait_held(workers[0], 30)
        job.plan([*workers[:2], late])
        job.notify(NoticeKind.HOSTS_UPDATED, "host b added")
        job.release(workers[0])
        ends = [job.wait_end(worker).lines[-1] for worker in (*workers[:2], late)]
        of_epoch = {
            worker: [line for line in job.processes[worker].lines if line.get("epoch") == 0]
            for worker in (*workers[:2], late)
        }
    assert len({end["weights"] for end in ends}) == 1
    assert [size for size, _ in groupby(line["size"] for line in of_epoch[workers[0]])] == [3, 2, 3]
    used = _used(job, 0)
    assert set(used) == set(range(samples))
    repeated = sum(lines[-1]["pad"] for lines in of_epoch.values())
    assert repeated < 3
    assert len(used) == samples + repeated


@pytest.mark.parametrize("how", ["first", "half"])
def test_a_peer_that_dies_in_a_sync_leaves_the_restore_point(how: str) -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        job.start(workers, "peer_dies_in_sync", how)
        job.wait_end(workers[0], 9)
        assert job.wait_end(workers[1]).lines[-1] == {"same": True, "step": 2, "commits": 1}
