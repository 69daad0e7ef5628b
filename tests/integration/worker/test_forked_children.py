"""Processes that a worker forks, as data loaders do: they know its rank, and cannot act for it."""

from __future__ import annotations

import pytest

from elastic_driver.words import Backend
from tests.support.fakes.fake_job import PROGRAM, FakeJob, workers_on
from tests.support.processes import forked
from tests.support.processes.backends import OTHERS_AT_RELEASE

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("backend", OTHERS_AT_RELEASE)
@pytest.mark.parametrize("program", ["refusals", "loader"])
def test_a_workers_child_has_its_numbers_and_cannot_act_for_it(backend: Backend, program: str) -> None:
    workers = workers_on(a=2)
    with FakeJob(backend=backend, auto=False) as job:
        job.start(workers, f"forked_child_program.{program}")
        for worker in workers:
            process = job.wait_end(worker)
            assert process.lines[-1] == {"total": 2}
            assert process.noise == []


def test_a_child_of_a_process_without_a_driver_may_be_a_job_of_one() -> None:
    assert forked.run([str(PROGRAM), "forked_child_program.refusals"]) == (0, '{"total": 1}\n')
