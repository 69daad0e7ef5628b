"""What a worker may do that outlives its round. Decides nothing else, and changes nothing."""

from __future__ import annotations

from elastic_driver.core.state import State, WorkerPhase, record_of
from elastic_driver.hosts import WorkerId


def why_no_rounds(state: State) -> str:
    """Why no worker of this job may ever ask for a round; "" when they may."""
    policy = state.policy
    if policy.on_change.restarts and not policy.becomes_in_place:
        return (
            "this job restarts its workers at each change (--on-change restart): hvd.init() needs --on-change auto or "
            "in-place"
        )
    return ""


def why_unpublished(state: State, worker: WorkerId, round_id: int) -> str:
    """Why a commit that a worker has made in a round may not be on disc; "" when it may.

    Only what a living member of the present round has is the job's state; in a reset that is the last round. It may
    have made the commit in a round before: the present one went on from that commit, or from a later one.
    """
    if state.ended:
        return "the job is over"
    record = record_of(state, worker)
    if record is None or record.phase is WorkerPhase.LEAVING:
        return f"worker {worker} is none of the job's workers any more"
    if round_id > state.round_id:
        return f"there has been no round {round_id}"
    if not state.is_member(worker):
        return f"round {round_id} is over, and worker {worker} is no member of round {state.round_id}"
    return ""
