"""Workers that are calls of a user's function, each in a thread of this process.

Owns the threads. For the driver they are processes as any others (:mod:`elastic_driver.launch.launcher`), with one
difference: a thread cannot be killed, it can only be asked to end, by an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence

from elastic_driver.compat.runner.hosts import SlotInfo
from elastic_driver.dialects.dialect import JobAddress, WorkerStart
from elastic_driver.hosts import SlotInfo as Place
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.launcher import ExitStatus
from elastic_driver.words import OnChange

CreateWorker = Callable[[SlotInfo, list[threading.Event]], tuple[int, float]]
"""Runs a worker on a slot until it ends or one of the events is set. Returns its exit code and the time."""

OnEnd = Callable[[WorkerId, SlotInfo, int, float], None]
"""Told in the worker's thread what its function returned, before its end is known to anybody else. May block."""

_FIELDS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_log = logging.getLogger("elastic_driver.horovod")


class ThreadDialect:
    """See Dialect. Workers learn their places by calls, and their first ones when they start."""

    @property
    def on_change(self) -> OnChange:
        """They say READY again."""
        return OnChange.IN_PLACE

    def environment(self, start: WorkerStart, *, job: JobAddress) -> dict[str, str]:
        """The place alone."""
        return {name: str(getattr(start.planned, name)) for name in _FIELDS}


def slot_info(worker: WorkerId, place: Place) -> SlotInfo:
    """A place as Horovod has it."""
    return SlotInfo(worker.hostname, **{name: getattr(place, name) for name in _FIELDS})


class ThreadWorker:
    """See WorkerProcess. Made on the running loop.

    Attributes:
        stopping: done when its event has been set: what it waits for is not waited for any more.
    """

    last_lines: Sequence[str] = ()
    error_file = ""
    runs_script = False

    def __init__(self, worker: WorkerId, slot: SlotInfo, label: str, create: CreateWorker, on_end: OnEnd) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked_to_end = threading.Event()
        self._work = (worker, slot, create, on_end)
        self.pid, self.label = os.getpid(), label
        self.exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        self.dying: asyncio.Future[ExitStatus | str] = self._loop.create_future()
        self.stopping: asyncio.Future[None] = self._loop.create_future()
        # A daemon: a function that does not heed its event must not keep the program from ending.
        threading.Thread(target=self._run, name=f"worker {worker}", daemon=True).start()

    def _run(self) -> None:
        worker, slot, create, on_end = self._work
        code, at = 1, 0.0
        try:
            code, at = create(slot, [self._asked_to_end])
        except BaseException:  # it is the worker's end, whatever it is
            _log.exception("worker %s raised", worker)
        try:
            on_end(worker, slot, code, at)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._has_ended, code)

    def _has_ended(self, code: int) -> None:
        self.dying.cancel()
        self.exited.set_result(ExitStatus(code))

    def watch_threads(self, pid: int, thread: int) -> None:
        """There is nothing to be seen from outside."""

    async def kill_hung(self, *, stacks_s: float, exits: bool) -> bool:
        """A thread is never spared: nothing runs around it."""
        if self.exited.done():
            return False
        self.kill()
        return True

    async def wait(self) -> ExitStatus:
        """Blocks until the function has returned."""
        return await asyncio.shield(self.exited)

    async def stop(self, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM) -> ExitStatus:
        """Sets its event, and blocks until the function has returned."""
        self.kill()
        return await self.wait()

    def kill(self) -> None:
        """Sets its event: more cannot be done to a thread."""
        self._asked_to_end.set()
        if not self.stopping.done():
            self.stopping.set_result(None)


class ThreadLauncher:
    """See Launcher.

    Args:
        create: runs a worker.
        on_end: see OnEnd.
    """

    def __init__(self, create: CreateWorker, on_end: OnEnd) -> None:
        self._create = create
        self._on_end = on_end
        self._started: list[ThreadWorker] = []

    def cores(self, hostname: str) -> int:
        """What a name means is the function's business."""
        return 1

    def addresses(self, hostnames: Sequence[str]) -> Mapping[str, str]:
        """Likewise."""
        return dict.fromkeys(hostnames, "")

    async def hold_port(self, hostname: str, generation: int) -> int:
        """Functions find each other as they like."""
        return 0

    def let_go(self, hostname: str, generation: int) -> None:
        """There is none."""

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> ThreadWorker:
        """Calls the function in a thread."""
        slot = SlotInfo(worker.hostname, **{name: int(env[name]) for name in _FIELDS})
        process = ThreadWorker(worker, slot, label, self._create, self._on_end)
        self._started = [one for one in self._started if not one.exited.done()] + [process]
        return process

    def pass_on(self, number: signal.Signals) -> None:
        """Nothing: a thread gets none."""

    def kill(self) -> None:
        """Sets the events of all."""
        for process in self._started:
            process.kill()

    async def close(self) -> None:
        """Sets the events of all, and waits for the functions to return."""
        self.kill()
        for process in self._started:
            await process.wait()
