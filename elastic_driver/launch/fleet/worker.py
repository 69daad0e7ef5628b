"""A worker on whatever host: what its agent says of it, and what its agent is told to do with it.

See :class:`~elastic_driver.launch.launcher.WorkerProcess`. Owns no process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.error_files import raised_in
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.launcher import ExitStatus
from elastic_driver.rendezvous.agent_messages import Dying, Exited, Kill, Labels, Stop


class RemoteWorker:
    """One worker, from the word that it runs until nothing is left of it.

    Args:
        worker: which.
        pid: its process's id on its host.
        label: see WorkerProcess.
        link: to its agent.
    """

    def __init__(self, worker: WorkerId, pid: int, label: str, link: AgentLink) -> None:
        loop = asyncio.get_running_loop()
        self.worker = worker
        self.pid = pid
        self.exited: asyncio.Future[ExitStatus] = loop.create_future()
        self.dying: asyncio.Future[ExitStatus | str] = loop.create_future()
        self.finished: asyncio.Future[ExitStatus] = loop.create_future()
        self._label = label
        self._link = link
        self._last_lines: Sequence[str] = ()
        self._error_file = ""
        self._killing: asyncio.Future[bool] | None = None

    @property
    def label(self) -> str:
        """What stands in the prefix of its output."""
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        if label != self._label:
            self._label = label
            self._link.send(Labels({self.worker.key: label}))

    @property
    def last_lines(self) -> Sequence[str]:
        """See WorkerProcess. Where it left its traceback in its error file only, the end of that."""
        raised = raised_in(self._error_file)
        printed = raised is None or any(raised.error in line for line in self._last_lines)
        return self._last_lines if raised is None or printed else (*raised.callstack[-19:], raised.error)

    @property
    def error_file(self) -> str:
        """See WorkerProcess."""
        return self._error_file

    def watch_threads(self, pid: int, thread: int) -> None:
        """Nothing: its agent has heard that before."""

    async def kill_hung(self, *, stacks_s: float, exits: bool) -> bool:
        """See WorkerProcess."""
        if self.exited.done():
            return False
        if self._killing is None:
            self._killing = asyncio.get_running_loop().create_future()
            killing = self._killing
            self._link.send(Kill(self.worker.key, stacks_s, exits))
            self._link.overdue(f"kill worker {self.worker}", lambda: self.exited.done() or killing.done())
        return await asyncio.shield(self._killing)

    async def wait(self) -> ExitStatus:
        """See WorkerProcess."""
        return await asyncio.shield(self.finished)

    async def stop(self, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM) -> ExitStatus:
        """See WorkerProcess."""
        if not self.finished.done():
            self._link.send(Stop(self.worker.key, grace_s, sever, int(number)))
            self._link.overdue(f"stop worker {self.worker} within {grace_s:g} s", self.exited.done, takes_s=grace_s)
        return await self.wait()

    def kill(self) -> None:
        """See WorkerProcess."""
        if not self.finished.done():
            self._link.send(Kill(self.worker.key, 0.0, exits=False))
            self._link.overdue(f"kill worker {self.worker}", self.exited.done)

    # --- what its agent says ---------------------------------------------------------------------------------------

    def is_dying(self, news: Dying) -> None:
        """It is about to end."""
        self._last_lines = tuple(news.last_lines)
        self._error_file = news.error_file
        if not self.dying.done() and not self.exited.done():
            self.dying.set_result(news.how if news.returncode is None else ExitStatus(news.returncode, note=news.note))

    def has_exited(self, news: Exited) -> None:
        """It is dead."""
        self._last_lines = tuple(news.last_lines)
        self._error_file = news.error_file
        self._exit(ExitStatus(news.returncode, note=news.note))

    def has_finished(self) -> None:
        """Nothing is left of it."""
        if self.exited.done() and not self.finished.done():
            self.finished.set_result(self.exited.result())

    def spared(self) -> None:
        """It was not killed: its script had ended."""
        killing, self._killing = self._killing, None
        if killing is not None and not killing.done():
            killing.set_result(False)

    def lost(self, why: str = "") -> None:
        """Its agent is lost, and it is with it."""
        # Why is told once, of the host.
        self._exit(ExitStatus(-signal.SIGKILL, reason="lost with its host", host_lost=True, note=why))
        self.has_finished()

    def _exit(self, status: ExitStatus) -> None:
        if self.exited.done():
            return
        self.dying.cancel()
        self.exited.set_result(status)
        if self._killing is not None and not self._killing.done():
            self._killing.set_result(True)
