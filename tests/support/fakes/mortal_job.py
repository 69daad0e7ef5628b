"""A job whose driver dies, again and again, and whose agents come back to the next one when they like.

Its books, and the audit of each step, are those of a job whose driver lives (``Job``), and so are ``Job.agents``: what
its agents would know then. Beside them are those that there are, ``met``: of a list of commands they hear those before
the driver dies, and none while they are away. Each that is back is to know what it would know if nobody had died.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator

from elastic_driver.core.document import read, write
from elastic_driver.core.events import (
    Command,
    Event,
    HostLost,
    WorkerNotStarted,
    WorkerReport,
    WorkersReported,
)
from elastic_driver.core.state import State
from tests.support.fakes.agents import Agents
from tests.support.fakes.membership_job import OTHER_ORIGIN, Job


def reporters(event: Event) -> Iterator[str]:
    """The hosts whose agents say this."""
    for each in event.reports if isinstance(event, WorkersReported) else (event,):
        if isinstance(each, WorkerReport | WorkerNotStarted):
            yield each.worker.hostname


class MortalJob(Job):
    """See above.

    Attributes:
        met: the agents that there are.
        away: hosts whose agents have not met the present driver.
        dies_after: the driver dies when it has carried out so many commands of the next step that has as many; None
            for not.
        deaths: how often it has died.
        returns: how often an agent came back of which something was due.
    """

    dies_each = 1 << 30  # it does so here

    def __init__(self, **limits: object) -> None:
        super().__init__(**limits)
        self.met = Agents()
        self.away: set[str] = set()
        self.dies_after: int | None = None
        self.deaths = self.returns = 0

    def fork(self) -> MortalJob:
        """See Job."""
        twin = super().fork()
        assert isinstance(twin, MortalJob)
        twin.met = self.met.copy()
        return twin

    def feed(self, event: Event, *, at: float | None = None) -> list[Command]:
        """See Job. Whose agent says something, it is back, and has been told what was due."""
        for name in reporters(event):
            self.come_back(name)
        return super().feed(event, at=at)

    def die(self) -> None:
        """The driver dies, and another has what it had written down."""
        self.deaths += 1
        now = self.now + OTHER_ORIGIN
        there = read(json.loads(json.dumps(write(self.state, self.now))), now)
        self.state = read(json.loads(json.dumps(write(there, now))), self.now)
        self.away = {worker.hostname for worker in (*self.started, *self.met.living)}

    def come_back(self, name: str) -> None:
        """The agent of a host meets the present driver, if it is away."""
        if name not in self.away:
            return
        before = self.met.of(name)
        gone = self.met.come_back(name, self.state)
        if name in self.met.refused:
            return  # until it is heard again, and begins anew
        self.away.discard(name)
        self.returns += self.met.of(name) != before
        if gone:
            assert all(self.agents.living[worker].stop or self.agents.living[worker].kill for worker in gone)
            super().feed(HostLost(name, "nobody knows how", gone, 0.0))
        for worker, process in self.met.of(name).items():
            if worker not in self.alive:  # it was lost with its host, and is there after all
                assert process.stop, "a process that nobody knows goes on"
                del self.met.living[worker]
        self.met.check_like(self.agents, name)

    def all_come_back(self) -> None:
        """All agents meet the present driver."""
        for name in sorted(self.away):
            self.come_back(name)

    def what_is_met(self) -> Hashable:
        """What the agents know, and who of them is away: jobs with the same state may differ in that."""
        return frozenset(self.met.living.items()), self.met.refused, frozenset(self.away)

    def _carry_out(self, before: State, event: Event, commands: list[Command]) -> None:
        super()._carry_out(before, event, commands)
        self.met.happened(event, self.state, away=self.away)
        dies = self.dies_after is not None and self.dies_after <= len(commands)
        for command in commands[: self.dies_after if dies else None]:
            self.met.carry_out(command, away=self.away)
        if dies:
            self.dies_after = None
            self.die()
