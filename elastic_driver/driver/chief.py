"""The keeper of the chief: starts its process beside the driver, stops it, and reports how it ended.

Owns the chief's process, and the port that its own server is to listen on. Decides nothing: when it is started, and
what its end means, is the core's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.core.events import ChiefExited, StartChief, StopChief
from elastic_driver.core.state import ChiefPhase, parameter_servers, serving_workers
from elastic_driver.dialects.dialect import JobAddress
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import LaunchError, in_words
from elastic_driver.health.last_words import last_words
from elastic_driver.hosts import CHIEF, WorkerId, with_number
from elastic_driver.launch.agent.ports import bound_port
from elastic_driver.launch.local.keeper import Launch, ProcessKeeper, ProcessListener
from elastic_driver.launch.local.process_tree import ProcessTree
from elastic_driver.launch.words import CommandNotFoundError, ExitStatus
from elastic_driver.report.chronicle import Chronicle


class Environment(Protocol):
    """Makes the environment of a chief."""

    def __call__(
        self, number: int, address: str, parameter_servers: Sequence[str], workers: Sequence[str], *, job: JobAddress
    ) -> dict[str, str]:
        """See :class:`elastic_driver.dialects.servers.ServerDialect`."""


@dataclass(frozen=True, slots=True)
class ChiefSide:
    """What a driver with a chief has, beside the rest.

    Attributes:
        processes: makes the keeper of its process, on this machine, which tells this listener.
        environment: of its process.
        server_command: what the servers run.
        address_of: an address of a host, by name, that all other hosts of the job reach; of this machine for "".
            Raises LaunchError.
        ports: first and last port that it may listen on; None for any.
    """

    processes: Callable[[ProcessListener], ProcessKeeper]
    environment: Environment
    server_command: Sequence[str]
    address_of: Callable[[str], str]
    ports: tuple[int, int] | None = None


class ChiefKeeper:
    """See above. A ProcessListener. Used on the event loop only.

    Args:
        side: what it is started with.
        command: the script.
        grace_s: between SIGTERM and SIGKILL, where nothing else is said; seconds.
        stepper: takes its end, and has the state.
        chronicle: is told of starts and ends.
    """

    def __init__(
        self, side: ChiefSide, *, command: Sequence[str], grace_s: float, stepper: Stepper, chronicle: Chronicle
    ) -> None:
        self._side = side
        self._command = command
        self._grace_s = grace_s
        self._stepper = stepper
        self._chronicle = chronicle
        self._processes = side.processes(self)
        self._chief: WorkerId | None = None  # from its start until nothing is left of it
        self._gone = asyncio.Event()
        self._held: socket.socket | None = None  # on the port that its server is to have
        self._job_ends = False

    @property
    def pid(self) -> int | None:
        """Of its process; None while none runs."""
        process = None if self._chief is None else self._processes.process(self._chief)
        return process.pid if process is not None and process.is_alive else None

    def start(self, order: StartChief, job: JobAddress) -> None:
        """Starts it. The last one has ended."""
        if not self._job_ends:
            self._chief = WorkerId(CHIEF, 0, order.number - 1)
            self._gone.clear()
            self._processes.start(self._chief, CHIEF, lambda: self._launch(order, job))

    def stop(self, order: StopChief) -> None:
        """SIGTERM, grace, SIGKILL; for one that is being started, as soon as its process is there."""
        self._stop(self._grace_s if order.grace_s is None else order.grace_s)

    def kill(self) -> None:
        """SIGKILL now."""
        self._stop(0.0)

    async def end(self, limit_s: float) -> None:
        """Stops it. Blocks until nothing is left of it, or for ``limit_s`` seconds."""
        self._job_ends = True
        if self._chief is not None:
            self._stop(self._grace_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), limit_s)

    async def close(self) -> None:
        """Kills what is left of it. Blocks until nothing is."""
        await self._processes.close()
        self._let_go()

    def _stop(self, grace_s: float) -> None:
        if self._chief is not None:
            self._processes.stop(self._chief, grace_s)

    async def _launch(self, order: StartChief, job: JobAddress) -> Launch:
        """What is run as the chief.

        Raises:
            LaunchError: it lacks an address or a port.
        """
        address = with_number(self._side.address_of(""), self._hold_port())
        env = self._side.environment(order.number, address, order.parameter_servers, order.workers, job=job)
        return Launch(self._command, env)

    def _hold_port(self) -> int:
        """A port that nobody else is given until the chief has ended. It can listen there: see launch/agent/ports.py.

        Raises:
            LaunchError: none is free.
        """
        self._let_go()
        try:
            self._held = bound_port(list(self._side.ports or ()))
        except OSError as error:
            raise LaunchError(f"there is no port for its server: {in_words(error)}") from error
        return int(self._held.getsockname()[1])

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    # --- what becomes of its process (ProcessListener) -------------------------------------------------------------

    def started(self, worker: WorkerId, process: ProcessTree) -> None:
        """See ProcessListener."""
        state = self._stepper.state
        servers, workers = len(parameter_servers(state)), len(serving_workers(state))
        self._chronicle.chief_started(_number_of(worker), process.pid, servers, workers)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """See ProcessListener."""
        self._let_go()
        self.finished(worker)
        bad_command = isinstance(error, CommandNotFoundError)
        how = str(error) if bad_command else f"could not be started: {error}"
        self._stepper.post(ChiefExited(_number_of(worker), None, how, bad_command=bad_command))

    def dying(self, worker: WorkerId, process: ProcessTree, status: ExitStatus | str) -> None:
        """See ProcessListener. It is replaced when it has ended."""

    def exited(self, worker: WorkerId, process: ProcessTree, status: ExitStatus) -> None:
        """See ProcessListener."""
        self._let_go()
        # TensorFlow writes to its end of servers that are gone.
        error, where = last_words(process.last_lines, of_traceback=True) if status.returncode else ("", "")
        how, chief = str(status), self._stepper.state.chief
        expected = self._stepper.is_over or (chief is not None and chief.phase is ChiefPhase.STOPPING)
        number, starved = _number_of(worker), status.out_of_memory
        self._chronicle.chief_exited(number, process.pid, status.returncode, how, expected=expected)
        self._stepper.post(ChiefExited(number, status.returncode, how, error, where, out_of_memory=starved))

    def finished(self, worker: WorkerId) -> None:
        """See ProcessListener. The next may have been started when its predecessor was dead."""
        if worker == self._chief:
            self._chief = None
            self._gone.set()


def _number_of(worker: WorkerId) -> int:
    return worker.attempt + 1
