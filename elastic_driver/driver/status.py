"""The job's status: the information of the core's state, health, discovery and the books, for all readers.

Owns the format of ``GET /v1/status``, on which the page, the metrics and ``elasticrun status`` are based too, and the
sentence that explains the condition of the job. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from elastic_driver.core.explain import explain, unused_slots
from elastic_driver.core.state import JobPhase, State, WorkerPhase, WorkerRecord, in_phase, record_of
from elastic_driver.discovery.source import Hosts
from elastic_driver.driver.agents import AgentSide
from elastic_driver.driver.health import Health
from elastic_driver.driver.progress import Progress
from elastic_driver.driver.stepper import Stepper
from elastic_driver.health.figures import FigureBook
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.routes import ALL, Route, Routes
from elastic_driver.reporting.goodput import Goodput
from elastic_driver.words import Backend


class Processes(Protocol):
    """The interface to the workers' processes."""

    def pid(self, worker: WorkerId) -> int | None:
        """Return the id of the worker's process; None if none runs."""


class JobStatus:
    """The status of one job. Used on the event loop only.

    Args:
        command: the command of the job, as the user gave it.
        job_id: the id of the job.
        stepper: has the state.
        clock: the job's time, seconds.
        processes: the processes of the workers.
        agents: know where the driver is reached.
        health: has the workers' vitals, and the suspected hangs.
        figures: the training's reported figures.
        progress: the workers' progress.
        goodput: what the time was spent on.
        discovery: knows why hosts are missing.
    """

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        stepper: Stepper,
        *,
        clock: Callable[[], float],
        processes: Processes,
        agents: AgentSide,
        health: Health,
        figures: FigureBook,
        progress: Progress,
        goodput: Goodput,
        discovery: Hosts,
    ) -> None:
        self._command = list(command)
        self._job_id = job_id
        self._stepper = stepper
        self._clock = clock
        self._processes = processes
        self._agents = agents
        self._health = health
        self._table = health.table
        self._figures = figures
        self._progress = progress
        self._goodput = goodput
        self._discovery = discovery

    @property
    def routes(self) -> Routes:
        """The routes for everybody."""
        return (Route("GET", "status", ALL, lambda _: self.document()),)

    def explained(self) -> str:
        """Explain the job's condition, suspected hangs, problems of discovery, and which hosts are not ready."""
        state = self._stepper.state
        waits = state.phase in (JobPhase.WAITING, JobPhase.RESETTING, JobPhase.RUNNING)
        sentence = explain(state, self._clock(), stall=self._health.stall)
        remarks = (self._stepper.trouble, self._health.remark(), self._discovery.remark() if waits else "")
        return "; ".join(filter(None, (sentence, *remarks)))

    def newest_commit(self) -> int:
        """Return the furthest worker's last commit, even if it has ended since; without commits that a loss undid."""
        state = self._stepper.state
        told = (vitals.commits for _, vitals in self._table)
        self._progress.reached(max(state.commits, 0, *(record.commits for record in state.workers), *told))
        return self._progress.newest_commit

    def document(self) -> dict[str, object]:
        """Return the status as a JSON document."""
        self._stepper.catch_up()
        state, now = self._stepper.state, self._clock()
        return {
            "job_id": self._job_id,
            "command": self._command,
            "urls": self._agents.urls,
            **self._health.status(),
            **standing(state, now),
            **self._booked(),
            "explain": self.explained(),
            "newest_commit": self.newest_commit(),
            "progress": asdict(self._progress.estimate(now)),
            **self._table.summary([record.worker for record in in_phase(state, WorkerPhase.MEMBER)], now),
            "figures": dict(self._figures.figures),
            "workers": [self._worker(record, now) for record in state.workers],
        }

    def _booked(self) -> dict[str, object]:
        booked = self._goodput.job()
        if booked is None:
            return {}
        return {
            "age_s": round(booked.wall_s, 3),  # the time without a driver is part of the job's
            "goodput": {"seconds": _rounded(booked.seconds), "share": round(booked.share, 6)},
        }

    def _worker(self, record: WorkerRecord, now: float) -> dict[str, object]:
        worker = record.worker
        booked = self._goodput.worker(worker)
        return {
            **standing_of(record, now),
            "commits": max(record.commits, self._table.commits(worker)),
            "pid": self._processes.pid(worker),
            "booked": None if booked is None else _rounded(booked.seconds),
            "vitals": self._table.entry(worker, now),
        }


def standing(state: State, now: float) -> dict[str, object]:
    """Return the part of a job's status that follows from the core's state alone, as JSON."""
    return {
        "age_s": round(now - state.began, 3),
        "phase": state.phase,
        "on_change": state.policy.on_change,
        "round_id": state.round_id,
        "commits": state.commits,
        "tells_commits": not any(Backend.HOROVOD in record.backends for record in state.workers),
        "resets": state.resets,
        "hosts": [{"name": host.name, "slots": host.slots, "labels": list(host.labels)} for host in state.hosts],
        "unused": unused_slots(state),
        "blacklisted": [h.name for h in state.hosts if state.blacklist.is_blacklisted(h.name)],
        "silent": [silence.hostname for silence in state.silent if silence.sure],
        "left_out": sorted(state.cuts.out),
        **_drained(state),
        **_chief_of(state, now),
    }


def standing_of(record: WorkerRecord, now: float) -> dict[str, object]:
    """Return the part of a worker's status that follows from the core's state alone, as JSON."""
    worker = record.worker
    return {
        "worker": worker.key,
        "host": worker.hostname,
        "slot": worker.slot,
        "phase": record.phase,
        "since_s": round(now - record.since, 3),
        "rank": record.rank if record.round_id else None,
        "round_id": record.round_id,
        "running": record.running,
        "commits": record.commits,
        "pid": None,
        **_server_of(record),
    }


def place_of(state: State, worker: WorkerId) -> tuple[int, int] | None:
    """Return the round of a worker, and its rank there; None if it is in none, or has ended."""
    record = record_of(state, worker)
    return (record.round_id, record.rank) if record is not None and record.round_id else None


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {category: round(spent_s, 3) for category, spent_s in seconds.items()}


def _drained(state: State) -> dict[str, object]:
    """Return the hosts that get no more workers, and for others the slots that get none, by host."""
    slots = {host.name: host.slots for host in state.hosts}
    whole = {name for name, slot in state.drained if slot is None}
    some: dict[str, list[int]] = {}
    for name, slot in sorted((name, slot) for name, slot in state.drained if slot is not None and name not in whole):
        some.setdefault(name, []).append(slot)
    whole |= {name for name, those in some.items() if len(those) >= slots.get(name, 1)}
    return {
        "drained": sorted(whole),
        "drained_slots": {name: those for name, those in some.items() if name not in whole},
    }


def _server_of(record: WorkerRecord) -> dict[str, object]:
    """Return the fields that only a server has."""
    if record.parameter_server is None and not record.address:
        return {}
    return {"parameter_server": record.parameter_server, "address": record.address}


def _chief_of(state: State, now: float) -> dict[str, object]:
    """Return the fields that only a job with a chief has."""
    chief = state.chief
    if not state.policy.has_chief:
        return {}
    if chief is None:
        return {"chief": None}
    return {"chief": {"number": chief.number, "phase": chief.phase, "since_s": round(now - chief.since, 3)}}
