"""What the trainings of this host's workers tell of themselves: read from a file of each worker's, told to the driver.

A worker appends lines like ``{"loss": 0.31}`` to a file in memory, which this process makes: by a descriptor that it
has inherited, or by the file's path. So whoever writes never waits for anybody: this process may be stopped, or dead.
Of each name only the newest value counts, so little is lost where lines come faster than they are read. What was read
is given back to the system.

Owns these files and how they are read. What a line may say is :mod:`elastic_driver.figures`'s.
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
from elastic_driver.rendezvous.agent_messages import FiguresSeen, GpusSeen, NoFigures, Said
from elastic_driver.rendezvous.environment import ENV_REPORT, ENV_REPORT_FD, FIGURES_FILE
from elastic_driver.system.kernel import memory_file

_LOOK_S = 1.0
# Of one worker, at a look: 500 lines of usual length in 3 ms, which others wait for. Of more the oldest are not read.
MOST_READ = 16 << 10
_PAGE = mmap.PAGESIZE
_FREED_AT = 64 << 10
# Files may only be so long here (ulimit -f): one of this length begins anew when all of it is read.
_ANEW_AT = 256 << 10
# Out of the way of scripts that use descriptors by number, as system/tether.py has it.
_FROM = 100
_SHOWN = 80


class FiguresFile:
    """The file of one worker's process.

    Attributes:
        descriptor: what the process inherits.
        values: the newest of each name.
        trouble: the first line that was no figures, and why; "" for none.

    Raises:
        OSError: no file is to be had.
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
        self._ends_line = False  # the last that was read
        self._changed_ns = 0  # when the file was changed, as far as it was read
        self._news: dict[str, float | None] = {}

    @property
    def environment(self) -> dict[str, str]:
        """By what the process finds it."""
        return {
            ENV_REPORT: f"/proc/{os.getpid()}/fd/{self.descriptor}",
            ENV_REPORT_FD: str(self.descriptor),
        }

    def close(self) -> None:
        """Frees it, once the process has, too. Harmless when repeated."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def news(self) -> dict[str, float | None]:
        """What has been reported since this was asked last."""
        news, self._news = self._news, {}
        return news

    def read(self, *, to_its_end: bool = False) -> None:
        """Takes the lines that have come.

        Args:
            to_its_end: whether a last line without an end is one, too: nobody will end it.
        """
        if self.descriptor < 0:
            return
        with contextlib.suppress(OSError):
            now = os.fstat(self.descriptor)
            size = now.st_size
            if size == self._read_to and now.st_mtime_ns == self._changed_ns:
                return
            if size <= self._read_to or self._is_other():  # somebody has opened it as "w"
                self._read_to = self._freed_to = 0
            begin = max(self._read_to, size - MOST_READ)
            data = os.pread(self.descriptor, size - begin, begin)
            lines = data.split(b"\n")
            rest = lines.pop()
            if begin > self._read_to and lines and not data.startswith(b"\0"):
                del lines[0]  # a part of one
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
        """Whether what was read last is not there any more. NUL: it is given back."""
        return self._ends_line and os.pread(self.descriptor, 1, max(0, self._read_to - 1)) not in (b"\n", b"\0")

    def _take(self, line: bytes) -> None:
        line = line.strip(b"\0 \r")  # NUL: what was read before somebody had opened it as "w", and wrote on
        if not line:
            return
        try:
            if len(line) > MOST_LINE:
                raise ValueError(f"a line has {MOST_LINE} bytes at most")
            for name, value in figures_of(line).items():
                if name not in self.values and len(self.values) >= MOST_NAMES:
                    raise ValueError(f"there are {MOST_NAMES} names at most")
                self.values[name] = self._news[name] = value
        except ValueError as error:
            self.trouble = self.trouble or f"{line[:_SHOWN].decode('utf-8', 'replace')!r}: {error}"

    def _free(self) -> None:
        """Gives what was read back to the system. The file's size stays as a rule: writers append behind it."""
        if self._read_to >= _ANEW_AT and self._read_to == os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, 0)  # a line that comes at this very moment is lost
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
    """The files of a host's workers, which are read each second, and what its GPUs do. Used on the event loop only.

    Args:
        send: tells the driver.
        is_heard: whether the driver takes what it is told. Where it does not, it is told the latest, later.
    """

    def __init__(self, send: Callable[[Said], None], is_heard: Callable[[], bool]) -> None:
        self._send = send
        self._is_heard = is_heard
        self._files: dict[WorkerId, FiguresFile] = {}
        self._gpus = GpuWatch(self._see_gpus)
        self._has_warned = False
        self._timer: asyncio.TimerHandle | None = None

    def new(self, worker: WorkerId) -> dict[str, str]:
        """What a process that is about to be started for a worker finds its file by; empty where there is none."""
        self.ended(worker)
        self._gpus.start()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_on_time)
        try:
            file = self._files[worker] = FiguresFile()
        except OSError:  # so many files may not be open: it trains all the same
            return {ENV_REPORT: "", ENV_REPORT_FD: ""}
        return file.environment

    def ended(self, worker: WorkerId) -> None:
        """Its process has ended: reads what it has left, and tells it. Harmless when repeated."""
        file = self._files.pop(worker, None)
        if file is None:
            return
        file.read(to_its_end=True)
        self._warn_of(worker, file)
        if news := file.news():
            self._send(FiguresSeen({worker.key: news}))
        file.close()

    def again(self) -> Iterator[Said]:
        """All that another driver is to be told."""
        found = {worker.key: dict(file.values) for worker, file in self._files.items() if file.values}
        if found:
            yield FiguresSeen(found)

    def close(self) -> None:
        """Reads no more."""
        self._gpus.close()
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Reads what there is, and tells what is new."""
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
        """Tells of what is no figure, once: all workers run the same script."""
        if file.trouble and not self._has_warned:
            self._has_warned = True
            self._send(NoFigures(worker.key, file.trouble))


def _high(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FROM)
    except OSError:  # so many may not be open
        return os.dup(descriptor)
