"""What the tests of the launcher share: a sink that remembers, and a launcher that must leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import uvloop

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.launcher import LocalLauncher, LocalWorker
from elastic_driver.launch.output_files import OutputFiles
from elastic_driver.launch.processes.guard import find_processes

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
WORKER = WorkerId("localhost", 0, 0)
PATIENCE_S = 150.0
# As a grace: beyond a test's own limit. Where a stop ends, it has not waited for that.
NEVER_S = 3600.0


class Sink:
    """Remembers what it is given. Can wait for a text, and can fail."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self.writes = 0
        self.error: Exception | None = None
        self._written = asyncio.Event()

    def write(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        self.writes += 1
        if self.error is not None:
            raise self.error
        assert data.endswith(b"\n")
        self.data[stream] += data
        self._written.set()

    def lines(self, stream: str = "stdout") -> list[str]:
        return self.data[stream].decode().splitlines()

    async def has(self, text: str, stream: str = "stdout") -> None:
        """Blocks until the text was written."""
        async with asyncio.timeout(PATIENCE_S):
            while text.encode() not in self.data[stream]:
                self._written.clear()
                await self._written.wait()


class Job:
    """A launcher and its sink."""

    def __init__(self, output_dir: Path | None, *, prefix_timestamp: bool) -> None:
        self.sink = Sink()
        self.warnings: list[str] = []
        self.earlier = psutil.Process().children()
        self.job_id = uuid.uuid4().hex
        self.outputs = OutputFiles(self.sink, folder=output_dir, width=2, warn=self.warnings.append)
        self.launcher = LocalLauncher(
            self.outputs,
            prefix_timestamp=prefix_timestamp,
            mark=self.job_id,
            warn=self.warnings.append,
        )

    async def start(
        self,
        command: Sequence[str],
        *,
        worker: WorkerId = WORKER,
        env: Mapping[str, str] = os.environ,
        label: str = "0",
        rank: int = 0,
    ) -> LocalWorker:
        return await self.launcher.start(worker, command, dict(env), label=label, rank_at_launch=rank)

    async def python(self, source: str, *arguments: str, worker: WorkerId = WORKER, label: str = "0") -> LocalWorker:
        """Starts a worker that runs this Python text."""
        return await self.start([sys.executable, "-c", source, *arguments], worker=worker, label=label)

    async def close(self) -> None:
        await self.launcher.close()
        await asyncio.to_thread(self.outputs.close)

    def children(self) -> list[int]:
        """This process's children, without those of tests before (multiprocessing's tracker stays for ever)."""
        return [child.pid for child in psutil.Process().children() if child not in self.earlier]

    def processes(self) -> list[psutil.Process]:
        """All that carry the job's mark."""
        return [process for processes in find_processes(self.job_id, {}).values() for process in processes]


@contextlib.asynccontextmanager
async def job(output_dir: Path | None = None, *, prefix_timestamp: bool = False) -> AsyncIterator[Job]:
    """A launcher; afterwards no process, child or descriptor may be left."""
    asyncio.get_running_loop()
    gc.collect()  # what tests before have left must not be closed meanwhile
    before = os.listdir("/proc/self/fd")
    one = Job(output_dir, prefix_timestamp=prefix_timestamp)
    try:
        yield one
    finally:
        await one.close()
    assert one.processes() == []
    assert one.children() == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def run(loop: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test's coroutine on one of the event loops that the driver can have."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())
