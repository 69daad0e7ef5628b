"""TensorFlow's own tests of what its coordinator does about failures, as they are in its wheel, with the elastic one.

They look at private parts of TensorFlow's coordinator in three places, which have a stand-in here: how many closures
are in hand, which error waits to be raised, and the names of its threads. They sleep until a server is there, or gone;
here that is waited for, and what they sleep is shortened.
"""

from __future__ import annotations

import gc
import threading
import time
import types
import unittest
from typing import Any

import pytest
from tensorflow.python.distribute.coordinator import fault_tolerance_test_base as own
from tensorflow.python.training.coordinator import Coordinator

from elastic_driver.tensorflow import ElasticClusterCoordinator
from tests.support.processes.tensorflow_job import until
from tests.support.processes.tensorflow_servers import Server, Servers, a_strategy

pytestmark = [pytest.mark.faults, pytest.mark.tensorflow, pytest.mark.slow]

# Of the pauses that they make, which are for machines with much to do.
SHORTER = 4.0

# Which are not run, and why.
NOT_RUN = {
    "testClusterStateNotDisrupted": "runs two of the others one after the other",
    "testTensorGotAfterWorkerFailure": "reads the private tensor on the worker, which is freed here when it was copied",
}

NAMES = sorted(name for name in dir(own.BaseFaultToleranceTest) if name.startswith("test"))


class TheirCluster:
    """Servers by job and index, as the tests name them."""

    def __init__(self, servers: Servers, workers: int, parameter_servers: int) -> None:
        there = servers.start_all(*["ps"] * parameter_servers, *["worker"] * workers)
        self.jobs: dict[str, list[Server]] = {"ps": there[:parameter_servers], "worker": there[parameter_servers:]}
        self.dead: set[tuple[str, int]] = set()

    def kill_task(self, job: str, index: int) -> None:
        self.jobs[job][index].kill()
        self.dead.add((job, index))

    def start_task(self, job: str, index: int) -> None:
        self.jobs[job][index].start_again()
        self.dead.discard((job, index))

    def stop(self) -> None:
        """They end with the test."""

    def is_up(self, device: str) -> bool:
        """Whether the process of "/job:JOB/replica:0/task:INDEX" is there."""
        job, index = device.split("/")[1].partition(":")[2], int(device.rpartition(":")[2])
        return (job, index) not in self.dead


class TheirView:
    """What the tests look at in TensorFlow's queue of closures, and in its handler of failures."""

    def __init__(self, cluster: Any) -> None:
        self._of = cluster
        self._preemption_handler_thread = types.SimpleNamespace(join=lambda: None)

    @property
    def _inflight_closure_count(self) -> int:
        return len([member for member in self._of.members() if not member.is_idle])

    @property
    def _error(self) -> BaseException | None:
        return self._of._schedule.error

    def stop(self) -> None:
        """There is no thread but those of the workers."""


class TheirTests(own.BaseFaultToleranceTest, unittest.TestCase):  # type: ignore[misc]
    __test__ = False  # test_theirs runs them
    servers: Servers

    def setUp(self) -> None:
        self.num_workers = self.num_ps = 2
        self._cluster = TheirCluster(self.servers, self.num_workers, self.num_ps)
        self.strategy = a_strategy(self._cluster.jobs["ps"], self._cluster.jobs["worker"])
        self.cluster_coord: Any = ElasticClusterCoordinator(self.strategy)
        view = TheirView(self.cluster_coord._cluster)
        self.cluster_coord._cluster.closure_queue = view
        self.cluster_coord._cluster.failure_handler = view
        self.thread_coord = Coordinator(clean_stop_exception_types=[])

    def _ensure_threads_closed(self) -> None:
        def ours() -> list[str]:
            return [thread.name for thread in threading.enumerate() if thread.name.startswith("elastic-tf")]

        assert ours()
        self.cluster_coord = None
        self.strategy = None
        gc.collect()
        until(lambda: not ours(), "the coordinator's threads have ended")


def test_all_are_known() -> None:
    assert set(NOT_RUN) <= set(NAMES)
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_RUN])
def test_theirs(servers: Servers, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shortened = types.SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(seconds / SHORTER))
    monkeypatch.setattr(own, "time", shortened)
    case = TheirTests(name)
    case.servers = servers
    case.setUp()
    check = own.context.check_alive

    def is_known(device: str) -> bool:
        try:
            return bool(check(device))
        except own.errors.InvalidArgumentError:
            return False  # the runtime has forgotten it until it is back

    def check_when_it_is_known(device: str) -> bool:
        up = case._cluster.is_up(device)
        until(lambda: is_known(device) == up, f"{device} is {'up' if up else 'gone'}")
        return up

    monkeypatch.setattr(
        own, "context", types.SimpleNamespace(check_alive=check_when_it_is_known, async_wait=own.context.async_wait)
    )
    getattr(case, name)()
