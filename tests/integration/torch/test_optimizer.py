"""DistributedOptimizer between real processes, against one process with the whole batch."""

from __future__ import annotations

import pytest

from elastic_driver.words import Backend
from tests.support.fakes.fake_job import FakeJob, workers_on
from tests.support.processes.backends import FIRST
from tests.support.processes.optimizer_checks import assert_ok, run_checks

pytestmark = pytest.mark.integration

CHECKS = (
    "plain_averages",
    "several_passes",
    "compressed",
    "grouped",
    "other_ops",
    "adasum",
    "adasum_with_a_closure",
    "gradients_live_in_the_buffer",
    "kept_gradients_stay",
    "rules",
    "bad_arguments",
    "clipping",
    "changed_on_their_way",
    "forgotten_passes",
    "missing_gradients",
    "used_twice",
    "changing_requires_grad",
    "converted_models",
    "converted_states",
    "sparse_gradients",
    "closures",
    "param_groups_and_schedulers",
    "several_optimizers",
    "odd_parameters",
    "uneven_inputs",
    "other_shapes_are_an_error",
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", FIRST)
def test_two_ranks(backend: Backend, check: str) -> None:
    assert_ok(*run_checks(backend, 2, CHECKS), check)


THREE = ("plain_averages", "missing_gradients", "adasum", "sparse_gradients", "uneven_inputs", "some_ranks")


@pytest.mark.parametrize("check", THREE)
def test_three_ranks(check: str) -> None:
    assert_ok(*run_checks(Backend.NATIVE, 3, THREE), check)


def test_sparse_gradients_on_some_ranks_only() -> None:
    check = "sparse_on_some_ranks"
    assert_ok(*run_checks(Backend.NATIVE, 2, (check,)), check)


def test_one_rank() -> None:
    assert_ok(*run_checks(Backend.NATIVE, 1, ("one_process",)), "one_process")


@pytest.mark.parametrize("backend", FIRST)
def test_a_rank_that_dies_in_its_backward_pass(backend: Backend) -> None:
    workers = workers_on(a=3)
    with FakeJob(backend=backend) as job:
        job.start(workers, "optimizer_program.killed_in_backward")
        for worker in workers[:2]:
            line = job.wait_end(worker).lines[-1]
            assert line["ok"]
            assert line["failures"]
