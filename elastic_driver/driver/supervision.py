"""Ending workers that hang, and remembering why they were ended.

Owns the heartbeats and the reasons. That a worker has ended, for whatever reason, the driver learns from its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection, Mapping

from elastic_driver.core.events import Fault
from elastic_driver.core.heartbeats import Heartbeats
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.launcher import WorkerProcess
from elastic_driver.report.chronicle import Chronicle
from elastic_driver.system.job_clock import JobClock, Timer
from elastic_driver.system.tasks import start_task

# Between the signal that makes a hung worker print its stack and the one that ends it.
_LAST_WORDS_S = 2.0
_LATE_S = 0.005


class Supervisor:
    """Watches over the workers of one job. Used on the event loop only.

    Args:
        heartbeats: when each was heard last.
        chronicle: is told who hangs.
        processes: the living processes; the driver's own mapping.
        clock: the job's.
    """

    def __init__(
        self,
        heartbeats: Heartbeats,
        chronicle: Chronicle,
        processes: Mapping[WorkerId, WorkerProcess],
        clock: JobClock,
    ) -> None:
        self._heartbeats = heartbeats
        self._chronicle = chronicle
        self._processes = processes
        self._clock = clock
        self._pids: dict[WorkerId, int] = {}  # of the processes that called init()
        self._reasons: dict[WorkerId, tuple[str, Fault]] = {}
        self._timers: dict[WorkerId, list[Timer]] = {}
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def interval_s(self) -> float:
        """How often workers are to be heard; 0 for never."""
        return self._heartbeats.interval_s

    def heard(self, worker: WorkerId, progress: int = 0, *, waiting: bool = True, pid: int | None = None) -> None:
        """A worker lives. See :meth:`Heartbeats.heard`; ``pid`` is that of the process that said so."""
        if pid is not None:
            self._pids[worker] = pid
        self._heartbeats.heard(worker, progress, waiting=waiting, now=self._clock())

    def forget(self, worker: WorkerId) -> None:
        """From here on its silence is no news."""
        self._heartbeats.forget(worker)

    def forget_all(self, *, but: Collection[WorkerId] = ()) -> None:
        """Likewise for all but these."""
        self._heartbeats.forget_all(but=but)

    def gone(self, worker: WorkerId) -> None:
        """Its process has ended."""
        self.forget(worker)
        self._pids.pop(worker, None)
        self._reasons.pop(worker, None)
        for timer in self._timers.pop(worker, ()):
            timer.cancel()

    def job_ends(self) -> None:
        """All workers are being stopped: nobody hangs any more."""
        self.forget_all()
        for timers in self._timers.values():
            for timer in timers:
                timer.cancel()
        self._timers.clear()

    def why_killed(self, worker: WorkerId) -> str:
        """Why it is being ended, in words; empty when it is not, or not from here."""
        return self._reasons.get(worker, ("", Fault.OWN))[0]

    def fault(self, worker: WorkerId) -> Fault | None:
        """Whose doing it is that it is being ended; None when it is not, or not from here."""
        return self._reasons[worker][1] if worker in self._reasons else None

    async def watch_over(self) -> None:
        """Ends those that are frozen or hang. Runs until it is cancelled."""
        while self.interval_s:
            # A little later than due: clocks are not compared for equality.
            await asyncio.sleep(self._heartbeats.look_in_s(self._clock()) + _LATE_S)
            for worker, reason, silent in self._heartbeats.find(self._clock()):
                process = self._processes.get(worker)
                if process is not None and not process.exited.done():
                    # Whoever is stopped, or cannot be reached, is silent; who says that it does nothing does so itself.
                    self._reasons[worker] = f"hung: {reason}", Fault.OUTSIDE if silent else Fault.OWN
                    self._end_hung(worker, process, reason)

    def has_its_process(self, worker: WorkerId) -> bool:
        """Whether the process that called init() is there. A shell that runs it may go on after its end."""
        pid, process = self._pids.get(worker), self._processes.get(worker)
        with contextlib.suppress(OSError):
            return process is not None and pid is not None and os.getsid(pid) == process.pid
        return False

    def end_unless_gone(
        self,
        worker: WorkerId,
        limit_s: float,
        reason: str,
        *,
        with_stacks: bool = False,
        while_: Callable[[WorkerId], bool] = lambda _: True,
    ) -> None:
        """Ends a worker that still runs after this time.

        Args:
            worker: whom.
            limit_s: when, seconds from now.
            reason: what it did not do, in words.
            with_stacks: whether it prints first where its threads are.
            while_: asked then: whether there is still a reason to.
        """

        def end() -> None:
            process = self._processes.get(worker)
            if process is None or process.exited.done() or not while_(worker):
                return
            self._reasons[worker] = reason, Fault.OWN
            if with_stacks:
                self._end_hung(worker, process, reason)
            else:
                self._chronicle.worker_stopped(worker, f"it {reason}")
                process.kill()

        self._timers.setdefault(worker, []).append(self._clock.call_later(limit_s, end))

    def _end_hung(self, worker: WorkerId, process: WorkerProcess, reason: str) -> None:
        self._chronicle.worker_hung(worker, reason)
        task = start_task(self._with_last_words(worker, process))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _with_last_words(self, worker: WorkerId, process: WorkerProcess) -> None:
        """Has a worker print where its threads are, and kills it."""
        pid = self._pids.get(worker, process.pid)
        # faulthandler, which init() has enabled, prints the stacks at this signal, whatever holds Python's lock. A
        # stopped process takes it when it goes on.
        with contextlib.suppress(OSError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGABRT)
                os.kill(pid, signal.SIGCONT)
                await asyncio.wait([process.exited], timeout=_LAST_WORDS_S)
        process.kill()
