"""What becomes of workers, as the core hears of it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.core.events import HostLost
from elastic_driver.driver.worker_events import WorkerEvents
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.worker import Worker

pytestmark = pytest.mark.unit


class Reports:
    """A stepper that keeps what is reported."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def report(self, report: Any) -> None:
        self.reports.append(report)


def test_a_machine_is_lost_once_by_each_of_its_names() -> None:
    """However many workers ran there."""
    one, two, other = WorkerId("localhost", 0, 0), WorkerId("localhost", 1, 0), WorkerId("127.0.0.1", 0, 0)
    stepper, forgotten = Reports(), list[WorkerId]()
    nobody: Any = None
    events = WorkerEvents(stepper, chronicle=nobody, standings=nobody, forget=forgotten.append)  # type: ignore[arg-type]
    events.lost([Worker(worker, 0, "0") for worker in (other, one, two)], "it was cut off")
    assert all(isinstance(report, HostLost) for report in stepper.reports)
    told = [(report.hostname, report.why, report.workers) for report in stepper.reports]
    assert told == [("127.0.0.1", "it was cut off", (other,)), ("localhost", "it was cut off", (one, two))]
    assert forgotten == [other, one, two]
