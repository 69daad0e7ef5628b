"""What the driver sees of a worker's process, wherever it runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId


class CommandNotFoundError(LaunchError):
    """The command itself is at fault: it is not there, or cannot be executed."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended.

    Attributes:
        returncode: its exit code, or minus the number of the signal that ended it.
    """

    returncode: int

    @property
    def ok(self) -> bool:
        """Whether it ended with exit code 0."""
        return self.returncode == 0

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"killed by {name}"


class WorkerProcess(Protocol):
    """A started worker.

    Attributes:
        worker: who it is.
        pid: of its process.
        label: stands in the prefix of its output: its present rank.
        exited: done as soon as the process is dead.
    """

    worker: WorkerId
    pid: int
    exited: asyncio.Future[ExitStatus]

    @property
    def label(self) -> str: ...

    @label.setter
    def label(self, text: str) -> None: ...

    @property
    def last_lines(self) -> Sequence[str]:
        """The last lines it printed, for the message that tells why it failed."""

    async def wait(self) -> ExitStatus:
        """Blocks until it has ended, with its tree, and its output has been passed on."""

    async def stop(self, grace_s: float) -> ExitStatus:
        """TERM to the whole tree, ``grace_s`` seconds, KILL. Idempotent."""

    def kill(self) -> None:
        """KILL now."""


class Launcher(Protocol):
    """Starts workers."""

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> WorkerProcess:
        """Raises LaunchError when it cannot."""

    async def close(self) -> None:
        """Ends what is left of the job."""
