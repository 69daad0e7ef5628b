"""The figures that training scripts on this host report: read from a file of each worker, sent to the driver.

A worker appends lines like ``{"loss": 0.31}`` to a file in memory, which this process makes: by a descriptor that it
has inherited, or by the file's path. The writer thus never waits: this process may be stopped, or dead. Of each name
only the newest value counts, so little is lost if lines arrive faster than they are read. The memory of lines that were
read is given back to the system.

Owns these files and how they are read. :mod:`elastic_driver.figures` defines what a line may contain.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator

from elastic_driver.figures import MOST_LINE, MOST_NAMES, GpuLook, figures_of
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.gpus import GpuWatch
from elastic_driver.rendezvous.agent_messages import AgentMessage, FiguresSeen, GpusSeen, NoFigures
from elastic_driver.rendezvous.environment import ENV_REPORT, ENV_REPORT_FD, FIGURES_FILE
from elastic_driver.system.kernel import memory_file

_LOOK_S = 1.0
# Per worker and look: 500 lines of usual length in 3 ms, which block the loop. Beyond that the oldest are not read.
MOST_READ = 16 << 10
_PAGE = mmap.PAGESIZE
_FREED_AT = 64 << 10
# File sizes may be limited here (ulimit -f): a file of this size is started over once all of it has been read.
_ANEW_AT = 256 << 10
# High enough not to collide with scripts that use descriptors by number, as in system/tether.py.
_FROM = 100
_SHOWN = 80


class FiguresFile:
    """The file of one worker's process.

    Attributes:
        descriptor: the one that the process inherits.
        values: the newest value of each name.
        trouble: the first line without valid figures, and why; "" if there is none.

    Raises:
        OSError: no file is available.
    """

    def __init__(self) -> None:
        made = memory_file(FIGURES_FILE)
        try:
            fcntl.fcntl(made, fcntl.F_SETFL, fcntl.fcntl(made, fcntl.F_GETFL) | os.O_APPEND)
            self.descriptor = _high(made)
        finally:
            os.close(made)
        self.values: dict[str, float | None] = {}
        self.trouble = ""
        self._read_to = self._freed_to = 0
        self._ends_line = False  # whether the last byte read ends a line
        self._changed_ns = 0  # mtime of the file when it was last read
        self._news: dict[str, float | None] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the process finds it."""
        return {
            ENV_REPORT: f"/proc/{os.getpid()}/fd/{self.descriptor}",
            ENV_REPORT_FD: str(self.descriptor),
        }

    def close(self) -> None:
        """Close it; the memory is freed once the process has closed it, too. Harmless when repeated."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def news(self) -> dict[str, float | None]:
        """Return what has been reported since the last call."""
        news, self._news = self._news, {}
        return news

    def read(self, *, to_its_end: bool = False) -> None:
        """Read the new lines.

        Args:
            to_its_end: whether to read a last line without a newline, too: it will not be completed.
        """
        if self.descriptor < 0:
            return
        with contextlib.suppress(OSError):
            now = os.fstat(self.descriptor)
            size = now.st_size
            if size == self._read_to and now.st_mtime_ns == self._changed_ns:
                return
            if size <= self._read_to or self._is_other():  # a process has opened it as "w"
                self._read_to = self._freed_to = 0
            begin = max(self._read_to, size - MOST_READ)
            data = os.pread(self.descriptor, size - begin, begin)
            lines = data.split(b"\n")
            rest = lines.pop()
            if begin > self._read_to and lines and not data.startswith(b"\0"):
                del lines[0]  # a partial line
            if (to_its_end or len(rest) > MOST_LINE) and rest:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._take(line)
            self._read_to = begin + len(data) - len(rest)
            self._ends_line = data[: len(data) - len(rest)].endswith(b"\n")
            self._free()
            self._changed_ns = os.fstat(self.descriptor).st_mtime_ns

    def _is_other(self) -> bool:
        """Return whether the last byte read has been overwritten. NUL is memory that was given back."""
        return self._ends_line and os.pread(self.descriptor, 1, max(0, self._read_to - 1)) not in (b"\n", b"\0")

    def _take(self, line: bytes) -> None:
        line = line.strip(b"\0 \r")  # NUL: a writer kept its offset after another had opened the file as "w"
        if not line:
            return
        try:
            if len(line) > MOST_LINE:
                raise ValueError(f"a line may have at most {MOST_LINE} bytes")
            for name, value in figures_of(line).items():
                if name not in self.values and len(self.values) >= MOST_NAMES:
                    raise ValueError(f"at most {MOST_NAMES} names are allowed")
                self.values[name] = self._news[name] = value
        except ValueError as error:
            self.trouble = self.trouble or f"{line[:_SHOWN].decode('utf-8', 'replace')!r}: {error}"

    def _free(self) -> None:
        """Give the memory of what was read back to the system. The file's size usually stays: writers append to it."""
        if self._read_to >= _ANEW_AT and self._read_to == os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, 0)  # a line appended at this very moment is lost
            self._read_to = self._freed_to = 0
            return
        end = self._read_to // _PAGE * _PAGE
        if end - self._freed_to < _FREED_AT:
            return
        with (
            contextlib.suppress(OSError, ValueError),
            mmap.mmap(self.descriptor, end - self._freed_to, offset=self._freed_to) as area,
        ):
            area.madvise(mmap.MADV_REMOVE)
            self._freed_to = end


class HostFigures:
    """Reads the files of a host's workers every second, and the state of its GPUs. Used on the event loop only.

    Args:
        send: sends the driver a message.
        is_heard: returns whether the driver keeps up. While it does not, reports wait, and only the latest is sent.
    """

    def __init__(self, send: Callable[[AgentMessage], None], is_heard: Callable[[], bool]) -> None:
        self._send = send
        self._is_heard = is_heard
        self._files: dict[WorkerId, FiguresFile] = {}
        self._gpus = GpuWatch(self._see_gpus)
        self._has_warned = False
        self._timer: asyncio.TimerHandle | None = None

    def new(self, worker: WorkerId) -> dict[str, str]:
        """Make the file of a process about to start; return the variables that name it, empty if there is none."""
        self.ended(worker)
        self._gpus.start()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_on_time)
        try:
            file = self._files[worker] = FiguresFile()
        except OSError:  # too many files are open: training continues without it
            return {ENV_REPORT: "", ENV_REPORT_FD: ""}
        return file.environment

    def ended(self, worker: WorkerId) -> None:
        """Read and report what a process that has ended left in its file. Harmless when repeated."""
        file = self._files.pop(worker, None)
        if file is None:
            return
        file.read(to_its_end=True)
        self._warn_of(worker, file)
        if news := file.news():
            self._send(FiguresSeen({worker.key: news}))
        file.close()

    def again(self) -> Iterator[AgentMessage]:
        """Yield all figures for another driver."""
        found = {worker.key: dict(file.values) for worker, file in self._files.items() if file.values}
        if found:
            yield FiguresSeen(found)

    def close(self) -> None:
        """Stop reading."""
        self._gpus.close()
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Read all files, and report what is new."""
        found: dict[str, dict[str, float | None]] = {}
        is_heard = self._is_heard()
        for worker, file in self._files.items():
            file.read()
            self._warn_of(worker, file)
            if is_heard and (news := file.news()):
                found[worker.key] = news
        if found:
            self._send(FiguresSeen(found))

    def _look_on_time(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_on_time)
        self.look()

    def _see_gpus(self, look: GpuLook) -> None:
        if self._is_heard():
            self._send(GpusSeen(look))

    def _warn_of(self, worker: WorkerId, file: FiguresFile) -> None:
        """Report invalid lines, once per host: all workers run the same script."""
        if file.trouble and not self._has_warned:
            self._has_warned = True
            self._send(NoFigures(worker.key, file.trouble))


def _high(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FROM)
    except OSError:  # too many files are open
        return os.dup(descriptor)
