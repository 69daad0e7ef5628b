"""Jobs with a chief: a script beside the driver that gives work to workers, and keeps its variables on servers.

Owns the decisions for jobs with parameter servers: when the chief is started and restarted; when a worker without a
place is stopped; what a lost parameter server means (decisions/0035). Their workers have no rounds either, so losses
and pauses are as in :mod:`elastic_driver.core.roundless`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from elastic_driver.core.endings import check_deadlines, end_if_no_host_can_start, limit_is_used_up, wait_for_slots
from elastic_driver.core.events import ChiefExited, Fault, StartChief, StopChief
from elastic_driver.core.explain import why_no_place
from elastic_driver.core.failures import Crash, failure_of, is_needed
from elastic_driver.core.placement import all_offered, has_place, target_places, usable_slots
from elastic_driver.core.roundless import judge_losses, lose
from elastic_driver.core.setbacks import Failure, described, fault_of
from elastic_driver.core.silence import give_up_silent
from elastic_driver.core.staffing import fill_places, stop_late_starts
from elastic_driver.core.state import (
    Chief,
    ChiefPhase,
    JobPhase,
    Round,
    Server,
    State,
    WorkerPhase,
    WorkerRecord,
    in_phase,
    lacks_servers,
    leaves_by,
    parameter_servers,
    serving_workers,
)
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import CHIEF, WorkerId
from elastic_driver.words import LONG_ROUND_S, ExitCode, counted


def take_start(t: Transition, record: WorkerRecord) -> None:
    """Ignore the start of a server's process: it is waited for until it answers."""


def take_answer(t: Transition, record: WorkerRecord, address: str) -> None:
    """Record that a server answers at this address."""
    server = Server(record.parameter_server, address)
    t.put(replace(record, phase=WorkerPhase.MEMBER, since=t.now, running=True, server=server))
    t.state = replace(t.state, ever_ready=True)


def take_clean_exit(t: Transition, record: WorkerRecord, *, wanted: bool) -> None:
    """Apply a server's exit with code 0, a failure: it should have served until it was told to end."""
    take_failure(t, record, Crash(failure_of(record, "exited with code 0"), Fault.OWN, wanted))


def take_failure(t: Transition, record: WorkerRecord, crash: Crash) -> None:
    """Apply a server's failure: the others continue; the chief cannot without a parameter server."""
    # A server that has answered may do so again, on a host that the job needs.
    stays = bool(record.address) and t.state.policy.cooldown_range_s is None
    lose(t, record, crash, stays=stays and is_needed(t.state, record.worker.hostname))
    if record.address and t.now - record.since >= LONG_ROUND_S:
        t.state = replace(t.state, setbacks=t.state.setbacks.ran_long())
    chief = t.state.chief
    if record.parameter_server is not None and chief is not None:
        _lose_server(t, chief, crash.failure, told=crash.told)


def _lose_server(t: Transition, chief: Chief, failure: Failure, *, told: bool) -> None:
    """Record the loss of a parameter server that the chief uses. The chief notices it by itself."""
    if chief.lost or chief.phase is not ChiefPhase.RUNNING:
        return
    text = f"{failure.who} {failure.how}, and its variables are lost"
    then = "the chief is restarted when a replacement parameter server answers"
    ends_by = None
    if not t.state.policy.restart_chief:
        ends_by = t.now + t.state.policy.drain_timeout_s
        then = (
            "it is not replaced, and the chief's next use of it fails (with --restart-chief, the chief would "
            "be restarted with another parameter server)"
        )
    what = f"the variables of {failure.who} are lost" if told else text
    t.report(f"{what}: {then}", warning=not told)
    t.state = replace(t.state, chief=replace(chief, lost=text, ends_by=ends_by))


def take_chief_exit(t: Transition, event: ChiefExited) -> None:
    """Apply the end of the chief's process."""
    chief = t.state.chief
    if chief is None or event.number != chief.number:
        return  # of a start that is known to have ended
    if chief.phase is ChiefPhase.STOPPING:
        t.state = replace(t.state, chief=None)
        return
    if event.bad_command and event.number == 1:
        t.end(ExitCode.BAD_USAGE, event.how)
        return
    if event.returncode == 0:
        t.end(ExitCode.SUCCESS, "the chief exited with code 0")
        return
    worker = WorkerId(CHIEF, 0, event.number - 1)
    failure = Failure.said(worker, None, event.how, event.error, event.where, "the chief")
    setbacks = t.state.setbacks.failed(failure, fault_of(event.returncode, out_of_memory=event.out_of_memory))
    if t.now - chief.since >= LONG_ROUND_S:
        setbacks = setbacks.ran_long()
    reset = t.in_reset().with_cause(failure.told, failure)
    failed = replace(chief, phase=ChiefPhase.FAILED, failed=described(failure))
    t.state = replace(t.state, reset=reset, setbacks=setbacks, chief=failed)


def _place_servers(t: Transition) -> None:
    """Stop servers whose place is gone, and start one in every free place."""
    if t.state.phase is JobPhase.WAITING:
        if usable_slots(t.state) < t.state.policy.num_proc:
            return
        t.state = replace(t.state, round=Round(0, (), None, t.now))
    there = [record for record in t.state.workers if record.phase is not WorkerPhase.LEAVING]
    # Parameter servers first: another of them may need a worker's place.
    for record in sorted(there, key=lambda record: record.parameter_server is None):
        _let_go(t, record)
    if t.state.setbacks.present.until is None:
        fill_places(t)


def _let_go(t: Transition, record: WorkerRecord) -> None:
    """Stop a server without a place, as soon as it is not in use."""
    if has_place(t.state, record):
        if record.leave_by is not None:
            t.put(replace(record, leave_by=None))
        return
    used = t.state.chief is not None and record.phase is WorkerPhase.MEMBER
    reason = why_no_place(t.state, record.worker.hostname, record.worker.slot)
    if record.parameter_server is not None:
        # Its contents are lost with it. So it stays as long as the chief uses it, whatever happens to its place.
        if not used:
            t.retire(record, reason)
        elif record.leave_by is not None:
            t.put(replace(record, leave_by=None))
        return
    if not used:
        t.retire(record, reason)
        return
    limit = t.state.policy.drain_timeout_s
    machine = leaves_by(t.state, record.worker.hostname)
    by = t.now + limit if record.leave_by is None else record.leave_by
    by = by if machine is None else max(t.now, min(by, machine))
    if t.now >= by:
        when = f"within {limit:g} s (--drain-timeout)"
        if machine is not None and t.now >= machine:
            when = "before its host goes away"
        t.retire(record, f"{reason}; the chief did not stop using it {when}")
    elif by != record.leave_by:
        t.put(replace(record, leave_by=by))


def _mind_chief(t: Transition) -> None:
    """Handle a chief that has failed, has lost a parameter server, or is to use another one."""
    state, chief = t.state, t.state.chief
    if chief is None:
        return
    if chief.phase is ChiefPhase.FAILED:
        _take_failure(t, chief)
    elif chief.phase is ChiefPhase.STOPPING:
        pass  # it is killed after its grace period: its end is awaited
    elif chief.lost and not state.policy.restart_chief:
        if chief.ends_by is not None and t.now >= chief.ends_by:
            limit = f"{state.policy.drain_timeout_s:g} s (--drain-timeout)"
            t.end(ExitCode.USER_CODE_FAILED, f"{chief.lost}; the chief was still running {limit} later")
    elif chief.lost:
        if _count_restart(t, chief.lost):
            _stop(t, chief, chief.lost, None)
    elif state.policy.restart_chief:
        _move_servers(t, chief)


def _take_failure(t: Transition, chief: Chief) -> None:
    if not t.state.policy.restart_chief:
        text = f"{chief.lost}; then {chief.failed}" if chief.lost else chief.failed
        t.end(ExitCode.USER_CODE_FAILED, text)
    elif _count_restart(t, chief.failed):
        t.report(f"{chief.failed}: restarting the chief", warning=True)
        t.state = replace(t.state, chief=None)


def _count_restart(t: Transition, cause: str) -> bool:
    """Count an unplanned restart. Return False if it exceeds the limit: the job has ended."""
    policy = t.state.policy
    if limit_is_used_up(t):
        limit = policy.reset_limit
        t.end(
            ExitCode.RESET_LIMIT,
            f"the limit of {counted(limit or 0, 'unplanned restart')} of the chief ({policy.limit_flag}) is "
            f"used up; the last cause: {cause}",
        )
        return False
    t.state = replace(t.state, tally=t.state.tally.one_more(t.now, policy.reset_window_s))
    return True


def _has_enough(t: Transition) -> bool:
    """Return whether all parameter servers answer, and enough workers. Booting ones are waited for."""
    state, policy = t.state, t.state.policy
    servers = parameter_servers(state)
    if state.setbacks.present.until is not None or len(servers) < policy.num_parameter_servers:
        return False
    if any(record.phase is not WorkerPhase.MEMBER for record in servers.values()):
        return False
    number = len(serving_workers(state))
    if number >= policy.num_proc:
        return True
    booting = any(record.parameter_server is None for record in in_phase(state, WorkerPhase.BOOTING))
    return number >= policy.min_num_proc and not booting


def _start_chief(t: Transition) -> None:
    """Start the chief if it has all that it needs."""
    if t.state.round is None or t.state.chief is not None or not _has_enough(t):
        return
    number = t.state.chiefs + 1
    t.commands.append(chief_start(t.state, number))
    t.state = replace(t.state, chief=Chief(number, ChiefPhase.RUNNING, t.now), chiefs=number)


def chief_start(state: State, number: int) -> StartChief:
    """Return the start of a chief, with the servers of this moment."""
    servers = tuple(record.address for record in parameter_servers(state).values() if record.address)
    workers = tuple(record.address for record in serving_workers(state))
    return StartChief(number, servers, workers)


def _stop(t: Transition, chief: Chief, reason: str, grace_s: float | None) -> None:
    t.commands.append(StopChief(chief.number, reason, grace_s))
    t.state = replace(t.state, chief=replace(chief, phase=ChiefPhase.STOPPING, since=t.now))


def _move_servers(t: Transition, chief: Chief) -> None:
    """Stop the chief, with time for a checkpoint, if a parameter server lost its place and another place is free."""
    state = t.state
    off = [r for r in parameter_servers(state).values() if not all_offered(state, (r.worker,))]
    without = replace(state, chief=None)
    if not off or usable_slots(without) < state.policy.min_num_proc:
        return
    grace_s = state.policy.drain_timeout_s
    for record in off:
        machine = leaves_by(state, record.worker.hostname)
        if machine is not None:
            grace_s = max(0.0, min(grace_s, machine - t.now))
    record = off[0]
    why = why_no_place(state, record.worker.hostname, record.worker.slot)
    _stop(t, chief, f"{record.server_name} moves: {why}", grace_s)


def _end_or_wait(t: Transition) -> None:
    """End the job when it has lacked slots or workers for too long."""
    state = t.state
    if state.round is None:
        return
    least, workers = state.policy.min_num_proc, serving_workers(state)
    if len(target_places(state)) < least:
        if state.chief is not None or not end_if_no_host_can_start(t, workers, begun=True):
            wait_for_slots(t)
    elif len(workers) >= least and not lacks_servers(state):
        t.state = replace(state, reset=None)
    elif state.setbacks.present.until is None and not in_phase(state, WorkerPhase.BOOTING, WorkerPhase.LEAVING):
        wait_for_slots(t)  # there are slots, but no worker can be started there now


def _give_up_hosts(t: Transition) -> None:
    """Give up silent hosts, and fill places again: a parameter server that would have been there goes elsewhere."""
    before: list[str] | None = None
    while not t.state.ended:
        given_up = [silence.hostname for silence in t.state.silent if silence.given_up]
        if given_up == before:
            return
        if before is not None:
            _place_servers(t)
            _start_chief(t)
            _end_or_wait(t)
        before = given_up
        if not t.state.ended:
            give_up_silent(t)


DECIDERS: tuple[Callable[[Transition], None], ...] = (
    partial(stop_late_starts, take_failure=take_failure, what="did not answer"),
    judge_losses,
    _mind_chief,
    _place_servers,
    _start_chief,
    _end_or_wait,
    check_deadlines,
    _give_up_hosts,
)
"""The decisions after each event, in this order: once a chief has ended, no departing server is in use any more."""
