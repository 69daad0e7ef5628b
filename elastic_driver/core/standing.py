"""The current activity of the job, in one word: for accounting of its time.

Owns no decision and no memory: the word follows from the state alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_driver.core.placement import usable_slots
from elastic_driver.core.state import ChiefPhase, JobPhase, State, WorkerPhase, finishing
from elastic_driver.words import OnChange


class JobActivity(StrEnum):
    """The current activity of the job."""

    FORMING = "forming"  # it starts, or the next round is being formed, or its members are not all ready yet
    WAITING_FOR_SLOTS = "waiting_for_slots"  # there are too few slots for a round
    TRAINING = "training"
    FINISHING = "finishing"  # a worker has ended well, and the others have not yet
    ENDED = "ended"  # nothing is started any more; what runs is being ended


@dataclass(frozen=True, slots=True)
class Standing:
    """The condition of the job.

    Attributes:
        phase: its phase.
        doing: its activity.
        on_change: what a change means for its current workers.
    """

    phase: JobPhase
    doing: JobActivity
    on_change: OnChange


def standing_of(state: State) -> Standing:
    """Return the current condition of the job."""
    phase = state.phase
    return Standing(phase, _doing(state, phase), state.policy.on_change)


def _doing(state: State, phase: JobPhase) -> JobActivity:
    if phase is JobPhase.ENDED:
        return JobActivity.ENDED
    if _trains(state, phase):
        return JobActivity.FINISHING if finishing(state) else JobActivity.TRAINING
    return JobActivity.WAITING_FOR_SLOTS if _lacks_slots(state, phase) else JobActivity.FORMING


def _trains(state: State, phase: JobPhase) -> bool:
    """Return whether the job trains, as far as known: workers that do not ask for rounds need not report it."""
    members = (record for record in state.workers if record.phase is WorkerPhase.MEMBER)
    if state.policy.has_chief:
        return state.chief is not None and state.chief.phase is ChiefPhase.RUNNING and not state.chief.lost
    if not state.policy.on_change.has_rounds:
        return any(True for _ in members)  # each works by itself, whoever else is missing
    if phase is not JobPhase.RUNNING:
        return False
    return state.policy.on_change.restarts or all(record.running for record in members)


def _lacks_slots(state: State, phase: JobPhase) -> bool:
    """Return whether the job waits for slots, and not for its workers to come up in the slots that it has."""
    if phase is JobPhase.WAITING:
        # Before discovery's first answer that is unknown; and once there are enough, they wait a moment for more.
        return state.discovery.hosts is not None and state.last_call is None
    waits = state.reset is not None and state.reset.slots_deadline is not None
    return waits and usable_slots(state) < state.policy.min_num_proc
