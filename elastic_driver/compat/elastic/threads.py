"""Workers that are calls of a user's function in threads of this process.

Owns the threads. Unlike a process, a thread cannot be killed: it can only be asked to end, by an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping

from elastic_driver.compat.runner.hosts import SlotInfo
from elastic_driver.hosts import SlotInfo as Place
from elastic_driver.hosts import WorkerId

CreateWorker = Callable[[SlotInfo, list[threading.Event]], tuple[int, float]]
"""Runs a worker on a slot until it ends or one of the events is set. Returns its exit code and the time."""

_FIELDS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_log = logging.getLogger("elastic_driver.horovod")


def slot_info(worker: WorkerId, place: Place) -> SlotInfo:
    """Convert a worker's place to Horovod's class."""
    return SlotInfo(worker.hostname, **{name: getattr(place, name) for name in _FIELDS})


class ThreadWorker:
    """A worker whose function is running.

    Attributes:
        event: set when the worker is asked to end.
        over: done when the worker was asked to end, or has ended. Requests on its behalf then stop waiting.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def was_stopped(self) -> bool:
        """Whether the worker was asked to end."""
        return self.event.is_set()

    def stop(self) -> None:
        """Ask the worker to end. Idempotent."""
        self.event.set()
        self.is_over()

    def is_over(self) -> None:
        """End the waits of requests on the worker's behalf. Idempotent."""
        if not self.over.done():
            self.over.set_result(None)


class ThreadKeeper:
    """Starts workers, and asks them to end. Used on the event loop only.

    Args:
        create: runs a worker.
        on_return: called in the worker's thread with the results of its function, before its end is reported. May
            block.
        on_exit: called on the loop when a worker's function has returned, with its exit code.
    """

    def __init__(
        self,
        create: CreateWorker,
        *,
        on_return: Callable[[WorkerId, SlotInfo, int, float], None],
        on_exit: Callable[[WorkerId, ThreadWorker, int], None],
    ) -> None:
        self._create = create
        self._on_return = on_return
        self._on_exit = on_exit
        self._living: dict[WorkerId, ThreadWorker] = {}
        self._none_lives = asyncio.Event()
        self._none_lives.set()
        self._job_ends = False

    @property
    def living(self) -> Mapping[WorkerId, ThreadWorker]:
        """The workers whose functions are running; a live view."""
        return self._living

    def start(self, worker: WorkerId, slot: SlotInfo) -> None:
        """Start a worker in a thread, unless the job is ending."""
        if self._job_ends:
            return
        thread = ThreadWorker()
        # A daemon: a function that ignores its event must not keep the program from ending.
        run = threading.Thread(
            target=self._run,
            args=(worker, slot, thread, asyncio.get_running_loop()),
            name=f"worker {worker}",
            daemon=True,
        )
        run.start()
        self._living[worker] = thread
        self._none_lives.clear()

    def stop(self, worker: WorkerId) -> None:
        """Ask a worker to end. Does nothing if it has ended."""
        thread = self._living.get(worker)
        if thread is not None:
            thread.stop()

    def job_ends(self) -> None:
        """Start no more workers."""
        self._job_ends = True

    async def end(self) -> None:
        """Ask all workers to end, and wait until their functions have returned: threads cannot be killed."""
        self.job_ends()
        for thread in self._living.values():
            thread.stop()
        await self._none_lives.wait()

    def _run(self, worker: WorkerId, slot: SlotInfo, thread: ThreadWorker, loop: asyncio.AbstractEventLoop) -> None:
        """Run the worker's thread."""
        code, at = 1, 0.0
        try:
            code, at = self._create(slot, [thread.event])
        except BaseException:  # any exception ends the worker
            _log.exception("worker %s raised an exception", worker)
        try:
            self._on_return(worker, slot, code, at)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop was closed: the job is over
                loop.call_soon_threadsafe(self._has_returned, worker, code)

    def _has_returned(self, worker: WorkerId, code: int) -> None:
        thread = self._living.pop(worker)
        thread.is_over()
        if not self._living:
            self._none_lives.set()
        self._on_exit(worker, thread, code)
