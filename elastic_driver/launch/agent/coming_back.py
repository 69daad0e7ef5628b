"""What an agent says to a driver that has come in the place of another: all that it knows, and what nobody has kept.

Owns which of that is said, and in which order. The state of a job says what was decided; what has become of it on a
host only its agent can say (docs/decisions/0044-a-driver-that-may-die.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from elastic_driver.launch.agent.host_rounds import HostRounds
from elastic_driver.launch.agent.ports import HeldPorts
from elastic_driver.launch.agent.workers import HostWorkers
from elastic_driver.rendezvous.agent_messages import (
    Exited,
    Finished,
    Leaves,
    NotStarted,
    Said,
    WorkerLevel,
    WorkerPhase,
)


def all_again(
    workers: HostWorkers,
    rounds: HostRounds,
    ports: HeldPorts,
    leaves: Leaves | None,
    untold: Sequence[Said],
    alone_s: float,
) -> Iterator[Said]:
    """All that another driver is told, in the order in which it has to hear it.

    Args:
        workers, rounds, ports: what this agent has.
        leaves: that its host is to leave; None where it is not.
        untold: what was said to the driver before and it has not kept, in order: what happened once. All else is a
            level, and said as it is now, or of no interest to another driver.
        alone_s: for how long there was no driver.
    """
    yield replace(rounds.levels(_with_gone(workers.levels(), untold), alone_s), held=ports.levels())
    yield from rounds.reports()
    yield from workers.warmed
    yield from workers.figures.again()
    if leaves is not None:
        yield leaves
    yield from rounds.questions()
    yield from untold


def _with_gone(levels: list[WorkerLevel], untold: Sequence[Said]) -> list[WorkerLevel]:
    """With the workers of whom nothing is left here but that nobody has kept their ends."""
    there = {each.worker for each in levels}
    gone = {each.worker: None for each in untold if isinstance(each, Exited | NotStarted | Finished)}
    return levels + [
        WorkerLevel(key, WorkerPhase.ENDED, 0, "", -1, leaving=False, exiting=False) for key in gone if key not in there
    ]
