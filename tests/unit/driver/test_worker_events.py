"""What becomes of workers, as the core hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_driver.core.events import HostLost
from elastic_driver.driver.worker_events import WorkerEvents
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.worker import Worker
from elastic_driver.launch.words import ExitStatus

pytestmark = pytest.mark.unit


class Reports:
    """A stepper that keeps what is reported, of a job that knows all workers."""

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


def test_a_worker_that_asks_for_input_in_vain_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag that gives its rank a terminal; and not where it had an input, which has ended."""
    monkeypatch.setattr("elastic_driver.driver.worker_events.record_of", lambda state, worker: object())
    warnings = list[str]()
    told: Any = SimpleNamespace(warning=warnings.append)
    stepper: Any = SimpleNamespace(report=lambda report: None, state=SimpleNamespace(round_id=0))
    events = WorkerEvents(stepper, chronicle=told, standings=told, forget=lambda worker: None)

    def fails(slot: int, *, has_input: bool) -> None:
        lines = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "bdb.BdbQuit")
        worker = Worker(WorkerId("node1", slot, 0), slot, str(slot), last_lines=lines, has_input=has_input)
        events.exited(worker, ExitStatus(1))

    fails(0, has_input=True)
    assert warnings == []
    fails(1, has_input=False)
    fails(2, has_input=False)
    [warning] = warnings
    assert "worker node1[1] tried to read its standard input" in warning
    assert "--stdin 1 " in warning
