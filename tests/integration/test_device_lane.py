"""Operations on devices, with CPU tensors in their place: each collective, errors on every rank, joins."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_job import FakeJob, workers_on

from elastic_driver.rendezvous.messages import Backend
from elastic_driver.worker.context import usable_backends

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(Backend.NATIVE not in usable_backends(), reason="needs the native engine"),
]


def test_every_collective(tmp_path: Path) -> None:
    workers = workers_on(a=3)
    env = {"ELASTIC_DRIVER_DEVICE_LANE": "cpu", "PYTHONWARNINGS": "error"}
    with FakeJob(backend=Backend.NATIVE, auto=False) as job:
        for worker in workers:
            job.spawn(worker, "ops_program.everything", str(tmp_path), env=env)
        job.plan(workers)
        for worker in workers:
            assert job.wait_end(worker).lines[-1] == {"ok": True}
