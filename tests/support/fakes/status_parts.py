"""A job's status of which only the core's state and the looks at workers are real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_driver.driver.progress import Progress
from elastic_driver.driver.status import JobStatus
from elastic_driver.health.figures import FigureBook
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.goodput import Booked


class Parts:
    """In place of the agents, goodput, discovery and processes.

    Attributes:
        table: the last looks at workers.
        progress: how far they have come.
        figures: that the training has reported.
        says: what discovery remarks.
        pids: of the workers' processes.
        booked: what the job's time went into; None before it has begun.
    """

    urls = ()

    def __init__(self) -> None:
        self.table = VitalsTable()
        self.progress = Progress()
        self.figures = FigureBook({}.get, list[str]().append)
        self.says = ""
        self.pids: Mapping[WorkerId, int] = {}
        self.booked: Booked | None = None

    def job(self) -> Booked | None:
        return self.booked

    def worker(self, worker: WorkerId) -> None:
        """Nothing is booked."""

    def remark(self) -> str:
        return self.says

    def pid(self, worker: WorkerId) -> int | None:
        return self.pids.get(worker)


def status_of(stepper: Any, clock: Callable[[], float], parts: Any) -> JobStatus:
    """The status of a job whose state this stepper has."""
    health = _Health(parts)
    return JobStatus(
        ["true"],
        "1f",
        stepper,
        clock=clock,
        processes=parts,
        agents=parts,
        health=health,  # type: ignore[arg-type]
        figures=parts.figures,
        progress=parts.progress,
        goodput=parts,
        discovery=parts,
    )


class _Health:
    """Nobody is suspected."""

    stall = ""

    def __init__(self, parts: Parts) -> None:
        self.table = parts.table

    def status(self) -> dict[str, object]:
        return {}

    def remark(self) -> str:
        return ""
