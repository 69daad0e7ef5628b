"""A worker's process on this machine, and all its descendants: its output, its end, and that nothing is left.

Owns the process, its pipes and its tree. Decides nothing: the owner of the keeper decides when a worker is started or
stopped (:mod:`elastic_driver.launch.local.keeper`).

A dead worker stays a zombie until all its descendants are gone. Its PID, and with it its session's id, can therefore
not be reused by a stranger while the session is being killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil

from elastic_driver.errors import in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.output import WorkerOutput
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
from elastic_driver.launch.processes.spawn import Spawned
from elastic_driver.launch.words import ExitStatus
from elastic_driver.system.kernel import pidfd_open, pidfd_send_signal
from elastic_driver.system.tasks import start_task

_log = logging.getLogger(__name__)

# Grace between SIGTERM and SIGKILL for the children of a worker that ended by itself. Not 0: multiprocessing's resource
# tracker removes the dead worker's shared memory in this time.
LEFTOVER_GRACE_S = 1.0
# How long to wait for output that a descendant out of our reach could still write.
_OUTPUT_END_S = 1.0
# A SIGKILLed process can linger in the kernel (a dead network disk); then it is left behind, with a warning.
_KILL_S = 5.0
# When one thread has ended, the first one, which knows the exit code, is about to: how often to look for that.
_LOOK_S = 0.001
_LOOKS = 50
# A process that blocks a signal for longer than that is waiting for it.
_BLOCKED_LOOK_S = 0.01
_BLOCKED_LOOKS = 20
_Found = dict[str, list[psutil.Process]]  # by worker key


class JobScanner:
    """Looks for the job's processes in a thread, once for all requests made at the same time.

    Args:
        mark: is in the environment of all of them.
        pool: provides the thread.
    """

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
        """Return the living processes of one worker, as of a scan that began after this call."""
        return (await self.find_all()).get(key, [])

    async def sever(self, key: str, endpoints: Iterable[tuple[str, int]] | None = None) -> None:
        """Shut down the connections of one worker's living processes: all, or those with one of these ends."""
        pids = [process.pid for process in await self.find(key)]
        ends = None if endpoints is None else frozenset(endpoints)
        await asyncio.get_running_loop().run_in_executor(self._pool, sever, pids, ends)

    async def find_all(self) -> _Found:
        """Return the living processes of the job by worker key."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._scan(self._running))
        return await asyncio.shield(self._next)

    async def _scan(self, before: asyncio.Task[_Found] | None) -> _Found:
        if before is not None:
            await asyncio.wait((before,))
        # Requests from here on may follow events that this scan does not show.
        self._running, self._next = self._next, None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, find_processes, self._mark, dict(self._leaders))


def _abort(pid: int) -> None:
    """Send SIGABRT to the main thread of a process, if the kernel allows it (Linux 6.9), else to any thread.

    Without worker/rounds/stacks.py that thread reads all others' frames: any but the main one could crash over it.
    """
    try:
        descriptor = pidfd_open(pid, PIDFD_THREAD)
    except OSError:
        os.kill(pid, signal.SIGABRT)
        return
    try:
        pidfd_send_signal(descriptor, signal.SIGABRT)
    finally:
        os.close(descriptor)


class ProcessTree:
    """A worker's process, from its start until nothing is left of its descendants.

    Args:
        worker: the worker.
        spawned: its process.
        scanner: finds its descendants.
        guard: ends all of them when this process dies.
        oom_kills: knows whether the kernel's OOM killer ended it.
        warn: called with one-line warnings.

    Attributes:
        exited: done at the moment the process is dead; its output until then has been passed on.
        dying: done when it is known that the process is about to end with a failure, though it may take seconds until
            it is dead: with its status, or in words if that is not known yet (it is dumping core). Canceled if it is
            dead
                without
            that.
        finished: done when it is dead, its descendants are gone, and its output is read to the end. A descendant that
            cannot be found or killed delays that for no longer than a few seconds.
    """

    def __init__(
        self,
        worker: WorkerId,
        spawned: Spawned,
        scanner: JobScanner,
        guard: GuardLink,
        oom_kills: OomKills,
        *,
        warn: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.worker = worker
        self.pid = spawned.popen.pid
        self.exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        self.dying: asyncio.Future[ExitStatus | str] = self._loop.create_future()
        self.finished: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._script_pid: int | None = None
        self._popen = spawned.popen
        self._leader = spawned.leader
        self._scanner = scanner
        self._guard = guard
        self._oom_kills = oom_kills
        self._note: str | None = None  # of its end, once observed
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
        """Take over the reader of its output."""
        self._output = output

    def pause_output(self) -> None:
        """Stop reading its pipes for now."""
        if self._output is not None:
            self._output.pause()

    def resume_output(self) -> None:
        """Resume reading its pipes."""
        if self._output is not None:
            self._output.resume()

    def relabel(self) -> None:
        """Update its bars, since the label of its output has changed."""
        if self._output is not None:
            self._output.relabel()

    @property
    def last_lines(self) -> Sequence[str]:
        """The end of its stderr, or of its stdout if it wrote nothing there."""
        return () if self._output is None else self._output.last_lines

    def watch_threads(self, pid: int, thread: int) -> None:
        """Record which process called ``init()``, and one of its threads that lives as long as its first one.

        Watches these two threads for ``dying``, unless that process is another than this one (for example if the
        command is a shell), ``dying`` is done already, or the system cannot report a thread's end.
        """
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

    def kill_hung(self, *, stacks_s: float, exits: bool) -> bool:
        """Kill the whole tree, after the process that called ``init()`` has printed its threads' stacks.

        Args:
            stacks_s: how long to wait for the stacks at most, seconds; 0 to print none.
            exits: whether to spare a worker whose script has ended: a shell that runs it may continue after its end.

        Returns:
            False if it was spared, or is dead already.
        """
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
        """Return whether the process that called init() exists."""
        with contextlib.suppress(OSError):
            return self._script_pid is not None and os.getsid(self._script_pid) == self.pid
        return False

    async def _print_stacks(self, limit_s: float) -> None:
        """Have that process print its threads' stacks, which ends it. Blocks until then, at most for ``limit_s``."""
        pid = self._script_pid or self.pid
        # At the first signal the thread with Python's lock prints the stacks, at the second whichever thread takes it.
        # A stopped process takes it when it continues.
        for _ in range(2):
            with contextlib.suppress(OSError):
                if not self.exited.done() and os.getsid(pid) == self.pid:
                    _abort(pid)
                    os.kill(pid, signal.SIGCONT)
                    await asyncio.wait([self.exited], timeout=limit_s / 2)

    def _look_if_dying(self, looks: int = _LOOKS) -> None:
        """Check for ``dying`` after a thread has ended: with the process, or without it if it called exec."""
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
        """Wait until it is dead, its descendants are gone, and its output is read to the end."""
        return await asyncio.shield(self.finished)

    def stop(self, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the whole tree, and SIGKILL to what is left after ``grace_s``.

        Harmless when repeated. A later call with an earlier deadline shortens the grace, and sends no other signal.

        Args:
            grace_s: the grace, seconds.
            sever: whether to shut its connections down, too, if the system permits: a thread that waits for a lost peer
                in a collective gets an error at once, and can still clean up.
            number: the signal.
        """
        self._end_tree_within(grace_s, number)
        if sever and not self.exited.done():
            start_task(self.sever())

    async def sever(self, endpoints: Iterable[tuple[str, int]] | None = None) -> None:
        """Shut down the connections of the tree: all, or those with one of these ends (addresses and ports)."""
        with contextlib.suppress(OSError, MemoryError):  # threads that wait there hang until they are killed
            await self._scanner.sever(self.worker.key, endpoints)

    @property
    def is_alive(self) -> bool:
        """Whether its process is not dead."""
        return not self.exited.done()

    @property
    def is_ending(self) -> bool:
        """Whether it is being stopped, or killed."""
        return self._kill_at < math.inf

    def pass_on(self, number: signal.Signals, looks: int = _BLOCKED_LOOKS) -> None:
        """Send a signal to its process, but not to its descendants.

        A signal that would end a process without a handler (all except SIGQUIT, which is meant to) is sent only if the
        process handles it: its script may not have installed a handler yet.

        Args:
            number: the signal.
            looks: how often the process must be seen to block the signal until it counts as waiting for it.
        """
        if self.exited.done():  # from then on the PID may be a stranger's
            return
        with contextlib.suppress(OSError):
            handled, blocked = (True, False) if number == signal.SIGQUIT else heeds_signal(self.pid, number)
            if not handled and blocked and looks > 1:
                self._loop.call_later(_BLOCKED_LOOK_S, self.pass_on, number, looks - 1)
            elif handled or blocked:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the tree."""
        # Not to the process first and to its children afterwards: then it would no longer be known whose children
        # they are.
        self._end_tree_within(0.0)

    def close(self) -> None:
        """Send SIGKILL to a living worker; what a dead one left gets a short grace (LEFTOVER_GRACE_S) first."""
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
                    self._warn(
                        f"cannot kill process {pids} of worker {self.worker}: still alive after SIGKILL; left behind"
                    )
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
        except (OSError, MemoryError) as error:  # no free descriptor to read /proc
            self._warn(f"cannot look for the processes that worker {self.worker} started: {in_words(error)}")
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
        # If a stop is in progress, what is left of the tree keeps that stop's grace.
        if self._ending is None:
            self._end_tree_within(LEFTOVER_GRACE_S)
        self._finishing = start_task(self._finish(status))

    def _abandon(self) -> None:
        if not self.exited.done():
            status = ExitStatus(-signal.SIGKILL)
            self._set_exited(status)
            self._close(status)

    def _noted(self, status: ExitStatus) -> ExitStatus:
        """Return its end, with a note if it was killed by the OOM killer."""
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
