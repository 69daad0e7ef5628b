"""The keeper of processes: starts workers, stops them, and tells when they die.

Owns each worker's process, from the order to start it until it has ended. Knows nothing of rounds and of the server,
and of what a worker is given only that its dialect says so. Decides nothing: who is started and stopped, and what a
death means, is the core's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from elastic_driver.core.events import KillWorker, StartWorker
from elastic_driver.dialects.dialect import Dialect, JobAddress, WorkerStart
from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.launcher import ExitStatus, Launcher, WorkerProcess
from elastic_driver.system.tasks import Tasks

# Between the signal that makes a hung worker print its stacks and the one that ends it.
_LAST_WORDS_S = 2.0


class ProcessListener(Protocol):
    """Is told what becomes of the processes. Called on the event loop."""

    def started(self, worker: WorkerId, process: WorkerProcess) -> None:
        """It runs."""

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """It could not be started. Nothing more will be heard of it."""

    def dying(self, worker: WorkerId, process: WorkerProcess, status: ExitStatus | str) -> None:
        """It is about to end, and not well; :meth:`exited` follows. See WorkerProcess."""

    def exited(self, worker: WorkerId, process: WorkerProcess, status: ExitStatus) -> None:
        """It has ended. Nothing more will be heard of it."""

    def killed(self, order: KillWorker) -> None:
        """The order is being carried out."""

    def spared(self, order: KillWorker) -> None:
        """It is not: there is no such process any more, or its script has ended."""


class Workers:
    """The workers' processes. Used on the event loop only.

    Args:
        launcher: starts processes. An error of its that is no LaunchError ends the job.
        dialect: of the workers.
        command: what each of them runs.
        grace_s: between SIGTERM and SIGKILL, seconds.
        tasks: run what nobody waits for; an error of theirs ends the job.
        listener: is told of starts and ends.
    """

    def __init__(
        self,
        launcher: Launcher,
        dialect: Dialect,
        *,
        command: Sequence[str],
        grace_s: float,
        tasks: Tasks,
        listener: ProcessListener,
    ) -> None:
        self._launcher = launcher
        self._dialect = dialect
        self._command = command
        self._grace_s = grace_s
        self._tasks = tasks
        self._listener = listener
        self._processes: dict[WorkerId, WorkerProcess] = {}
        self._starting: dict[WorkerId, asyncio.Task[None]] = {}
        self._stop_when_started: set[WorkerId] = set()
        self._job_ends = False

    @property
    def living(self) -> Mapping[WorkerId, WorkerProcess]:
        """The processes that run; it follows what happens."""
        return self._processes

    def start(self, order: StartWorker, job: JobAddress, round_id: int, resets: int = 0) -> None:
        """Starts a worker of this job, while this round runs (0 for none), after so many unplanned resets."""
        cores = self._launcher.cores(order.worker.hostname)
        start = WorkerStart(order.worker, order.planned, order.hosts, round_id, cores, resets)
        env = self._dialect.environment(start, job=job)
        self._starting[order.worker] = self._tasks.start(self._start(order, env))

    def stop(self, worker: WorkerId) -> None:
        """SIGTERM, grace, SIGKILL; for a worker that is being started, as soon as its process is there."""
        process = self._processes.get(worker)
        if process is not None:
            self._tasks.start(self._stop(process))
        elif worker in self._starting:
            self._stop_when_started.add(worker)

    def kill(self, order: KillWorker) -> None:
        """SIGKILL; a worker that hangs prints first where its threads are. The listener is told whether it is done.

        Not for one that has ended, nor for one that exits when its script has ended. One that is being started is
        stopped as soon as its process is there.
        """
        worker = order.worker
        process = self._processes.get(worker)
        if process is not None and not process.exited.done():
            if order.exits:
                self._tasks.start(self._kill_unless_spared(process, order))
                return
            if order.hangs:
                self._tasks.start(self._kill_hung(process))
            else:
                process.kill()
        elif process is None and worker in self._starting:
            self.stop(worker)
        else:
            self._listener.spared(order)
            return
        self._listener.killed(order)

    def label(self, worker: WorkerId, label: str) -> None:
        """From now on this stands in the prefix of its output."""
        process = self._processes.get(worker)
        if process is not None:
            process.label = label

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        """Takes which process called init(), and one of its threads; see WorkerProcess."""
        process = self._processes.get(worker)
        if process is not None:
            process.watch_threads(pid, thread)

    def pid(self, worker: WorkerId) -> int | None:
        """Its process's id; None when none runs."""
        process = self._processes.get(worker)
        return None if process is None else process.pid

    def job_ends(self) -> None:
        """Nobody is started any more; who is being started is stopped as soon as its process is there."""
        self._job_ends = True

    async def stop_all(self, limit_s: float) -> None:
        """Stops all workers. Blocks until they have ended, or for ``limit_s`` seconds."""
        self.job_ends()
        # Who is being started is stopped by its task.
        ending = [self._tasks.start(self._stop(process)) for process in self._processes.values()]
        ending += self._starting.values()
        if ending:
            await asyncio.wait(ending, timeout=limit_s)

    async def _start(self, order: StartWorker, env: Mapping[str, str]) -> None:
        worker = order.worker
        try:
            if self._job_ends:
                return
            process = await self._launcher.start(
                worker,
                self._command,
                env,
                label="standby" if order.standby else str(order.planned.rank),
                rank_at_launch=order.planned.rank,
            )
        except LaunchError as error:
            self._stop_when_started.discard(worker)
            self._listener.not_started(worker, error)
            return
        finally:
            del self._starting[worker]
        self._processes[worker] = process
        process.exited.add_done_callback(lambda future: self._exited(worker, process, future))
        process.dying.add_done_callback(lambda future: self._dying(worker, process, future))
        self._listener.started(worker, process)
        if worker in self._stop_when_started or self._job_ends:
            self._stop_when_started.discard(worker)
            await self._stop(process)

    def _dying(self, worker: WorkerId, process: WorkerProcess, future: asyncio.Future[ExitStatus | str]) -> None:
        if not future.cancelled() and worker in self._processes:
            self._listener.dying(worker, process, future.result())

    def _exited(self, worker: WorkerId, process: WorkerProcess, future: asyncio.Future[ExitStatus]) -> None:
        if future.cancelled():
            return
        del self._processes[worker]
        # What it has started ends after it, and is waited for.
        self._tasks.start(self._wait_for(process))
        self._listener.exited(worker, process, future.result())

    async def _kill_hung(self, process: WorkerProcess) -> None:
        await process.kill_hung(stacks_s=_LAST_WORDS_S, exits=False)

    async def _kill_unless_spared(self, process: WorkerProcess, order: KillWorker) -> None:
        if await process.kill_hung(stacks_s=_LAST_WORDS_S if order.hangs else 0.0, exits=True):
            self._listener.killed(order)
        else:
            self._listener.spared(order)

    async def _wait_for(self, process: WorkerProcess) -> None:
        await process.wait()

    async def _stop(self, process: WorkerProcess) -> None:
        await process.stop(self._grace_s)
