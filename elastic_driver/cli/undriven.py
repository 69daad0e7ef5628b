"""Agents of this machine that have lost a driver on another one: they are all that is seen of their job here.

Owns what is made of them for people and programs. Of a job whose driver was on this machine its journal tells
(:mod:`elastic_driver.cli.recorded`), unless that is gone or cannot be read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_driver.launch.agent.control import AgentHere, agents_here, end_alone
from elastic_driver.rendezvous.job_files import left_jobs, running_jobs
from elastic_driver.words import counted

# Longer than it takes an agent to end workers that the kernel holds.
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Undriven:
    """A job of which there are such agents here.

    Attributes:
        job_id: which.
        agents: by their sockets.
    """

    job_id: str
    agents: dict[Path, AgentHere]

    @property
    def alone_s(self) -> float:
        """For how long they have not heard of their driver, seconds."""
        return max(agent.alone_s for agent in self.agents.values())

    def words(self) -> str:
        """What is seen of it, for a table."""
        return f"no driver for {self.alone_s:.0f} s ({', '.join(map(_of, self.agents.values()))})"

    def document(self) -> dict[str, Any]:
        """Likewise, for programs."""
        hosts = {agent.host: agent.workers for agent in self.agents.values()}
        none_s = round(self.alone_s, 3)
        named: dict[str, Any] = {"job": self.job_id, "pid": None, "driver": None, "command": []}
        return {**named, "no_driver_s": none_s, "workers_here": hosts}


def _of(agent: AgentHere) -> str:
    return f"{agent.host}: {counted(agent.workers, 'worker')}"


def undriven_jobs(job_id: str, left: Collection[str]) -> list[Undriven]:
    """Those of this user whose ids begin so.

    Args:
        job_id: how.
        left: ids of those whose journals tell of them.

    Raises:
        SettingsError: they cannot be looked for.
    """
    alone: dict[str, dict[Path, AgentHere]] = {}
    for path, agent in agents_here().items():
        if agent.job and agent.job.startswith(job_id) and not agent.connected:
            alone.setdefault(agent.job, {})[path] = agent
    for known in (*(job.job_id for job in running_jobs()), *left):
        alone.pop(known, None)
    return [Undriven(each, agents) for each, agents in alone.items()]


def end_undriven(job: Undriven) -> tuple[bool, str]:
    """Has its agents here end. Blocks until they have.

    Returns:
        Whether all have; and what has become of it, in words.
    """
    late = end_alone(job.agents, _END_S)
    ended = [_of(agent) for agent in job.agents.values() if agent not in late]
    said = [f"ended on this machine ({', '.join(ended)}), without a driver; agents on other machines are not ended"]
    if late:
        hosts = ", ".join(agent.host for agent in late)
        said = [*said[: bool(ended)], f"not ended within {_END_S:g} s, or taken over by a driver again: {hosts}"]
    return not late, "; ".join(said)


def end_here(journal: Path) -> str:
    """Has agents of this machine end whose job has its journal there, and no driver any more. Blocks until they have.

    Returns:
        What has become of the job, in words; "" where there are none.
    """
    ids = [file.job_id for file in left_jobs() if Path(file.journal) == journal.resolve()]
    for job in (job for job_id in ids for job in undriven_jobs(job_id, ())):
        return f"job {job.job_id}: {end_undriven(job)[1]}"
    return ""
