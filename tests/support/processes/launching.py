"""What the tests of workers' processes share: a sink that remembers, and a keeper that must leave nothing behind."""

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
import pytest
import uvloop

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.keeper import Launch, ProcessKeeper
from elastic_driver.launch.local.process_tree import ProcessTree
from elastic_driver.launch.output_files import OutputFiles
from elastic_driver.launch.processes.guard import find_processes
from elastic_driver.launch.words import ExitStatus
from elastic_driver.words import Bar

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
# Driver and agents run on uvloop.
EACH_LOOP = (pytest.param("asyncio", marks=pytest.mark.release), "uvloop")
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

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        """See Screen."""

    def lines(self, stream: str = "stdout") -> list[str]:
        return self.data[stream].decode().splitlines()

    async def has(self, text: str, stream: str = "stdout") -> None:
        """Blocks until the text was written."""
        async with asyncio.timeout(PATIENCE_S):
            while text.encode() not in self.data[stream]:
                self._written.clear()
                await self._written.wait()


async def stopped(process: ProcessTree, grace_s: float) -> ExitStatus:
    """Stops a process. Blocks until nothing is left of it."""
    process.stop(grace_s)
    return await process.wait()


class Starts:
    """Waits for what comes of starts; keeps what else is told of workers. A ProcessListener."""

    def __init__(self) -> None:
        self.told: list[tuple[str, WorkerId]] = []
        self._waiting: dict[WorkerId, asyncio.Future[ProcessTree]] = {}

    async def start(self, keeper: ProcessKeeper, worker: WorkerId, label: str, launch: Launch) -> ProcessTree:
        """Starts a worker. Blocks until its process is there.

        Raises:
            LaunchError: it could not be started.
        """

        async def launched() -> Launch:
            return launch

        future = self._waiting[worker] = asyncio.get_running_loop().create_future()
        keeper.start(worker, label, launched)
        return await future

    def of(self, worker: WorkerId) -> list[str]:
        """What was told of a worker; that it is dying may go before its end, or not."""
        return [what for what, each in self.told if each == worker and what != "dying"]

    def started(self, worker: WorkerId, process: ProcessTree) -> None:
        self.told.append(("started", worker))
        self._waiting.pop(worker).set_result(process)

    def not_started(self, worker: WorkerId, error: LaunchError) -> None:
        self.told.append(("not started", worker))
        self._waiting.pop(worker).set_exception(error)

    def dying(self, worker: WorkerId, process: ProcessTree, status: ExitStatus | str) -> None:
        self.told.append(("dying", worker))

    def exited(self, worker: WorkerId, process: ProcessTree, status: ExitStatus) -> None:
        self.told.append(("exited", worker))

    def finished(self, worker: WorkerId) -> None:
        self.told.append(("finished", worker))


class Job:
    """A keeper of processes and its sink."""

    def __init__(self, output_dir: Path | None, *, prefix_timestamp: bool) -> None:
        self.sink = Sink()
        self.warnings: list[str] = []
        self.earlier = psutil.Process().children()
        self.job_id = uuid.uuid4().hex
        self.outputs = OutputFiles(self.sink, folder=output_dir, width=2, warn=self.warnings.append)
        self.starts = Starts()
        self.keeper = self.new_keeper(prefix_timestamp=prefix_timestamp)

    def new_keeper(self, *, prefix_timestamp: bool = False, **more: Any) -> ProcessKeeper:
        """A keeper of this job's processes."""
        return ProcessKeeper(
            self.outputs,
            self.starts,
            prefix_timestamp=prefix_timestamp,
            mark=self.job_id,
            warn=self.warnings.append,
            **more,
        )

    async def start(
        self,
        command: Sequence[str],
        *,
        worker: WorkerId = WORKER,
        env: Mapping[str, str] = os.environ,
        label: str = "0",
        rank: int = 0,
        **more: Any,
    ) -> ProcessTree:
        return await self.starts.start(self.keeper, worker, label, Launch(command, dict(env), rank, **more))

    async def python(self, source: str, *arguments: str, worker: WorkerId = WORKER, label: str = "0") -> ProcessTree:
        """Starts a worker that runs this Python text."""
        return await self.start([sys.executable, "-c", source, *arguments], worker=worker, label=label)

    async def close(self) -> None:
        await self.keeper.close()
        await asyncio.to_thread(self.outputs.close)

    def children(self) -> list[int]:
        """This process's children, without those of tests before (multiprocessing's tracker stays forever)."""
        return [child.pid for child in psutil.Process().children() if child not in self.earlier]

    def processes(self) -> list[psutil.Process]:
        """All that carry the job's mark."""
        return [process for processes in find_processes(self.job_id, {}).values() for process in processes]


@contextlib.asynccontextmanager
async def job(output_dir: Path | None = None, *, prefix_timestamp: bool = False) -> AsyncIterator[Job]:
    """A keeper; afterwards no process, child or descriptor may be left."""
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
