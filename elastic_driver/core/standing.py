"""What the job does now, in one word: for those who keep account of its time.

Owns no decision, and nothing that is remembered: the word follows from the state alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_driver.core.placement import usable_slots
from elastic_driver.core.state import ChiefPhase, JobPhase, State, WorkerPhase, finishing
from elastic_driver.words import OnChange


class Doing(StrEnum):
    """What the job does."""

    FORMING = "forming"  # it starts, or the next round is being formed, or its members are not all there yet
    WAITING_FOR_SLOTS = "waiting_for_slots"  # there are too few slots for a round
    TRAINING = "training"
    FINISHING = "finishing"  # a worker has ended well, and the others are still to
    ENDED = "ended"  # nothing is started any more; what runs is being ended


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the job stands.

    Attributes:
        phase: see JobPhase.
        doing: what it does.
        on_change: what a change means for its workers as they are now.
    """

    phase: JobPhase
    doing: Doing
    on_change: OnChange


def standing_of(state: State) -> Standing:
    """Where the job stands now."""
    phase = state.phase
    return Standing(phase, _doing(state, phase), state.policy.on_change)


def _doing(state: State, phase: JobPhase) -> Doing:
    if phase is JobPhase.ENDED:
        return Doing.ENDED
    if _trains(state, phase):
        return Doing.FINISHING if finishing(state) else Doing.TRAINING
    return Doing.WAITING_FOR_SLOTS if _lacks_slots(state, phase) else Doing.FORMING


def _trains(state: State, phase: JobPhase) -> bool:
    """Whether the job trains, as far as that is known: who is restarted, or has no rounds, need not say so."""
    members = (record for record in state.workers if record.phase is WorkerPhase.MEMBER)
    if state.policy.has_chief:
        return state.chief is not None and state.chief.phase is ChiefPhase.RUNNING and not state.chief.lost
    if not state.policy.on_change.has_rounds:
        return any(True for _ in members)  # each works for itself, whoever else is missing
    if phase is not JobPhase.RUNNING:
        return False
    return state.policy.on_change.restarts or all(record.running for record in members)


def _lacks_slots(state: State, phase: JobPhase) -> bool:
    """Whether what the job waits for is slots, and not its workers to come up in those that it has."""
    if phase is JobPhase.WAITING:
        # Before discovery's first answer nobody knows; and once there are enough, they wait a moment for more.
        return state.discovery.hosts is not None and state.last_call is None
    waits = state.reset is not None and state.reset.slots_deadline is not None
    return waits and usable_slots(state) < state.policy.min_num_proc
