"""What the driver needs of whoever starts processes: the protocols, and how a process ended.

Owns no process. :mod:`elastic_driver.launch.fleet.launcher` has agents start them. This is the seam for others: nothing
above it sends a signal, looks at a process, counts processors or asks which machine a name means.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId

Stream = Literal["stdout", "stderr"]

# The note of an end that was the OOM killer's.
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
        reason: says it instead, where nobody has seen the end ("lost with its host").
        host_lost: whether that is so.
        note: what is known of it beside; "" for nothing.
    """

    returncode: int
    reason: str = ""
    host_lost: bool = False
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.returncode == 0

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel's OOM killer took it."""
        return self.note == OUT_OF_MEMORY

    @property
    def signal_name(self) -> str | None:
        """``SIGKILL`` and the like; None when no signal ended it."""
        if self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:  # the real-time signals have no names
            return f"signal {-self.returncode}"

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        name = self.signal_name
        how = f"exited with code {self.returncode}" if name is None else f"killed by {name}"
        return f"{how} ({self.note})" if self.note else how


class OutputSink(Protocol):
    """Takes the workers' output. Called on the event loop."""

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """A worker runs, and was started for this rank. Comes before its output.

        Args:
            worker: which.
            pid: of its process.
            rank: -1 for a process that has none.
            label: as it stands in the prefix of its output at first.
        """

    def write(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """Takes whole lines, prefix and newline included."""

    def end(self, worker: WorkerId) -> None:
        """Nothing more comes of this worker."""


class WorkerProcess(Protocol):
    """A worker's process, from its start to the end of everything that it started.

    Attributes:
        pid: its process id, on whatever machine it is: for people, in messages and logs. Nobody above acts on it.
        label: what stands in the prefix of its output: its current rank. The driver sets it at each round.
        exited: done at the moment the process is dead; what it wrote until then has been passed on.
        dying: done when it is known that the process ends and not well, though it may take seconds until it is dead:
            with what, or in words when that is not known yet (it dumps its core). Cancelled when it is dead without
            that.
    """

    pid: int
    label: str
    exited: asyncio.Future[ExitStatus]
    dying: asyncio.Future[ExitStatus | str]

    @property
    def last_lines(self) -> Sequence[str]:
        """The end of its stderr, or of its stdout when it wrote nothing there; 20 lines at most."""

    def watch_threads(self, pid: int, thread: int) -> None:
        """Takes which process called ``init()``, and one of its threads that lives as long as its first one.

        Watches these two threads for ``dying``, unless that is another process than this (the command is a shell, say),
        it is done already, or the system cannot tell of a thread's end.
        """

    async def kill_hung(self, *, stacks_s: float, exits: bool) -> bool:
        """Has the process that called ``init()`` print where its threads are, and kills the whole tree.

        Blocks until it is known whether that is done, and no longer than until the process is dead.

        Args:
            stacks_s: for how long at most the stacks are waited for; 0 to print none.
            exits: whether to spare a worker whose script has ended: a shell that runs it may go on after its end.

        Returns:
            False when it was spared, or is dead already.
        """

    async def wait(self) -> ExitStatus:
        """Blocks until the process is dead, its leftover children are gone and its output is read to the end.

        A descendant that nobody can find or kill does not hold it for longer than a few seconds.
        """

    @property
    def error_file(self) -> str:
        """What it has written into its error file (:mod:`elastic_driver.launch.error_files`); "" for nothing."""

    async def stop(self, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM) -> ExitStatus:
        """A signal to the whole tree, after ``grace_s`` SIGKILL to what is left; blocks as :meth:`wait` does.

        Harmless when repeated. A later call with a nearer deadline shortens the grace, and sends no other signal.

        Args:
            grace_s: how long, seconds.
            sever: whether its connections are shut too, where the system lets us: who waits for a lost peer in a
                collective gets an error at once, and can still tidy up.
            number: the signal.
        """

    def kill(self) -> None:
        """SIGKILL to the whole tree now."""


class Launcher(Protocol):
    """Starts worker processes."""

    def cores(self, hostname: str) -> int:
        """How many processors the workers on a host may use together."""

    def addresses(self, hostnames: Sequence[str]) -> Mapping[str, str]:
        """Where the workers of one round listen for each other, by host: an address that the others' hosts reach.

        Args:
            hostnames: of all its members; addresses of one machine do where they are all on it.
        """

    async def hold_port(self, hostname: str, generation: int) -> int:
        """Keeps a port of a host from all others, for rank 0 of a generation of workers to listen at.

        Blocks until it is held. A port that was held for an earlier generation is still.

        Args:
            hostname: the host of that rank.
            generation: a number that no other generation of the job has.

        Returns:
            The port; 0 where workers have no need of one.

        Raises:
            LaunchError: the host has no agent any more, or no port.
        """

    def let_go(self, hostname: str, generation: int) -> None:
        """That port is no longer needed."""

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> WorkerProcess:
        """Starts ``command`` with exactly the environment ``env`` plus the marks of job and worker.

        Its rank is -1 where it has none.
        No shell has a part in it; ``${local_rank}`` in an argument becomes what ENV_LOCAL_RANK says, if it is set.

        Raises:
            CommandNotFoundError: the command cannot be run, wherever it is tried.
            LaunchError: the process could not be started.
        """

    def pass_on(self, number: signal.Signals) -> None:
        """Sends this signal to the process of each worker that runs, and not to what that has started.

        Of those that would end the process where nothing handles them (all but SIGQUIT, which is meant so), only to
        who does: not to one whose script has not come so far yet.
        """

    def kill(self) -> None:
        """SIGKILL now to all that is left of all workers, also to what dead ones have left behind."""

    async def close(self) -> None:
        """Kills what still runs and ends the launcher. Blocks until nothing of the job is left."""
