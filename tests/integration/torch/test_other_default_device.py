"""The programs of the PyTorch API, while the library runs under a default device on which nothing can be computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_default_device import OTHER

from elastic_driver.words import Backend
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.processes.optimizer_checks import assert_ok, run_checks

pytestmark = pytest.mark.integration

CHECKS = (
    "state_and_parameters",
    "plain_averages",
    "several_passes",
    "compressed",
    "other_ops",
    "adasum",
    "gradients_live_in_the_buffer",
    "missing_gradients",
    "sparse_gradients",
    "closures",
    "norms",
    "norms_with_empty_batches",
)


@pytest.mark.parametrize("check", CHECKS)
def test_optimizer_and_state(check: str) -> None:
    assert_ok(*run_checks(Backend.TORCH, 2, CHECKS, ((OTHER, "1"),)), check)


def test_sparse_gradients_on_some_ranks_only() -> None:
    check = "sparse_on_some_ranks"
    assert_ok(*run_checks(Backend.NATIVE, 2, (check,), ((OTHER, "1"),)), check)


@pytest.mark.release
def test_every_collective(tmp_path: Path) -> None:
    workers = workers_on(a=3)
    with FakeJob(backend=Backend.TORCH) as job:
        env = {OTHER: "1", "PYTHONWARNINGS": "error"}
        job.start(workers, "ops_program.everything", str(tmp_path), "FEW", env=env)
        for worker in workers:
            assert job.wait_end(worker).lines[-1] == {"ok": True}
