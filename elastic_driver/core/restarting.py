"""Workers that are restarted each round: their processes are started with their ranks, and ended together.

Owns the decisions for ``OnChange.RESTART``, and what the starts and ends of such workers mean.

A round has four stages. It is launched: its members are fixed, and their processes are started with the ranks that they
keep. It begins when all of them run. It is over at the first failure, or when the job's places differ from its
members': the remaining workers are stopped. When all have ended, the next round is launched; a worker that does not end
in time keeps its place, and nothing else waits for it. A worker that has ended with code 0 is restarted with the
others: they cannot continue without it, and its work is in the checkpoint.

From the launch on, a worker that fails is a failed member. So a script that fails before its siblings have started
counts like any other failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from elastic_driver.core.assignment import assign_ranks, hosts_of
from elastic_driver.core.deadlines import first_to_go, gone_by, launch_held_until, pause_until
from elastic_driver.core.endings import (
    at_start,
    check_deadlines,
    end_if_given_up,
    end_if_no_host_can_start,
    is_put_off,
    judge,
    report_pause,
    wait_for_slots,
)
from elastic_driver.core.events import Fault, PublishRound, StartWorker
from elastic_driver.core.failures import Crash, fail_in_round, is_needed, leave_round
from elastic_driver.core.formation import cause_of, warn_of_absent_hosts
from elastic_driver.core.past import forget_round
from elastic_driver.core.placement import Places, first_root, launch_places, usable_slots
from elastic_driver.core.registry import WorkerState, WorkerStateRegistry
from elastic_driver.core.setbacks import described
from elastic_driver.core.silence import give_up_silent
from elastic_driver.core.staffing import kill_late_workers, name_workers, report_unused_slots, stop_late_starts
from elastic_driver.core.state import (
    JobPhase,
    Launch,
    Round,
    WorkerPhase,
    WorkerRecord,
    causes,
    finishing,
    gives_time,
    in_phase,
    is_on_one_host,
)
from elastic_driver.core.transition import Transition
from elastic_driver.words import Ending, ExitCode


def take_start(t: Transition, record: WorkerRecord) -> None:
    """Apply the start of a process: it is ready for the round for which it was started."""
    t.put(replace(record, phase=WorkerPhase.READY, since=t.now))
    t.state = replace(t.state, ever_ready=True)
    t.register(record.worker, WorkerState.READY)


def take_clean_exit(t: Transition, record: WorkerRecord, *, wanted: bool) -> None:
    """Apply an exit with code 0: the worker has finished."""
    leave_round(t, record.worker, wanted=wanted)


def take_failure(t: Transition, record: WorkerRecord, crash: Crash) -> None:
    """Apply a failure, which ends the round; a script that fails at the start of the training may end the job."""
    # A worker that fails when its round is over already mostly fails because of that, as do those that are stopped for
    # it: both may be reported in one step, as after a takeover.
    follows = t.state.phase is JobPhase.RESETTING and t.state.first_failure is not None
    stays = crash.ran and _stays(t, record, Fault.OUTSIDE if follows else crash.fault)
    fail_in_round(t, record, crash, stays=stays)
    if crash.wanted and not stays and not follows:
        _end_at_start(t, record, crash)


def _stays(t: Transition, record: WorkerRecord, fault: Fault) -> bool:
    """Return whether the host of a failed worker stays in the job.

    It does if the job needs it, and the worker was killed, or had trained for a while, or failing starts are retried.
    The setbacks and the limit of resets bound how often. If hosts return after a cooldown, this one gets a cooldown
    too.
    """
    state, policy = t.state, t.state.policy
    if policy.cooldown_range_s is not None:
        return False
    if state.setbacks.is_start(t.now) and fault is Fault.OWN:
        ends = is_on_one_host(state) if policy.ends_at_start else not policy.retries_starts
        if ends:
            return False
    return is_needed(state, record.worker.hostname)


def _end_at_start(t: Transition, record: WorkerRecord, crash: Crash) -> None:
    """End the job if a worker has failed by itself before any training: it would most likely fail again.

    With other hosts, one of them may be lost without that being known yet: then the second consecutive failure
    ends the job (:func:`~elastic_driver.core.endings.end_if_given_up`).
    """
    state, policy = t.state, t.state.policy
    if not policy.ends_at_start or crash.fault is not Fault.OWN or not state.setbacks.is_start(t.now):
        return
    if not is_on_one_host(state):
        return
    if not policy.blames_hosts or is_needed(state, record.worker.hostname):
        t.end(ExitCode.USER_CODE_FAILED, f"{described(crash.failure)}, {at_start(crash.failure, policy)}")


def _begin_or_end_round(t: Transition) -> None:
    """Begin the launched round when all its processes run; end the running one when it cannot continue."""
    if t.state.phase is JobPhase.STARTING:
        if t.state.registry.workers_in(WorkerState.FAILURE):
            _end_launch(t)
        elif t.state.registry.complete:
            _begin_round(t)
    if t.state.phase is JobPhase.RUNNING and _has_other_places(t):
        t.in_reset()
    if t.state.phase is JobPhase.RUNNING and t.state.registry.complete:
        t.end(ExitCode.SUCCESS, f"all workers of round {t.state.round_id} exited with code 0")
    if t.state.phase is JobPhase.RESETTING:
        _stop_the_rest(t)


def _launch_next(t: Transition) -> None:
    """Launch a round when no process of the last one is left, there are slots, and no pause is due."""
    if t.state.phase is JobPhase.WAITING:
        places, enough = launch_places(t.state), usable_slots(t.state) >= t.state.policy.num_proc
        if not _awaits_more(t, places, due=enough) and enough:
            _launch(t, places)
        return
    if t.state.phase is not JobPhase.RESETTING:
        return
    fails_again = judge(t)
    if end_if_given_up(t):
        return
    if fails_again:
        report_pause(t, pause_until(t.state))
    if _waits_for_ends(t):
        t.state = replace(t.state, last_call=None)  # the time for others has passed meanwhile
        return
    places = launch_places(t.state)
    if len(places) < t.state.policy.min_num_proc:
        if not end_if_no_host_can_start(t, (), begun=True):
            wait_for_slots(t)
            t.state = replace(t.state, reset=replace(t.in_reset(), lacks_slots=True), last_call=None)
        return
    if _awaits_more(t, places, due=t.in_reset().lacks_slots):
        return
    t.state = replace(t.state, reset=replace(t.in_reset(), lacks_slots=False))
    if not is_put_off(t, launch_held_until(t.state)):
        _launch(t, places)


def _awaits_more(t: Transition, places: Places, *, due: bool) -> bool:
    """Return whether new slots wait for more slots: hosts that appear together cost one restart.

    Args:
        t: the step.
        places: the places that a round would have now.
        due: whether there are new slots for which a round is to be launched. If they are gone again, nothing is due.
    """
    policy = t.state.policy
    most = policy.max_num_proc
    has_room = most is None or len(places) < most - most % policy.multiple
    until = None
    if due and has_room and policy.last_call_s > 0:
        until = t.now + policy.last_call_s if t.state.last_call is None else t.state.last_call
        until = None if t.now >= until else until
    if until != t.state.last_call:
        t.state = replace(t.state, last_call=until)
    return until is not None


def _launch(t: Transition, places: Places) -> None:
    state = t.state
    fresh = name_workers(t, places)
    if not state.round_id:
        warn_of_absent_hosts(t)
    placed = assign_ranks(tuple(fresh), host_order=state.discovery.order, root=first_root(state, fresh))
    members = tuple(member.worker for member in placed)
    # A round whose processes could not all be started has never begun.
    old_size = len(state.members) if state.launch is None else state.launch.old_size
    cause, round_id, reset = cause_of(t, members), state.next_round_id, t.in_reset()
    tally = state.tally.one_more(t.now, state.policy.reset_window_s) if reset.unplanned else state.tally
    t.state = replace(
        forget_round(t.state, Round(round_id, members, None, reset.began)),
        # Nothing else of the reset is dropped: it continues until the round begins.
        reset=replace(reset, unplanned=False, peers_lost=False, lacks_slots=False),
        last_call=None,
        launch=Launch(placed, cause, old_size),
        tally=tally,
    )
    rank_of = {member.worker: member.slot.rank for member in placed}
    booting = in_phase(t.state, WorkerPhase.BOOTING)
    t.put_all(replace(record, round_id=round_id, rank=rank_of[record.worker]) for record in booting)
    hosts = hosts_of(placed)
    t.commands += [StartWorker(member.worker, member.slot, hosts=hosts) for member in placed]


def _begin_round(t: Transition) -> None:
    state = t.state
    assert state.launch is not None
    assert state.round is not None
    begun = replace(state.round, commits=state.commits)
    t.commands.append(
        PublishRound(
            round_id=begun.round_id,
            placed=state.launch.placed,
            sync=begun.sync,
            commits=begun.commits,
            backend=begun.backend,
            cause=state.launch.cause,
            old_size=state.launch.old_size,
        )
    )
    registry = WorkerStateRegistry(state.registry.expected)
    for worker in state.registry.workers_in(WorkerState.SUCCESS):  # before all processes ran
        registry = registry.record(worker, WorkerState.SUCCESS)
    setbacks = state.setbacks.begin(t.now)
    t.state = replace(state, round=begun, reset=None, registry=registry, launch=None, setbacks=setbacks)
    t.put_all(replace(r, phase=WorkerPhase.MEMBER, since=t.now) for r in in_phase(state, WorkerPhase.READY))


def _end_launch(t: Transition) -> None:
    """End a launch: the job lacks what a round needs, however many hosts there are, until one has begun."""
    state, policy, reset = t.state, t.state.policy, t.in_reset()
    assert state.launch is not None
    reset = replace(
        reset.waiting_for_slots(t.now + policy.elastic_timeout_s),
        deadline=t.now + policy.start_timeout_s,
        waits_for_ends=True,
    )
    t.state = replace(state, reset=reset, launch=replace(state.launch, broken=True))


def _has_other_places(t: Transition) -> bool:
    """Return whether the round is over since the job has other places.

    New places wait for more of them; a lost place ends the round at once: its machine may be gone soon.
    """
    has_left = t.state.registry.expected != t.state.members
    places = launch_places(t.state)
    old = [(worker.hostname, worker.slot) for worker in t.state.members]
    stays = all(place in places for place in old)
    grows = not finishing(t.state) and stays and len(places) > len(old)
    if _awaits_more(t, places, due=grows and not has_left) or finishing(t.state):
        return False
    # A member that has left by itself, since its place was gone, leaves the others with the ranks of a larger round.
    return has_left or grows or not stays


def _stop_the_rest(t: Transition) -> None:
    """Stop the workers that must end for the next round; each counts as having asked for it.

    While all members live they may checkpoint together. Once one is lost the others hang in their current collective,
    and cannot make any more progress.
    """
    state, policy = t.state, t.state.policy
    reset = t.in_reset()
    members = dict.fromkeys(state.members)
    staying = [record for record in state.workers if record.phase is not WorkerPhase.LEAVING]
    slow = [record for record in state.workers if record.worker in members and gives_time(state, record) is not None]
    is_broken = reset.unplanned or reset.peers_lost or state.registry.expected != state.members
    due = first_to_go(state, (*staying, *slow))
    is_late = due is not None and t.now >= due
    what = "other workers of the round are lost" if is_broken else "one of its hosts goes away"
    hurry = f"round {state.round_id} is over, and {what}"
    why = f"round {state.round_id} is over: {'; '.join(causes(state)) or 'the hosts have changed'}"
    for record in staying:
        ending = Ending.BROKEN if is_broken or is_late else Ending.PLANNED
        t.retire(record, hurry if is_late and not is_broken else why, ending)
        t.register(record.worker, WorkerState.READY)
    if is_broken or is_late:
        for record in slow:
            t.hurry(record, hurry)
        if slow:
            deadline = min(reset.deadline, t.now + policy.start_timeout_s)
            t.state = replace(t.state, reset=replace(t.in_reset(), deadline=deadline))
    elif staying:
        # Nothing is killed before --drain-timeout; a process that is left after that does not end by itself.
        deadline = t.now + policy.drain_timeout_s + policy.start_timeout_s
        t.state = replace(t.state, reset=replace(reset, deadline=deadline))


def _waits_for_ends(t: Transition) -> bool:
    """Return whether processes of the last round delay the next."""
    until = gone_by(t.state)
    if until is not None and t.now >= until:
        t.state = replace(t.state, reset=replace(t.in_reset(), waits_for_ends=False))
    return until is not None and t.now < until


DECIDERS: tuple[Callable[[Transition], None], ...] = (
    kill_late_workers,
    partial(stop_late_starts, take_failure=take_failure, what="was not started"),
    _begin_or_end_round,
    _launch_next,
    check_deadlines,
    report_unused_slots,
    give_up_silent,
)
"""The decisions after each event, in this order."""
