"""Workers that are calls of a user's function, each in a thread of this process: their keeper.

Owns the threads. They differ from processes in that a thread cannot be killed: it can only be asked to end, by an
event.
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
    """A place as Horovod has it."""
    return SlotInfo(worker.hostname, **{name: getattr(place, name) for name in _FIELDS})


class ThreadWorker:
    """One worker, until its function has returned.

    Attributes:
        over: done when it was asked to end, or has ended: what it waits for is not waited for any more.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def was_stopped(self) -> bool:
        """Whether it was asked to end."""
        return self.event.is_set()

    def stop(self) -> None:
        """Asks it to end. Harmless when repeated."""
        self.event.set()
        self.is_over()

    def is_over(self) -> None:
        """Nothing that it waits for is waited for any more."""
        if not self.over.done():
            self.over.set_result(None)


class ThreadKeeper:
    """Starts workers, and asks them to end. Used on the event loop only.

    Args:
        create: runs a worker.
        on_return: called in the worker's thread with what its function returned, before its end is known to anybody
            else. May block.
        on_exit: called on the loop with each worker whose function has returned, and its exit code.
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
        """The workers whose functions run; it follows what happens."""
        return self._living

    def start(self, worker: WorkerId, slot: SlotInfo) -> None:
        """Calls the function in a thread; not any more once the job ends."""
        if self._job_ends:
            return
        thread = ThreadWorker()
        # A daemon: a function that does not heed its event must not keep the program from ending.
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
        """Asks a worker to end. Harmless when it has ended."""
        thread = self._living.get(worker)
        if thread is not None:
            thread.stop()

    def job_ends(self) -> None:
        """Nobody is started any more."""
        self._job_ends = True

    async def end(self) -> None:
        """Asks all workers to end. Blocks until their functions have returned, for they cannot be killed."""
        self.job_ends()
        for thread in self._living.values():
            thread.stop()
        await self._none_lives.wait()

    def _run(self, worker: WorkerId, slot: SlotInfo, thread: ThreadWorker, loop: asyncio.AbstractEventLoop) -> None:
        """The worker's thread."""
        code, at = 1, 0.0
        try:
            code, at = self._create(slot, [thread.event])
        except BaseException:  # it is the worker's end, whatever it is
            _log.exception("worker %s raised", worker)
        try:
            self._on_return(worker, slot, code, at)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._has_returned, worker, code)

    def _has_returned(self, worker: WorkerId, code: int) -> None:
        thread = self._living.pop(worker)
        thread.is_over()
        if not self._living:
            self._none_lives.set()
        self._on_exit(worker, thread, code)
