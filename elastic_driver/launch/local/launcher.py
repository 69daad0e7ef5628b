"""Worker processes on this machine.

Owns each worker's process, pipes and process tree. Decides nothing: when a worker is started or stopped is the driver's
business.

A dead worker stays a zombie until all it started is gone. Its process id, and with it its session's, can therefore
not be given to a stranger while the session is being killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil

from elastic_driver.errors import LaunchError, shortage
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.launcher import ExitStatus, OutputSink
from elastic_driver.launch.local.output import WorkerOutput
from elastic_driver.launch.processes.binding import bind
from elastic_driver.launch.processes.death import (
    PIDFD_THREAD,
    dying,
    exit_status,
    heeds_signal,
    is_alive,
    set_once,
    wait_gone,
    watch_child,
    watch_thread,
)
from elastic_driver.launch.processes.guard import find_processes, send_signal
from elastic_driver.launch.processes.guard_link import GuardLink
from elastic_driver.launch.processes.oom import OomKills
from elastic_driver.launch.processes.sever import sever
from elastic_driver.launch.processes.spawn import Given, Spawned, let_children_be_reaped, spawn
from elastic_driver.launch.warm.forks import WarmStarts
from elastic_driver.rendezvous.environment import ENV_LOCAL_RANK, ENV_MARK, ENV_WORKER
from elastic_driver.system.tasks import start_task
from elastic_driver.system.tether import Tether
from elastic_driver.system.threads import started_pool

_log = logging.getLogger(__name__)

# What the children of a worker that ended by itself get between SIGTERM and SIGKILL. Not 0: multiprocessing's resource
# tracker removes the dead worker's shared memory in this time.
LEFTOVER_GRACE_S = 1.0
# How long output is waited for that a descendant outside of our reach could still write.
_OUTPUT_END_S = 1.0
# A SIGKILLed process can linger in the kernel (a dead network disc); then it is left behind, with a warning.
_KILL_S = 5.0
# Two threads for what blocks: a scan must not hold up the start of a replacement.
_THREADS = 2
# When one thread has ended, the first one, which knows the exit code, is on its way: how often to look for that.
_LOOK_S = 0.001
_LOOKS = 50
# Who blocks a signal for longer than that waits for it.
_BLOCKED_LOOK_S = 0.01
_BLOCKED_LOOKS = 20
_Found = dict[str, list[psutil.Process]]  # by worker key


class _JobScanner:
    """Looks for the job's processes in a thread, once for all who ask at the same time."""

    def __init__(self, mark: str, pool: ThreadPoolExecutor) -> None:
        self._mark = mark
        self._pool = pool
        self._leaders: dict[str, psutil.Process] = {}
        self._running: asyncio.Task[_Found] | None = None
        self._next: asyncio.Task[_Found] | None = None

    def add(self, key: str, leader: psutil.Process) -> None:
        self._leaders[key] = leader

    def remove(self, key: str) -> None:
        self._leaders.pop(key, None)

    async def find(self, key: str) -> list[psutil.Process]:
        """The living processes of one worker, as of a scan that began after this call."""
        return (await self.find_all()).get(key, [])

    async def sever(self, key: str, endpoints: Iterable[tuple[str, int]] | None = None) -> None:
        """Shuts the connections of the living processes of one worker: all, or those with one of these ends."""
        pids = [process.pid for process in await self.find(key)]
        ends = None if endpoints is None else frozenset(endpoints)
        await asyncio.get_running_loop().run_in_executor(self._pool, sever, pids, ends)

    async def find_all(self) -> _Found:
        """The living processes of the job by worker key."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._scan(self._running))
        return await asyncio.shield(self._next)

    async def _scan(self, before: asyncio.Task[_Found] | None) -> _Found:
        if before is not None:
            await asyncio.wait((before,))
        # Who asks from here on may have seen something that this scan does not show.
        self._running, self._next = self._next, None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, find_processes, self._mark, dict(self._leaders))


def _abort(pid: int) -> None:
    """SIGABRT to the main thread of a process, where one can be named (Linux 6.9), else to whichever takes it.

    Of a process that was stopped that may be any. It would read the main thread's frames while that runs on, over which
    faulthandler may crash: what it has printed ends in the middle.
    """
    try:
        descriptor = os.pidfd_open(pid, PIDFD_THREAD)
    except OSError:
        os.kill(pid, signal.SIGABRT)
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGABRT)
    finally:
        os.close(descriptor)


class LocalWorker:
    """A worker process on this machine. See :class:`~elastic_driver.launch.launcher.WorkerProcess`.

    Attributes:
        finished: done when it is dead, what it started is gone, and its output is read to the end.
    """

    def __init__(
        self,
        worker: WorkerId,
        spawned: Spawned,
        scanner: _JobScanner,
        guard: GuardLink,
        oom_kills: OomKills,
        *,
        label: str,
        warn: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.worker = worker
        self.pid = spawned.popen.pid
        self.label = label
        self.exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        self.dying: asyncio.Future[ExitStatus | str] = self._loop.create_future()
        self.finished: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._script_pid: int | None = None
        self._popen = spawned.popen
        self._leader = spawned.leader
        self._scanner = scanner
        self._guard = guard
        self._oom_kills = oom_kills
        self._note: str | None = None  # of its end, once that was seen
        self._warn = warn
        self._output: WorkerOutput | None = None
        self._ending: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._kill_now: asyncio.Future[None] = self._loop.create_future()
        self._kill_at = math.inf
        self._kill_timer: asyncio.TimerHandle | None = None
        self._unwatch: tuple[Callable[[], None], ...] = ()
        watch_child(self.pid, self._died)
        scanner.add(worker.key, spawned.leader)
        guard.started(self.pid)

    def forward(self, output: WorkerOutput) -> None:
        """Takes over the reading of its output."""
        self._output = output

    def pause_output(self) -> None:
        """Its pipes are not read for now."""
        if self._output is not None:
            self._output.pause()

    def resume_output(self) -> None:
        """They are again."""
        if self._output is not None:
            self._output.resume()

    @property
    def last_lines(self) -> Sequence[str]:
        """The end of its stderr, or of its stdout when it wrote nothing there."""
        return () if self._output is None else self._output.last_lines

    def watch_threads(self, pid: int, thread: int) -> None:
        """Watches two threads for ``dying``; see the protocol."""
        self._script_pid = pid
        if pid != self.pid or self._unwatch or self.dying.done() or self.exited.done():
            return
        # Two, because the last thread of a process to end is the one that has to free its memory.
        watches = []
        with contextlib.suppress(OSError):
            for thread_id in (pid, thread):
                if thread_id > 0:
                    watches.append(watch_thread(thread_id, self._look_if_dying))
        self._unwatch = tuple(watches)

    @property
    def error_file(self) -> str:
        """What it has written there is its agent's to read."""
        return ""

    async def kill_hung(self, *, stacks_s: float, exits: bool) -> bool:
        """Kills it, and has it say before where it hangs; see the protocol."""
        if self.exited.done() or (exits and not self._runs_script()):
            return False
        if stacks_s > 0:
            start_task(self._kill_with_last_words(stacks_s))
        else:
            self.kill()
        return True

    async def _kill_with_last_words(self, stacks_s: float) -> None:
        await self._print_stacks(stacks_s)
        self.kill()

    def _runs_script(self) -> bool:
        """Whether the process that called init() is there."""
        with contextlib.suppress(OSError):
            return self._script_pid is not None and os.getsid(self._script_pid) == self.pid
        return False

    async def _print_stacks(self, limit_s: float) -> None:
        """Has that process print where its threads are, which ends it. Blocks until it has, for ``limit_s`` at most."""
        pid = self._script_pid or self.pid
        # faulthandler, which init() has enabled, prints the stacks at this signal, whatever holds Python's lock. A
        # stopped process takes it when it goes on.
        with contextlib.suppress(OSError):
            if os.getsid(pid) == self.pid:
                _abort(pid)
                os.kill(pid, signal.SIGCONT)
                await asyncio.wait([self.exited], timeout=limit_s)

    def _look_if_dying(self, looks: int = _LOOKS) -> None:
        """A thread has ended: with the process, or, if it called exec, without it."""
        if self.dying.done() or self.exited.done():
            return
        status = dying(self.pid)
        if status is None:
            if looks > 1:
                self._loop.call_later(_LOOK_S, self._look_if_dying, looks - 1)
            return
        if isinstance(status, str) or not status.ok:
            if self._output is not None:
                self._output.read_available()
            self.dying.set_result(status if isinstance(status, str) else self._noted(status))

    async def wait(self) -> ExitStatus:
        """Blocks until it is dead, what it started is gone, and its output is read to the end."""
        return await asyncio.shield(self.finished)

    async def stop(self, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM) -> ExitStatus:
        """A signal to the tree, SIGKILL after the grace; see the protocol."""
        self._end_tree_within(grace_s, number)
        if sever and not self.exited.done():
            with contextlib.suppress(OSError, MemoryError):  # it hangs until it is killed
                await self._scanner.sever(self.worker.key)
        return await self.wait()

    async def sever(self, endpoints: Iterable[tuple[str, int]]) -> None:
        """Shuts the connections of the tree that have one of these ends (addresses and ports)."""
        with contextlib.suppress(OSError, MemoryError):
            await self._scanner.sever(self.worker.key, endpoints)

    @property
    def is_ending(self) -> bool:
        """Whether it is being stopped, or killed."""
        return self._kill_at < math.inf

    def pass_on(self, number: signal.Signals, looks: int = _BLOCKED_LOOKS) -> None:
        """Sends a signal to its process; see the protocol of launchers.

        Args:
            number: the signal.
            looks: how often the process has to be seen to block it to be taken for one that waits for it.
        """
        if self.exited.done():  # from then on the id may be a stranger's
            return
        with contextlib.suppress(OSError):
            handled, blocked = (True, False) if number == signal.SIGQUIT else heeds_signal(self.pid, number)
            if not handled and blocked and looks > 1:
                self._loop.call_later(_BLOCKED_LOOK_S, self.pass_on, number, looks - 1)
            elif handled or blocked:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the tree."""
        # Not the process first and its children afterwards: with it would go the knowledge whose children they are.
        self._end_tree_within(0.0)

    def close(self) -> None:
        """SIGKILL to a living worker; what a dead one left gets its short grace (see LEFTOVER_GRACE_S) and no more."""
        if self.exited.done():
            self._end_tree_within(LEFTOVER_GRACE_S)
        else:
            self.kill()

    def _end_tree_within(self, grace_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        if self.finished.done():
            return
        now = self._loop.time()
        if now + grace_s < self._kill_at and not self._kill_now.done():
            self._kill_at = now + grace_s
            if self._kill_timer is not None:
                self._kill_timer.cancel()
                self._kill_timer = None
            if grace_s <= 0:
                self._no_more_grace()
            else:
                self._kill_timer = self._loop.call_later(grace_s, self._no_more_grace)
        if self._ending is None:
            self._ending = start_task(self._end_tree(number))

    def _no_more_grace(self) -> None:
        if not self._kill_now.done():
            self._kill_now.set_result(None)

    async def _end_tree(self, number: signal.Signals) -> None:
        # Kept over the scans: a child without marks is known as ours only as long as its parent lives.
        processes: set[psutil.Process] = set()
        if not self._kill_now.done():
            processes.update(await self._find())
            for process in processes:
                send_signal(process, number)
            await wait_gone(processes, self._kill_now)
        give_up = self._loop.create_future()
        timer = self._loop.call_later(_KILL_S, set_once, give_up)
        try:
            while True:
                processes.update(await self._find())
                processes = {process for process in processes if is_alive(process)}
                if not processes:
                    return
                if give_up.done():
                    pids = ", ".join(str(process.pid) for process in processes)
                    self._warn(f"SIGKILL did not end process {pids} of worker {self.worker}; it is left behind")
                    self._abandon()
                    return
                for process in processes:
                    send_signal(process, signal.SIGKILL)
                await wait_gone(processes, give_up)
        finally:
            timer.cancel()

    async def _find(self) -> list[psutil.Process]:
        try:
            return await self._scanner.find(self.worker.key)
        except (OSError, MemoryError) as error:  # no descriptor is free to look into /proc
            self._warn(f"cannot look for what worker {self.worker} started: {shortage(error) or error}")
            return [] if self.exited.done() else [self._leader]

    def _died(self) -> None:
        status = exit_status(self.pid)
        if status is None or self.exited.done():  # it was abandoned, and has ended after all
            self._popen.wait()
            return
        status = self._noted(status)
        if self._output is not None:
            self._output.read_available()
        self._set_exited(status)
        # When a stop is under way, what is left of the tree keeps that stop's grace.
        if self._ending is None:
            self._end_tree_within(LEFTOVER_GRACE_S)
        self._finishing = start_task(self._finish(status))

    def _abandon(self) -> None:
        if not self.exited.done():
            status = ExitStatus(-signal.SIGKILL)
            self._set_exited(status)
            self._close(status)

    def _noted(self, status: ExitStatus) -> ExitStatus:
        """Its end, and whether the OOM killer was it."""
        if self._note is None:
            self._note = self._oom_kills.note(status)
        return replace(status, note=self._note)

    def _set_exited(self, status: ExitStatus) -> None:
        for unwatch in self._unwatch:
            unwatch()
        self.dying.cancel()
        self.exited.set_result(status)

    async def _finish(self, status: ExitStatus) -> None:
        try:
            if self._ending is not None:
                await asyncio.wait((self._ending,))
            if self._output is not None:
                await self._output.wait_ended(_OUTPUT_END_S)
        finally:
            self._popen.wait()  # dead already: this only reaps it
            self._close(status)

    def _close(self, status: ExitStatus) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self._output is not None:
            self._output.close()
        self._scanner.remove(self.worker.key)
        self._guard.gone(self.pid)
        self.finished.set_result(status)


class LocalLauncher:
    """Starts workers on this machine. Create and use it on the event loop's thread.

    Args:
        sink: takes the workers' output.
        prefix_timestamp: whether the prefix of each line begins with the time.
        mark: stands in the environment of all that it starts.
        warn: takes one-line reports of what went wrong and does not end the job. The log, when not given.
        warm: whether workers may be forked from a warmed process, once warm_up() was called.
        preload: the modules that it imports; None to choose them by the script.
        warm_first: whether that is not waited for: the first workers are forked, too.
        on_warm: called with its process id and the seconds it took, whenever workers can be forked from now on.
    """

    def __init__(
        self,
        sink: OutputSink,
        *,
        prefix_timestamp: bool,
        mark: str,
        warn: Callable[[str], None] = _log.warning,
        warm: bool = False,
        preload: Sequence[str] | None = None,
        warm_first: bool = False,
        on_warm: Callable[[int, float], None] | None = None,
    ) -> None:
        self._sink = sink
        self._prefix_timestamp = prefix_timestamp
        self._mark = mark
        self._complained = False
        self._warn = warn
        self._pool = started_pool(_THREADS, "elastic-driver-launch")
        self._scanner = _JobScanner(mark, self._pool)
        self._guard: GuardLink | None = None
        self._oom_kills = OomKills()
        self._tether: Tether | None = None
        self._may_warm = warm
        self._preload = preload
        self._warm_first = warm_first
        self._on_warm = on_warm
        self._warm: WarmStarts | None = None
        self._workers: set[LocalWorker] = set()
        self._starting: set[asyncio.Task[LocalWorker]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._output_paused = False

    @property
    def guard_pid(self) -> int | None:
        """The process id of the guard; None when there is none."""
        return None if self._guard is None else self._guard.pid

    @staticmethod
    def cores(hostname: str) -> int:
        """The processors that this process may use: all hosts are this machine."""
        return len(os.sched_getaffinity(0))

    @staticmethod
    def addresses(hostnames: Sequence[str]) -> Mapping[str, str]:
        """All hosts are this machine."""
        return dict.fromkeys(hostnames, "127.0.0.1")

    async def start(
        self,
        worker: WorkerId,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        label: str,
        rank_at_launch: int,
        given: Given | None = None,
        shown: Callable[[bytes], None] | None = None,
    ) -> LocalWorker:
        """Starts a worker; see the protocol.

        Args:
            worker, command, env, label, rank_at_launch: see the protocol.
            given: its standard input; None for none.
            shown: takes what it writes to its terminal, if it has one, as it is.

        Raises:
            CommandNotFoundError: the command cannot be run.
            LaunchError: the process could not be started.
        """
        if self._closing is not None:
            raise LaunchError(f"cannot start worker {worker}: the job is ending")
        try:
            return await self._begin(worker, command, env, label, rank_at_launch, given, shown)
        except (OSError, MemoryError, RuntimeError) as error:
            # Another host may have room. What no shortage explains is a bug, and not the host's.
            reason = shortage(error) or (isinstance(error, OSError) and (error.strerror or str(error)))
            if not reason:
                raise
            raise LaunchError(f"cannot start worker {worker}: {reason}") from error

    async def _begin(
        self,
        worker: WorkerId,
        command: Sequence[str],
        env: Mapping[str, str],
        label: str,
        rank_at_launch: int,
        given: Given | None,
        shown: Callable[[bytes], None] | None,
    ) -> LocalWorker:
        if not self._workers and not self._starting:
            self._oom_kills.forget()
        guard, tether = self._set_up()
        starting = asyncio.get_running_loop().create_task(
            self._start(guard, tether, worker, command, env, label, rank_at_launch, given, shown)
        )
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Nobody takes the process any more, but it may exist.
            starting.add_done_callback(_kill_unwanted)
            raise

    def _set_up(self) -> tuple[GuardLink, Tether]:
        """What ends processes when this one is dead; and where workers are forked, if they may be."""
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

    async def prepare(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Imports what workers of this command and environment import, so that the first can be forked.

        Blocks until it is done, or known that they will be started afresh.
        """
        if self._closing is not None or not self._may_warm:
            return
        try:
            self._set_up()
        except LaunchError:
            return  # whoever is started here says so
        except (OSError, MemoryError, RuntimeError) as error:
            if not shortage(error):
                raise
            return
        assert self._warm is not None
        await self._warm.wait_first(command, {**env, ENV_MARK: self._mark})

    @property
    def warm(self) -> WarmStarts | None:
        """Where workers are forked; None before the first worker, and when they all start afresh."""
        return self._warm

    def warm_up(self) -> None:
        """Has later workers forked from a warmed process. Not before the first ones run: it would slow them down."""
        if self._warm is not None and self._closing is None:
            self._warm.warm_up()

    def pause_output(self) -> None:
        """Reads no worker's output for now: who writes much blocks. What a dead worker has left is read at its end."""
        self._output_paused = True
        for process in self._workers:
            process.pause_output()

    def resume_output(self) -> None:
        """Reads on."""
        self._output_paused = False
        for process in self._workers:
            process.resume_output()

    def pass_on(self, number: signal.Signals) -> None:
        """Sends this signal to the process of each worker that runs; see the protocol."""
        for process in tuple(self._workers):
            process.pass_on(number)

    def kill(self) -> None:
        """SIGKILL to all workers and to what dead ones have left behind."""
        for process in tuple(self._workers):
            process.kill()

    async def close(self) -> None:
        """Kills what is left of the job, ends the guard. Harmless when repeated."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._warm is not None:
            self._warm.wait_no_more()
        if self._starting:
            await asyncio.wait(tuple(self._starting))
        if self._warm is not None:
            await self._warm.close()
        for process in tuple(self._workers):
            process.close()
        await asyncio.gather(*(process.wait() for process in self._workers))
        if self._guard is not None:
            # What carries the job's mark and no worker's: a discovery script that hangs.
            try:
                found = await self._scanner.find_all()
            except (OSError, MemoryError) as error:
                self._warn(f"cannot look for what is left of the job: {shortage(error) or error}")
            else:
                for processes in found.values():
                    for leftover in processes:
                        send_signal(leftover, signal.SIGKILL)
            await self._guard.close()
        if self._tether is not None:
            self._tether.close()
        self._pool.shutdown(wait=False)

    async def _start(
        self,
        guard: GuardLink,
        tether: Tether,
        worker: WorkerId,
        command: Sequence[str],
        env: Mapping[str, str],
        label: str,
        rank_at_launch: int,
        given: Given | None,
        shown: Callable[[bytes], None] | None,
    ) -> LocalWorker:
        marked = {**env, ENV_MARK: self._mark, ENV_WORKER: worker.key}
        loop = asyncio.get_running_loop()
        if self._warm_first and self._warm is not None:
            await self._warm.wait_first(command, marked)
            if self._closing is not None:
                raise LaunchError(f"cannot start worker {worker}: the job is ending")
        spawned, complaint = await loop.run_in_executor(
            self._pool, self._spawn, worker, tuple(command), marked, tether, given
        )
        if complaint and not self._complained:
            self._complained = True
            self._warn(complaint)
        try:
            process = LocalWorker(worker, spawned, self._scanner, guard, self._oom_kills, label=label, warn=self._warn)
        except BaseException:
            spawned.undo()
            raise
        self._workers.add(process)
        process.finished.add_done_callback(lambda _: self._finished(process))
        try:
            self._sink.begin(worker, process.pid, rank_at_launch, label)
            process.forward(
                WorkerOutput(
                    spawned.pipes,
                    worker,
                    self._sink,
                    label=lambda: process.label,
                    prefix_timestamp=self._prefix_timestamp,
                    warn=self._warn,
                    paused=self._output_paused,
                    shown=shown,
                )
            )
        except BaseException:
            process.kill()
            for descriptor in spawned.pipes.values():
                loop.remove_reader(descriptor)
                os.close(descriptor)
            raise
        return process

    def _spawn(
        self,
        worker: WorkerId,
        command: Sequence[str],
        env: Mapping[str, str],
        tether: Tether,
        given: Given | None,
    ) -> tuple[Spawned, str]:
        """Starts a process. Returns it, and why it is not as it should be; "" when it is."""
        forked = self._warm.fork(command, env, given) if self._warm is not None else None
        if forked is None:
            # A forked worker does this itself: the warmed process's command is that of all.
            own = env.get(ENV_LOCAL_RANK)
            words = command if own is None else [word.replace("${local_rank}", own) for word in command]
            spawned = spawn(worker, words, env, tether, given)
        else:
            spawned = forked
        try:
            # Now, that is before it has threads: each is bound as the one that starts it.
            bind(spawned.popen.pid, env)
        except LaunchError as error:
            return spawned, f"{error}; they run unbound"
        return spawned, ""

    def _finished(self, process: LocalWorker) -> None:
        self._workers.discard(process)
        self._sink.end(process.worker)


def _kill_unwanted(starting: asyncio.Task[LocalWorker]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()
