"""The keeper of the chief: starts its process beside the driver, stops it, and reports how it ended.

Owns the chief's process, and the port for its own server. Decides nothing: the core decides when it is started, and
what its end means.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_driver.core.events import ChiefExited, KillWorker, StartChief, StopChief
from elastic_driver.core.state import ChiefPhase, parameter_servers, serving_workers
from elastic_driver.dialects.dialect import JobAddress
from elastic_driver.driver.stepper import Stepper
from elastic_driver.errors import LaunchError, in_words
from elastic_driver.health.last_words import last_words
from elastic_driver.hosts import CHIEF, WorkerId, with_number
from elastic_driver.launch.agent.ports import bound_port
from elastic_driver.launch.fleet.chief import WorkersWithChief
from elastic_driver.launch.fleet.worker import Worker, WorkerListener
from elastic_driver.launch.local.keeper import Launch, ProcessKeeper, ProcessListener
from elastic_driver.launch.local.process_tree import ProcessTree
from elastic_driver.launch.words import CommandNotFoundError, ExitStatus
from elastic_driver.reporting.chronicle import Chronicle


class Environment(Protocol):
    """Creates the environment of a chief."""

    def __call__(
        self, number: int, address: str, parameter_servers: Sequence[str], workers: Sequence[str], *, job: JobAddress
    ) -> dict[str, str]:
        """Return the variables, as :class:`elastic_driver.dialects.servers.ServerDialect` does."""


@dataclass(frozen=True, slots=True)
class ChiefSide:
    """What a driver needs for its chief.

    Attributes:
        processes: creates the keeper of its process, on this machine, which notifies this listener.
        environment: creates the environment of its process.
        server_command: the command of the servers.
        address_of: returns an address of a host, by name, that all other hosts of the job reach; of this machine for
            "". Raises LaunchError.
        ports: first and last port that it may listen on; None for any.
    """

    processes: Callable[[ProcessListener], ProcessKeeper]
    environment: Environment
    server_command: Sequence[str]
    address_of: Callable[[str], str]
    ports: tuple[int, int] | None = None


class TakeoverListener(WorkerListener, Protocol):
    """A WorkerListener that is also notified of workers that another driver started."""

    def back(self, worker: Worker) -> None:
        """A process runs that another driver had started."""


class ChiefKeeper:
    """The chief of a job. Used on the event loop only; subclasses choose the parent of its process.

    Args:
        side: what its start needs.
        command: the script.
        grace_s: the default time between SIGTERM and SIGKILL, seconds.
        stepper: takes its end, and has the state.
        chronicle: reports starts and ends.
    """

    def __init__(
        self, side: ChiefSide, *, command: Sequence[str], grace_s: float, stepper: Stepper, chronicle: Chronicle
    ) -> None:
        self._side = side
        self._command = command
        self._grace_s = grace_s
        self._stepper = stepper
        self._chronicle = chronicle
        self._chief: WorkerId | None = None  # from its start until nothing is left of it
        self._gone = asyncio.Event()
        self._held: socket.socket | None = None  # on the port reserved for its server
        self._job_ends = False

    def start(self, order: StartChief, job: JobAddress) -> None:
        """Start the chief. The last one has ended."""
        if not self._job_ends:
            self._chief = WorkerId(CHIEF, 0, order.number - 1)
            self._gone.clear()
            self._start(self._chief, lambda: self._launch(order, job))

    def stop(self, order: StopChief) -> None:
        """Send SIGTERM, and SIGKILL after the grace period; if it is being started, once its process exists."""
        self._stop_it(self._grace_s if order.grace_s is None else order.grace_s)

    def kill(self) -> None:
        """Send SIGKILL now."""
        self._stop_it(0.0)

    async def end(self, limit_s: float) -> None:
        """Stop it. Blocks until nothing is left of it, or for ``limit_s`` seconds."""
        self._job_ends = True
        if self._chief is not None:
            self._stop_it(self._grace_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), limit_s)

    async def close(self) -> None:
        """Release its resources. A child has ended completely after that."""
        self._let_go()

    def _stop_it(self, grace_s: float) -> None:
        if self._chief is not None:
            self._stop(self._chief, grace_s)

    def _start(self, chief: WorkerId, launch: Callable[[], Launch]) -> None:
        raise NotImplementedError

    def _stop(self, chief: WorkerId, grace_s: float) -> None:
        raise NotImplementedError

    def _launch(self, order: StartChief, job: JobAddress) -> Launch:
        """Return the command and environment of the chief.

        Raises:
            LaunchError: it lacks an address or a port.
        """
        address = with_number(self._side.address_of(""), self._hold_port())
        env = self._side.environment(order.number, address, order.parameter_servers, order.workers, job=job)
        return Launch(self._command, env)

    def _hold_port(self) -> int:
        """Reserve a port until the chief has ended. The chief can listen there: see launch/agent/ports.py.

        Raises:
            LaunchError: none is free.
        """
        self._let_go()
        try:
            self._held = bound_port(list(self._side.ports or ()))
        except OSError as error:
            raise LaunchError(f"cannot open a port for its server: {in_words(error)}") from error
        return int(self._held.getsockname()[1])

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    # --- the course of its process ---------------------------------------------------------------------------------

    def _runs(self, chief: WorkerId, pid: int) -> None:
        state = self._stepper.state
        servers, workers = len(parameter_servers(state)), len(serving_workers(state))
        self._chronicle.chief_started(_number_of(chief), pid, servers, workers)

    def _has_not_started(self, chief: WorkerId, error: LaunchError) -> None:
        self._let_go()
        self._is_gone(chief)
        bad_command = isinstance(error, CommandNotFoundError)
        how = str(error) if bad_command else f"could not be started: {error}"
        self._stepper.post(ChiefExited(_number_of(chief), None, how, bad_command=bad_command))

    def _has_exited(self, chief: WorkerId, pid: int, status: ExitStatus, last_lines: Sequence[str]) -> None:
        self._let_go()
        # At its end TensorFlow writes about servers that are gone.
        error, where = last_words(last_lines, of_traceback=True) if status.returncode else ("", "")
        how, there = str(status), self._stepper.state.chief
        expected = self._stepper.is_over or (there is not None and there.phase is ChiefPhase.STOPPING)
        number, starved = _number_of(chief), status.out_of_memory
        self._chronicle.chief_exited(number, pid, status.returncode, how, expected=expected)
        self._stepper.post(ChiefExited(number, status.returncode, how, error, where, out_of_memory=starved))

    def _is_gone(self, chief: WorkerId) -> None:
        """Record that nothing is left of it. Its successor may have been started when it was dead."""
        if chief == self._chief:
            self._chief = None
            self._gone.set()


class OwnChief(ChiefKeeper):
    """A child of this process, which ends with it. A ProcessListener."""

    def __init__(
        self, side: ChiefSide, *, command: Sequence[str], grace_s: float, stepper: Stepper, chronicle: Chronicle
    ) -> None:
        super().__init__(side, command=command, grace_s=grace_s, stepper=stepper, chronicle=chronicle)
        self._processes = side.processes(self)

    async def close(self) -> None:
        """Kill what is left of it. Blocks until nothing is."""
        await self._processes.close()
        await super().close()

    def _start(self, chief: WorkerId, launch: Callable[[], Launch]) -> None:
        async def launched() -> Launch:
            return launch()

        self._processes.start(chief, CHIEF, launched)

    def _stop(self, chief: WorkerId, grace_s: float) -> None:
        self._processes.stop(chief, grace_s)

    # --- ProcessListener -------------------------------------------------------------------------------------------

    def started(self, worker: WorkerId, process: ProcessTree) -> None:
        """Record that its process runs."""
        self._runs(worker, process.pid)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """Report that it could not be started."""
        self._has_not_started(worker, error)

    def dying(self, worker: WorkerId, process: ProcessTree, status: ExitStatus | str) -> None:
        """Ignore that it is dying: it is replaced when it has ended."""

    def exited(self, worker: WorkerId, process: ProcessTree, status: ExitStatus) -> None:
        """Report how it ended."""
        self._has_exited(worker, process.pid, status, process.last_lines)

    def finished(self, worker: WorkerId) -> None:
        """Record that nothing is left of it."""
        self._is_gone(worker)


class AgentsChief(ChiefKeeper):
    """A process of this machine's agent, which outlives this driver. A WorkerListener that passes on all but the chief.

    Attributes:
        workers: starts and stops the chief; to be set before anything else.
        others: the listener for all other workers; to be set before anything else.
    """

    workers: WorkersWithChief
    others: TakeoverListener

    def _start(self, chief: WorkerId, launch: Callable[[], Launch]) -> None:
        self.workers.start_chief(chief, launch)

    def _stop(self, chief: WorkerId, grace_s: float) -> None:
        self.workers.stop_chief(chief, grace_s)

    # --- WorkerListener --------------------------------------------------------------------------------------------

    def started(self, worker: Worker) -> None:
        """Record that the chief's process runs, or pass it on."""
        if worker.id.hostname == CHIEF:
            self._runs(worker.id, worker.pid)
        else:
            self.others.started(worker)

    def back(self, worker: Worker) -> None:
        """Record a chief that another driver had started, or pass it on."""
        if worker.id.hostname == CHIEF:
            self._chief = worker.id
            self._gone.clear()
        else:
            self.others.back(worker)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """Report that the chief could not be started, or pass it on."""
        if worker.hostname == CHIEF:
            self._has_not_started(worker, error)
        else:
            self.others.not_started(worker, error)

    def dying(self, worker: Worker, status: ExitStatus | str) -> None:
        """Pass it on, except for the chief, which is replaced when it has ended."""
        if worker.id.hostname != CHIEF:
            self.others.dying(worker, status)

    def exited(self, worker: Worker, status: ExitStatus) -> None:
        """Report how the chief ended, or pass it on."""
        if worker.id.hostname == CHIEF:
            self._has_exited(worker.id, worker.pid, status, worker.last_lines)
            self._is_gone(worker.id)
        else:
            self.others.exited(worker, status)

    def lost(self, workers: Sequence[Worker], why: str) -> None:
        """Report the loss of the chief, and pass on the others."""
        for worker in workers:
            if worker.id.hostname == CHIEF:
                self._has_not_started(worker.id, LaunchError(f"the agent of its machine is lost: {why}"))
        if rest := [worker for worker in workers if worker.id.hostname != CHIEF]:
            self.others.lost(rest, why)

    def killed(self, order: KillWorker) -> None:
        """Pass on that a worker is being killed."""
        self.others.killed(order)

    def spared(self, order: KillWorker) -> None:
        """Pass on that a worker was spared."""
        self.others.spared(order)


def _number_of(worker: WorkerId) -> int:
    return worker.attempt + 1
