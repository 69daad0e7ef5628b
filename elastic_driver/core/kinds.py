"""The kinds of jobs, by what a change means for their workers: each kind is one module.

Owns the interface of such a module, and the choice of a job's kind. Otherwise kinds differ in which places they need
(:mod:`~elastic_driver.core.placement`), what they wait for (:mod:`~elastic_driver.core.deadlines`) and how they are
described (:mod:`~elastic_driver.core.explain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from elastic_driver.core import chief, in_place, restarting, roundless
from elastic_driver.core.failures import Crash
from elastic_driver.core.state import State, WorkerRecord
from elastic_driver.core.transition import Transition
from elastic_driver.words import OnChange


class Kind(Protocol):
    """The meaning of what happens to a worker of one kind, and the decisions on all of them.

    The worker was not told to end before. When it has ended, its record is already dropped.
    """

    @property
    def DECIDERS(self) -> tuple[Callable[[Transition], None], ...]:
        """The decisions after each event, in this order. Each may end the job."""

    def take_start(self, t: Transition, record: WorkerRecord) -> None:
        """Apply the start of its process."""

    def take_clean_exit(self, t: Transition, record: WorkerRecord, *, wanted: bool) -> None:
        """Apply an exit with code 0; ``wanted`` if there was to be a worker in its place."""

    def take_failure(self, t: Transition, record: WorkerRecord, crash: Crash) -> None:
        """Apply its failure or loss."""


_KINDS: Mapping[OnChange, Kind] = {
    OnChange.IN_PLACE: in_place,
    OnChange.RESTART: restarting,
    OnChange.NO_ROUNDS: roundless,
}


def kind_of(state: State) -> Kind:
    """Return the current kind of a job: a job that restarts its workers may become one that resets them in place."""
    return chief if state.policy.has_chief else _KINDS[state.policy.on_change]
