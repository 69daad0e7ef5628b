"""One sentence that says why the job is or is not running: for the log, the status page, timeout messages and tests."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_driver.hosts import WorkerId
from elastic_driver.job_state import (
    JobPhase,
    State,
    WorkerPhase,
    finishing,
    in_phase,
    in_target,
    joiners_wait_until,
    pause_until,
    standing_by,
    target_places,
    usable_slots,
)
from elastic_driver.rendezvous.messages import NoticeKind


def names(workers: Sequence[WorkerId], *, at_most: int = 6) -> str:
    """Workers as a list for a sentence: "worker a[0]", "workers a[0], a[1]", "workers a[0], … and 3 more"."""
    if not workers:
        return ""
    text = ", ".join(str(worker) for worker in workers[:at_most])
    more = f" and {len(workers) - at_most} more" if len(workers) > at_most else ""
    return f"worker{'s' if len(workers) > 1 else ''} {text}{more}"


def explain(state: State, now: float) -> str:
    """Why the job stands where it stands.

    Args:
        state: the job.
        now: the present, seconds of the core's clock.
    """
    policy = state.policy
    match state.phase:
        case JobPhase.WAITING:
            if not state.discovered:
                return "waiting for host discovery to answer"
            left = _left(state.slots_deadline, now)
            return f"waiting for {_count(policy.num_proc, 'slot')} (-np), {_slots(state)}{left}"
        case JobPhase.STARTING if not state.registry.complete:
            missing = names(state.registry.missing)
            return f"waiting for {missing} to call hvd.init(){_left(state.registry.deadline, now)}"
        case JobPhase.RESETTING if not state.registry.complete:
            missing = names(state.registry.missing)
            left = _left(state.registry.deadline, now)
            return f"round {state.round_id} is over; waiting for {missing} to leave it{left}"
        case JobPhase.STARTING | JobPhase.RESETTING:
            ready = [r for r in in_phase(state, WorkerPhase.READY) if in_target(r, target_places(state))]
            if len(ready) >= policy.min_num_proc and (until := pause_until(state)) is not None and until > now:
                times = f"{_count(state.setbacks.count, 'round')} in a row failed without progress"
                return f"{times}; the next begins after a pause{_booting(state)}{_left(until, now)}"
            if len(ready) >= policy.min_num_proc:
                left = _left(joiners_wait_until(state), now)
                return f"{_count(len(ready), 'worker')} ready, giving others a moment{_booting(state)}{left}"
            return (
                f"waiting for {_count(policy.min_num_proc, 'worker')} (--min-np), ready: {len(ready)}, {_slots(state)}"
                f"{_booting(state)}{_left(state.slots_deadline, now)}"
            )
        case JobPhase.RUNNING:
            members = f"round {state.round_id} runs with {_count(len(in_phase(state, WorkerPhase.MEMBER)), 'worker')}"
            if finishing(state):
                return f"{members}; some have finished, waiting for the others"
            if state.notice_kind is NoticeKind.HOSTS_UPDATED:
                return f"{members}; hosts changed, waiting for the next commit"
            return f"{members}{_standby(state)}{_booting(state)}"
        case JobPhase.ENDED:
            return "the job has ended"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _slots(state: State) -> str:
    blacklisted = [host.name for host in state.hosts if state.blacklist.is_blacklisted(host.name)]
    hosts = [f"{host}" for host in state.hosts if host.name not in blacklisted]
    text = f"slots: {usable_slots(state)}" + (f" ({', '.join(hosts)})" if hosts else "")
    return text + (f", blacklisted: {', '.join(blacklisted)}" if blacklisted else "")


def _booting(state: State) -> str:
    booting = in_phase(state, WorkerPhase.BOOTING)
    return f"; {names([record.worker for record in booting])} starting" if booting else ""


def _standby(state: State) -> str:
    standbys = standing_by(state)
    return f"; {names([record.worker for record in standbys])} standing by" if standbys else ""


def _left(deadline: float | None, now: float) -> str:
    return "" if deadline is None else f"; {max(0.0, deadline - now):.0f} s left"
