"""Operations on CUDA tensors, where there is a GPU: by each of the ways that they can go, and through faults.

With a GPU for each rank they have one each. With one GPU they share it: without more they must not use NCCL then, and
where a test is about NCCL, each is made to look like a machine of its own (shared_gpu.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import distributed_program
import pytest
import torch

from elastic_driver.hosts import WorkerId
from elastic_driver.words import Backend, NoticeKind
from elastic_driver.worker.engine.choice import usable_backends
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import Job

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(Backend.NATIVE not in usable_backends(), reason="needs the native engine"),
]

ENOUGH = torch.cuda.device_count() >= 2
FIRST, SECOND, THIRD = workers_on(a=2, b=1) if ENOUGH else workers_on(a=1, b=1, c=1)
NCCL = {"ELASTIC_DRIVER_DEVICE_LANE": "cuda"} | ({} if ENOUGH else {"SHARE_GPU": "1"})
PROGRAM = PROGRAMS / "distributed_program.py"
STEPS = 40


def run(program: str, *arguments: str, env: dict[str, str]) -> list[dict[str, Any]]:
    workers = workers_on(a=2)
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        for worker in workers:
            job.spawn(worker, program, *arguments, env=env)
        job.plan(workers)
        return [job.wait_end(worker).lines[-1] for worker in workers]


@pytest.mark.parametrize("lane", ["", "off"])
def test_collectives(lane: str) -> None:
    for line in run("device_program.collectives", "cuda", env={"ELASTIC_DRIVER_DEVICE_LANE": lane}):
        assert line["ok"]
        assert line["on_device"] == (lane == "" and ENOUGH)


def test_collectives_by_nccl() -> None:
    for line in run("device_program.collectives", "cuda", env=NCCL):
        assert line["on_device"]


@pytest.mark.parametrize("lane", ["auto", "off", "cuda"])
def test_training(lane: str) -> None:
    for line in run("device_program.ways", env={"ELASTIC_DRIVER_DEVICE_LANE": lane}):
        assert line["on_device"] == (ENOUGH and lane != "off")
        assert bool(line["error"]) == (lane == "cuda" and not ENOUGH)


@contextlib.contextmanager
def training(*faults: str, env: dict[str, str] = NCCL) -> Iterator[FakeJob]:
    """Two ranks that train, the second with these faults."""
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        job.spawn(FIRST, "device_program.train", "cuda", str(STEPS), env=env | {"HOLD_AT": str(STEPS - 1)})
        job.spawn(SECOND, "device_program.train", "cuda", str(STEPS), *faults, env=env)
        job.plan([FIRST, SECOND])
        yield job


def steps_of(job: FakeJob, worker: WorkerId, size: int) -> list[dict[str, Any]]:
    return [line for line in job.processes[worker].lines if line.get("size") == size]


def check_losses(lines: Sequence[dict[str, Any]], expected: Sequence[float]) -> None:
    for line in lines:
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-3, abs=1e-6), line


def loses_second(job: FakeJob) -> None:
    """The first goes on alone, in the process it is in, and then with another one, over NCCL again."""
    import device_program

    job.notify(NoticeKind.ABORT, "b is lost")
    job.plan([FIRST], removed=[SECOND])
    job.wait_held(FIRST, STEPS - 1)
    job.spawn(THIRD, "device_program.train", "cuda", str(2 * STEPS), env=NCCL)
    job.plan([FIRST, THIRD])
    job.notify(NoticeKind.HOSTS_UPDATED, "c has come")
    job.release(FIRST)
    first = job.wait_end(FIRST)
    job.processes[SECOND].popen.kill()
    job.processes[THIRD].popen.kill()
    steps = [line for line in first.lines if "step" in line]
    check_losses(steps, device_program.expected_losses(STEPS))
    assert len({line["pid"] for line in steps}) == 1
    assert all(line["on_device"] == (line["size"] == 2) for line in steps)


@pytest.mark.parametrize("fault", ["kill", "stop", "never joins", "raises", "long kernel"])
def test_rank_that_is_lost_within_an_operation(fault: str) -> None:
    with training(fault, "30") as job:
        job.wait_for(
            lambda: (
                any("fault" in line for line in job.processes[SECOND].lines)
                or (fault == "raises" and bool(job.requests[2:]))
            ),
            "the fault",
        )
        loses_second(job)


@pytest.mark.parametrize("kind", ["ddp-cuda", "fsdp-cuda", "zero-cuda"])
def test_process_group_loses_a_rank(kind: str) -> None:
    workers = [FIRST, SECOND, THIRD][: 3 if torch.cuda.device_count() >= 3 or not ENOUGH else 2]
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        for worker in workers:
            env = NCCL | {"STEP_LOG": "/dev/stdout", "HOROVOD_HOSTNAME": worker.hostname}
            job.spawn(worker, kind, env=env, file=PROGRAM)
        job.plan(workers)

        def wait_for(members: Sequence[WorkerId]) -> None:
            job.wait_for(
                lambda: all(len(steps_of(job, worker, len(members))) >= 5 for worker in members), f"steps of {members}"
            )

        wait_for(workers)
        job.processes[workers[-1]].popen.kill()
        job.notify(NoticeKind.ABORT, "lost")
        job.plan(workers[:-1], removed=workers[-1:])
        wait_for(workers[:-1])
        lines = [line for worker in workers for line in job.processes[worker].lines if "loss" in line]
        check_losses(lines, distributed_program.expected_losses(max(line["step"] for line in lines) + 1))


def test_nothing_is_left_of_fifty_rounds_over_nccl() -> None:
    workers = [FIRST, SECOND]
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        for worker in workers:
            env = NCCL | {"STEP_LOG": "/dev/stdout", "HOROVOD_HOSTNAME": worker.hostname}
            job.spawn(worker, "ddp-cuda-resets", env=env, file=PROGRAM)
        job.plan_until_all_have_ended(workers)
        for worker in workers:
            distributed_program.check_nothing_is_left(job.wait_end(worker).lines)


@pytest.mark.parametrize("flags", [(), ("--standby", "1"), ("--preload", "torch")], ids=["cold", "standby", "preload"])
def test_a_job_loses_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    """With elasticrun: a lost rank's host goes, and another comes."""
    for name, value in NCCL.items():
        monkeypatch.setenv(name, value)
    hosts = "localhost:1\n127.0.0.1:1\n"
    command = [sys.executable, str(PROGRAM), "ddp-cuda"]
    with Job(tmp_path, hosts, "-np", "2", "--min-np", "1", *flags, command=command) as job:
        lines = job.wait_for_steps(2)
        first, second = ([line["pid"] for line in lines if line["rank"] == rank][-1] for rank in (0, 1))
        os.kill(second, signal.SIGKILL)
        job.set_hosts("localhost:1\n127.0.0.2:1\n")
        lines = job.wait_for_steps(2, after=max(line["time"] for line in job.steps()))
        assert first in {line["pid"] for line in lines}
        check_losses(job.steps(), distributed_program.expected_losses(max(line["step"] for line in job.steps()) + 1))


def test_commits_are_page_locked() -> None:
    import elastic_driver.torch as hvd
    from elastic_driver.torch.state import TorchState

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3)).cuda()
    before = [param.detach().clone() for param in model.parameters()]
    state = TorchState(model, step=0)
    for _ in range(3):
        state.commit()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state.restore()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(tensor.is_pinned() for tensor in state._copy.tensors)
