"""What can happen to the workers' health: one frozen class each, of plain values.

Owns the words that go into :meth:`~elastic_driver.health.watch.HealthWatch.step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from elastic_driver.core.state import State
from elastic_driver.hosts import WorkerId
from elastic_driver.vitals import Vitals


@dataclass(frozen=True, slots=True)
class JobChanged:
    """The core has made a step: the job as it is now. Who has no place in its round any more need not be heard."""

    state: State


@dataclass(frozen=True, slots=True)
class VitalsSeen:
    """An agent has looked at a worker.

    Attributes:
        worker: which; one that is none of the job's is ignored.
        vitals: what the agent has seen.
        peer_is_ours: whether ``vitals.peer`` is one of the job's hosts.
    """

    worker: WorkerId
    vitals: Vitals
    peer_is_ours: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A worker has spoken itself: it asks for its round, or for the notices of its round.

    Attributes:
        worker: which. From here on it is to be heard.
        progress: how many operations it has finished.
        waiting: whether it waits in one for others, or for its round.
        leaving: whether it has said that nothing more is heard of it: then it is not.
    """

    worker: WorkerId
    progress: int = 0
    waiting: bool = True
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's process has ended."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class StackTaken:
    """What a StackWanted came to.

    Attributes:
        worker, number: of the StackWanted.
        text: the stacks as faulthandler writes them; None where they cannot be had.
    """

    worker: WorkerId
    number: int
    text: str | None


@dataclass(frozen=True, slots=True)
class CommitFound:
    """There is a commit on disc that the job can go on from."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """It is ``next_deadline`` or later.

    Attributes:
        unheard: hosts whose agents say nothing though their machines acknowledge, and for how long, seconds.
        audible_s: of ``overdue_hosts``, those that have not been heard all the time, and for how long they were heard
            without a gap, seconds: no worker there could have been heard before.
    """

    unheard: Mapping[str, float] = field(default_factory=dict)
    audible_s: Mapping[str, float] = field(default_factory=dict)


Event: TypeAlias = JobChanged | VitalsSeen | WorkerHeard | WorkerGone | StackTaken | CommitFound | TimePassed
