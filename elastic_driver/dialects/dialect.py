"""Dialect: what the driver has to know of the kind of worker that it runs.

Owns the seam only. A dialect is a class that has these members; :mod:`elastic_driver.dialects.ours` is that of this
library's own workers. Knows nothing of processes and of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import JobKey
from elastic_driver.words import OnChange


@dataclass(frozen=True, slots=True)
class JobAddress:
    """Where a job is to be found, and with what.

    Attributes:
        url: the driver's HTTP server.
        key: of the job; workers get what is derived from it.
        job_id: marks the job's processes.
        owner: the driver's process, as :mod:`elastic_driver.system.process_name` names it.
    """

    url: str
    key: JobKey
    job_id: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one generation of workers find each other, if they ask nobody else: rank 0 listens there.

    Attributes:
        address: of rank 0's host, which the other hosts reach.
        port: on that host; nobody else is given it while the generation lives.
    """

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """One start of a worker's process.

    Attributes:
        worker: whose.
        planned: its place if the round were formed now.
        hosts: those of all who are planned, in the order of their first ranks.
        round_id: the round that runs now, or is being started; 0 for none.
        cores: processors of its host that workers may use.
        resets: unplanned resets of the job so far.
        meeting: of its generation; None where no port was to be had.
        restarted: whether it is restarted at each change, and in the round from its start on.
        address: where its host is reached by those that it is planned with.
        parameter_server: which of the parameter servers it is; None for a worker.
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
        """The whole environment of one worker's process.

        Args:
            start: whose, and in which place.
            job: where the driver is.
        """
