"""Collectives on CUDA tensors where there is a GPU, by both ways; on CPU tensors in the device lane everywhere."""

from __future__ import annotations

import pytest
import torch
from fake_job import FakeJob, workers_on

from elastic_driver.rendezvous.messages import Backend
from elastic_driver.worker.context import usable_backends

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(Backend.NATIVE not in usable_backends(), reason="needs the native engine"),
]


@pytest.mark.parametrize(
    ("device", "lane"),
    [("cpu", "cpu"), pytest.param("cuda", "", marks=gpu), pytest.param("cuda", "cuda", marks=gpu)],
)
def test_collectives(device: str, lane: str) -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        for worker in workers:
            job.spawn(worker, "device_program.collectives", device, env={"ELASTIC_DRIVER_DEVICE_LANE": lane})
        job.plan(workers)
        for worker in workers:
            assert job.wait_end(worker).lines[-1] == {"ok": True, "lane": bool(lane)}
