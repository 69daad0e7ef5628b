"""The membership core: the only code that changes who is in the job.

``step(state, event, now) -> (state, commands)`` is a pure function. An event changes what is known; then ``settle``
looks at the levels (hosts, living workers, reports) and decides. So feeding an event twice is harmless, and changes
that cancel out before anything was done about them do nothing.

What follows here is for workers that reset in place. Those that are restarted, and those without rounds, have deciders
of their own: :mod:`elastic_driver.core.restarting`, :mod:`elastic_driver.core.roundless`.

How a round ends. Every member of round r has one record in the registry of r: READY (it asks for the next round),
SUCCESS or FAILURE (its process ended). The first READY or FAILURE opens the reset. When all members have a record, or
the deadline has passed and the silent are voted out, the next round is formed from those who are READY and placed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from elastic_driver.core import chief, restarting, roundless
from elastic_driver.core.deadlines import held_until, joiners_wait_until, next_deadline, pause_until
from elastic_driver.core.endings import (
    check_deadlines,
    end_half_finished,
    end_if_given_up,
    end_if_no_host_can_start,
    is_put_off,
    judge,
    report_pause,
    wait_for_slots,
)
from elastic_driver.core.events import (
    Command,
    Event,
    Fault,
    KillWorker,
    ReportExit,
    WorkerExited,
    WorkerNotStarted,
    WorkersReported,
)
from elastic_driver.core.explain import explain, names, room_for_standbys, unused_slots
from elastic_driver.core.formation import form_round
from elastic_driver.core.intake import take
from elastic_driver.core.invariants import check_invariants
from elastic_driver.core.past import forget_worker
from elastic_driver.core.placement import (
    in_target,
    is_drained,
    next_members,
    reachable,
    standby_places,
    target_places,
    that_fit,
    trains_until_replaced,
    usable_slots,
    why_left_over,
)
from elastic_driver.core.registry import WorkerState, WorkerStateRegistry
from elastic_driver.core.setbacks import Failure, described
from elastic_driver.core.silence import give_up_silent
from elastic_driver.core.staffing import fill_places, stop_late_starts, stop_misplaced
from elastic_driver.core.state import (
    DISMISSED_GRACE_S,
    JobPhase,
    Kill,
    Policy,
    State,
    WorkerPhase,
    WorkerRecord,
    deadline_of,
    finishing,
    in_phase,
    leaves_by,
    new_state,
    record_of,
)
from elastic_driver.core.transition import Transition
from elastic_driver.core.unreachable import leave_out_unreachable
from elastic_driver.words import ExitCode, NoticeKind, OnChange

__all__ = ["Policy", "State", "check_invariants", "explain", "new_state", "next_deadline", "step"]


def step(state: State, event: Event, now: float) -> tuple[State, list[Command]]:
    """What the job becomes, and what is to be done, when this happens at this time.

    Args:
        state: the job so far; not changed.
        event: what happened.
        now: the present, seconds of a clock that never goes back.

    Returns:
        The new state, and the commands in the order in which they are to be carried out.
    """
    if state.ended:
        return _after_the_end(state, event)
    transition = Transition(state, now)
    take(transition, event)
    settle(transition)
    return transition.state, transition.commands


def _after_the_end(state: State, event: Event) -> tuple[State, list[Command]]:
    """Nothing follows from anything any more; it is told who has ended."""
    events = event.reports if isinstance(event, WorkersReported) else (event,)
    told: list[Command] = []
    for gone in events:
        if not isinstance(gone, WorkerExited | WorkerNotStarted):
            continue
        record = record_of(state, gone.worker)
        if record is not None and isinstance(gone, WorkerExited):
            told.append(ReportExit(gone.worker, expected=not record.failed))
        state = forget_worker(state, gone.worker)
    return state, told


def settle(t: Transition) -> None:
    """Looks at the levels and does what is due. Every branch leaves a deadline, an end, or a running round."""
    # Each may end the job, and then nothing more is to be done.
    policy = t.state.policy
    for decide in _WITH_CHIEF if policy.num_parameter_servers else _DECIDERS[policy.on_change]:
        if t.state.ended:
            return
        decide(t)


def _vote_out(t: Transition) -> None:
    _kill_late_workers(t)
    _stop_late_workers(t)
    _vote_out_the_silent(t)


def _place_workers(t: Transition) -> None:
    if t.state.phase is JobPhase.WAITING:
        _start_first_round(t)
    stop_misplaced(t)
    fill_places(t)


def _close_or_tell(t: Transition) -> None:
    if t.state.phase is not JobPhase.WAITING and t.state.registry.complete:
        round_id = t.state.round_id
        _close_registry(t)
        if t.state.round_id != round_id:
            fill_places(t)  # the standbys of a round are started when it is formed
    if t.state.phase is JobPhase.RUNNING and not finishing(t.state):
        _set_planned_notice(t)


def _kill_late_workers(t: Transition) -> None:
    """Ends who said that it exits and did not, and who trains on in a drained place."""
    policy = t.state.policy
    limited = [record for record in t.state.workers if record.exit_by is not None or record.leave_by is not None]
    for record in limited:
        if record.exit_by is not None and t.now >= record.exit_by:
            how = f"did not end within {policy.start_timeout_s:g} s of its exit (--start-timeout)"
            command = KillWorker(record.worker, how, hangs=True, exits=True)
            record = t.kill(replace(record, exit_by=None), command, Kill(how, Fault.OWN))
        if record.leave_by is not None and t.now >= record.leave_by:
            record = replace(record, leave_by=None)
            # Who is READY waits for the others, and for slots.
            trains = record.phase in (WorkerPhase.BOOTING, WorkerPhase.MEMBER)
            machine = leaves_by(t.state, record.worker.hostname)
            goes = machine is not None and t.now >= machine
            if goes and usable_slots(t.state) < policy.min_num_proc:
                t.put(record)  # without it there is nobody to go on, and its machine may live longer than was said
            elif trains and is_drained(t.state, record.worker.hostname, record.worker.slot):
                how, fault = f"did not leave within {policy.drain_timeout_s:g} s (--drain-timeout)", Fault.OWN
                reason = how
                if goes:
                    how, fault = "had not left when its host was about to go", Fault.OUTSIDE
                    reason = f"{how}: what it has done since the last commit is lost"
                t.kill(record, KillWorker(record.worker, reason), Kill(how, fault))
            else:
                t.put(record)


def _stop_late_workers(t: Transition) -> None:
    for record in in_phase(t.state, WorkerPhase.BOOTING, WorkerPhase.LEAVING):
        deadline = deadline_of(t.state, record)
        if deadline is None or t.now < deadline:
            continue
        if record.phase is WorkerPhase.LEAVING:
            t.stop(record, f"it did not end within {DISMISSED_GRACE_S:g} s of being dismissed")
        elif record.worker not in t.state.registry.expected:
            how = f"did not call hvd.init() within {t.state.policy.start_timeout_s:g} s (--start-timeout)"
            t.stop(record, f"it {how}; another is started in its place")


def _vote_out_the_silent(t: Transition) -> None:
    registry, reset = t.state.registry, t.state.reset
    if reset is None or registry.complete or t.now < reset.deadline:
        return
    limit = f"{t.state.policy.start_timeout_s:g} s (--start-timeout)"
    if not t.state.ever_ready:
        other = "" if t.state.policy.must_init else "; if it never does, use --on-change restart"
        t.end(
            ExitCode.BAD_USAGE,
            f"no worker called hvd.init() within {limit}; missing: {names(registry.missing)}. Does the script call "
            f"it? If it only starts slowly, raise --start-timeout{other}",
        )
        return
    what = "call hvd.init()" if t.state.phase is JobPhase.STARTING else "ask for the next round"
    for worker in registry.missing:
        how = f"did not {what} within {limit}"
        record = record_of(t.state, worker)
        rank = record.rank if record is not None and record.round_id else None
        # Whoever is frozen, or on a host that cannot be reached, is found by its heartbeat before: this one lives.
        t.note_failure(Failure(worker, rank, how), Fault.OWN, f"worker {worker} hung ({how})")
        t.state = replace(t.state, registry=t.state.registry.record(worker, WorkerState.FAILURE))
        if record is not None:
            t.stop(record, f"it {how}")


def _start_first_round(t: Transition) -> None:
    if usable_slots(t.state) < t.state.policy.num_proc:
        return
    t.in_reset()
    fill_places(t)
    t.state = replace(t.state, registry=WorkerStateRegistry(tuple(record.worker for record in t.state.workers)))


def _close_registry(t: Transition) -> None:
    """All who are expected have reported: ends the job, forms the next round, or waits."""
    leave_out_unreachable(t)
    if t.state.ended:
        return
    ready = in_phase(t.state, WorkerPhase.READY)
    fails_again = judge(t)
    if _end_if_over(t, ready):
        return
    members = next_members(t.state)
    if fails_again:
        report_pause(t, pause_until(t.state))
    if len(members) < t.state.policy.min_num_proc:
        if not end_if_no_host_can_start(t, ready, begun=bool(t.state.round_id)):
            wait_for_slots(t)
        return
    if not is_put_off(t, held_until(t.state)):
        form_round(t, members, ready)


def _end_if_over(t: Transition, ready: tuple[WorkerRecord, ...]) -> bool:
    """Ends the job when the closed registry says so."""
    if not t.state.round_id:
        return _end_if_start_failed(t, ready)
    state, failure = t.state, t.state.first_failure
    failed = state.registry.workers_in(WorkerState.FAILURE)
    succeeded = state.registry.workers_in(WorkerState.SUCCESS)
    # Those too that were dismissed since, as others cannot reach their hosts: they had not finished.
    members = state.registry.workers_in(WorkerState.READY)
    stateful = any(record.has_state for record in ready)
    if not stateful and not succeeded and not state.policy.durable:
        hosts = ", ".join(dict.fromkeys(worker.hostname for worker in failed or state.members))
        # A failure of the training's own would come again.
        hint = "" if state.setbacks.present.failure else "; with --durable-dir a job goes on from commits on disc"
        t.end(
            ExitCode.USER_CODE_FAILED,
            f"all workers of round {state.round_id} that had the training's state are lost (hosts {hosts}); "
            f"first: {described(failure)}{hint}",
        )
    elif not members and not failed:
        t.end(ExitCode.SUCCESS, f"all workers of round {state.round_id} ended with code 0")
    elif succeeded and failed:
        end_half_finished(t)
    elif succeeded:
        t.end(
            ExitCode.USER_CODE_FAILED,
            f"{names(succeeded)} exited with code 0 while {names(members)} still trained: a rank left early",
        )
    else:
        return end_if_given_up(t)
    return True


def _end_if_start_failed(t: Transition, ready: tuple[WorkerRecord, ...]) -> bool:
    if ready or in_phase(t.state, WorkerPhase.BOOTING):
        return False
    done = t.state.registry.workers_in(WorkerState.SUCCESS)
    if done and t.state.first_failure is None:
        number = "worker" if len(done) == 1 else f"{len(done)} workers"
        t.end(ExitCode.SUCCESS, f"all {number} ended with code 0; none called hvd.init()")
        return True
    if done:
        end_half_finished(t)
        return True
    if t.state.first_failure is None:
        return False
    t.end(
        ExitCode.USER_CODE_FAILED,
        f"all workers failed before their first round; first: {described(t.state.first_failure)}",
    )
    return True


def _set_planned_notice(t: Transition) -> None:
    """Asks the members to leave at their next commit when the round they would get is another than this one."""
    targets = target_places(t.state)
    members = in_phase(t.state, WorkerPhase.MEMBER)
    off = tuple(record for record in members if not in_target(record, targets))
    fit = that_fit(t.state, (*members, *reachable(t.state)))
    joiners = tuple(record for record in fit if record.phase is WorkerPhase.READY)
    booting = tuple(r for r in in_phase(t.state, WorkerPhase.BOOTING) if in_target(r, targets))
    waits = joiners_wait_until(t.state)
    grows = bool(joiners) and (waits is None or t.now >= waits)
    # Members that leave go on training while those who are to replace them boot, if they are needed until then.
    enough = len(fit) >= t.state.policy.min_num_proc
    if not trains_until_replaced(t.state, off, fit) and (grows or (off and (enough or not booting))):
        drained = dict.fromkeys(r.worker.hostname for r in off if is_drained(t.state, r.worker.hostname, r.worker.slot))
        going = [f"host {name} drained" for name in drained]
        for name in dict.fromkeys(r.worker.hostname for r in off if r.worker.hostname not in drained):
            flag = why_left_over(t.state, name)
            going.append(f"host {name} {f'left over ({flag})' if flag else 'removed or reduced'}")
        coming = [f"host {name} ready" for name in dict.fromkeys(r.worker.hostname for r in joiners)]
        t.notify(NoticeKind.HOSTS_UPDATED, ", ".join((*going, *coming)))
    elif t.state.notice_kind is NoticeKind.HOSTS_UPDATED:
        t.notify(NoticeKind.NONE, "")


def _tell_of_standbys(t: Transition) -> None:
    """Says that there is no room for all standbys; again only when there is less than ever before."""
    if not t.state.policy.num_standby or t.state.phase is not JobPhase.RUNNING or finishing(t.state):
        return
    room, told = len(standby_places(t.state)), t.state.standby_room
    if room < (t.state.policy.num_standby if told is None else told):
        t.report(room_for_standbys(t.state, t.now))
        t.state = replace(t.state, standby_room=room)


def _tell_of_unused(t: Transition) -> None:
    """Says which slots a multiple leaves over, whenever it is another answer."""
    if t.state.policy.multiple == 1 or t.state.phase not in (JobPhase.STARTING, JobPhase.RUNNING):
        return
    text = unused_slots(t.state)
    if text != t.state.unused:
        t.state = replace(t.state, unused=text)
        if text:
            t.report(text)


# For jobs with a chief, in this order: when it has ended, nobody who has to leave is used any more.
_WITH_CHIEF: tuple[Callable[[Transition], None], ...] = (
    stop_late_starts,
    roundless.judge_losses,
    chief.mind_chief,
    chief.place_servers,
    chief.start_chief,
    chief.end_or_wait,
    check_deadlines,
    chief.give_up_hosts,
)

# For each kind of other workers, in this order.
_DECIDERS: Mapping[OnChange, tuple[Callable[[Transition], None], ...]] = {
    OnChange.IN_PLACE: (
        _vote_out,
        _place_workers,
        _close_or_tell,
        check_deadlines,
        _tell_of_standbys,
        _tell_of_unused,
        give_up_silent,
    ),
    OnChange.RESTART: (
        _kill_late_workers,
        stop_late_starts,
        restarting.begin_or_end_round,
        restarting.launch_next,
        check_deadlines,
        _tell_of_unused,
        give_up_silent,
    ),
    OnChange.NO_ROUNDS: (
        _kill_late_workers,
        stop_late_starts,
        roundless.judge_losses,
        roundless.place_workers,
        roundless.end_or_wait_for_slots,
        check_deadlines,
        _tell_of_unused,
        give_up_silent,
    ),
}
