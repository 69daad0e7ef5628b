"""A worker's process that is nothing but futures: the test says when it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.launcher import ExitStatus


class FakeProcess:
    """See WorkerProcess."""

    def __init__(self, worker: WorkerId, pid: int) -> None:
        loop = asyncio.get_running_loop()
        self.worker, self.pid, self.label = worker, pid, "?"
        self.exited: asyncio.Future[ExitStatus] = loop.create_future()
        self.dying: asyncio.Future[str] = loop.create_future()
        self.last_lines: Sequence[str] = ()
        self.error_file = ""
        self.stops: list[tuple[float, bool]] = []
        self.is_stubborn = False
        self.runs_script = False
        self.printed = 0
        self.stop_error: Exception | None = None

    def end(self, returncode: int) -> None:
        if not self.exited.done():
            self.dying.cancel()
            self.exited.set_result(ExitStatus(returncode))

    def watch_threads(self, pid: int, thread: int) -> None:
        self.runs_script = True

    async def kill_hung(self, *, stacks_s: float, exits: bool) -> bool:
        if self.exited.done() or (exits and not self.runs_script):
            return False
        if stacks_s:
            self.printed += 1
            if not self.is_stubborn:
                self.end(-6)
            asyncio.get_running_loop().call_later(stacks_s, self.kill)
        else:
            self.kill()
        return True

    async def wait(self) -> ExitStatus:
        return await asyncio.shield(self.exited)

    async def stop(self, grace_s: float, *, sever: bool = False, number: signal.Signals = signal.SIGTERM) -> ExitStatus:
        self.stops.append((grace_s, sever))
        if self.stop_error is not None:
            raise self.stop_error
        if not self.is_stubborn:
            self.end(-15)
        return await self.wait()

    def kill(self) -> None:
        self.end(-9)
