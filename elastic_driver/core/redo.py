"""What is still due of a host's processes, from the state of a job and from what the host's agent knows.

For a driver that takes a running job over (docs/decisions/0044-a-driver-that-may-die.md). The last one may have died
before it had carried out the commands of its last step, or while this agent was away: no more is known than that the
state has decided them. They are made anew from the state, and who has carried them out already does nothing when they
come again. So nobody has to know which of them had been.

Only what is due of processes is made here. Round and notice are levels, which each agent is told that comes; a request
that is open is answered from the state (``Round``, and that a worker is LEAVING); the end of the job is ``State.end``.

Workers that reset in place are started with a forecast of their ranks, which is made anew; those that are restarted
with the ranks of their launch, which stand in the state. A chief is a process of the driver's own machine, and stands
for a host of its own.
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

_AGAIN = "the driver has told it so before, and was away since"


class OlderStateError(ElasticError, ValueError):
    """A state is older than what the job's agents know: another driver has gone on from it."""


@dataclass(frozen=True, slots=True)
class HostLevels:
    """What the agent of a host knows.

    Attributes:
        hostname: of which host; all workers below are of this one.
        there: the workers that it runs, or was told to start.
        ended: those that have ended, or could not be started, of which nobody has taken the end from it yet. It may
            have been taken all the same. Each comes as a report of its own.
        round_id: the last round that it was told of; 0 for none.
        notice_version: of the last notice that it was told of; 0 for none. That the job is over is none of these.
    """

    hostname: str
    there: tuple[WorkerId, ...]
    ended: tuple[WorkerId, ...]
    round_id: int
    notice_version: int


def redo(state: State, levels: HostLevels) -> list[Command]:
    """The commands that this host's agent has still to be given, in the order in which they are to be carried out.

    Carrying them out twice is harmless, and what was carried out before is among them: its agent does what it was told
    first. Of whom the agent knows nothing, and nothing is made here, :func:`unknown` says so.

    Raises:
        OlderStateError: the agent knows a round, or a notice, that this job has not had yet. Its workers train in a
            round that this driver knows nothing of: it is refused, and ends them.
    """
    _check_age(state, levels)
    if levels.hostname == CHIEF:
        return list(_chief_orders(state, levels))
    # When the job has ended, the state no longer says who was heard again since.
    if not state.ended and any(one.hostname == levels.hostname and one.given_up for one in state.silent):
        return [GiveUpHost(levels.hostname, "it was given up while it was not heard")]
    commands = [command for worker in levels.there for command in _orders(state, worker)]
    fresh = [record.worker for record in _not_there(state, levels) if _is_to_start(state, record)]
    # A plan is of all workers of the job: none is made for each of a thousand hosts that needs no start.
    return [*commands, *_starts(state, fresh)] if fresh else commands


def _starts(state: State, fresh: list[WorkerId]) -> list[StartWorker]:
    if state.policy.has_chief:
        return server_starts(state, fresh)
    if not state.policy.on_change.restarts:
        return planned_starts(state, fresh, places_to_stand_by(state))
    assert state.launch is not None, "restarted workers boot for a launch"
    hosts = hosts_of(state.launch.placed)
    placed = (each for each in state.launch.placed if each.worker in fresh)
    return [StartWorker(each.worker, each.slot, hosts=hosts) for each in placed]


def unknown(state: State, levels: HostLevels) -> tuple[WorkerId, ...]:
    """The workers of the state of which the host's agent knows nothing, but for those that redo starts.

    They were told to end before anybody had started them, or have ended and nobody has seen how: as with HostLost.
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
                f"cannot go on with host {levels.hostname}: its agent knows {what} {known}, and the last one here is "
                f"{own}; this state is older than the job, perhaps of a copy"
            )


def _orders(state: State, worker: WorkerId) -> Iterator[Command]:
    """What a worker that runs, or was told to start, has been told."""
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
    """What the agent of the driver's machine has still to be given of the chief."""
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
    """The chief, where it was to be stopped before its agent had heard of it."""
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
