"""Workers without rounds: each runs for itself, and another takes the place of one that is lost.

Owns the decisions for ``OnChange.NO_ROUNDS``. Nobody is told of anything: a worker whose place is gone is stopped. The
registry expects those who live, and those whose end counts.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_driver.core.endings import (
    end_half_finished,
    end_if_no_host_can_start,
    report_pause,
    wait_for_slots,
    what_failed,
)
from elastic_driver.core.placement import target_places, usable_slots
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.staffing import fill_places, stop_misplaced
from elastic_driver.core.state import (
    JobPhase,
    Round,
    State,
    WorkerPhase,
    finishing,
    in_phase,
    lacks_servers,
    serving_workers,
)
from elastic_driver.core.transition import Transition
from elastic_driver.words import ExitCode


def judge_losses(t: Transition) -> None:
    """Losses of the workers' own making are setbacks; after some in a row nobody is started for a while, or ever."""
    before = t.state.setbacks
    if before.present.until is None and (before.present.failure is not None or before.present.excused):
        _await_others(t)
        setbacks = before.judged(t.now, t.state.policy.pause_range_s)
        t.state = replace(t.state, setbacks=setbacks)
        if setbacks.count >= t.state.policy.setbacks_limit:
            t.end(ExitCode.USER_CODE_FAILED, what_failed(t.state))
            return
        until = setbacks.present.until
        if until is not None and until > t.now and not _only_ends(t.state):
            report_pause(t, until)
    until = t.state.setbacks.present.until
    if until is not None and t.now >= until:
        t.state = replace(t.state, setbacks=t.state.setbacks.next_round())


def _only_ends(state: State) -> bool:
    """Whether nothing is started again, since the job ends with a chief that has failed or cannot go on."""
    chief = state.chief
    return chief is not None and not state.policy.restart_chief and bool(chief.lost or chief.failed)


def _await_others(t: Transition) -> None:
    """Where hosts are plenty and nobody comes up on any, the job lacks workers all the same."""
    reset = t.in_reset()
    if len(serving_workers(t.state)) < t.state.policy.min_num_proc or lacks_servers(t.state):
        t.state = replace(t.state, reset=reset.waiting_for_slots(t.now + t.state.policy.elastic_timeout_s))


def place_workers(t: Transition) -> None:
    """Stops workers whose place is gone, and starts one in every place that has none."""
    if t.state.phase is JobPhase.WAITING:
        if usable_slots(t.state) < t.state.policy.num_proc:
            return
        t.state = replace(t.state, round=Round(0, (), None, t.now))
    stop_misplaced(t)
    if t.state.setbacks.present.until is None:
        known = {record.worker for record in t.state.workers}
        fill_places(t)
        fresh = tuple(record.worker for record in t.state.workers if record.worker not in known)
        if fresh:
            t.state = replace(t.state, registry=t.state.registry.expecting(*fresh))


def end_or_wait_for_slots(t: Transition) -> None:
    """Ends the job when its workers have, or when too few can be had for too long."""
    if t.state.round is None:
        return
    if finishing(t.state):
        if t.state.reset is not None:
            t.state = replace(t.state, reset=replace(t.state.reset, slots_deadline=None))
        _end_if_all_have_ended(t)
    elif len(target_places(t.state)) < t.state.policy.min_num_proc:
        if not end_if_no_host_can_start(t, in_phase(t.state, WorkerPhase.MEMBER), begun=True):
            wait_for_slots(t)
    elif len(in_phase(t.state, WorkerPhase.MEMBER)) >= t.state.policy.min_num_proc:
        t.state = replace(t.state, reset=None)
    elif t.state.setbacks.present.until is None and not in_phase(t.state, WorkerPhase.BOOTING, WorkerPhase.LEAVING):
        wait_for_slots(t)  # there are slots, but nobody can be started there now


def _end_if_all_have_ended(t: Transition) -> None:
    """Once one has ended with code 0 nobody is started any more, and the job ends with the last of the others."""
    if any(record.phase is not WorkerPhase.LEAVING for record in t.state.workers):
        return
    if t.state.registry.workers_in(WorkerState.FAILURE):
        end_half_finished(t)
    else:
        t.end(ExitCode.SUCCESS, "all workers ended with code 0")
