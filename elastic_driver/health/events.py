"""Events of the workers' health: one frozen class each, of plain values.

Owns the input of :meth:`~elastic_driver.health.watch.HealthWatch.step`.
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
    """The core has made a step: the new state of the job. Workers without a place in its round may be silent."""

    state: State


@dataclass(frozen=True, slots=True)
class VitalsSeen:
    """An agent has observed a worker.

    Attributes:
        worker: the worker; an unknown one is ignored.
        vitals: what the agent has observed.
        peer_is_ours: whether ``vitals.peer`` is one of the job's hosts.
    """

    worker: WorkerId
    vitals: Vitals
    peer_is_ours: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A worker has sent a request itself: for its round, or for the notices of its round.

    Attributes:
        worker: the worker. From now on it must send heartbeats.
        progress: how many operations it has finished.
        waiting: whether it waits for others in one, or for its round.
        leaving: whether it has announced that it sends nothing more: then it need not.
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
    """The result of a StackWanted.

    Attributes:
        worker, number: as in the StackWanted.
        text: the stacks as faulthandler writes them; None if they cannot be taken.
    """

    worker: WorkerId
    number: int
    text: str | None


@dataclass(frozen=True, slots=True)
class CommitFound:
    """There is a commit on disk from which the job can resume."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """It is ``next_deadline`` or later.

    Attributes:
        unheard: hosts whose agents are silent though their machines acknowledge, and for how long, seconds.
        audible_s: those of ``overdue_hosts`` that have not been connected all the time, and for how long they were
            connected without a gap, seconds: no worker there could have been heard before.
    """

    unheard: Mapping[str, float] = field(default_factory=dict)
    audible_s: Mapping[str, float] = field(default_factory=dict)


Event: TypeAlias = JobChanged | VitalsSeen | WorkerHeard | WorkerGone | StackTaken | CommitFound | TimePassed
