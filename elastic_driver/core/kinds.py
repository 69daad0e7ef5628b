"""The kinds of jobs, by what a change means for their workers: each is one module.

Owns what such a module has, and which one is a job's. Beside that, kinds differ in which places they need
(:mod:`~elastic_driver.core.placement`), what they wait for (:mod:`~elastic_driver.core.deadlines`) and what is said of
it (:mod:`~elastic_driver.core.explain`).
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
    """What happens to a worker of one kind, and what is decided of all of them.

    The worker was not told to end before. When it has ended, it is forgotten already.
    """

    @property
    def DECIDERS(self) -> tuple[Callable[[Transition], None], ...]:
        """What is decided after each event, in this order. Each may end the job."""

    def take_start(self, t: Transition, record: WorkerRecord) -> None:
        """Its process runs."""

    def take_clean_exit(self, t: Transition, record: WorkerRecord, *, wanted: bool) -> None:
        """Its process has ended with code 0, and there was to be a worker in its place, or not."""

    def take_failure(self, t: Transition, record: WorkerRecord, crash: Crash) -> None:
        """It has failed, or was lost."""


_KINDS: Mapping[OnChange, Kind] = {
    OnChange.IN_PLACE: in_place,
    OnChange.RESTART: restarting,
    OnChange.NO_ROUNDS: roundless,
}


def kind_of(state: State) -> Kind:
    """The kind that a job is now: one that restarts its workers may become one that resets them in place."""
    return chief if state.policy.has_chief else _KINDS[state.policy.on_change]
