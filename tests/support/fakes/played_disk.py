"""A journal whose disk the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from elastic_driver.core.events import Event
from elastic_driver.core.state import State
from elastic_driver.journal.entries import Fact
from elastic_driver.journal.journal import Done, Step


class Disk:
    """See Journal: what it is given is on disk when the test says so, or soon."""

    name = "/journal"
    is_on_disk = True

    def __init__(self) -> None:
        self.trouble = ""
        self.silence = "the disk does not answer"
        self.given_up = False
        self.written: list[Step] = []
        self.states: list[State] = []
        self.waiting: list[Done] = []
        self.writes = 0
        self.facts: list[Fact] = []
        self.looks: list[Callable[[], object]] = []
        self.answers_soon = False
        self.epoch = 2
        self.beside: Callable[[], object] = lambda: None

    def write(self, clock: float, state: State, steps: Sequence[Step], done: Done) -> None:
        assert not self.waiting, "one write is under way"
        self.writes += 1
        self.written += steps
        self.states.append(state)
        self.waiting.append(done)
        if self.answers_soon:
            asyncio.get_running_loop().call_soon(self.answers)

    def look(self, looked: Callable[[], object]) -> None:
        self.looks.append(looked)
        if self.answers_soon:
            asyncio.get_running_loop().call_soon(self.looked)

    def looked(self) -> None:
        self.looks.pop()()

    def keep(self, fact: Fact) -> None:
        self.facts.append(fact)

    def give_up(self) -> None:
        self.given_up = True

    def answers(self, error: Exception | None = None) -> None:
        self.waiting.pop()(error)

    def events(self) -> list[Event]:
        return [each.event for each in self.written]
