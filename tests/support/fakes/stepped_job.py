"""A job of two whose steps the test makes come: what comes of them is only noted down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from elastic_driver.core.events import Command, Event, HostsDiscovered, WorkerReady
from elastic_driver.core.membership import Policy
from elastic_driver.driver.stepper import Stepper
from elastic_driver.driver.write_ahead import WriteAhead
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.words import Backend, ReadyCause
from tests.support.fakes.virtual_loop import VirtualLoop

_T = TypeVar("_T")

A, B = WorkerId("a", 0, 0), WorkerId("b", 0, 0)
HOSTS = HostsDiscovered((Host("a", 1), Host("b", 1)))


def ready(worker: WorkerId) -> WorkerReady:
    """It asks for its first round."""
    return WorkerReady(worker, 0, 0, ReadyCause.START, "", (Backend.NATIVE,))


class SteppedJob:
    """A stepper, and what came of it.

    Args:
        loop: of the test.
        ahead: how steps get on disk; None for without.

    Attributes:
        stepper: of a job with one slot on each host.
        commands: all that were carried out.
        errors: all that were told.
        fails_at: carrying out such a command fails.
        comes_of: events that come of such commands, once.
        takes_s: how long carrying out the commands of a step takes.
    """

    def __init__(self, loop: VirtualLoop, ahead: WriteAhead | None = None) -> None:
        self.loop = loop
        self.commands: list[Command] = []
        self.errors: list[Exception] = []
        self.fails_at: type | None = None
        self.comes_of: dict[type, Event] = {}
        self.takes_s = 0.0
        self.stepper = Stepper(
            Policy(num_proc=2, min_num_proc=1, start_timeout_s=60.0),
            clock=loop.time,
            carry_out=self._carry_out,
            on_error=self._failed,
            ahead=ahead,
        )

    def _carry_out(self, commands: Sequence[Command], now: float) -> None:
        self.loop.stand_still(self.takes_s)
        for command in commands:
            self.commands.append(command)
            if (event := self.comes_of.pop(type(command), None)) is not None:
                self.stepper.post(event)
            if self.fails_at is not None and isinstance(command, self.fails_at):
                raise ZeroDivisionError("a bug")

    def _failed(self, error: Exception) -> None:
        self.errors.append(error)

    def of(self, kind: type[_T]) -> list[_T]:
        """The commands of this kind."""
        return [command for command in self.commands if isinstance(command, kind)]
