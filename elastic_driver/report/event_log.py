"""The event log: what happened to the job, one JSON object a line, for programs.

A log must never end the job that it tells of, nor hold it up: a full disc or a vanished file is said once and then
borne, and a disc that hangs is a thread's business.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from elastic_driver.errors import SettingsError, in_words
from elastic_driver.report.event_records import line_of, records_of
from elastic_driver.report.happenings import Happening, JobStarted
from elastic_driver.report.instant import Instant
from elastic_driver.system.file_writer import FLUSH_S, FileWriter
from elastic_driver.system.safe_files import open_named

_BLOCK_BYTES = 1 << 20


class EventWriter:
    """Appends events to a file, in the thread of a writer. See Listener.

    Args:
        what: the file, for messages.
        on_warning: told once when it cannot be written; at the next event, or at the end.
        instant: when that happens which is written down.
    """

    live = False

    def __init__(
        self,
        what: str,
        *,
        on_warning: Callable[[str], None] = lambda text: None,
        instant: Instant | None = None,
    ) -> None:
        self._what = what
        self._instant = instant or Instant()
        self._on_warning = on_warning
        self._writer: FileWriter | None = None
        self._descriptor = -1
        self._trouble = ""  # written by the writer's thread, once
        self._late = False

    def hear(self, happening: Happening) -> None:
        """See Listener."""
        if self._writer is None:
            return
        if isinstance(happening, JobStarted) and happening.again:
            # Its first driver may have died before it had written that; or the file is another by now.
            [record] = records_of(replace(happening, again=False))
            data = line_of(record, self._instant)
            self._put(functools.partial(self._append_start, happening.job_id, data), len(data))
        for record in records_of(happening):
            self.write(**record)

    def write(self, event: str, **fields: object) -> None:
        """Appends ``{"time": unix seconds, "at_s": seconds, "event": event, **fields}``.

        Those of ``at_s`` count from the job's start, whoever sets the time of day meanwhile. A value without a JSON
        form becomes text. It is in the file a moment later. Never blocks.
        """
        if self._writer is None:
            return
        if self._trouble:
            self.close()
            return
        data = line_of({"event": event, **fields}, self._instant)
        self._put(functools.partial(self._append, data, event), len(data))

    def _put(self, work: Callable[[], object], size: int) -> None:
        if self._writer is not None and not self._writer.put(work, size) and not self._late:
            self._late = True
            self._on_warning(f"{self._what} lacks events: the disk cannot keep up")

    def _append(self, data: bytes, event: str = "") -> None:
        """One write for each line, so that it is there as a whole. In the writer's thread."""
        if self._trouble:
            return
        try:
            if os.write(self._descriptor, data) < len(data):
                self._trouble = "no space left for a whole line"
        except BlockingIOError:
            self._trouble = "no space left for a whole line"
        except OSError as error:
            self._trouble = in_words(error)

    def _append_start(self, job_id: str, data: bytes) -> None:
        """Of a job that has had another driver. In the writer's thread."""
        # The end of that line; within texts the quotes are escaped.
        if not _says(self._descriptor, f'"job_id": {json.dumps(job_id)}}}\n'.encode()):
            self._append(data)

    def _end_torn_line(self) -> None:
        """Else the first event would be a part of a line that nobody can read. In the writer's thread, or before."""
        if _is_torn(self._descriptor):
            self._append(b"\n")

    def _close(self) -> None:
        if self._descriptor < 0:
            return
        try:
            os.close(self._descriptor)
        except OSError as error:  # some file systems tell only here that the disc is full
            self._trouble = self._trouble or in_words(error)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Closes the file when all is written, or the time is over. Idempotent."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.put(self._close)
        writer.close(timeout_s)
        if self._trouble:
            self._on_warning(f"cannot write {self._what}: {self._trouble}; continuing without it")
        elif writer.lost:
            self._on_warning(f"{writer.lost} bytes are missing from {self._what}: the disk cannot keep up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventLog(EventWriter):
    """The file that the user names.

    Args:
        path: the file; None for no log.
        on_warning: see EventWriter.
        instant: see EventWriter.

    Raises:
        SettingsError: the file cannot be opened, may be another user's, or is a pipe that nobody reads.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        on_warning: Callable[[str], None] = lambda text: None,
        instant: Instant | None = None,
    ) -> None:
        super().__init__(f"the event log {path}", on_warning=on_warning, instant=instant)
        if path is None:
            return
        try:
            # A pipe does not block: one that nobody reads must hold up neither the start nor, once full, the end.
            self._descriptor = open_named(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise SettingsError(f"cannot write the event log {path} (--event-log): {in_words(error)}") from error
        self._writer = FileWriter("elasticrun-events")
        self._writer.put(self._end_torn_line)


def _is_torn(descriptor: int) -> bool:
    """Whether the last line of a file has no end: its writer was killed in the middle of it, or the disc was full."""
    size = os.fstat(descriptor).st_size
    try:
        with _reading(descriptor) as file:
            return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    except OSError:
        return False


def _says(descriptor: int, text: bytes) -> bool:
    """Whether it is in a file; yes where nobody can tell."""
    try:
        with _reading(descriptor) as file:
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                if text in rest + block:
                    return True
                rest = (rest + block)[-len(text) :]
            return False
    except OSError:
        return True


def _reading(descriptor: int) -> FileIO:
    """The same file, also where another has its name by now. Raises OSError where it can only be written."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.ESPIPE, "it is not a regular file")
    return open(f"/proc/self/fd/{descriptor}", "rb", buffering=0)
