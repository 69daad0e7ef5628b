"""Operations on CUDA tensors, where there is a GPU: by each of the ways that they can go.

With several GPUs the ranks have one each, and use NCCL; with one they share it, and must not.
"""

from __future__ import annotations

import pytest
import torch

from elastic_driver.words import Backend
from elastic_driver.worker.engine.choice import usable_backends
from tests.support.fakes.fake_job import FakeJob, workers_on

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(Backend.NATIVE not in usable_backends(), reason="needs the native engine"),
]

WORKERS = 2


def run(program: str, *arguments: str, lane: str) -> list[dict[str, object]]:
    workers = workers_on(a=WORKERS)
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        for worker in workers:
            job.spawn(worker, program, *arguments, env={"ELASTIC_DRIVER_DEVICE_LANE": lane})
        job.plan(workers)
        return [job.wait_end(worker).lines[-1] for worker in workers]


@pytest.mark.parametrize("lane", ["", "off"])
def test_collectives(lane: str) -> None:
    for line in run("device_program.collectives", "cuda", lane=lane):
        assert line["ok"]
        assert line["on_device"] == (lane == "" and torch.cuda.device_count() >= WORKERS)


@pytest.mark.skipif(torch.cuda.device_count() < WORKERS, reason="needs a GPU for each rank")
def test_collectives_by_nccl() -> None:
    for line in run("device_program.collectives", "cuda", lane="cuda"):
        assert line["on_device"]


@pytest.mark.parametrize("lane", ["auto", "off", "cuda"])
def test_training(lane: str) -> None:
    enough = torch.cuda.device_count() >= WORKERS
    for line in run("device_program.ways", lane=lane):
        assert line["on_device"] == (enough and lane != "off")
        assert bool(line["error"]) == (lane == "cuda" and not enough)
