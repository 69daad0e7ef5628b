"""Workers that reset in place: each asks for the next round, and continues to train inside its process.

Owns the decisions for ``OnChange.IN_PLACE``, and the meaning of the reports that only such workers make.

How a round ends: every member of round r has one record in the registry of r: READY (it asks for the next round),
SUCCESS or FAILURE (its process ended). The first READY or FAILURE opens the reset. When all members have a record, or
the deadline has passed and silent members are voted out, the next round is formed from the READY workers with places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elastic_driver.core.becoming import become_in_place
from elastic_driver.core.cuts import Accused, Accuser
from elastic_driver.core.deadlines import held_until, joiners_wait_until, pause_until
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
from elastic_driver.core.events import Fault, WorkerReady
from elastic_driver.core.explain import names, room_for_standbys
from elastic_driver.core.failures import Crash, blame_host, fail_in_round, failure_of, leave_round, report_blamed
from elastic_driver.core.formation import form_round
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
    wanted_places,
    why_left_over,
)
from elastic_driver.core.registry import WorkerState, WorkerStateRegistry
from elastic_driver.core.setbacks import Failure, described
from elastic_driver.core.silence import give_up_silent
from elastic_driver.core.staffing import fill_places, kill_late_workers, report_unused_slots, stop_misplaced
from elastic_driver.core.state import (
    DISMISSED_GRACE_S,
    JobPhase,
    State,
    WorkerPhase,
    WorkerRecord,
    causes,
    deadline_of,
    finishing,
    in_phase,
    record_of,
)
from elastic_driver.core.transition import Transition
from elastic_driver.core.unreachable import leave_out_unreachable
from elastic_driver.hosts import WorkerId
from elastic_driver.words import Backend, ExitCode, NoticeKind, ReadyCause


def take_start(t: Transition, record: WorkerRecord) -> None:
    """Ignore the start of a process: it is waited for until it asks for a round."""


def take_ready(t: Transition, record: WorkerRecord, event: WorkerReady) -> None:
    """Apply a request for the next round. The first one may turn the job into one of workers that reset in place."""
    if not t.state.policy.on_change.asks_for_rounds:
        become_in_place(t, event.worker)
        record = t.state.workers.find(event.worker) or record
    _blame_who_never_asked(t)
    was_member = record.phase is WorkerPhase.MEMBER
    if was_member and _leaves_as_asked(t.state, event):
        event = replace(event, cause=ReadyCause.HOSTS_UPDATED)
    t.put(
        replace(
            record,
            phase=WorkerPhase.READY,
            since=t.now,
            # A worker with commits, or that left by itself, had finished its sync, though its report was lost.
            has_state=record.has_state
            or (was_member and (event.commits > 0 or event.cause is not ReadyCause.INTERNAL_ERROR)),
            commits=max(event.commits, record.commits) if was_member else event.commits,
            committed_at=t.now - event.uncommitted_s if was_member and event.uncommitted_s > 0 else None,
            backends=event.backends,
            running=False,
        )
    )
    t.state = replace(
        t.state,
        ever_ready=True,
        commits=max(t.state.commits, event.commits),
        registry=t.state.registry.record(event.worker, WorkerState.READY),
    )
    if not was_member and t.state.round is not None and in_target(record, standby_places(t.state)):
        t.report(f"worker {event.worker} stands by to replace a lost member")
    if was_member:
        reset = t.in_reset()
        if event.unreachable:
            reset = replace(reset, accusers=reset.accusers.put(_accuser(t.state, event)))
        if event.cause is ReadyCause.REINIT:
            reset = replace(reset, reinits=(*reset.reinits, event.worker))
        setbacks = t.state.setbacks.came_to(max(event.commits, record.commits), event.steps)
        if event.cause is ReadyCause.INTERNAL_ERROR:
            how = "raised HorovodInternalError" if event.raised else "lost its round"
            failure = Failure.said(event.worker, record.rank, how, event.detail, event.where)
            setbacks = setbacks.complained(failure, raised=event.raised)
            reset = replace(reset, unplanned=True)
            t.break_round(failure.told)
        t.state = replace(t.state, reset=reset, setbacks=setbacks)


def _leaves_as_asked(state: State, event: WorkerReady) -> bool:
    """Return whether a worker that cannot say why it leaves its round does so because it was asked to.

    Its agent reports what it has received so far, and the notice may have reached the other workers first.
    """
    return (
        event.cause is ReadyCause.INTERNAL_ERROR
        and Backend.HOROVOD in event.backends
        and state.notice_kind is NoticeKind.HOSTS_UPDATED
    )


def _blame_who_never_asked(t: Transition) -> None:
    """Count earlier ends with code 0 as failures as soon as another worker asks for the first round."""
    if t.state.round is not None or not t.state.registry.successes:
        return
    for worker in t.state.registry.workers_in(WorkerState.SUCCESS):
        failure = Failure(worker, None, "exited with code 0 before it called hvd.init(), as others did")
        wanted = (worker.hostname, worker.slot) in wanted_places(t.state)
        t.state = replace(t.state, registry=t.state.registry.without(worker))
        text = f"worker {worker} {failure.how}"
        if blame_host(t, worker.hostname, Crash(failure, Fault.OWN, wanted)):
            report_blamed(t, worker.hostname, text, told=False)
        t.note_failure(failure, Fault.OWN, text)


def _accuser(state: State, event: WorkerReady) -> Accuser:
    """Return which members of its round a worker accuses. Problems inside one host have nothing to do with networks."""
    by_host: dict[str, list[WorkerId]] = {}
    for rank in sorted(set(event.unreachable)):
        if rank < len(state.members) and state.members[rank].hostname != event.worker.hostname:
            by_host.setdefault(state.members[rank].hostname, []).append(state.members[rank])
    return Accuser(event.worker, tuple(Accused(accused[0], len(accused)) for accused in by_host.values()))


def take_clean_exit(t: Transition, record: WorkerRecord, *, wanted: bool) -> None:
    """Apply an exit with code 0: the worker has finished, if it was in a round."""
    worker = record.worker
    if record.round_id:
        leave_round(t, worker, wanted=wanted)
        return
    message = f"worker {worker} exited with code 0 before it called hvd.init()"
    if t.state.ever_ready:
        take_failure(t, record, Crash(failure_of(record, "exited with code 0"), Fault.OWN, wanted))
    elif t.state.policy.must_init:
        t.end(ExitCode.BAD_USAGE, f"{message}; is the command a training script that uses this library?")
    else:
        t.register(worker, WorkerState.SUCCESS)  # it may have nothing to train: it is not replaced


def take_failure(t: Transition, record: WorkerRecord, crash: Crash) -> None:
    """Apply a failure: the worker's host is taken out of the job, and the others of its round leave it."""
    # Horovod's own library can only abort if another worker is lost while they connect.
    is_met = record.running or Backend.HOROVOD not in record.backends
    stays = crash.aborted and not is_met and t.state.phase is JobPhase.RESETTING and bool(causes(t.state))
    fail_in_round(t, record, crash, stays=stays)


def _vote_out(t: Transition) -> None:
    kill_late_workers(t)
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


def _stop_late_workers(t: Transition) -> None:
    for record in in_phase(t.state, WorkerPhase.BOOTING, WorkerPhase.LEAVING):
        deadline = deadline_of(t.state, record)
        if deadline is None or t.now < deadline:
            continue
        if record.phase is WorkerPhase.LEAVING:
            t.stop(record, f"it did not end within {DISMISSED_GRACE_S:g} s of being dismissed")
        elif record.worker not in t.state.registry.expected:
            how = f"did not call hvd.init() within {t.state.policy.start_timeout_s:g} s (--start-timeout)"
            t.stop(record, f"it {how}; a replacement is started")


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
    what = "call hvd.init()" if t.state.phase is JobPhase.STARTING else "join the next round"
    for worker in registry.missing:
        how = f"did not {what} within {limit}"
        record = record_of(t.state, worker)
        rank = record.rank if record is not None and record.round_id else None
        # A worker that is frozen, or on an unreachable host, would have been found by its heartbeat: this one lives.
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
    """End the job, form the next round, or wait, after all expected workers have reported."""
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
    """End the job if the closed registry says so."""
    if not t.state.round_id:
        return _end_if_start_failed(t, ready)
    state, failure = t.state, t.state.first_failure
    failed = state.registry.workers_in(WorkerState.FAILURE)
    succeeded = state.registry.workers_in(WorkerState.SUCCESS)
    # Includes those that were dismissed since, as others cannot reach their hosts: they had not finished.
    members = state.registry.workers_in(WorkerState.READY)
    stateful = any(record.has_state for record in ready)
    if not stateful and not succeeded and not state.policy.durable:
        lost = tuple(dict.fromkeys(worker.hostname for worker in failed or state.members))
        hosts = f"host{'' if len(lost) == 1 else 's'} {', '.join(lost)}"
        # A failure of the training itself would recur.
        hint = "" if state.setbacks.present.failure else "; with --durable-dir, a job resumes from commits on disk"
        t.end(
            ExitCode.USER_CODE_FAILED,
            f"{described(failure)}; all workers of round {state.round_id} that had the training's state are lost "
            f"({hosts}){hint}",
        )
    elif not members and not failed:
        t.end(ExitCode.SUCCESS, f"all workers of round {state.round_id} exited with code 0")
    elif succeeded and failed:
        end_half_finished(t)
    elif succeeded:
        t.end(
            ExitCode.USER_CODE_FAILED,
            f"{names(succeeded)} exited with code 0 while {names(members)} were still training: a rank left early",
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
        t.end(ExitCode.SUCCESS, f"all {number} exited with code 0 without calling hvd.init()")
        return True
    if done:
        end_half_finished(t)
        return True
    if t.state.first_failure is None:
        return False
    t.end(
        ExitCode.USER_CODE_FAILED,
        f"{described(t.state.first_failure)}; all workers failed before their first round",
    )
    return True


def _set_planned_notice(t: Transition) -> None:
    """Ask the members to leave at their next commit if the next round would differ from this one."""
    targets = target_places(t.state)
    members = in_phase(t.state, WorkerPhase.MEMBER)
    off = tuple(record for record in members if not in_target(record, targets))
    fit = that_fit(t.state, (*members, *reachable(t.state)))
    joiners = tuple(record for record in fit if record.phase is WorkerPhase.READY)
    booting = tuple(r for r in in_phase(t.state, WorkerPhase.BOOTING) if in_target(r, targets))
    waits = joiners_wait_until(t.state)
    grows = bool(joiners) and (waits is None or t.now >= waits)
    # Departing members that are needed train on while their replacements boot.
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


def _report_missing_standbys(t: Transition) -> None:
    """Report that there is no room for all standbys; again only if there is less room than ever before."""
    if not t.state.policy.num_standby or t.state.phase is not JobPhase.RUNNING or finishing(t.state):
        return
    room, told = len(standby_places(t.state)), t.state.standby_room
    if room < (t.state.policy.num_standby if told is None else told):
        t.report(room_for_standbys(t.state, t.now))
        t.state = replace(t.state, standby_room=room)


DECIDERS: tuple[Callable[[Transition], None], ...] = (
    _vote_out,
    _place_workers,
    _close_or_tell,
    check_deadlines,
    _report_missing_standbys,
    report_unused_slots,
    give_up_silent,
)
"""The decisions after each event, in this order."""
