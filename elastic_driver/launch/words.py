"""The vocabulary for starting processes: how a process ended, where its output goes, which signals are passed on.

Owns no process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal, Protocol

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.words import Bar

Stream = Literal["stdout", "stderr"]

# The note of an end caused by the OOM killer.
OUT_OF_MEMORY = "out of memory: the kernel's OOM killer"

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGQUIT)
"""Signals that mean nothing to us: a scheduler's warning, a trigger of the script's. They are passed on to workers."""


class CommandNotFoundError(LaunchError):
    """The command itself cannot be run (no such file, not executable): another attempt or host changes nothing."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended.

    Attributes:
        returncode: the exit code, or minus the number of the signal that killed it (as in :mod:`subprocess`).
        reason: describes the end instead, if it was not observed ("lost with its host").
        note: what else is known of it; "" for nothing.
    """

    returncode: int
    reason: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.returncode == 0

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel's OOM killer killed it."""
        return self.note == OUT_OF_MEMORY

    @property
    def signal_name(self) -> str | None:
        """``SIGKILL`` and the like; None if no signal ended it."""
        if self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:  # real-time signals have no names
            return f"signal {-self.returncode}"

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        name = self.signal_name
        how = f"exited with code {self.returncode}" if name is None else f"killed by {name}"
        return f"{how} ({self.note})" if self.note else how


class OutputSink(Protocol):
    """Receives the workers' output. Called on the event loop."""

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """Called when a worker runs, with the rank for which it was started, before its output.

        Args:
            worker: the worker.
            pid: of its process.
            rank: -1 for a process that has none.
            label: in the prefix of its output at first.
        """

    def write(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """Receive whole lines, prefix and newline included."""

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """Receive the newest state of a line that the worker redraws; the last one also arrives as an ordinary line."""

    def end(self, worker: WorkerId) -> None:
        """Receive nothing more from this worker."""
