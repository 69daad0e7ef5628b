"""Workers without rounds: each runs by itself, and a lost one is replaced.

Owns the decisions for ``OnChange.NO_ROUNDS``, and what the starts and ends of such workers mean. There are no notices:
a worker whose place is gone is stopped. The registry expects the living workers, and those whose end counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from elastic_driver.core.endings import (
    check_deadlines,
    end_half_finished,
    end_if_no_host_can_start,
    report_pause,
    wait_for_slots,
    what_failed,
)
from elastic_driver.core.events import Fault
from elastic_driver.core.failures import Crash, blame_host, report_blamed
from elastic_driver.core.placement import all_offered, target_places, usable_slots
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.silence import give_up_silent
from elastic_driver.core.staffing import (
    fill_places,
    kill_late_workers,
    report_unused_slots,
    stop_late_starts,
    stop_misplaced,
)
from elastic_driver.core.state import (
    JobPhase,
    Round,
    State,
    WorkerPhase,
    WorkerRecord,
    finishing,
    in_phase,
    lacks_servers,
    serving_workers,
)
from elastic_driver.core.transition import Transition
from elastic_driver.words import ExitCode


def take_start(t: Transition, record: WorkerRecord) -> None:
    """Apply the start of a process."""
    t.put(replace(record, phase=WorkerPhase.MEMBER, since=t.now))
    t.state = replace(t.state, ever_ready=True)


def take_clean_exit(t: Transition, record: WorkerRecord, *, wanted: bool) -> None:
    """Apply an exit with code 0: the worker has finished, whether its place was wanted or not."""
    t.register(record.worker, WorkerState.SUCCESS)


def take_failure(t: Transition, record: WorkerRecord, crash: Crash) -> None:
    """Apply a failure: the others, including those on its host, continue."""
    lose(t, record, crash, stays=False)


def lose(t: Transition, record: WorkerRecord, crash: Crash, *, stays: bool) -> None:
    """Record the loss of a worker, which may be replaced.

    Args:
        t: the step.
        record: the worker's.
        crash: its failure.
        stays: whether its host stays in the job nevertheless.
    """
    worker, failure, fault = record.worker, crash.failure, crash.fault
    text = f"{failure.who} {failure.how}"
    if crash.wanted and stays:
        fault = Fault.OWN  # if the host is the cause, it will recur, and there must be an end
    own = fault is Fault.OWN and all_offered(t.state, (worker,))
    reset = t.in_reset().with_cause(text, failure)
    registry = t.state.registry
    # Its failure counts for the end of the job only if others succeeded; otherwise it is replaced.
    ending = finishing(t.state)
    t.state = replace(
        t.state,
        reset=reset,
        registry=registry.record(worker, WorkerState.FAILURE) if ending else registry.without(worker),
        setbacks=t.state.setbacks.failed(failure, Fault.OWN if own else Fault.OUTSIDE),
    )
    if blame_host(t, worker.hostname, crash, stays=stays):
        report_blamed(t, worker.hostname, text, told=crash.told)


def judge_losses(t: Transition) -> None:
    """Count losses through the workers' own fault as setbacks; several in a row pause all starts, then end the job."""
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
    """Return whether nothing is restarted, since the job ends with a chief that has failed or cannot continue."""
    chief = state.chief
    return chief is not None and not state.policy.restart_chief and bool(chief.lost or chief.failed)


def _await_others(t: Transition) -> None:
    """Begin the wait for slots if too few workers run: they may fail to come up however many hosts there are."""
    reset = t.in_reset()
    if len(serving_workers(t.state)) < t.state.policy.min_num_proc or lacks_servers(t.state):
        t.state = replace(t.state, reset=reset.waiting_for_slots(t.now + t.state.policy.elastic_timeout_s))


def _place_workers(t: Transition) -> None:
    """Stop workers whose place is gone, and start one in every free place."""
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


def _end_or_wait_for_slots(t: Transition) -> None:
    """End the job when its workers have ended, or when it has lacked workers for too long."""
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
        wait_for_slots(t)  # there are slots, but no worker can be started there now


def _end_if_all_have_ended(t: Transition) -> None:
    """End the job with the last worker: once one has ended with code 0, no more are started."""
    if any(record.phase is not WorkerPhase.LEAVING for record in t.state.workers):
        return
    if t.state.registry.workers_in(WorkerState.FAILURE):
        end_half_finished(t)
    else:
        t.end(ExitCode.SUCCESS, "all workers exited with code 0")


DECIDERS: tuple[Callable[[Transition], None], ...] = (
    kill_late_workers,
    partial(stop_late_starts, take_failure=take_failure, what="was not started"),
    judge_losses,
    _place_workers,
    _end_or_wait_for_slots,
    check_deadlines,
    report_unused_slots,
    give_up_silent,
)
"""The decisions after each event, in this order."""
