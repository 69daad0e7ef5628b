"""The driver's end of the guard: starts it, reports the workers to it, starts another when it dies.

The guard itself is :mod:`elastic_driver.launch.processes.guard`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from elastic_driver.errors import LaunchError, in_words
from elastic_driver.launch.processes import guard
from elastic_driver.launch.processes.death import watch_child
from elastic_driver.launch.words import ExitStatus

# A guard that is ordered to quit does so in milliseconds; one that does not (it was stopped) is killed.
_QUIT_S = 1.0
# A guard that dies this many times without a worker's start in between is given up: something here kills it on sight.
_MAX_RESTARTS = 5


class GuardLink:
    """Keeps one guard process for the job. Used on the event loop only."""

    def __init__(self, mark: str, warn: Callable[[str], None]) -> None:
        self._mark = mark
        self._warn = warn
        self._workers: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._died: asyncio.Event = asyncio.Event()
        self._restarts = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The guard's PID; None before the first worker and after the end."""
        return None if self._process is None else self._process.pid

    def ensure(self) -> None:
        """Start the guard if there is none. To be called before a worker is started.

        Raises:
            LaunchError: it cannot be started. Without it a worker could outlive the driver.
        """
        self._restarts = 0
        if self._process is not None:
            return
        try:
            self._start()
        except OSError as error:
            raise LaunchError(
                f"cannot start the guard process, which kills workers when the driver dies: {in_words(error)}"
            ) from error

    def started(self, pid: int) -> None:
        """Report a running worker to the guard."""
        self._workers.add(pid)
        self._tell(f"+ {pid}\n")

    def gone(self, pid: int) -> None:
        """Report to the guard that a worker and all its descendants are gone."""
        self._workers.discard(pid)
        self._tell(f"- {pid}\n")

    async def close(self) -> None:
        """End the guard, which kills nothing then. Blocks until it is gone."""
        self._closed = True
        process = self._process
        if process is None:
            return
        self._tell("quit\n")
        try:
            await asyncio.wait_for(self._died.wait(), _QUIT_S)
        except TimeoutError:
            process.kill()
            await self._died.wait()

    def _start(self) -> None:
        # Not the marks of an outer job, if this driver runs in one: the guard must outlive the processes that it kills.
        marks = (guard.ENV_MARK, guard.ENV_WORKER)
        environment = {name: value for name, value in os.environ.items() if name not in marks}
        psutil_at = str(Path(psutil.__file__).resolve().parent.parent)
        command = [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve()), self._mark, psutil_at]
        # Blocked here, and so in the child from its first moment: Python needs a while until the guard ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, guard.UNHEARD)
        try:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert process.stdin is not None
        try:
            os.set_blocking(process.stdin.fileno(), False)
            watch_child(process.pid, lambda: self._ended(process))
        except BaseException:
            process.kill()
            process.wait()
            process.stdin.close()
            raise
        self._process = process
        self._died.clear()
        for pid in sorted(self._workers):
            self._tell(f"+ {pid}\n")

    def _tell(self, line: str) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            written = process.stdin.write(line.encode())
        except BrokenPipeError:
            return  # it is dead: _ended() follows
        if written != len(line):
            # The pipe is full because the guard does not read (it was stopped): such a guard guards nothing.
            process.kill()

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._process = None
        self._died.set()
        if self._closed:
            return
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            self._warn(f"the guard process has exited {self._restarts} times: workers may outlive a killed driver")
            return
        self._warn(f"the guard process {ExitStatus(code)}; starting another")
        try:
            self._start()
        except (OSError, MemoryError, RuntimeError) as error:
            self._warn(f"cannot restart the guard process: {in_words(error)}; workers may outlive a killed driver")
