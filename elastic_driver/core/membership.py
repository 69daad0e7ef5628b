"""The membership core: the only code that changes who is in the job.

``step(state, event, now) -> (state, commands)`` is a pure function. An event changes what is known; then ``settle``
looks at the levels (hosts, living workers, reports) and decides. So feeding an event twice is harmless, and changes
that cancel out before anything was done about them do nothing.

How a round ends. Every member of round r has one record in the registry of r: READY (it asks for the next round),
SUCCESS or FAILURE (its process ended). The first READY or FAILURE opens the reset. When all members have a record, or
the deadline has passed and the silent are voted out, the next round is formed from those who are READY and placed.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_driver.core.assignment import assign_ranks
from elastic_driver.core.deadlines import held_until, joiners_wait_until, next_deadline, pause_until
from elastic_driver.core.events import (
    Command,
    Event,
    Fault,
    KillWorker,
    ReportExit,
    StartWorker,
    WorkerExited,
    WorkerNotStarted,
    WorkersReported,
)
from elastic_driver.core.explain import explain, names, room_for_standbys, why_no_place
from elastic_driver.core.formation import form_round
from elastic_driver.core.intake import take
from elastic_driver.core.invariants import check_invariants
from elastic_driver.core.past import forget_worker
from elastic_driver.core.placement import (
    in_target,
    is_drained,
    keeps_its_places,
    next_members,
    standby_places,
    target_places,
    usable_slots,
    wanted_places,
)
from elastic_driver.core.registry import WorkerState, WorkerStateRegistry
from elastic_driver.core.setbacks import Failure
from elastic_driver.core.state import (
    DISMISSED_GRACE_S,
    JobPhase,
    Kill,
    Policy,
    State,
    WorkerPhase,
    WorkerRecord,
    causes,
    deadline_of,
    finishing,
    in_phase,
    new_state,
    record_of,
)
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import WorkerId
from elastic_driver.words import ExitCode, NoticeKind

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
    for decide in (_vote_out, _place_workers, _close_or_tell, _check_deadlines, _tell_of_standbys):
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
    _stop_misplaced(t)
    _fill_places(t)


def _close_or_tell(t: Transition) -> None:
    if t.state.phase is not JobPhase.WAITING and t.state.registry.complete:
        round_id = t.state.round_id
        _close_registry(t)
        if t.state.round_id != round_id:
            _fill_places(t)  # the standbys of a round are started when it is formed
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
            if trains and is_drained(t.state, record.worker.hostname, record.worker.slot):
                how = f"did not leave within {policy.drain_timeout_s:g} s (--drain-timeout)"
                t.kill(record, KillWorker(record.worker, how), Kill(how, Fault.OWN))
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
        t.end(
            ExitCode.BAD_USAGE,
            f"no worker called hvd.init() within {limit}; missing: {names(registry.missing)}. Does the script call "
            "it? If it only starts slowly, raise --start-timeout",
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
    _fill_places(t)
    t.state = replace(t.state, registry=WorkerStateRegistry(tuple(record.worker for record in t.state.workers)))


def _stop_misplaced(t: Transition) -> None:
    """Blank workers whose place is gone leave at once; those with state leave when the round is closed."""
    places = wanted_places(t.state)
    for record in t.state.workers:
        if record.round_id or record.phase is WorkerPhase.LEAVING or in_target(record, places):
            continue
        t.state = replace(t.state, registry=t.state.registry.without(record.worker))
        reason = why_no_place(t.state, record.worker.hostname, record.worker.slot)
        if record.phase is WorkerPhase.READY:
            t.dismiss(record, reason)
        else:
            t.stop(record, reason)


def _fill_places(t: Transition) -> None:
    """Starts a worker in every wanted place that has none (a leaving one still holds its place)."""
    if t.state.phase in (JobPhase.WAITING, JobPhase.ENDED) or finishing(t.state):
        return
    held = {(record.worker.hostname, record.worker.slot) for record in t.state.workers}
    # Nobody boots a spare on the cores that a reset needs.
    standbys = standby_places(t.state) if t.state.phase is JobPhase.RUNNING else {}
    free = [place for place in (*target_places(t.state), *standbys) if place not in held]
    if not free:
        return
    listed = {host.name for host in t.state.hosts}
    attempts, given = t.state.attempts.give(free, needed=lambda place: place[0] in listed or place in held)
    fresh = dict.fromkeys(WorkerId(*place, attempt) for place, attempt in zip(free, given, strict=True))
    records = (WorkerRecord(worker, WorkerPhase.BOOTING, t.now) for worker in fresh)
    t.state = replace(t.state, workers=t.state.workers.put(*records), attempts=attempts)
    staying = [record for record in t.state.workers if record.phase is not WorkerPhase.LEAVING]
    ranked = dict.fromkeys(record.worker for record in staying if not in_target(record, standbys))
    for placed in assign_ranks(tuple(ranked), host_order=t.state.discovery.order, root=None):
        if placed.worker in fresh:
            t.commands.append(StartWorker(placed.worker, placed.slot))
    if len(ranked) == len(staying):
        return
    # A standby is planned as if all had a rank: that clashes with nobody's local rank.
    for placed in assign_ranks([r.worker for r in staying], host_order=t.state.discovery.order, root=None):
        if placed.worker in fresh and placed.worker not in ranked:
            t.commands.append(StartWorker(placed.worker, placed.slot, standby=True))


def _close_registry(t: Transition) -> None:
    """All who are expected have reported: ends the job, forms the next round, or waits."""
    ready = in_phase(t.state, WorkerPhase.READY)
    fails_again = _judge(t)
    if _end_if_over(t, ready):
        return
    members = next_members(t.state)
    if fails_again and (until := pause_until(t.state)) is not None:
        then = f"pausing for {until - t.now:g} s; {t.state.policy.setbacks_limit} times in a row end the job"
        t.report(f"{t.state.setbacks.told}; {then}", warning=True)
    if len(members) < t.state.policy.min_num_proc:
        if not _end_if_no_host_can_start(t, ready):
            _wait_for_slots(t)
        return
    waits = held_until(t.state)
    late = t.state.slots_deadline is not None and t.now >= t.state.slots_deadline
    if waits is None or t.now >= waits or late:
        form_round(t, members, ready)


def _judge(t: Transition) -> bool:
    """Once for each round, when it is over: was it a setback? Returns whether it was."""
    state = t.state
    if not state.round_id or state.setbacks.present.until is not None:
        return False
    setbacks = state.setbacks
    # A failure on a machine that is being taken away, or of those who had to do with it, says nothing of the script.
    if not keeps_its_places(state):
        setbacks = setbacks.excuse()
    setbacks = setbacks.judged(t.now, state.policy.pause_range_s)
    t.state = replace(state, setbacks=setbacks)
    return setbacks.count > state.setbacks.count


def _end_if_over(t: Transition, ready: tuple[WorkerRecord, ...]) -> bool:
    """Ends the job when the closed registry says so."""
    if not t.state.round_id:
        return _end_if_start_failed(t, ready)
    state, failure = t.state, t.state.first_failure
    failed = state.registry.workers_in(WorkerState.FAILURE)
    succeeded = state.registry.workers_in(WorkerState.SUCCESS)
    before = frozenset(state.members)
    members = tuple(record.worker for record in ready if record.worker in before)
    stateful = any(record.has_state for record in ready)
    if not stateful and not succeeded and not state.policy.durable:
        hosts = ", ".join(dict.fromkeys(worker.hostname for worker in failed or state.members))
        t.end(
            ExitCode.USER_CODE_FAILED,
            f"all workers of round {state.round_id} that had the training's state are lost (hosts {hosts}); "
            f"first: {_described(failure)}",
        )
    elif not members and not failed:
        t.end(ExitCode.SUCCESS, f"all workers of round {state.round_id} ended with code 0")
    elif succeeded and failed:
        t.end(ExitCode.USER_CODE_FAILED, f"{_described(failure)}, when other workers had already finished")
    elif succeeded:
        t.end(
            ExitCode.USER_CODE_FAILED,
            f"{names(succeeded)} exited with code 0 while {names(members)} still trained: a rank left early",
        )
    elif state.setbacks.count >= state.policy.setbacks_limit:
        t.end(ExitCode.USER_CODE_FAILED, state.setbacks.told)
    elif t.in_reset().unplanned and _limit_is_used_up(t):
        t.end(
            ExitCode.RESET_LIMIT,
            f"the limit of {state.policy.reset_limit} unplanned resets (--reset-limit) is used up; the last cause: "
            f"{'; '.join(causes(state))}",
        )
    else:
        return False
    return True


def _end_if_start_failed(t: Transition, ready: tuple[WorkerRecord, ...]) -> bool:
    if ready or in_phase(t.state, WorkerPhase.BOOTING) or t.state.first_failure is None:
        return False
    t.end(
        ExitCode.USER_CODE_FAILED,
        f"all workers failed before their first round; first: {_described(t.state.first_failure)}",
    )
    return True


def _end_if_no_host_can_start(t: Transition, ready: tuple[WorkerRecord, ...]) -> bool:
    """Ends a job that has nobody to wait for it, before its start or after, when every host is out for good."""
    state = t.state
    alive = len(ready) + len(in_phase(state, WorkerPhase.BOOTING))
    # Once it has started, those who live may hold its state.
    if not state.hosts or alive >= (1 if state.round_id else state.policy.min_num_proc):
        return False
    if not all(state.blacklist.is_out_for_good(host.name) for host in state.hosts):
        return False
    hosts = ", ".join(host.name for host in state.hosts)
    what = "go on" if state.round_id else "start"
    t.end(
        ExitCode.USER_CODE_FAILED,
        f"cannot {what}: {_described(state.first_failure)}, which leaves no host to start workers on (blacklisted: "
        f"{hosts}); {len(ready)} ready of {state.policy.min_num_proc} needed (--min-np)",
    )
    return True


def _wait_for_slots(t: Transition) -> None:
    reset = t.in_reset()
    if reset.slots_deadline is None:
        deadline = t.now + t.state.policy.elastic_timeout_s
        t.state = replace(t.state, reset=replace(reset, slots_deadline=deadline))
        t.report(explain(t.state, t.now))


def _set_planned_notice(t: Transition) -> None:
    """Asks the members to leave at their next commit when the round they would get is another than this one."""
    targets = target_places(t.state)
    members = in_phase(t.state, WorkerPhase.MEMBER)
    off = tuple(record for record in members if not in_target(record, targets))
    joiners = tuple(r for r in in_phase(t.state, WorkerPhase.READY) if in_target(r, targets))
    booting = tuple(r for r in in_phase(t.state, WorkerPhase.BOOTING) if in_target(r, targets))
    waits = joiners_wait_until(t.state)
    grows = bool(joiners) and (waits is None or t.now >= waits)
    # Members that leave go on training while those who are to replace them boot, if they are needed until then.
    enough = len(members) - len(off) + len(joiners) >= t.state.policy.min_num_proc
    if grows or (off and (enough or not booting)):
        drained = dict.fromkeys(r.worker.hostname for r in off if is_drained(t.state, r.worker.hostname, r.worker.slot))
        going = [f"host {name} drained" for name in drained]
        gone = dict.fromkeys(r.worker.hostname for r in off if r.worker.hostname not in drained)
        going += [f"host {name} removed or reduced" for name in gone]
        coming = [f"host {name} ready" for name in dict.fromkeys(r.worker.hostname for r in joiners)]
        t.notify(NoticeKind.HOSTS_UPDATED, ", ".join((*going, *coming)))
    elif t.state.notice_kind is NoticeKind.HOSTS_UPDATED:
        t.notify(NoticeKind.NONE, "")


def _check_deadlines(t: Transition) -> None:
    state, outage = t.state, t.state.discovery.outage
    if state.ended:
        return
    limit = f"{state.policy.elastic_timeout_s:g} s (--elastic-timeout)"
    if state.slots_deadline is not None and t.now >= state.slots_deadline:
        why = explain(state, t.now, gives_up=True)
        first = f"; first failure: {_described(state.first_failure)}" if state.first_failure else ""
        t.end(ExitCode.TOO_FEW_SLOTS, f"{why}; gave up after {limit}{first}")
    elif outage is not None and t.now >= outage.since + state.policy.elastic_timeout_s:
        t.end(ExitCode.TOO_FEW_SLOTS, f"host discovery has failed for {limit}; last: {outage.error}")


def _tell_of_standbys(t: Transition) -> None:
    """Says that there is no room for all standbys; again only when there is less than ever before."""
    if not t.state.policy.num_standby or t.state.phase is not JobPhase.RUNNING or finishing(t.state):
        return
    room, told = len(standby_places(t.state)), t.state.standby_room
    if room < (t.state.policy.num_standby if told is None else told):
        t.report(room_for_standbys(t.state, t.now))
        t.state = replace(t.state, standby_room=room)


def _limit_is_used_up(t: Transition) -> bool:
    policy = t.state.policy
    limit, window_s = policy.reset_limit, policy.reset_window_s
    return limit is not None and t.state.tally.that_count(t.now, window_s) >= limit


def _described(failure: Failure | None) -> str:
    if failure is None:
        return "no failure was recorded"
    # Without a line of code, its last words may have nothing to do with its end.
    return failure.full if failure.where else str(failure)
