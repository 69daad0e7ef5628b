"""When the job is sampled: by its age for the log, each few seconds for the page, and at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_driver.driver.samples import Samples
from elastic_driver.health.figures import FigureBook
from elastic_driver.health.sampler import Sampled
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.page.curves import Curves
from elastic_driver.vitals import Vitals

pytestmark = pytest.mark.unit

ONE = WorkerId("a", 0, 0)


class Job:
    """A job that began at 50 s of its clock, without a driver's loop."""

    def __init__(self, *, draws: bool = True) -> None:
        self.now = 50.0
        self.told: list[tuple[float, Sampled]] = []
        self.table = VitalsTable()
        self.curves = Curves() if draws else None
        state: Any = SimpleNamespace(began=50.0, workers=())
        self.samples = Samples(
            SimpleNamespace(state=state, is_over=False),  # type: ignore[arg-type]
            health=SimpleNamespace(table=self.table),  # type: ignore[arg-type]
            figures=FigureBook({}.get, list[str]().append),
            chronicle=SimpleNamespace(found=self.sampled),  # type: ignore[arg-type]
            clock=lambda: self.now,
            curves=self.curves,
            wall_clock=lambda: 1e9 + self.now,
        )

    def sampled(self, sample: Sampled) -> None:
        self.told.append((self.now - 50.0, sample))

    def pass_time(self, until: float) -> None:
        """Looks each second."""
        while self.now < 50.0 + until:
            self.now += 1
            self.samples.look()


def test_the_log_has_one_each_ten_seconds_at_first_and_each_minute_later() -> None:
    job = Job()
    job.pass_time(900)
    times = [at for at, _ in job.told]
    assert times == [*range(10, 601, 10), *range(660, 901, 60)]


def test_the_page_has_one_each_two_seconds() -> None:
    job = Job()
    job.pass_time(20)
    assert job.curves is not None
    assert len(job.curves.news()["curves_new"]["t"]) == pytest.approx(10, abs=1)


def test_without_a_page_nothing_is_drawn() -> None:
    job = Job(draws=False)
    job.pass_time(20)
    assert [at for at, _ in job.told] == [10, 20]


def test_the_last_one_is_told_at_the_end() -> None:
    job = Job()
    job.table.take(ONE, Vitals(1.0, 7, rss_bytes=5), job.now)
    job.now += 1
    job.samples.last()
    [(_, sample)] = job.told
    assert sample.memory_bytes == 5
    assert job.curves is not None
    assert len(job.curves.news()["curves_new"]["t"]) == 1
