"""Answers to drain requests: whether a drain is possible, its effect, and which workers end at once instead.

Owns no decision on when a worker leaves: :mod:`elastic_driver.core.intake` applies the requests,
:mod:`elastic_driver.core.in_place` asks members to leave, and :mod:`~elastic_driver.core.staffing` kills those that do
not.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_driver.core.placement import usable_slots
from elastic_driver.core.state import (
    ChiefPhase,
    JobPhase,
    Leaving,
    State,
    WorkerPhase,
    leaves_by,
    parameter_servers,
    record_of,
)
from elastic_driver.hosts import WorkerId
from elastic_driver.words import NoticeKind, counted


def ends_at_once(state: State, worker: WorkerId) -> bool:
    """Return whether a worker that was told to leave has no commit to leave at: no round yet, or being stopped."""
    record = record_of(state, worker)
    return (
        record is None
        or record.leaving not in (None, Leaving.DISMISSED)
        or state.phase is JobPhase.ENDED
        or not state.round_id
    )


def why_refused(state: State, hostname: str) -> str:
    """Return why a host can be neither drained nor released; "" if it can."""
    if state.is_listed(hostname):
        return ""
    return f"the job has no host {hostname}; its hosts: {', '.join(state.listed) or 'none'}"


def why_needed(state: State, hostname: str, slot: int | None) -> str:
    """Return why a slow place cannot be drained, in words; "" if the job can do without it."""
    if state.phase is not JobPhase.RUNNING or state.notice_kind is not NoticeKind.NONE:
        return "the job's hosts are about to change anyway"
    if any(record.leave_by is not None or record.phase is WorkerPhase.LEAVING for record in state.workers):
        return "another worker is leaving"
    after = replace(state, drained=state.drained | {(hostname, slot)})
    slots, policy = usable_slots(after), state.policy
    if slots < policy.min_num_proc:
        return f"that would leave {slots} of the {policy.min_num_proc} slots that the job needs ({policy.least_flag})"
    return ""


def describe_drain(before: State, after: State, hostname: str, *, undo: bool) -> str:
    """Describe the effect of a drain, or of its undoing, to the user who asked for it.

    Args:
        before, after: the job before the request and after it.
        hostname: the host.
        undo: whether it can be used again.
    """
    if undo:
        was_drained = any(name == hostname for name, _ in before.drained)
        return f"host {hostname} can be used again" if was_drained else f"host {hostname} was not drained"
    already = "already " if (hostname, None) in before.drained else ""
    goes = leaves_by(after, hostname) is not None
    living = any(record.worker.hostname == hostname for record in after.workers)
    leave = ": its workers leave at their next commit" if living else ""
    if living and not after.policy.on_change.has_commits:
        leave = ": its workers are being stopped"
    if living and after.policy.has_chief:
        leave = _of_servers(after, hostname)
    elif living and goes:
        leave += "; workers still there one second before it goes away are killed"
    return f"host {hostname} is {already}drained{leave}{describe_shortage(after)}"


def _of_servers(state: State, hostname: str) -> str:
    """Describe what a drained host's servers do, in a job with a chief."""
    if state.chief is None:
        return ": its servers are being stopped"
    text = ": its workers are stopped when the chief no longer uses them"
    stay = [server for server in parameter_servers(state).values() if server.worker.hostname == hostname]
    if not stay:
        return text
    moves = state.chief.phase is ChiefPhase.STOPPING
    return f"{text}; {stay[0].server_name} {'moves when the chief has exited' if moves else 'stays'}"


def describe_shortage(state: State) -> str:
    """Describe that the remaining slots do not suffice, and the consequence; "" if they do."""
    slots, policy = usable_slots(state), state.policy
    if slots >= policy.min_num_proc:
        return ""
    return (
        f"; that leaves {counted(slots, 'slot')} of the {policy.min_num_proc} that the job needs "
        f"({policy.least_flag}): it waits for more, and ends after {policy.elastic_timeout_s:g} s (--elastic-timeout)"
    )
