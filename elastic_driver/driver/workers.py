"""The keeper of processes: starts workers, stops them, and tells when they die.

Owns each worker's process, from the order to start it until it has ended. Knows nothing of rounds and of the server,
and of what a worker is given only that its dialect says so. Decides nothing: who is started and stopped, and what a
death means, is the core's.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_driver.core.events import KillWorker, StartWorker
from elastic_driver.dialects.dialect import Dialect, JobAddress, Meeting, WorkerStart
from elastic_driver.errors import LaunchError
from elastic_driver.hosts import Host, SlotInfo, WorkerId
from elastic_driver.launch.launcher import ExitStatus, Launcher, WorkerProcess
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Ending

# Between the signal that makes a hung worker print its stacks and the one that ends it.
_LAST_WORDS_S = 2.0
# What a worker gets whose peers are lost: time for its exit handlers, since its connections are shut.
BROKEN_S = 0.2


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


@dataclass(frozen=True, slots=True)
class _Generation:
    """Workers that are started to meet each other.

    Attributes:
        number: no other generation has it.
        key: its round, and the host of its rank 0.
        meeting: where they meet, or why they cannot.
    """

    number: int
    key: tuple[int, str]
    meeting: asyncio.Future[Meeting | LaunchError | None]


class Workers:
    """The workers' processes. Used on the event loop only.

    Args:
        launcher: starts processes. An error of its that is no LaunchError ends the job.
        dialect: of the workers.
        command: what each of them runs.
        grace_s: between SIGTERM and SIGKILL, seconds.
        drain_s: the same for a worker that may checkpoint first, since the change is a planned one.
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
        drain_s: float,
        tasks: Tasks,
        listener: ProcessListener,
    ) -> None:
        self._launcher = launcher
        self._dialect = dialect
        self._command = command
        self._grace_s = {Ending.USUAL: grace_s, Ending.PLANNED: drain_s, Ending.BROKEN: min(BROKEN_S, grace_s)}
        self._tasks = tasks
        self._listener = listener
        self._processes: dict[WorkerId, WorkerProcess] = {}
        self._starting: dict[WorkerId, asyncio.Task[None]] = {}
        self._stop_when_started: dict[WorkerId, Ending] = {}
        self._generation: _Generation | None = None
        self._generations = 0
        self._job_ends = False
        self._end_signal = signal.SIGTERM

    @property
    def living(self) -> Mapping[WorkerId, WorkerProcess]:
        """The processes that run; it follows what happens."""
        return self._processes

    def start(
        self, order: StartWorker, job: JobAddress, round_id: int, resets: int = 0, *, restarted: bool = False
    ) -> None:
        """Starts a worker of this job, while this round runs (0 for none), after so many unplanned resets.

        Args:
            order: which, and where.
            job: where the driver is.
            round_id, resets, restarted: see WorkerStart.
        """
        cores = self._launcher.cores(order.worker.hostname)
        # Not all of them: each start would cost as much as the job has hosts.
        some = list(dict.fromkeys((order.worker.hostname, *order.hosts[:1], *order.hosts[-1:])))
        start = WorkerStart(
            order.worker,
            order.planned,
            order.hosts,
            round_id,
            cores,
            resets,
            restarted=restarted,
            address=self._launcher.addresses(some)[order.worker.hostname],
            parameter_server=order.parameter_server,
        )
        generation = self._generation_of(start)
        self._starting[order.worker] = self._tasks.start(self._start(order, start, job, generation))

    def sample(self, host: Host, job: JobAddress) -> tuple[Sequence[str], Mapping[str, str]]:
        """The command of restarted workers, and the environment of one on this host, but for its place."""
        planned = SlotInfo(0, host.slots, 0, host.slots, 0, 1)
        cores = self._launcher.cores(host.name)
        start = WorkerStart(WorkerId(host.name, 0, 0), planned, (host.name,), 0, cores, restarted=True)
        return self._command, self._dialect.environment(start, job=job)

    def stop(self, worker: WorkerId, ending: Ending = Ending.USUAL) -> None:
        """SIGTERM (or what :meth:`end_by` says), grace, SIGKILL; for one that is being started, once it is there."""
        process = self._processes.get(worker)
        if process is not None:
            self._tasks.start(self._stop(process, ending))
        elif worker in self._starting:
            before = self._stop_when_started.get(worker, ending)
            self._stop_when_started[worker] = min(before, ending, key=self._grace_s.__getitem__)

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

    def pid(self, worker: WorkerId) -> int | None:
        """Its process's id; None when none runs."""
        process = self._processes.get(worker)
        return None if process is None else process.pid

    def end_by(self, number: signal.Signals) -> None:
        """From now on this signal ends workers, in place of SIGTERM: the job ends by it."""
        self._end_signal = number

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

    def _generation_of(self, start: WorkerStart) -> _Generation | None:
        """The workers that it is started with. A new generation ends the hold of the last one's port."""
        if not start.hosts:
            return None
        key = start.round_id, start.hosts[0]
        last = self._generation
        if last is None or last.key != key:
            if last is not None:
                self._launcher.let_go(last.key[1], last.number)
            self._generations += 1
            self._generation = _Generation(self._generations, key, asyncio.get_running_loop().create_future())
            self._tasks.start(self._meet(start.hosts, self._generation))
        return self._generation

    async def _meet(self, hosts: Sequence[str], generation: _Generation) -> None:
        """Finds where a generation on these hosts meets; or why it cannot, where its first host is at fault."""
        found: Meeting | LaunchError | None
        try:
            port = await self._launcher.hold_port(hosts[0], generation.number)
        except LaunchError as error:
            found = error
        else:
            found = Meeting(self._launcher.addresses(hosts)[hosts[0]], port) if port else None
        generation.meeting.set_result(found)

    async def _start(
        self, order: StartWorker, start: WorkerStart, job: JobAddress, generation: _Generation | None
    ) -> None:
        worker = order.worker
        try:
            if self._job_ends:
                return
            if generation is not None:
                meeting = await asyncio.shield(generation.meeting)
                if isinstance(meeting, LaunchError):
                    if worker.hostname == start.hosts[0]:
                        raise meeting
                    # It is not this host's fault. The core ends the round with those of the other.
                    meeting = None
                start = replace(start, meeting=meeting)
            if self._job_ends:
                return
            env = self._dialect.environment(start, job=job)
            process = await self._launcher.start(
                worker,
                self._command,
                env,
                label=_label_of(order),
                rank_at_launch=order.planned.rank if order.parameter_server is None else -1,
            )
        except LaunchError as error:
            self._stop_when_started.pop(worker, None)
            self._listener.not_started(worker, error)
            return
        finally:
            del self._starting[worker]
        self._processes[worker] = process
        process.exited.add_done_callback(lambda future: self._exited(worker, process, future))
        process.dying.add_done_callback(lambda future: self._dying(worker, process, future))
        self._listener.started(worker, process)
        if worker in self._stop_when_started or self._job_ends:
            await self._stop(process, self._stop_when_started.pop(worker, Ending.USUAL))

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

    async def _stop(self, process: WorkerProcess, ending: Ending = Ending.USUAL) -> None:
        await process.stop(self._grace_s[ending], sever=ending is Ending.BROKEN, number=self._end_signal)


def _label_of(order: StartWorker) -> str:
    if order.parameter_server is not None:
        return f"ps{order.parameter_server}"
    return "standby" if order.standby else str(order.planned.rank)
