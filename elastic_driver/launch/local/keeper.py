"""The keeper of the workers' processes on one machine: carries out orders, reports events, keeps one record per worker.

Owns each worker from the order to start it until nothing is left of it, and the parts that all workers share: the
guard, the warmed process from which they are forked, and the threads for blocking work. How a process ends, with all
its descendants, is in :mod:`elastic_driver.launch.local.process_tree`. Decides nothing: an agent gives the orders, and
for the chief its keeper.

Orders for a worker that is being started are carried out as soon as its process exists.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic_driver.errors import LaunchError, in_words, shortage
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.output import WorkerOutput
from elastic_driver.launch.local.process_tree import JobScanner, ProcessTree
from elastic_driver.launch.processes.binding import bind
from elastic_driver.launch.processes.guard import send_signal
from elastic_driver.launch.processes.guard_link import GuardLink
from elastic_driver.launch.processes.oom import OomKills
from elastic_driver.launch.processes.spawn import Given, Spawned, let_children_be_reaped, spawn
from elastic_driver.launch.warm.forks import WarmStarts
from elastic_driver.launch.words import ExitStatus, OutputSink
from elastic_driver.rendezvous.environment import ENV_LOCAL_RANK, ENV_MARK, ENV_WORKER
from elastic_driver.system.tasks import start_task
from elastic_driver.system.tether import Tether
from elastic_driver.system.threads import started_pool

_log = logging.getLogger(__name__)

# Two threads for blocking work: a scan must not delay the start of a replacement.
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Launch:
    """The command and environment to run as a worker.

    Attributes:
        command: the program and its arguments. No shell is involved; ``${local_rank}`` in an argument becomes the value
            of ENV_LOCAL_RANK, if it is set.
        env: its whole environment, except for the marks of job and worker.
        rank: for which it is started; -1 if there is none.
        given: its standard input, or None.
        shown: called with its unmodified output to its terminal, if it has one.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    rank: int = -1
    given: Given | None = None
    shown: Callable[[bytes], None] | None = None


class ProcessListener(Protocol):
    """Notified of the starts and ends of workers. Called on the event loop.

    For each worker ordered, either ``not_started`` is called, or ``started``, ``exited`` and ``finished``, in this
    order, and perhaps ``dying`` before its end.
    """

    def started(self, worker: WorkerId, process: ProcessTree) -> None:
        """Called when it runs, before its output."""

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        """Called when it could not be started, with a CommandNotFoundError if its command can be run nowhere."""

    def dying(self, worker: WorkerId, process: ProcessTree, status: ExitStatus | str) -> None:
        """Called when it is about to end with a failure; see ProcessTree."""

    def exited(self, worker: WorkerId, process: ProcessTree, status: ExitStatus) -> None:
        """Called when its process is dead."""

    def finished(self, worker: WorkerId) -> None:
        """Called when nothing is left of it. It may be started again."""


@dataclass(eq=False, slots=True)
class _Stop:
    """How to stop a worker.

    Attributes:
        grace_s: until SIGKILL, seconds.
        sever: whether to shut its connections down.
        number: the first signal.
    """

    grace_s: float
    sever: bool
    number: signal.Signals


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker, from the order to start it until nothing is left of it.

    Attributes:
        label: stands in the prefix of its output.
        process: its process; None while it is being started.
        stop: how to stop it as soon as it has a process.
        preparing: finds out what to run; None once that is known.
        starting: starts it; None once the process exists.
    """

    label: str
    process: ProcessTree | None = None
    stop: _Stop | None = None
    preparing: asyncio.Future[Launch] | None = None
    starting: asyncio.Task[None] | None = None


class ProcessKeeper:
    """Starts, stops and tracks processes of workers. Create and use it on the event loop's thread.

    Args:
        sink: receives the workers' output.
        listener: notified of their starts and ends.
        prefix_timestamp: whether the prefix of each line begins with the time.
        mark: is in the environment of everything started here.
        warn: called with one-line warnings about failures that do not end the job. Default: the log.
        warm: whether workers may be forked from a warmed process, once warm_up() was called.
        preload: the modules that it imports; None to choose them by the script.
        warm_first: whether to fork the first workers, too, without waiting for that call.
        is_watched: returns whether anybody watches the progress bars of a worker with this label now.
        on_warm: called with the PID of the warmed process and the seconds it took, whenever workers can be forked from
            now on.
    """

    def __init__(
        self,
        sink: OutputSink,
        listener: ProcessListener,
        *,
        prefix_timestamp: bool,
        mark: str,
        warn: Callable[[str], None] = _log.warning,
        warm: bool = False,
        preload: Sequence[str] | None = None,
        warm_first: bool = False,
        on_warm: Callable[[int, float], None] | None = None,
        is_watched: Callable[[str], bool] = lambda label: False,
    ) -> None:
        self._sink = sink
        self._listener = listener
        self._prefix_timestamp = prefix_timestamp
        self._is_watched = is_watched
        self._mark = mark
        self._complained = False
        self._warn = warn
        self._pool = started_pool(_THREADS, "elastic-driver-launch")
        self._scanner = JobScanner(mark, self._pool)
        self._guard: GuardLink | None = None
        self._oom_kills = OomKills()
        self._tether: Tether | None = None
        self._may_warm = warm
        self._preload = preload
        self._warm_first = warm_first
        self._on_warm = on_warm
        self._warm: WarmStarts | None = None
        self._workers: dict[WorkerId, _Worker] = {}
        self._closing: asyncio.Task[None] | None = None
        self._output_paused = False

    # --- one worker ------------------------------------------------------------------------------------------------

    def start(self, worker: WorkerId, label: str, launch: Callable[[], Coroutine[Any, Any, Launch]]) -> None:
        """Start a worker of which nothing is left from before. The listener is notified of the outcome.

        Args:
            worker: the worker.
            label: stands in the prefix of its output.
            launch: returns what to run. Called once, in a task of its own; may raise LaunchError. The worker counts as
                being started meanwhile.
        """
        assert worker not in self._workers, worker
        if not self._workers:
            self._oom_kills.forget()
        one = self._workers[worker] = _Worker(label)
        one.starting = start_task(self._start(worker, one, launch))

    def stop(
        self, worker: WorkerId, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM
    ) -> None:
        """Stop a worker and all its descendants; see ProcessTree. Harmless if it has ended, or is unknown."""
        one = self._workers.get(worker)
        if one is None:
            return
        if one.process is not None:
            one.process.stop(grace_s, sever=sever, number=number)
        elif one.stop is None:
            one.stop = _Stop(grace_s, sever, number)
        else:
            one.stop.grace_s = min(one.stop.grace_s, grace_s)
            one.stop.sever |= sever

    def kill(self, worker: WorkerId) -> None:
        """Send SIGKILL to a worker and all its descendants."""
        one = self._workers.get(worker)
        if one is not None and one.process is not None:
            one.process.kill()
        else:
            self.stop(worker, 0.0)

    def label(self, worker: WorkerId, label: str) -> None:
        """Set what stands in the prefix of its output from now on."""
        one = self._workers.get(worker)
        if one is not None and one.label != label:
            one.label = label
            if one.process is not None:
                one.process.relabel()

    def runs(self, worker: WorkerId) -> bool:
        """Return whether its process exists, or is about to."""
        one = self._workers.get(worker)
        return one is not None and (one.process is None or one.process.is_alive)

    def process(self, worker: WorkerId) -> ProcessTree | None:
        """Return its process, dead or alive; None before it was started, and when nothing is left of it."""
        one = self._workers.get(worker)
        return None if one is None else one.process

    # --- all workers -----------------------------------------------------------------------------------------------

    def _processes(self) -> list[ProcessTree]:
        return [worker.process for worker in self._workers.values() if worker.process is not None]

    def pass_on(self, number: signal.Signals) -> None:
        """Send this signal to the process of each running worker; see ProcessTree."""
        for process in self._processes():
            process.pass_on(number)

    def kill_all(self) -> None:
        """Send SIGKILL to all workers, and to what dead ones have left behind."""
        for worker in self._workers:
            self.kill(worker)

    def pause_output(self) -> None:
        """Stop reading the workers' output for now: those that write much block. A dead worker's output is read."""
        self._output_paused = True
        for process in self._processes():
            process.pause_output()

    def resume_output(self) -> None:
        """Resume reading the workers' output."""
        self._output_paused = False
        for process in self._processes():
            process.resume_output()

    async def close(self) -> None:
        """Kill what is left of the job, and end the guard. Blocks until every end has been reported to the listener.

        Harmless when repeated.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._warm is not None:
            self._warm.wait_no_more()
        for worker in self._workers.values():
            if worker.preparing is not None:
                worker.preparing.cancel()
        starting = [worker.starting for worker in self._workers.values() if worker.starting is not None]
        if starting:
            await asyncio.wait(starting)
        if self._warm is not None:
            await self._warm.close()
        processes = self._processes()
        for process in processes:
            process.close()
        await asyncio.gather(*(process.wait() for process in processes))
        if self._guard is not None:
            # Processes with the job's mark but no worker's, such as a hung discovery script.
            try:
                found = await self._scanner.find_all()
            except (OSError, MemoryError) as error:
                self._warn(f"cannot look for leftover processes of the job: {in_words(error)}")
            else:
                for left in found.values():
                    for leftover in left:
                        send_signal(leftover, signal.SIGKILL)
            await self._guard.close()
        if self._tether is not None:
            self._tether.close()
        self._pool.shutdown(wait=False)

    # --- warmed processes ------------------------------------------------------------------------------------------

    async def prepare(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Import what workers of this command and environment import, so that the first can be forked.

        Blocks until that is done, or it is known that they will be started afresh.
        """
        if self._closing is not None or not self._may_warm:
            return
        try:
            self._set_up()
        except LaunchError:
            return  # starting a worker reports the error
        except (OSError, MemoryError, RuntimeError) as error:
            if not shortage(error):
                raise
            return
        assert self._warm is not None
        await self._warm.wait_first(command, {**env, ENV_MARK: self._mark})

    @property
    def warm(self) -> WarmStarts | None:
        """Where workers are forked; None before the first worker, and if none of them is to be forked."""
        return self._warm

    def warm_up(self) -> None:
        """Fork later workers from a warmed process. Not before the first ones run, which it would slow down."""
        if self._warm is not None and self._closing is None:
            self._warm.warm_up()

    @property
    def guard_pid(self) -> int | None:
        """The PID of the guard; None if there is none."""
        return None if self._guard is None else self._guard.pid

    # --- a start ---------------------------------------------------------------------------------------------------

    async def _start(self, worker: WorkerId, one: _Worker, launch: Callable[[], Coroutine[Any, Any, Launch]]) -> None:
        try:
            process = await self._run(worker, one, await self._prepared(worker, one, launch))
        except LaunchError as error:
            del self._workers[worker]
            self._listener.not_started(worker, error)
            return
        except BaseException:
            del self._workers[worker]
            raise
        one.starting = None
        process.dying.add_done_callback(lambda future: self._dying(worker, process, future))
        process.exited.add_done_callback(lambda future: self._listener.exited(worker, process, future.result()))
        process.finished.add_done_callback(lambda _: self._finished(worker))
        self._listener.started(worker, process)
        if one.stop is not None:
            process.stop(one.stop.grace_s, sever=one.stop.sever, number=one.stop.number)

    async def _prepared(
        self, worker: WorkerId, one: _Worker, launch: Callable[[], Coroutine[Any, Any, Launch]]
    ) -> Launch:
        if self._closing is not None:
            raise LaunchError(f"cannot start worker {worker}: the job is ending")
        one.preparing = asyncio.get_running_loop().create_task(launch())
        try:
            return await one.preparing
        except asyncio.CancelledError:
            if self._closing is None:
                raise
            raise LaunchError(f"cannot start worker {worker}: the job is ending") from None
        finally:
            one.preparing = None

    async def _run(self, worker: WorkerId, one: _Worker, launch: Launch) -> ProcessTree:
        """Start its process, and start reading its output.

        Raises:
            CommandNotFoundError: the command cannot be run.
            LaunchError: the process could not be started.
        """
        try:
            guard, tether = self._set_up()
            marked = {**launch.env, ENV_MARK: self._mark, ENV_WORKER: worker.key}
            if self._warm_first and self._warm is not None:
                await self._warm.wait_first(launch.command, marked)
            if self._closing is not None:
                raise LaunchError(f"cannot start worker {worker}: the job is ending")
            spawned, complaint = await asyncio.get_running_loop().run_in_executor(
                self._pool, self._spawn, worker, tuple(launch.command), marked, tether, launch.given
            )
            if complaint and not self._complained:
                self._complained = True
                self._warn(complaint)
            try:
                process = ProcessTree(worker, spawned, self._scanner, guard, self._oom_kills, warn=self._warn)
            except BaseException:
                spawned.undo()
                raise
            one.process = process
            await self._read(worker, one, process, spawned, launch)
        except (OSError, MemoryError, RuntimeError) as error:
            # Another host may have room. An error that no shortage explains is a bug, not the host's fault.
            reason = shortage(error) or (isinstance(error, OSError) and in_words(error))
            if not reason:
                raise
            raise LaunchError(f"cannot start worker {worker}: {reason}") from error
        return process

    async def _read(
        self, worker: WorkerId, one: _Worker, process: ProcessTree, spawned: Spawned, launch: Launch
    ) -> None:
        """Start reading its output. If that is impossible, blocks until nothing is left of the worker."""
        try:
            output = WorkerOutput(
                spawned.pipes,
                worker,
                self._sink,
                label=lambda: one.label,
                prefix_timestamp=self._prefix_timestamp,
                warn=self._warn,
                paused=self._output_paused,
                shown=launch.shown,
                is_watched=self._is_watched,
            )
            self._sink.begin(worker, process.pid, launch.rank, one.label)
        except BaseException:
            process.kill()
            for descriptor in spawned.pipes.values():
                asyncio.get_running_loop().remove_reader(descriptor)
                os.close(descriptor)
            await process.wait()
            raise
        process.forward(output)

    def _set_up(self) -> tuple[GuardLink, Tether]:
        """Set up what ends the processes when this one dies, and where workers are forked, if they may be."""
        if self._guard is None:
            let_children_be_reaped()
            self._guard = GuardLink(self._mark, self._warn)
        self._guard.ensure()
        if self._tether is None:
            self._tether = Tether()
        if self._may_warm and self._warm is None:
            self._warm = WarmStarts(
                self._preload,
                pool=self._pool,
                guard=self._guard,
                tether=self._tether,
                warn=self._warn,
                on_ready=self._on_warm,
            )
        return self._guard, self._tether

    def _spawn(
        self,
        worker: WorkerId,
        command: Sequence[str],
        env: Mapping[str, str],
        tether: Tether,
        given: Given | None,
    ) -> tuple[Spawned, str]:
        """Start a process. Returns it, and why it is not bound to processors as asked; "" if it is."""
        forked = self._warm.fork(command, env, given) if self._warm is not None else None
        if forked is None:
            # A forked worker does this itself: the warmed process has the command of all.
            own = env.get(ENV_LOCAL_RANK)
            words = command if own is None else [word.replace("${local_rank}", own) for word in command]
            spawned = spawn(worker, words, env, tether, given)
        else:
            spawned = forked
        try:
            # Now, before it has threads: each inherits the binding of the one that starts it.
            bind(spawned.popen.pid, env)
        except LaunchError as error:
            return spawned, f"{error}; they run without binding"
        return spawned, ""

    # --- an end ----------------------------------------------------------------------------------------------------

    def _dying(self, worker: WorkerId, process: ProcessTree, future: asyncio.Future[ExitStatus | str]) -> None:
        if not future.cancelled() and process.is_alive:
            self._listener.dying(worker, process, future.result())

    def _finished(self, worker: WorkerId) -> None:
        del self._workers[worker]
        self._sink.end(worker)
        self._listener.finished(worker)
