"""What the job's status says beside the core's state: whose job it is, who may hang, what its time has gone into.

Owns nothing; the rest of ``GET /v1/status`` is in :mod:`elastic_driver.driver.rounds`.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic_driver.core.state import JobPhase
from elastic_driver.discovery.source import Hosts
from elastic_driver.driver.agents import AgentSide
from elastic_driver.driver.health import Health
from elastic_driver.driver.stepper import Stepper
from elastic_driver.hosts import WorkerId
from elastic_driver.report.goodput import Goodput
from elastic_driver.settings.settings import Settings


class StatusDetails:
    """See above. Used on the event loop only.

    Args:
        settings: what the user asked for.
        job_id: of the job.
        stepper: has the state.
        agents: know where the driver is reached.
        goodput: what the time has gone into.
        health: knows who may hang.
        discovery: knows why hosts are not there.
    """

    def __init__(
        self,
        settings: Settings,
        job_id: str,
        stepper: Stepper,
        *,
        agents: AgentSide,
        goodput: Goodput,
        health: Health,
        discovery: Hosts,
    ) -> None:
        self._command = list(settings.command)
        self._job_id = job_id
        self._stepper = stepper
        self._agents = agents
        self._goodput = goodput
        self._health = health
        self._discovery = discovery

    def of_job(self) -> dict[str, object]:
        """What is said of the job."""
        about: dict[str, object] = {"job_id": self._job_id, "command": self._command, "urls": self._agents.urls}
        about |= self._health.status()
        booked = self._goodput.job()
        if booked is not None:
            about["goodput"] = {"seconds": _rounded(booked.seconds), "share": round(booked.share, 6)}
        return about

    def booked(self, worker: WorkerId) -> dict[str, float] | None:
        """What a worker's time has gone into so far."""
        booked = self._goodput.worker(worker)
        return None if booked is None else _rounded(booked.seconds)

    def remark(self) -> str:
        """Who may hang, what discovery does, and which hosts are not ready."""
        waits = self._stepper.state.phase in (JobPhase.WAITING, JobPhase.RESETTING, JobPhase.RUNNING)
        return "; ".join(filter(None, (self._health.remark(), self._discovery.remark() if waits else "")))


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {category: round(spent_s, 3) for category, spent_s in seconds.items()}
