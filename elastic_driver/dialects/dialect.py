"""Dialect: what the driver has to know about the kind of worker that it runs.

Owns the interface only. A dialect is a class with these members; :mod:`elastic_driver.dialects.ours` is the one for
this library's own workers. Knows nothing of processes and rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.words import OnChange


@dataclass(frozen=True, slots=True)
class JobAddress:
    """The address of a job's driver, and the credentials for it.

    Attributes:
        url: of the driver's HTTP server.
        key: of the job; workers get a key derived from it.
        job_id: marks the job's processes.
        owner: the driver's process, as :mod:`elastic_driver.system.process_name` names it.
    """

    url: str
    key: JobKey
    job_id: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one generation of workers find each other without the driver: rank 0 listens there.

    Attributes:
        address: of rank 0's host, reachable from the other hosts.
        port: on that host; assigned to nobody else while the generation lives.
    """

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """One start of a worker's process.

    Attributes:
        worker: the worker to start.
        planned: its place if the round were formed now.
        hosts: of all planned workers, in the order of their first ranks.
        round_id: the round that runs now, or is being started; 0 for none.
        cores: processors of its host that workers may use.
        resets: unplanned resets of the job so far.
        meeting: of its generation; None if no port was free.
        restarted: whether it is restarted at each change, and is in the round from its start on.
        address: of its host, as the workers planned with it reach it.
        parameter_server: its index among the parameter servers; None for a worker.
    """

    worker: WorkerId
    planned: SlotInfo
    hosts: tuple[str, ...]
    round_id: int
    cores: int
    resets: int = 0
    meeting: Meeting | None = None
    restarted: bool = False
    address: str = ""
    parameter_server: int | None = None


class Dialect(Protocol):
    """A kind of worker."""

    @property
    def on_change(self) -> OnChange:
        """What a change of the membership means for its workers."""

    def environment(self, start: WorkerStart, *, job: JobAddress) -> dict[str, str]:
        """Return the whole environment of one worker's process.

        Args:
            start: the worker and its place.
            job: the address of the driver.
        """
