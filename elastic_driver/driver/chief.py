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


class ListenerOfAll(WorkerListener, Protocol):
    """Is told, too, who was started by another driver."""

    def back(self, worker: Worker) -> None:
        """A process runs that another driver has had started."""


class ChiefKeeper:
    """The chief of a job. Used on the event loop only; whose child its process is, is its subclasses' business.

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
        self._chief: WorkerId | None = None  # from its start until nothing is left of it
        self._gone = asyncio.Event()
        self._held: socket.socket | None = None  # on the port that its server is to have
        self._job_ends = False

    def start(self, order: StartChief, job: JobAddress) -> None:
        """Starts it. The last one has ended."""
        if not self._job_ends:
            self._chief = WorkerId(CHIEF, 0, order.number - 1)
            self._gone.clear()
            self._start(self._chief, lambda: self._launch(order, job))

    def stop(self, order: StopChief) -> None:
        """SIGTERM, grace, SIGKILL; for one that is being started, as soon as its process is there."""
        self._stop_it(self._grace_s if order.grace_s is None else order.grace_s)

    def kill(self) -> None:
        """SIGKILL now."""
        self._stop_it(0.0)

    async def end(self, limit_s: float) -> None:
        """Stops it. Blocks until nothing is left of it, or for ``limit_s`` seconds."""
        self._job_ends = True
        if self._chief is not None:
            self._stop_it(self._grace_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), limit_s)

    async def close(self) -> None:
        """Lets go of what it has. Of a child nothing is left then."""
        self._let_go()

    def _stop_it(self, grace_s: float) -> None:
        if self._chief is not None:
            self._stop(self._chief, grace_s)

    def _start(self, chief: WorkerId, launch: Callable[[], Launch]) -> None:
        raise NotImplementedError

    def _stop(self, chief: WorkerId, grace_s: float) -> None:
        raise NotImplementedError

    def _launch(self, order: StartChief, job: JobAddress) -> Launch:
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

    # --- what becomes of its process -------------------------------------------------------------------------------

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
        # TensorFlow writes to its end of servers that are gone.
        error, where = last_words(last_lines, of_traceback=True) if status.returncode else ("", "")
        how, there = str(status), self._stepper.state.chief
        expected = self._stepper.is_over or (there is not None and there.phase is ChiefPhase.STOPPING)
        number, starved = _number_of(chief), status.out_of_memory
        self._chronicle.chief_exited(number, pid, status.returncode, how, expected=expected)
        self._stepper.post(ChiefExited(number, status.returncode, how, error, where, out_of_memory=starved))

    def _is_gone(self, chief: WorkerId) -> None:
        """Nothing is left of it. The next may have been started when its predecessor was dead."""
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
        """Kills what is left of it. Blocks until nothing is."""
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
        """See ProcessListener."""
        self._runs(worker, process.pid)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """See ProcessListener."""
        self._has_not_started(worker, error)

    def dying(self, worker: WorkerId, process: ProcessTree, status: ExitStatus | str) -> None:
        """See ProcessListener. It is replaced when it has ended."""

    def exited(self, worker: WorkerId, process: ProcessTree, status: ExitStatus) -> None:
        """See ProcessListener."""
        self._has_exited(worker, process.pid, status, process.last_lines)

    def finished(self, worker: WorkerId) -> None:
        """See ProcessListener."""
        self._is_gone(worker)


class AgentsChief(ChiefKeeper):
    """A process of this machine's agent, which outlives this driver. A WorkerListener: others are another's.

    Attributes:
        workers: start it; to be set before anything else.
        others: is told of all but the chief; likewise.
    """

    workers: WorkersWithChief
    others: ListenerOfAll

    def _start(self, chief: WorkerId, launch: Callable[[], Launch]) -> None:
        self.workers.start_chief(chief, launch)

    def _stop(self, chief: WorkerId, grace_s: float) -> None:
        self.workers.stop_chief(chief, grace_s)

    # --- WorkerListener --------------------------------------------------------------------------------------------

    def started(self, worker: Worker) -> None:
        """See WorkerListener."""
        if worker.id.hostname == CHIEF:
            self._runs(worker.id, worker.pid)
        else:
            self.others.started(worker)

    def back(self, worker: Worker) -> None:
        """A process runs that another driver has had started."""
        if worker.id.hostname == CHIEF:
            self._chief = worker.id
            self._gone.clear()
        else:
            self.others.back(worker)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """See WorkerListener."""
        if worker.hostname == CHIEF:
            self._has_not_started(worker, error)
        else:
            self.others.not_started(worker, error)

    def dying(self, worker: Worker, status: ExitStatus | str) -> None:
        """See WorkerListener. A chief is replaced when it has ended."""
        if worker.id.hostname != CHIEF:
            self.others.dying(worker, status)

    def exited(self, worker: Worker, status: ExitStatus) -> None:
        """See WorkerListener."""
        if worker.id.hostname == CHIEF:
            self._has_exited(worker.id, worker.pid, status, worker.last_lines)
            self._is_gone(worker.id)
        else:
            self.others.exited(worker, status)

    def lost(self, workers: Sequence[Worker], why: str) -> None:
        """See WorkerListener."""
        for worker in workers:
            if worker.id.hostname == CHIEF:
                self._has_not_started(worker.id, LaunchError(f"its machine's agent is lost: {why}"))
        if rest := [worker for worker in workers if worker.id.hostname != CHIEF]:
            self.others.lost(rest, why)

    def killed(self, order: KillWorker) -> None:
        """See WorkerListener."""
        self.others.killed(order)

    def spared(self, order: KillWorker) -> None:
        """See WorkerListener."""
        self.others.spared(order)


def _number_of(worker: WorkerId) -> int:
    return worker.attempt + 1
