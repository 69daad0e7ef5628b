"""The effect of a worker's failure on its host, and on its round.

Owns the part that all kinds of workers share. The module of each kind (:mod:`elastic_driver.core.kinds`) defines what
else a failure means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_driver.core.events import Fault
from elastic_driver.core.explain import why_no_place
from elastic_driver.core.placement import usable_slots
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.setbacks import Failure
from elastic_driver.core.state import JobPhase, State, WorkerPhase, WorkerRecord, leaves_by
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import WorkerId


@dataclass(frozen=True, slots=True)
class Crash:
    """The failure of a worker that was not told to end.

    Attributes:
        failure: what happened to it.
        fault: who caused that.
        wanted: whether its place was still wanted.
        draw: for the cooldown of its host, 0 to 1.
        told: whether the driver has reported it: an exit code other than 0 is reported when the process ends.
        ran: whether there was a process. A host on which none can be started is blacklisted in any case.
        aborted: whether its process was aborted.
        host_lost: whether its whole host is lost.
        after_another: whether another failure, of the same lost host, stands for all of them.
    """

    failure: Failure
    fault: Fault
    wanted: bool
    draw: float = 0.0
    told: bool = False
    ran: bool = True
    aborted: bool = False
    host_lost: bool = False
    after_another: bool = False


def failure_of(record: WorkerRecord, how: str, error: str = "", where: str = "") -> Failure:
    """Describe a worker's failure."""
    role = "" if record.parameter_server is None else record.server_name
    return Failure.said(record.worker, record.rank if record.round_id else None, how, error, where, role)


def is_needed(state: State, hostname: str) -> bool:
    """Return whether the job has too few slots without a host."""
    others = replace(state.discovery, hosts=tuple(host for host in state.hosts if host.name != hostname))
    return usable_slots(replace(state, discovery=others)) < state.policy.min_num_proc


def blame_host(t: Transition, hostname: str, crash: Crash, *, stays: bool = False, ran: bool = True) -> bool:
    """Count a failure against a host whose place was wanted, unless the host stays.

    Args:
        t: the step.
        hostname: the host.
        crash: the failure.
        stays: whether the host stays in the job nevertheless.
        ran: whether its worker has done anything yet.

    Returns:
        Whether this took the host out of use for new workers.
    """
    state, was_out = t.state, t.state.blacklist.is_blacklisted(hostname)
    if crash.wanted and not stays and (state.policy.blames_hosts or not ran):
        blacklist = state.blacklist.fail(hostname, now=t.now, draw=crash.draw, lost=crash.host_lost)
        t.state = replace(state, blacklist=blacklist)
    return crash.wanted and not was_out and t.state.blacklist.is_blacklisted(hostname)


def report_blamed(t: Transition, hostname: str, text: str, *, told: bool) -> None:
    """Report that a host gets no new workers from now on, and why."""
    for_now = "" if t.state.blacklist.is_out_for_good(hostname) else " until its cooldown is over"
    t.report(f"host {hostname} gets no new workers{for_now}: {text}", warning=not told)


def fail_in_round(t: Transition, record: WorkerRecord, crash: Crash, *, stays: bool) -> None:
    """Fail a worker that has rounds: its round, if any, is over.

    Args:
        t: the step.
        record: the record of the worker.
        crash: its failure.
        stays: whether its host stays in the job nevertheless.
    """
    worker, how, wanted, fault = record.worker, crash.failure.how, crash.wanted, crash.fault
    t.register(worker, WorkerState.FAILURE)
    if crash.after_another:
        return
    if wanted and (stays or (crash.ran and not t.state.policy.blames_hosts)):
        fault = Fault.OWN  # its host stays: if that is the cause, it will recur, and there must be an end
    # A failure before the first round would recur at once, and no limit counts it.
    is_member = t.state.is_member(worker)
    is_news = blame_host(t, worker.hostname, crash, stays=stays, ran=crash.ran and is_member)
    if not is_member:
        # A joiner, or a worker of the first round: its host gets no new workers, but the living ones there continue.
        text = f"worker {worker} {how} before its first round"
        if is_news:
            report_blamed(t, worker.hostname, text, told=crash.told)
        if t.state.phase is JobPhase.STARTING:
            t.note_failure(crash.failure, fault, text)
        return
    text = f"host {worker.hostname} lost (worker {worker} {how})"
    if stays:
        text = f"worker {worker} {how}"
    elif wanted and t.state.blacklist.is_blacklisted(worker.hostname):
        for other in t.on_host(worker.hostname):
            if other.phase is not WorkerPhase.LEAVING:
                t.stop(other, f"its host is removed from the job: worker {worker} {how}")
    else:
        late = leaves_by(t.state, worker.hostname) is not None
        text = f"worker {worker} {how}{'' if wanted or late else ' after its slot was removed'}"
    t.note_failure(crash.failure, fault, text)
    t.break_round(text)


def leave_round(t: Transition, worker: WorkerId, *, wanted: bool) -> None:
    """Record a member's exit with code 0: it has finished, unless its place was no longer wanted."""
    registry = t.state.registry
    if wanted or registry.expected == (worker,):
        t.register(worker, WorkerState.SUCCESS)
        return
    # It had been asked to leave, by discovery's list or by whatever took its machine away: not the end of the job.
    t.report(f"worker {worker} left: {why_no_place(t.state, worker.hostname, worker.slot)}")
    t.state = replace(t.state, registry=registry.without(worker), setbacks=t.state.setbacks.excuse())
