"""Which actions of a worker that outlast its round are allowed. Decides nothing else, and changes nothing."""

from __future__ import annotations

from elastic_driver.core.state import State, WorkerPhase, record_of
from elastic_driver.hosts import WorkerId


def why_no_rounds(state: State) -> str:
    """Return why no worker of this job may ever ask for a round; "" if they may."""
    policy = state.policy
    if policy.on_change.restarts and not policy.becomes_in_place:
        return (
            "this job restarts its workers at each change (--on-change restart): hvd.init() needs --on-change auto or "
            "in-place"
        )
    return ""


def why_unpublished(state: State, worker: WorkerId, round_id: int) -> str:
    """Return why a worker's commit of a round may not be written to disk; "" if it may.

    Only the state of a living member of the current round (in a reset, of the last one) is the job's state. It may have
    made the commit in an earlier round: the current one resumed from that commit, or from a later one.
    """
    if state.ended:
        return "the job is over"
    record = record_of(state, worker)
    if record is None or record.phase is WorkerPhase.LEAVING:
        return f"worker {worker} no longer belongs to the job"
    if round_id > state.round_id:
        return f"there has been no round {round_id}"
    if not state.is_member(worker):
        return f"round {round_id} is over, and worker {worker} is not a member of round {state.round_id}"
    return ""
