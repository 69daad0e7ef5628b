"""A job in the pods of mpi-operator (v2: ssh, v1: kubexec), with its launcher, its ConfigMap and its workers."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jobs import check_agreement
from machines import marks
from mpi_operator import DISCOVERY, MpiJob, Operator, leave
from namespaces import Namespaces, cannot_serve_ssh
from pods import Pods

pytestmark = marks

FLAGS = ("-np", "2", "--min-np", "1", "--host-discovery-script", DISCOVERY)


@contextlib.contextmanager
def made_pods(count: int, **more: Any) -> Iterator[Pods]:
    """Room for so many pods."""
    if reason := cannot_serve_ssh():
        pytest.skip(reason)
    with Namespaces(count, sshd=False) as machines, Pods(machines, **more) as pods:
        yield pods


def no_step_is_lost(job: MpiJob) -> bool:
    lines = job.steps()
    check_agreement(lines)
    done = [(line["step"], line["rank"]) for line in lines]
    steps = sorted({step for step, _ in done})
    return len(done) == len(set(done)) and steps == list(range(1, len(steps) + 1))


def test_workers_start_late_leave_come_back_and_crash() -> None:
    with made_pods(6) as pods:
        operator = Operator(pods)
        launcher = operator.launcher(read_only_home=True)
        with MpiJob(pods, launcher, operator.launchers_environment, *FLAGS) as job:
            # The launcher is there before any worker: none is listed, then one has no name yet, then no server.
            job.wait_for("that it waits", lambda: "hosts: none" in job.said())
            operator.write(2, [0, 1])
            job.wait_for_event("host_unready", host=operator.host(0))
            operator.worker(0)
            late = operator.worker(1, late=True)
            job.wait_for("a refusal", lambda: "port 2222: Connection refused" in job.said())
            late.go()
            job.wait_for_steps(2)
            assert job.ranks(2) == {operator.host(0): 0, operator.host(1): 1}

            # Up, and down with elasticrun leave as preStop. The deleted pod is listed all the while, and its successor.
            operator.worker(2)
            operator.write(3, [0, 1, 2])
            job.wait_for_steps(3)
            at = time.time()
            said = operator.workers[2].delete(leave(within_s=3))
            assert said == f"host {operator.host(2)} has left its job\n"
            job.wait_for_steps(2, after=at)
            assert not job.events("host_lost")
            operator.worker(2)
            job.wait_for_steps(3, after=time.time())
            assert job.ranks(3)[operator.host(2)] == 2
            assert no_step_is_lost(job)
            assert operator.workers[2].log().count("Accepted publickey for mpiuser") == 1

            # Without, it is a crash: sshd ends, and with it all that runs in the pod.
            at = time.time()
            operator.workers[2].delete()
            job.wait_for_event("host_lost", host=operator.host(2))
            job.wait_for_steps(2, after=at)
            check_agreement(job.steps())
            assert operator.host(1) in job.elasticrun("status").stdout
            assert job.end() == 128 + signal.SIGTERM
