"""The waits of the job and their deadlines, all from the state; and the next time when something is due."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_driver.core.placement import (
    in_target,
    keeps_its_places,
    launch_places,
    next_members,
    next_places,
    reachable,
    target_places,
    that_fit,
    trains_until_replaced,
)
from elastic_driver.core.state import (
    ChiefPhase,
    JobPhase,
    State,
    WorkerPhase,
    WorkerRecord,
    deadline_of,
    finishing,
    gives_time,
    in_phase,
    leaves_by,
)
from elastic_driver.words import NoticeKind

# How long the first READY joiner waits for others that are still booting, so that hosts that appear together cost one
# reset and not one each. The imports of one machine's workers end within a few seconds of each other.
JOINERS_WINDOW_S = 5.0


def joiners_wait_until(state: State) -> float | None:
    """Return until when READY joiners wait for booting ones, before the round is closed for them.

    A worker that leaves a place counts as booting there: its successor is started as soon as it has ended. None if
    nothing waits for this: no joiner is READY or none boots, the notice has already been sent, or the job lacks workers
    (then their number decides, not the window).
    """
    joiners = any(record.phase is WorkerPhase.READY and not record.round_id for record in state.workers)
    if not joiners or not in_phase(state, WorkerPhase.BOOTING, WorkerPhase.LEAVING):
        return None
    targets, runs = target_places(state), state.phase is JobPhase.RUNNING
    # The workers for a round by now: members stay, and a multiple may leave a joiner over until another has come.
    members = in_phase(state, WorkerPhase.MEMBER) if runs else ()
    fit = that_fit(state, (*members, *reachable(state)))
    joined = [record.since for record in fit if record.phase is WorkerPhase.READY and not record.round_id]
    alive = {(r.worker.hostname, r.worker.slot) for r in state.workers if r.phase is not WorkerPhase.LEAVING}
    free = dict.fromkeys(place for place in targets if place not in alive)
    booting = [record for record in in_phase(state, WorkerPhase.BOOTING) if in_target(record, targets)]
    booting += [record for record in in_phase(state, WorkerPhase.LEAVING) if in_target(record, free)]
    if not joined or not booting:
        return None
    if runs:
        waiting = state.notice_kind is NoticeKind.NONE and not finishing(state)
        off = [record for record in members if not in_target(record, targets)]
        waiting = waiting and not trains_until_replaced(state, off, fit)
    else:
        waiting = state.registry.complete and len(fit) >= state.policy.min_num_proc
    return min(joined) + JOINERS_WINDOW_S if waiting else None


def pause_until(state: State) -> float | None:
    """Return until when no round is formed, since the last one was a setback or its members could not reach each other.

    None if no round is put off.

    A round in other places than those of the failed one is not put off: a host that is new, drained or removed may make
    the difference. Restarted processes in the same places do not.
    """
    pauses = [state.setbacks.present.until if state.setbacks.count >= 2 else None, state.cuts.until]
    until = max((pause for pause in pauses if pause is not None), default=None)
    if state.phase is not JobPhase.RESETTING or until is None or not keeps_its_places(state):
        return None
    failed = dict.fromkeys((worker.hostname, worker.slot) for worker in state.members)
    return until if all(place in failed for place in next_places(state)) else None


def gone_by(state: State) -> float | None:
    """Return until when the next round of restarted workers waits for the last one's to end; None if it does not."""
    reset = state.reset
    if state.phase is not JobPhase.RESETTING or reset is None or not reset.waits_for_ends:
        return None
    members = dict.fromkeys(state.members)
    return reset.deadline if any(r.worker in members for r in in_phase(state, WorkerPhase.LEAVING)) else None


def checkpoints_by(state: State) -> float | None:
    """Return until when ending workers may checkpoint together, if one of their hosts goes away; otherwise None."""
    if state.phase is not JobPhase.RESETTING or not state.departing:
        return None
    members = dict.fromkeys(state.members)
    return first_to_go(state, [r for r in state.workers if r.worker in members and gives_time(state, r) is not None])


def first_to_go(state: State, records: Sequence[WorkerRecord]) -> float | None:
    """Return when the first of these workers must have ended since its machine goes away; None if none does."""
    times = (leaves_by(state, record.worker.hostname) for record in records) if state.departing else ()
    return min((time for time in times if time is not None), default=None)


def launch_held_until(state: State) -> float | None:
    """Return until when the start of the next round of restarted workers is held back; None if it is not."""
    if state.phase is not JobPhase.RESETTING:
        return None
    if (ends := gone_by(state)) is not None:
        return ends
    return pause_until(state) if len(launch_places(state)) >= state.policy.min_num_proc else None


def held_until(state: State) -> float | None:
    """Return until when a possible round waits for the end of a pause, or for joiners; None if it does not."""
    if state.ended or state.reset is None or not state.registry.complete:
        return None
    waits, pause = joiners_wait_until(state), pause_until(state)
    if waits is None and pause is None:
        return None
    members = next_members(state)
    if len(members) < state.policy.min_num_proc:
        return None
    # A sufficient number of survivors never waits for joiners, nor does a start with all that it asked for.
    survivors = sum(1 for record in members if record.round_id)
    if survivors >= state.policy.min_num_proc or (
        state.phase is JobPhase.STARTING and len(members) >= state.policy.num_proc
    ):
        waits = None
    return max((time for time in (waits, pause) if time is not None), default=None)


def next_deadline(state: State) -> float | None:
    """Return when the driver is to feed TimerExpired next (seconds, the clock of ``now``); None for never.

    The time may be in the past: then feed it at once. The step that applies it moves the deadline on.
    """
    if state.phase is JobPhase.ENDED:
        return None
    times = [deadline_of(state, record) for record in in_phase(state, WorkerPhase.BOOTING, WorkerPhase.LEAVING)]
    times += [record.leave_by for record in state.workers if record.leave_by is not None]
    times += [record.exit_by for record in state.workers if record.exit_by is not None]
    times += [silence.kept_until for silence in state.silent if silence.kept_until is not None]
    if state.policy.on_change.asks_for_rounds:
        if state.reset is not None and not state.registry.complete:
            times.append(state.reset.deadline)
        times.append(joiners_wait_until(state) if state.phase is JobPhase.RUNNING else held_until(state))
    elif state.policy.on_change.restarts:
        times.append(launch_held_until(state) if state.last_call is None else state.last_call)
        times.append(checkpoints_by(state))
        times += [preparing_host.until for preparing_host in state.preparing if not preparing_host.late]
    else:
        times.append(state.setbacks.present.until)
    if state.chief is not None and state.chief.phase is ChiefPhase.RUNNING:
        times.append(state.chief.ends_by)
    times += [state.slots_deadline, state.blacklist.next_expiry(), state.cuts.next_expiry()]
    return min((time for time in times if time is not None), default=None)
