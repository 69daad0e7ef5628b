"""What is true of every state."""

from __future__ import annotations

from elastic_driver.core.deadlines import next_deadline
from elastic_driver.core.state import JobPhase, State, WorkerPhase, in_phase


def check_invariants(state: State) -> None:
    """Raises AssertionError when the state is one that must not be. For tests, and for the driver's debug mode."""
    policy = state.policy
    places = [
        (record.worker.hostname, record.worker.slot)
        for record in state.workers
        if record.phase is not WorkerPhase.LEAVING
    ]
    assert len(places) == len(set(places)), "two living workers in one place"
    assert len(state.members) == len(set(state.members)), "a member twice"
    if state.round is not None:
        assert state.round.round_id > 0
        assert set(state.registry.expected) <= set(state.members), "a report is expected of one who was not there"
        assert state.round.reset_began >= state.began
        limit = policy.max_num_proc
        # The one round in which a job of one worker moves to another host has two.
        assert limit is None or len(state.members) <= max(2, limit), "more members than max-np"
        assert len(state.members) >= policy.min_num_proc, "fewer members than min-np"
    for record in in_phase(state, WorkerPhase.MEMBER):
        assert record.worker in state.members, "a member that the round does not know"
        assert record.round_id == state.round_id
    assert state.setbacks.present.until is None or state.registry.complete, "a round is judged before it is over"
    if state.phase is JobPhase.RUNNING:
        assert in_phase(state, WorkerPhase.MEMBER), "a round runs without a living member"
    elif state.phase is not JobPhase.ENDED:
        assert next_deadline(state) is not None, f"{state.phase} without a deadline"
    for record in state.workers:
        assert record.phase is WorkerPhase.MEMBER or not record.running, "one that is no member trains"
        assert record.phase is WorkerPhase.LEAVING or not record.stopped, "one that is stopped stays"
        assert record.phase is not WorkerPhase.BOOTING or not record.round_id, "one that boots has had a round"
        assert record.round_id <= state.round_id, "a round that is to come"
