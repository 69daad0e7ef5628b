"""Workers as child processes on this machine.

Owns their start, their end (felt through a pidfd, at once), their process trees and their output pipes. One asyncio
loop; scans of /proc run in a thread so that they never hold it up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.output import LineCutter, OutputSink, Stream, WorkerOutput
from elastic_driver.launch.process import CommandNotFoundError, ExitStatus, WorkerProcess
from elastic_driver.launch.tree import kill_all, processes_of, send

# A dead worker's pipes end with it, unless a process that escaped its tree holds them: then they are cut.
_DRAIN_S = 2.0
_READ_BYTES = 256 << 10


class LocalProcess:
    """One worker's process and its tree. See :class:`elastic_driver.launch.process.WorkerProcess`."""

    def __init__(self, worker: WorkerId, popen: subprocess.Popen[bytes], output: WorkerOutput, job_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.worker = worker
        self.pid = popen.pid
        self.exited: asyncio.Future[ExitStatus] = loop.create_future()
        self._popen = popen
        self._output = output
        self._job_id = job_id
        self._open_pipes = 0
        self._drained = loop.create_future()
        self._stopping: asyncio.Task[None] | None = None
        self._swept: asyncio.Task[None] | None = None
        assert popen.stdout is not None
        assert popen.stderr is not None
        self._pipes: dict[IO[bytes], tuple[Stream, LineCutter]] = {
            popen.stdout: ("stdout", LineCutter()),
            popen.stderr: ("stderr", LineCutter()),
        }
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
            loop.add_reader(pipe.fileno(), self._read, pipe)
        self._pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(self._pidfd, self._dead)

    @property
    def label(self) -> str:
        """What stands in the prefix of its output: its present rank."""
        return self._output.label

    @label.setter
    def label(self, text: str) -> None:
        self._output.label = text

    @property
    def last_lines(self) -> Sequence[str]:
        """The last lines of its standard error, or of its standard output when it said nothing there."""
        return tuple(self._output.last_lines["stderr"] or self._output.last_lines["stdout"])

    async def wait(self) -> ExitStatus:
        """Blocks until the process has ended, nothing of its tree is left, and its output has been passed on."""
        status = await asyncio.shield(self.exited)
        await asyncio.shield(self._drained)
        return status

    async def stop(self, grace_s: float) -> ExitStatus:
        """TERM to the whole tree, and KILL to what is left of it after ``grace_s`` seconds. Idempotent."""
        if self._stopping is None and not self.exited.done():
            self._stopping = asyncio.get_running_loop().create_task(self._stop(grace_s))
        return await self.wait()

    def kill(self) -> None:
        """KILL to the process now; its end takes the rest of its tree along."""
        if not self.exited.done():
            self._popen.kill()

    async def _stop(self, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        tree = await asyncio.to_thread(self._find)
        send(tree, signal.SIGTERM)
        if not self.exited.done():
            await asyncio.wait([self.exited], timeout=grace_s)
        if not self.exited.done():
            send(await asyncio.to_thread(self._find), signal.SIGKILL)
            return
        # The worker heeded the signal; its children get the rest of the grace.
        others = [process for process in tree if process.pid != self.pid]
        if others:
            await asyncio.to_thread(psutil.wait_procs, others, timeout=max(0.0, deadline - loop.time()))

    def _find(self) -> list[psutil.Process]:
        return processes_of(self._job_id, worker_key=self.worker.key, leaders=(self.pid,))

    def _dead(self) -> None:
        """The process has ended: says so at once, then sees to what it left behind."""
        loop = asyncio.get_running_loop()
        returncode = self._popen.poll()
        if returncode is None:
            return
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._swept = loop.create_task(self._sweep())
        self.exited.set_result(ExitStatus(returncode))

    async def _sweep(self) -> None:
        if self._stopping is not None:
            await asyncio.wait([self._stopping])
        await asyncio.to_thread(kill_all, self._job_id, worker_key=self.worker.key, leaders=(self.pid,))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _DRAIN_S
        while self._pipes and loop.time() < deadline:
            # The last bytes are in the pipes already: each turn of the loop reads on.
            await asyncio.sleep(0.005)
        for pipe in tuple(self._pipes):
            self._end(pipe)
        self._output.close()
        if not self._drained.done():
            self._drained.set_result(None)

    def _read(self, pipe: IO[bytes]) -> None:
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(pipe)
            return
        stream, cutter = self._pipes[pipe]
        self._output.write(stream, cutter.feed(data))

    def _end(self, pipe: IO[bytes]) -> None:
        stream, cutter = self._pipes.pop(pipe)
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        self._output.write(stream, cutter.end())
        pipe.close()


class LocalLauncher:
    """Starts workers on this machine.

    Args:
        sink: takes their output.
        output_dir: folder for ``rank.R/stdout`` and ``stderr``; None for none.
        prefix_timestamp: whether output lines begin with the time.
        job_id: marks every process of the job.
        width: digits of R.
        on_warning: told of what the user should know.
    """

    def __init__(
        self,
        sink: OutputSink,
        *,
        output_dir: Path | None,
        prefix_timestamp: bool,
        job_id: str,
        width: int,
        on_warning: Callable[[str], None],
    ) -> None:
        self._sink = sink
        self._output_dir = output_dir
        self._prefix_timestamp = prefix_timestamp
        self._job_id = job_id
        self._width = width
        self._on_warning = on_warning
        self._guard: subprocess.Popen[bytes] | None = None
        self._pids: list[int] = []
        self._file_warned = False

    async def start(
        self, worker: WorkerId, command: Sequence[str], env: Mapping[str, str], *, label: str, rank_at_launch: int
    ) -> WorkerProcess:
        """Starts a process in a session of its own, with the environment given and no input.

        Args:
            worker: who it is.
            command: program and arguments; no shell reads them.
            env: its whole environment.
            label: stands in the prefix of its output until it is changed.
            rank_at_launch: names its folder of ``--output-filename``.

        Raises:
            CommandNotFoundError: the program is not there or cannot be executed.
            LaunchError: the system refuses another process.
        """
        self._check_guard()
        try:
            popen = await asyncio.to_thread(
                subprocess.Popen,
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(env),
                start_new_session=True,
                bufsize=0,
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise CommandNotFoundError(f"cannot run {command[0]!r}: {error.strerror}") from error
        except OSError as error:
            raise LaunchError(f"cannot start worker {worker}: {error.strerror}") from error
        self._tell_guard(f"{popen.pid}\n")
        self._pids.append(popen.pid)
        folder = None
        if self._output_dir is not None:
            folder = self._output_dir / f"rank.{rank_at_launch:0{self._width}d}"
        output = WorkerOutput(
            self._sink,
            prefix_timestamp=self._prefix_timestamp,
            folder=folder,
            header=f"worker {worker.key}, pid {popen.pid}, started {time.strftime('%Y-%m-%d %H:%M:%S')}",
            on_error=self._warn_of_files,
        )
        output.label = label
        return LocalProcess(worker, popen, output, self._job_id)

    async def close(self) -> None:
        """Kills what is left of the job, and lets the guard go."""
        if self._pids:
            await asyncio.to_thread(kill_all, self._job_id, worker_key=None, leaders=tuple(self._pids))
        if self._guard is not None:
            self._tell_guard("done\n")
            guard, self._guard = self._guard, None
            assert guard.stdin is not None
            guard.stdin.close()
            await asyncio.to_thread(guard.wait)

    def _warn_of_files(self, text: str) -> None:
        if not self._file_warned:
            self._file_warned = True
            self._on_warning(text)

    def _check_guard(self) -> None:
        """Starts the guard, and another when it has died."""
        if self._guard is not None and self._guard.poll() is None:
            return
        if self._guard is not None:
            self._on_warning(f"the guard process (pid {self._guard.pid}) has died; starting another")
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "elastic_driver.launch.guard", self._job_id],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
                env=_guard_env(),
            )
        except OSError as error:
            raise LaunchError(f"cannot start the guard process: {error.strerror}") from error
        for pid in self._pids:
            self._tell_guard(f"{pid}\n")

    def _tell_guard(self, text: str) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        try:
            self._guard.stdin.write(text.encode())
        except OSError:
            return  # it has died: the next start makes another, which is told all pids


def _guard_env() -> dict[str, str]:
    """The guard finds this package where the driver found it, however that was started."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
