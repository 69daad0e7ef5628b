"""Samples of how the job does: sums over its workers, and means over the time between two samples."""

from __future__ import annotations

import pytest

from elastic_driver.health.sampler import Sampled, Sampler
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals

pytestmark = pytest.mark.unit

ONE, TWO = WorkerId("a", 0, 0), WorkerId("b", 0, 0)
MB = 1 << 20


class Job:
    """Two workers; time passes as the test says."""

    def __init__(self) -> None:
        self.table = VitalsTable()
        self.now = 0.0
        self.sampler = Sampler(self.table, self.now)

    def look(self, worker: WorkerId, at_s: float, **more: object) -> None:
        values = {"pid": 7, "round_id": 1, "pulse_s": 0.1, "rss_bytes": 100 * MB, **more}
        self.table.take(worker, Vitals(at_s, **values), self.now)  # type: ignore[arg-type]

    def sample(self) -> Sampled:
        return self.sampler.take(self.now, [ONE, TWO], workers=2)


@pytest.fixture
def job() -> Job:
    return Job()


def test_of_a_job_without_workers_nothing_is_known(job: Job) -> None:
    assert job.sample() == Sampled(workers=2)


def test_rates_are_means_since_the_last_sample(job: Job) -> None:
    for worker, offset in ((ONE, 0.0), (TWO, 500.0)):
        job.look(worker, offset + 1.0, steps=0, cpu_s=5.0, waited_s=1.0)
    first = job.sample()
    assert (first.steps_per_s, first.cpu, first.waiting, first.memory_bytes) == (None, None, None, 200 * MB)
    for second in range(1, 11):
        job.now = float(second)
        for worker, offset, share in ((ONE, 0.0, 0.5), (TWO, 500.0, 0.1)):
            job.look(worker, offset + 1 + second, steps=2 * second, cpu_s=5 + second, waited_s=1 + share * second)
    sample = job.sample()
    assert sample.steps_per_s == pytest.approx(2.0)
    assert sample.cpu == pytest.approx(2.0)
    assert sample.waiting == pytest.approx(0.3)


def test_a_long_wait_counts_while_it_lasts(job: Job) -> None:
    job.look(ONE, 1.0, steps=1, waited_s=0.0)
    job.sample()
    job.now = 10.0
    job.look(ONE, 11.0, steps=1, waits_s=9.0)
    assert job.sample().waiting == pytest.approx(0.9)
    job.now = 20.0
    job.look(ONE, 21.0, steps=1, waited_s=19.0)
    assert job.sample().waiting == pytest.approx(1.0)


def test_what_was_not_looked_at_anew_holds_for_some_seconds(job: Job) -> None:
    job.look(ONE, 1.0)
    job.sample()
    job.now = 1.0
    job.look(ONE, 2.0, cpu_s=0.5)
    assert job.sample().cpu == pytest.approx(0.5)
    job.now = 2.0
    assert job.sample().cpu == pytest.approx(0.5)
    job.now = 7.0
    assert job.sample().cpu is None


def test_another_process_has_no_rates_with_the_one_before(job: Job) -> None:
    job.look(ONE, 1.0, cpu_s=100.0)
    job.sample()
    job.now = 10.0
    job.look(ONE, 11.0, pid=8, cpu_s=1.0)
    assert job.sample().cpu is None


def test_workers_that_say_nothing_of_themselves_have_no_steps_and_no_waits(job: Job) -> None:
    job.look(ONE, 1.0, pulse_s=None)
    job.sample()
    job.now = 10.0
    job.look(ONE, 11.0, pulse_s=None, cpu_s=10.0)
    sample = job.sample()
    assert (sample.steps_per_s, sample.waiting, sample.cpu) == (None, None, pytest.approx(1.0))


def test_steps_of_a_standstill_of_the_driver_are_of_all_that_time(job: Job) -> None:
    """The job's clock does not count it."""
    job.look(ONE, 1.0, steps=0)
    job.now = 10.0
    job.look(ONE, 11.0, steps=100)
    job.sample()
    job.now = 20.0  # and 40 s more, of which nothing is known before somebody is looked at
    assert job.sample().steps_per_s == 0
    job.table.take(ONE, Vitals(71.0, 7, round_id=1, pulse_s=0.1, steps=700), job.now, lost_s=40.0)
    job.now = 30.0
    assert job.sample().steps_per_s == pytest.approx(12.0)


def test_samples_close_to_each_other_have_the_rate_of_the_last_seconds(job: Job) -> None:
    """Else one of two steps in three seconds would go up and down all the while."""
    for second in range(12):
        job.now = float(second)
        job.look(ONE, 1.0 + second, steps=second // 2)
        if second % 2:
            sample = job.sample()
    assert sample.steps_per_s == job.table.steps_per_s(job.now)


def test_steps_of_the_time_between_count_although_nobody_steps_now(job: Job) -> None:
    job.look(ONE, 1.0, steps=1)
    job.sample()
    job.now = 5.0
    job.look(ONE, 6.0, steps=21)
    job.now = 10.0
    job.table.forget(ONE)
    assert job.sample() == Sampled(steps_per_s=2.0, workers=2)


def test_the_first_sample_is_of_all_that_was_before_it(job: Job) -> None:
    job.look(ONE, 1.0, steps=4)
    job.now = 8.0
    job.table.forget(ONE)
    assert job.sample().steps_per_s == pytest.approx(0.5)
