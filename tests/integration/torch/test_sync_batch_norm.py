"""SyncBatchNorm between real processes, against torch's BatchNorm of the whole batch."""

from __future__ import annotations

import pytest

from elastic_driver.words import Backend
from tests.support.processes.backends import FIRST
from tests.support.processes.optimizer_checks import assert_ok, run_checks

pytestmark = pytest.mark.integration

CHECKS = (
    "norms",
    "norms_far_from_zero",
    "norms_in_channels_last",
    "norms_with_empty_batches",
    "norm_errors",
    "norms_in_a_model",
)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", FIRST)
def test_two_ranks(backend: Backend, check: str) -> None:
    assert_ok(*run_checks(backend, 2, CHECKS), check)


THREE = ("norms", "norms_with_empty_batches", "norms_of_some_ranks")


@pytest.mark.parametrize("check", THREE)
def test_three_ranks(check: str) -> None:
    assert_ok(*run_checks(Backend.NATIVE, 3, THREE), check)


def test_one_rank() -> None:
    assert_ok(*run_checks(Backend.NATIVE, 1, ("norms",)), "norms")
