"""The keeper of the chief: starts its process beside the driver, stops it, and tells how it ended.

Owns the chief's process, and the port that its own server is to listen on. Decides nothing: when it is started, and
what its end means, is the core's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.core.events import ChiefExited, StartChief, StopChief
from elastic_driver.dialects.dialect import JobAddress
from elastic_driver.errors import LaunchError
from elastic_driver.health.last_words import last_words
from elastic_driver.hosts import CHIEF, WorkerId
from elastic_driver.launch.agent.ports import bound_port
from elastic_driver.launch.launcher import CommandNotFoundError, ExitStatus, WorkerProcess
from elastic_driver.system.tasks import Tasks


class Environment(Protocol):
    """Makes the environment of a chief."""

    def __call__(
        self, number: int, address: str, parameter_servers: Sequence[str], workers: Sequence[str], *, job: JobAddress
    ) -> dict[str, str]:
        """See :class:`elastic_driver.dialects.servers.ServerDialect`."""


class Launcher(Protocol):
    """Starts processes on this machine; see :class:`~elastic_driver.launch.launcher.Launcher`."""

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> WorkerProcess:
        """See there."""

    async def close(self) -> None:
        """See there."""


@dataclass(frozen=True, slots=True)
class ChiefSide:
    """What a driver with a chief has, beside the rest.

    Attributes:
        launcher: starts it, on this machine.
        environment: of its process.
        server_command: what the servers run.
        address_of: an address of a host, by name, that all other hosts of the job reach; of this machine for "".
            Raises LaunchError.
        ports: first and last port that it may listen on; None for any.
    """

    launcher: Launcher
    environment: Environment
    server_command: Sequence[str]
    address_of: Callable[[str], str]
    ports: tuple[int, int] | None = None


class ChiefListener(Protocol):
    """Is told what becomes of it. Called on the event loop."""

    def chief_started(self, number: int, pid: int) -> None:
        """Its process runs."""

    def chief_exited(self, event: ChiefExited, pid: int | None) -> None:
        """It has ended; pid None where there was no process."""


class ChiefKeeper:
    """See above. Used on the event loop only.

    Args:
        side: what it is started with.
        command: the script.
        grace_s: between SIGTERM and SIGKILL, where nothing else is said; seconds.
        tasks: run what nobody waits for; an error of theirs ends the job.
        listener: is told of starts and ends.
    """

    def __init__(
        self,
        side: ChiefSide,
        *,
        command: Sequence[str],
        grace_s: float,
        tasks: Tasks,
        listener: ChiefListener,
    ) -> None:
        self._side = side
        self._command = command
        self._grace_s = grace_s
        self._tasks = tasks
        self._listener = listener
        self._process: WorkerProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stop_within_s: float | None = None  # of one that is being started
        self._held: socket.socket | None = None  # on the port that its server is to have
        self._job_ends = False

    @property
    def pid(self) -> int | None:
        """Of its process; None while none runs."""
        return None if self._process is None else self._process.pid

    def start(self, order: StartChief, job: JobAddress) -> None:
        """Starts it. The last one has ended."""
        self._stop_within_s = None
        self._starting = self._tasks.start(self._start(order, job))

    def stop(self, order: StopChief) -> None:
        """SIGTERM, grace, SIGKILL; for one that is being started, as soon as its process is there."""
        self._stop(self._grace_s if order.grace_s is None else order.grace_s)

    def kill(self) -> None:
        """SIGKILL now."""
        self._stop(0.0)

    async def end(self, limit_s: float) -> None:
        """Stops it. Blocks until it has ended, or for ``limit_s`` seconds."""
        self._job_ends = True
        waits: list[asyncio.Task[None]] = []
        if self._process is not None:
            waits.append(self._tasks.start(self._ended(self._process, self._grace_s)))
        elif self._starting is not None:
            waits.append(self._starting)
        if waits:
            await asyncio.wait(waits, timeout=limit_s)

    async def close(self) -> None:
        """Kills what is left of it. Blocks until nothing is."""
        await self._side.launcher.close()
        self._let_go()

    def _stop(self, grace_s: float) -> None:
        if self._process is not None:
            self._tasks.start(self._ended(self._process, grace_s))
        elif self._starting is not None and not self._starting.done():
            self._stop_within_s = grace_s

    async def _ended(self, process: WorkerProcess, grace_s: float) -> None:
        await process.stop(grace_s)

    async def _start(self, order: StartChief, job: JobAddress) -> None:
        worker = WorkerId(CHIEF, 0, order.number - 1)
        try:
            if self._job_ends:
                return
            host = self._side.address_of("")
            port = self._hold_port()
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            env: Mapping[str, str] = self._side.environment(
                order.number, address, order.parameter_servers, order.workers, job=job
            )
            process = await self._side.launcher.start(worker, self._command, env, label=CHIEF, rank_at_launch=-1)
        except LaunchError as error:
            self._let_go()
            bad_command = isinstance(error, CommandNotFoundError)
            how = str(error) if bad_command else f"could not be started: {error}"
            self._listener.chief_exited(ChiefExited(order.number, None, how, bad_command=bad_command), None)
            return
        self._process = process
        process.exited.add_done_callback(lambda future: self._exited(order.number, process, future))
        self._listener.chief_started(order.number, process.pid)
        grace_s = self._ends_within_s()
        if grace_s is not None:
            await self._ended(process, grace_s)

    def _hold_port(self) -> int:
        """A port that nobody else is given until the chief has ended. It can listen there: see launch/agent/ports.py.

        Raises:
            LaunchError: none is free.
        """
        self._let_go()
        try:
            self._held = bound_port(list(self._side.ports or ()))
        except OSError as error:
            raise LaunchError(f"there is no port for its server: {error.strerror}") from error
        return int(self._held.getsockname()[1])

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _ends_within_s(self) -> float | None:
        """The grace of one that was told to end before it was there; None where it was not."""
        return self._grace_s if self._stop_within_s is None and self._job_ends else self._stop_within_s

    def _exited(self, number: int, process: WorkerProcess, future: asyncio.Future[ExitStatus]) -> None:
        if future.cancelled():
            return
        self._process = None
        self._let_go()
        self._tasks.start(self._wait_for(process))  # what it has started ends after it, and is waited for
        status = future.result()
        # TensorFlow writes to its end of servers that are gone.
        error, where = last_words(process.last_lines, of_traceback=True) if status.returncode else ("", "")
        ended = ChiefExited(number, status.returncode, str(status), error, where, out_of_memory=status.out_of_memory)
        self._listener.chief_exited(ended, process.pid)

    async def _wait_for(self, process: WorkerProcess) -> None:
        await process.wait()
