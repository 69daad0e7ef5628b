"""Agents of this machine that have lost a driver on another one: nothing else of their job is visible here.

Owns their presentation as text and data. For a job whose driver was on this machine its journal is used instead
(:mod:`elastic_driver.cli.recorded`), unless it is missing or unreadable.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_driver.launch.agent.control import AgentHere, agents_here, end_alone
from elastic_driver.rendezvous.job_files import left_jobs, running_jobs
from elastic_driver.words import counted

# Longer than an agent takes to kill workers that are blocked in the kernel.
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class DriverlessJob:
    """A job with such agents here.

    Attributes:
        job_id: of the job.
        agents: by the paths of their sockets.
    """

    job_id: str
    agents: dict[Path, AgentHere]

    @property
    def alone_s(self) -> float:
        """How long they have had no contact to their driver, seconds."""
        return max(agent.alone_s for agent in self.agents.values())

    def words(self) -> str:
        """Describe it for a table."""
        return f"no driver for {self.alone_s:.0f} s ({', '.join(map(_of, self.agents.values()))})"

    def document(self) -> dict[str, Any]:
        """Describe it as data."""
        hosts = {agent.host: agent.workers for agent in self.agents.values()}
        none_s = round(self.alone_s, 3)
        named: dict[str, Any] = {"job": self.job_id, "pid": None, "driver": None, "command": []}
        return {**named, "no_driver_s": none_s, "workers_here": hosts}


def _of(agent: AgentHere) -> str:
    return f"{agent.host}: {counted(agent.workers, 'worker')}"


def driverless_jobs(job_id: str, left: Collection[str]) -> list[DriverlessJob]:
    """Find such jobs of this user.

    Args:
        job_id: the beginning of their ids.
        left: ids of jobs that are known from their journals.

    Raises:
        SettingsError: the search for jobs failed.
    """
    alone: dict[str, dict[Path, AgentHere]] = {}
    for path, agent in agents_here().items():
        if agent.job and agent.job.startswith(job_id) and not agent.connected:
            alone.setdefault(agent.job, {})[path] = agent
    for known in (*(job.job_id for job in running_jobs()), *left):
        alone.pop(known, None)
    return [DriverlessJob(each, agents) for each, agents in alone.items()]


def end_driverless(job: DriverlessJob) -> tuple[bool, str]:
    """Stop the job's agents here. Blocks until they have ended.

    Returns:
        Whether all have ended; and a description of the result.
    """
    late = end_alone(job.agents, _END_S)
    ended = [_of(agent) for agent in job.agents.values() if agent not in late]
    said = [f"ended on this machine ({', '.join(ended)}), without a driver; agents on other machines are not ended"]
    if late:
        hosts = ", ".join(agent.host for agent in late)
        said = [*said[: bool(ended)], f"not ended within {_END_S:g} s, or taken over by a driver again: {hosts}"]
    return not late, "; ".join(said)


def end_here(journal: Path) -> str:
    """Stop agents of this machine whose job has this journal, and no driver any more. Blocks until they have ended.

    Returns:
        A description of the result; "" if there are none.
    """
    ids = [file.job_id for file in left_jobs() if Path(file.journal) == journal.resolve()]
    for job in (job for job_id in ids for job in driverless_jobs(job_id, ())):
        return f"job {job.job_id}: {end_driverless(job)[1]}"
    return ""
