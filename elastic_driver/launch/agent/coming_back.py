"""What an agent sends a driver that has taken the job over: all of its state, and the events not yet persisted.

Owns the choice and the order. The state of a job records what was decided; only a host's agent can report what has
become of it there (docs/decisions/0044-a-driver-that-may-die.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from elastic_driver.launch.agent.host_rounds import HostRounds
from elastic_driver.launch.agent.ports import HeldPorts
from elastic_driver.launch.agent.workers import HostWorkers
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Exited,
    Finished,
    Leaves,
    NotStarted,
    WorkerLevel,
    WorkerPhase,
)


def all_again(
    workers: HostWorkers,
    rounds: HostRounds,
    ports: HeldPorts,
    leaves: Leaves | None,
    untold: Sequence[AgentMessage],
    alone_s: float,
) -> Iterator[AgentMessage]:
    """Yield all messages for another driver, in the order in which it must receive them.

    Args:
        workers, rounds, ports: the parts of this agent.
        leaves: the message that its host is leaving; None if it is not.
        untold: events that the previous driver has not persisted, in order. Everything else is state, sent as it is
            now, or of no interest to another driver.
        alone_s: how long there was no driver, seconds.
    """
    yield replace(rounds.levels(_with_gone(workers.levels(), untold), alone_s), held=ports.levels())
    yield from rounds.reports()
    yield from workers.warmed
    yield from workers.figures.again()
    if leaves is not None:
        yield leaves
    yield from rounds.questions()
    yield from untold


def _with_gone(levels: list[WorkerLevel], untold: Sequence[AgentMessage]) -> list[WorkerLevel]:
    """Return the levels, with the workers of which only unpersisted reports of their ends are left."""
    there = {level.worker for level in levels}
    gone = {each.worker: None for each in untold if isinstance(each, Exited | NotStarted | Finished)}
    return levels + [
        WorkerLevel(key, WorkerPhase.ENDED, 0, "", -1, leaving=False, exiting=False) for key in gone if key not in there
    ]
