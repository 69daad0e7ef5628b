"""Collectives between real processes, and how processes end."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.environment import ENV_PORTS
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.fake_job import PROGRAM, FakeJob, workers_on
from tests.support.processes import forked
from tests.support.processes.backends import EACH, FIRST

pytestmark = pytest.mark.integration


# Only the first engine has ways of its own inside of a host.
@pytest.mark.parametrize(
    ("hosts", "backend"),
    [
        pytest.param(
            hosts,
            backend,
            id=f"{name}-{backend}",
            marks=[pytest.mark.release] * (name == "one-host" and backend not in FIRST),
        )
        for name, hosts in (("one-host", {"a": 3}), ("two-hosts", {"a": 2, "b": 2}))
        for backend in EACH
    ],
)
def test_numpy_collectives_agree_with_numpy(hosts: dict[str, int], backend: Backend) -> None:
    workers = workers_on(**hosts)
    with FakeJob(backend=backend) as job:
        job.start(workers, "numpy_collectives")
        slots, members = [], []
        for worker in workers:
            line = job.wait_end(worker).lines[-1]
            slots.append(line["slot"])
            members.append(line["members"])
    if hosts == {"a": 3}:
        assert slots == [[rank, 3, rank, 3, 0, 1] for rank in range(3)]
        assert members == [{}] * 3
    else:
        assert slots == [[0, 4, 0, 2, 0, 2], [1, 4, 1, 2, 0, 2], [2, 4, 0, 2, 1, 2], [3, 4, 1, 2, 1, 2]]
        locals_, crosses = [m["local"] for m in members], [m["cross"] for m in members]
        assert locals_ == [0x0011, 0x0011, 0x1100, 0x1100]
        assert crosses == [0x0101, 0x1010, 0x0101, 0x1010]


def test_native_collectives_over_ipv6_and_within_a_range_of_ports() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    workers = workers_on(a=2, b=1)
    with FakeJob(backend=Backend.NATIVE, address="::1") as job:
        for machine, worker in enumerate(workers):
            env = {ENV_PORTS: "21000-21099", "ELASTIC_DRIVER_MACHINE": str(machine // 2)}
            job.spawn(worker, "numpy_collectives", env=env)
        job.plan(workers)
        for worker in workers:
            assert job.wait_end(worker).lines[-1]["slot"][1] == 3


def test_without_the_native_extension_no_range_can_be_kept() -> None:
    program = "from elastic_driver.worker.engine.choice import usable_backends; print(*usable_backends())"
    env = {**os.environ, "ELASTIC_DRIVER_BACKEND": "torch", ENV_PORTS: "21000-21099"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
    assert "cannot honor --port-range without the native extension" in done.stderr


@pytest.mark.parametrize("backend", EACH)
def test_torch_collectives(backend: Backend) -> None:
    workers = workers_on(a=3)
    with FakeJob(backend=backend) as job:
        job.start(workers, "torch_collectives")
        assert len({job.wait_end(worker).lines[-1]["digest"] for worker in workers}) == 1


@pytest.mark.parametrize("backend", FIRST)
def test_exit_code_and_exception_are_the_users(backend: Backend) -> None:
    workers = workers_on(a=2)
    for how, code in (("raise", 1), ("exit", 7)):
        with FakeJob(backend=backend, auto=False) as job:
            job.start(workers, "end", how)
            for worker in workers:
                process = job.wait_end(worker, code)
            if how == "raise":
                assert any("user's own" in text for text in process.noise)


@pytest.mark.parametrize("backend", EACH)
def test_fork_leaves_the_parents_collectives_alone(backend: Backend) -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=backend) as job:
        job.start(workers, "end", "fork")
        for worker in workers:
            process = job.wait_end(worker)
            assert process.lines[-1] == {"total": 2}
            assert process.noise == []


@pytest.mark.parametrize("backend", FIRST)
def test_shutdown_and_init_again(backend: Backend) -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=backend) as job:
        job.start(workers, "end", "again")
        job.wait_for(lambda: bool(job.rounds), "the first round")
        job.plan(workers)
        for worker in workers:
            assert job.wait_end(worker).lines[-1] == {"total": 2}
        assert [request.cause for request in job.requests[2:]] == [ReadyCause.REINIT] * 2
        assert {request.after_round for request in job.requests[2:]} == {1}


@pytest.mark.parametrize("backend", EACH)
def test_rounds_leave_nothing_behind(backend: Backend) -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=backend) as job:
        job.start(workers, "rebuild", "15")
        for round_id in range(1, 16):
            job.wait_for(lambda round_id=round_id: len(job.rounds) == round_id, f"round {round_id}")
            job.plan(workers)
        for worker in workers:
            line = job.wait_end(worker).lines[-1]
            assert line["last"] <= line["first"] + 1
            names = {re.sub(r"-\d+$", "", name) for name in line["threads"]}
            expected = {"MainThread", "elastic-comm", "elastic-watch", "elastic-canary", "elastic-leave"}
            assert names <= expected
            assert len(line["threads"]) == len(names)


def test_removed_worker_ends_well() -> None:
    worker = WorkerId("a", 0, 0)
    with FakeJob() as job:
        job.plan([], removed=[worker])
        job.spawn(worker, "end", "well")
        process = job.wait_end(worker, 0)
        assert any("has no slot in the next round (the test says so)" in text for text in process.noise)


def test_without_elasticrun_a_script_is_a_job_of_one() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "train", "3"], capture_output=True, text=True, check=True)
    assert '"done": true' in done.stdout
    code, said = forked.run([str(PROGRAM), "torch_train", "6"])
    assert code == 0, said
    assert '"done": true' in said


def test_import_is_cheap() -> None:
    code = (
        "import elastic_driver, sys; "
        "print([m for m in ('numpy', 'torch', 'cloudpickle', 'http.client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
