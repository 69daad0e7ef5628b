"""Where the workers' output goes on the driver's machine: to the console, and into files (``--output-filename``).

torchrun's options for it are in :mod:`elastic_driver.launch.rank_logs`. Owns the files of each worker. Knows nothing of
how the output arrives here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from elastic_driver.errors import in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.log_files import LogFiles
from elastic_driver.launch.rank_logs import RankLogs
from elastic_driver.launch.words import Stream
from elastic_driver.system.file_writer import FileWriter
from elastic_driver.system.keeping import Keeping
from elastic_driver.words import Bar

_log = logging.getLogger(__name__)

DESCRIPTORS_EACH = 2
"""Open files of the driver that each worker needs if its output is kept."""


class Screen(Protocol):
    """Shows output; the console implements it."""

    def write(self, stream: Stream, data: bytes) -> None:
        """Show whole lines, prefix and newline included."""

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        """Show the newest state of a worker's progress bar; empty data: its stream no longer has a bar.

        None: the worker has no bar at all.
        """


class _NoScreen:
    """Shows nothing, if output is shown elsewhere."""

    def write(self, stream: Stream, data: bytes) -> None:
        """Show nothing."""

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        """Show nothing."""


NO_SCREEN = _NoScreen()


class OutputFiles:
    """Passes the workers' output on, and keeps it. Implements OutputSink; a context manager, which ends the writing.

    Args:
        screen: shows all output, too.
        folder: keeps each worker's in ``rank.R/stdout`` and ``stderr``, that of other processes under their labels;
            None to keep none.
        width: digits of R.
        logs: keeps output, too, and selects what the screen shows; None without such options.
        keeping: counts the output written to files; None to count none.
        is_shown: returns whether the screen already shows a stream of a worker, as written; None if it shows none.
        warn: called with one-line warnings about failures that do not end the job. Default: the log.
    """

    def __init__(
        self,
        screen: Screen,
        *,
        folder: Path | None,
        width: int,
        logs: RankLogs | None = None,
        keeping: Keeping | None = None,
        is_shown: Callable[[WorkerId, Stream], bool] | None = None,
        warn: Callable[[str], None] = _log.warning,
    ) -> None:
        self._screen = screen
        self._folder = folder
        self._width = width
        self._logs = logs
        self._keeping = keeping
        self._is_shown = is_shown
        self._warn = warn
        self._writer: FileWriter | None = None  # made with the first worker
        self._files: dict[WorkerId, LogFiles] = {}
        self._disk_warned = False
        self._is_lacking = False  # also written by the writer's thread

    @property
    def has_all(self) -> bool:
        """Whether the files have all output of workers. torchrun's options select some of the ranks and streams."""
        return self._folder is not None and not self._is_lacking

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """Open the files of a worker that runs."""
        keeps_logs = self._logs is not None and self._logs.keeps_files
        if self._folder is None and not keeps_logs:
            return
        loop = asyncio.get_running_loop()

        def warn(message: str) -> None:
            self._is_lacking = True
            with contextlib.suppress(RuntimeError):  # the job has ended, and the loop with it
                loop.call_soon_threadsafe(self._warn_disk, message)

        try:
            if self._writer is None:
                self._writer = FileWriter("elasticrun-files")
        except RuntimeError as error:  # cannot start a thread
            self._is_lacking = True
            self._warn_disk(f"cannot write the workers' output to {self._kept_in}: {in_words(error)}")
            return
        self.end(worker)
        if self._logs is not None and keeps_logs:
            self._logs.begin(worker, pid, self._writer, warn)
        if self._folder is None:
            return
        name = f"rank.{rank:0{self._width}d}" if rank >= 0 else label
        files = self._files[worker] = LogFiles(self._folder, name, self._writer, warn)
        files.begin(worker, pid)

    def write(self, worker: WorkerId, stream: Stream, data: bytes) -> None:
        """Write whole lines to the files, and show them."""
        files = self._files.get(worker)
        if files is not None:
            files.write(stream, data)
        shown = data if self._logs is None else self._logs.take(worker, stream, data)
        if self._keeping is not None and self._writer is not None:
            self._writer.put(partial(self._keeping.keep_soon, self._keeping.comes()))
        if shown and (self._is_shown is None or not self._is_shown(worker, stream)):
            self._screen.write(stream, shown)

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """Show a bar's state, and write it to files if it is a line; not counted, since later states replace it."""
        files = self._files.get(worker)
        if files is not None and bar.is_line:
            files.write(bar.stream, bar.data)
        shown = bar.data
        if self._logs is not None and shown:
            take = self._logs.take if bar.is_line else self._logs.on_terminal
            shown = take(worker, bar.stream, shown)
        if self._is_shown is None or not self._is_shown(worker, bar.stream):
            self._screen.bar(worker, replace(bar, data=shown))

    def end(self, worker: WorkerId) -> None:
        """Close the files of a worker that has ended."""
        self._screen.bar(worker, None)
        files = self._files.pop(worker, None)
        if files is not None:
            files.close()
        if self._logs is not None:
            self._logs.end(worker)

    def close(self) -> None:
        """End the writing. Blocks until everything is written, for at most a few seconds. Harmless when repeated."""
        for worker in tuple(self._files):
            self.end(worker)
        if self._logs is not None:
            self._logs.close()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            if writer.lost:
                self._warn(
                    f"{writer.lost} bytes of output are missing from {self._kept_in}: the disk could not keep up"
                )

    @property
    def _kept_in(self) -> Path | None:
        return self._logs.folder if self._folder is None and self._logs is not None else self._folder

    def _warn_disk(self, message: str) -> None:
        if not self._disk_warned:
            self._disk_warned = True
            self._warn(f"{message}; the job continues without it")
