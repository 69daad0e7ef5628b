"""The files under ``--output-filename`` and ``--log-dir``: the output of each worker.

Others may be able to write to that folder as well: no link is followed, no file truncated, and nothing there can block.
All work is done in the thread of a :class:`~elastic_driver.system.file_writer.FileWriter`, since a disk may hang.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from elastic_driver.errors import in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.words import Stream
from elastic_driver.system.file_writer import FileWriter
from elastic_driver.system.safe_files import open_folder_inside, open_inside

NAMES: Mapping[Stream, str] = MappingProxyType({"stdout": "stdout", "stderr": "stderr"})
"""Names of the files under ``--output-filename``."""


class LogFiles:
    """``DIR/rank.R/stdout`` and ``stderr``: appended to, so that an earlier attempt's log is kept.

    A file that cannot be written (the disk is full) is reported once, and retried with the next output. It may be a
    named pipe with a reader; if the reader ends, or does not keep up, the pipe is given up.

    Args:
        folder: ``DIR``; missing folders are made.
        name: ``rank.R``.
        writer: does everything that may block.
        warn: called with warnings, in any thread.
        names: of the files; a stream without one is not kept.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        writer: FileWriter,
        warn: Callable[[str], None],
        *,
        names: Mapping[Stream, str] = NAMES,
    ) -> None:
        self._names = names
        self._folder = folder
        self._name = name
        self._writer = writer
        self._warn = warn
        # The following belong to the writer's thread alone.
        self._warned = False
        self._descriptors: dict[Stream, int] = {}
        self._pipes: set[Stream] = set()
        self._torn: set[Stream] = set()
        writer.put(self._open)

    def begin(self, worker: WorkerId, pid: int) -> None:
        """Write the header of this attempt into the files."""
        header = f"===== worker {worker.key}, pid {pid}, started {time.asctime()} =====\n".encode()
        for stream in self._names:
            self.write(stream, header)

    def write(self, stream: Stream, data: bytes) -> None:
        """Append whole lines, soon. Never blocks."""
        if not self._writer.put(functools.partial(self._write, stream, data), len(data)):
            self._warn(f"some output of the workers is missing from {self._folder}: the disk cannot keep up")

    def close(self) -> None:
        """Close the files when everything is written. Harmless when repeated."""
        self._writer.put(self._close)

    # --- in the writer's thread ------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            folder = open_folder_inside(self._folder, self._name)
        except OSError as error:
            self._failed(error)
            return
        try:
            for stream, file in self._names.items():
                try:
                    descriptor = open_inside(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, dir_fd=folder, pipes=True)
                except OSError as error:
                    self._failed(error, stream)
                    continue
                self._descriptors[stream] = descriptor
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    self._pipes.add(stream)
        finally:
            os.close(folder)

    def _write(self, stream: Stream, data: bytes) -> None:
        descriptor = self._descriptors.get(stream)
        if descriptor is None:
            return
        view = memoryview(b"\n" + data if stream in self._torn else data)
        whole = len(view)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError as error:
            if len(view) < whole:
                self._torn.add(stream)
            if stream in self._pipes:
                self._give_up(stream, error)
            else:
                self._failed(error, stream)
        else:
            self._torn.discard(stream)

    def _give_up(self, stream: Stream, error: OSError) -> None:
        """Close a pipe for good: unlike a disk, its reader will not recover."""
        os.close(self._descriptors.pop(stream))
        if isinstance(error, BlockingIOError):
            error = OSError(error.errno, "its reader cannot keep up")
        self._failed(error, stream)

    def _close(self) -> None:
        while self._descriptors:
            stream, descriptor = self._descriptors.popitem()
            # Some file systems only report here that the disk is full.
            try:
                os.close(descriptor)
            except OSError as error:
                self._failed(error, stream)

    def _failed(self, error: OSError, stream: Stream | None = None) -> None:
        if not self._warned:
            self._warned = True
            path = self._folder / self._name / ("" if stream is None else self._names[stream])
            self._warn(f"cannot write the workers' output to {path}: {in_words(error)}")
