"""Commands still due to a host's processes, derived from the state of a job and the knowledge of the host's agent.

For a driver that takes over a running job (docs/decisions/0044-a-driver-that-may-die.md). The last one may have died
before it had carried out the commands of its last step, or while this agent was away: all that is known is that the
state has decided them. They are derived anew from the state, and an agent that has carried them out already ignores
their repetition. So it need not be known which of them had been carried out.

Only the commands to processes are derived here. Round and notice are levels, which each connecting agent gets; an open
request is answered from the state (``Round``, and that a worker is LEAVING); the end of the job is ``State.end``.

Workers that reset in place are started with a forecast of their ranks, which is computed anew; restarted workers with
the ranks of their launch, which are in the state. A chief is a process of the driver's own machine, and counts as a
host of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic_driver.core.assignment import hosts_of
from elastic_driver.core.chief import chief_start
from elastic_driver.core.events import Command, GiveUpHost, KillWorker, StartWorker, StopChief, StopWorker
from elastic_driver.core.staffing import places_to_stand_by, planned_starts, server_starts
from elastic_driver.core.state import (
    ChiefPhase,
    State,
    WorkerPhase,
    WorkerRecord,
    chief_of,
    record_of,
    told_ending,
)
from elastic_driver.errors import ElasticError
from elastic_driver.hosts import CHIEF, WorkerId

_AGAIN = "repeated after the driver's absence"


class OlderStateError(ElasticError, ValueError):
    """A state is older than the knowledge of the job's agents: another driver has continued from it."""


@dataclass(frozen=True, slots=True)
class HostLevels:
    """The knowledge of a host's agent.

    Attributes:
        hostname: the host; all workers below are of this one.
        there: the workers that it runs, or was told to start.
        ended: the workers that have ended, or could not be started, whose end nobody has acknowledged yet. It may have
            been processed all the same. Each arrives as a report of its own.
        round_id: the last round that it got; 0 for none.
        notice_version: the version of the last notice that it got; 0 for none. The end of the job is not a notice.
    """

    hostname: str
    there: tuple[WorkerId, ...]
    ended: tuple[WorkerId, ...]
    round_id: int
    notice_version: int


def redo(state: State, levels: HostLevels) -> list[Command]:
    """Return the commands still due to this host's agent, in the order to carry them out.

    Carrying them out twice is harmless, and they include commands that were carried out before: the agent obeys the
    first. :func:`unknown` returns the workers that the agent does not know, and for which there is no command here.

    Raises:
        OlderStateError: the agent knows a round, or a notice, that this job has not had yet. Its workers train in a
            round that this driver does not know: the agent is rejected, and ends them.
    """
    _check_age(state, levels)
    if levels.hostname == CHIEF:
        return list(_chief_orders(state, levels))
    # When the job has ended, the state no longer records which hosts were heard again since.
    if not state.ended and any(silence.hostname == levels.hostname and silence.given_up for silence in state.silent):
        return [GiveUpHost(levels.hostname, "it was given up while it did not respond")]
    commands = [command for worker in levels.there for command in _orders(state, worker)]
    fresh = [record.worker for record in _not_there(state, levels) if _is_to_start(state, record)]
    # A plan covers all workers of the job: none is made for each of a thousand hosts that need no start.
    return [*commands, *_starts(state, fresh)] if fresh else commands


def _starts(state: State, fresh: list[WorkerId]) -> list[StartWorker]:
    if state.policy.has_chief:
        return server_starts(state, fresh)
    if not state.policy.on_change.restarts:
        return planned_starts(state, fresh, places_to_stand_by(state))
    assert state.launch is not None, "restarted workers boot for a launch"
    hosts = hosts_of(state.launch.placed)
    placed = (member for member in state.launch.placed if member.worker in fresh)
    return [StartWorker(member.worker, member.slot, hosts=hosts) for member in placed]


def unknown(state: State, levels: HostLevels) -> tuple[WorkerId, ...]:
    """Return the workers of the state that the host's agent does not know, except those that redo starts.

    They were told to end before they were started, or have ended unseen: as with HostLost.
    """
    gone = tuple(record.worker for record in _not_there(state, levels) if not _is_to_start(state, record))
    return (*gone, *_unknown_chief(state, levels))


def _check_age(state: State, levels: HostLevels) -> None:
    last = state.next_round_id - 1
    for what, known, own in (
        ("round", levels.round_id, last),
        ("notice", levels.notice_version, state.notice_version),
    ):
        if known > own:
            raise OlderStateError(
                f"cannot continue with host {levels.hostname}: its agent knows {what} {known}, but the last one here "
                f"is {own}; this state is older than the job, for example a copy"
            )


def _orders(state: State, worker: WorkerId) -> Iterator[Command]:
    """Yield the commands given so far to a worker that runs, or was told to start."""
    record = record_of(state, worker)
    if record is None:
        yield StopWorker(worker, "the job does not know it")
        return
    ending = told_ending(record)
    if ending is not None:
        yield StopWorker(worker, _AGAIN, ending)
    if state.end is not None:
        yield StopWorker(worker, state.end.message)
    if record.killed is not None:
        yield KillWorker(worker, record.killed.how, record.killed.hangs, record.killed.exits)


def _chief_orders(state: State, levels: HostLevels) -> Iterator[Command]:
    """Yield the commands still due to the agent of the driver's machine for the chief."""
    chief, worker = state.chief, chief_of(state)
    for other in levels.there:
        if other != worker or state.end is not None:
            yield StopWorker(other, "the job does not know it" if state.end is None else state.end.message)
    if chief is None or worker in levels.ended or state.ended:
        return
    if chief.phase is ChiefPhase.STOPPING and worker in levels.there:
        # Its agent keeps an earlier deadline, if it has one.
        yield StopChief(chief.number, _AGAIN, state.policy.drain_timeout_s)
    elif chief.phase is ChiefPhase.RUNNING and worker not in levels.there:
        yield chief_start(state, chief.number)


def _unknown_chief(state: State, levels: HostLevels) -> tuple[WorkerId, ...]:
    """Return the chief, if it was to be stopped before its agent knew of it."""
    worker = chief_of(state)
    if levels.hostname != CHIEF or worker is None or worker in (*levels.there, *levels.ended):
        return ()
    stops = state.chief is not None and state.chief.phase is ChiefPhase.STOPPING
    return (worker,) if stops or state.ended else ()


def _not_there(state: State, levels: HostLevels) -> list[WorkerRecord]:
    known = {*levels.there, *levels.ended}
    return [record for record in state.workers.by_host.get(levels.hostname, ()) if record.worker not in known]


def _is_to_start(state: State, record: WorkerRecord) -> bool:
    return record.phase is WorkerPhase.BOOTING and record.killed is None and not state.ended
