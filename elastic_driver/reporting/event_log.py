"""The event log: the job's events for programs, one JSON object a line.

A log must never end or delay the job that it records: a full disk or a vanished file is reported once and then ignored,
and a slow disk delays only the writer's thread.
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
from elastic_driver.reporting.event_records import line_of, records_of
from elastic_driver.reporting.happenings import Happening, JobStarted
from elastic_driver.reporting.instant import Instant
from elastic_driver.system.file_writer import FLUSH_S, FileWriter
from elastic_driver.system.safe_files import open_named

_BLOCK_BYTES = 1 << 20


class EventWriter:
    """Appends events to a file, in the thread of a writer. A Listener.

    Args:
        what: the name of the file, for messages.
        on_warning: called once if the file cannot be written; at the next event, or at the end.
        instant: the time of each happening.
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
        self._trouble = ""  # set by the writer's thread, once
        self._late = False

    def hear(self, happening: Happening) -> None:
        """Append the events of a happening (Listener)."""
        if self._writer is None:
            return
        if isinstance(happening, JobStarted) and happening.again:
            # The job's first driver may have died before it wrote this event; or the file may be another one now.
            [record] = records_of(replace(happening, again=False))
            data = line_of(record, self._instant)
            self._put(functools.partial(self._append_start, happening.job_id, data), len(data))
        for record in records_of(happening):
            self.write(**record)

    def write(self, event: str, **fields: object) -> None:
        """Append ``{"time": unix seconds, "at_s": seconds, "event": event, **fields}``.

        ``at_s`` counts from the job's start, independent of changes to the time of day. A value without a JSON form
        becomes text. The event is in the file a moment later. Never blocks.
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
            self._on_warning(f"{self._what} is missing events: the disk cannot keep up")

    def _append(self, data: bytes, event: str = "") -> None:
        """Write a line in a single call, so that it is never torn. In the writer's thread."""
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
        """Append the start of a job that has had another driver, if missing. In the writer's thread."""
        # The end of that line; quotes inside strings are escaped.
        if not _says(self._descriptor, f'"job_id": {json.dumps(job_id)}}}\n'.encode()):
            self._append(data)

    def _end_torn_line(self) -> None:
        """End a torn last line, else it would swallow the first event. In the writer's thread, or before it starts."""
        if _is_torn(self._descriptor):
            self._append(b"\n")

    def _close(self) -> None:
        if self._descriptor < 0:
            return
        try:
            os.close(self._descriptor)
        except OSError as error:  # some file systems report a full disk only here
            self._trouble = self._trouble or in_words(error)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Close the file when all is written, or the time has run out. Idempotent."""
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
    """The event log at the path that the user has given.

    Args:
        path: the file; None for no log.
        on_warning: see EventWriter.
        instant: see EventWriter.

    Raises:
        SettingsError: the file cannot be opened, may be another user's, or is a pipe without a reader.
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
            # Opened non-blocking: a pipe without a reader must delay neither the start nor, once full, the end.
            self._descriptor = open_named(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise SettingsError(f"cannot write the event log {path} (--event-log): {in_words(error)}") from error
        self._writer = FileWriter("elasticrun-events")
        self._writer.put(self._end_torn_line)


def _is_torn(descriptor: int) -> bool:
    """Return whether a file's last line is unterminated: its writer was killed while writing, or the disk was full."""
    size = os.fstat(descriptor).st_size
    try:
        with _reading(descriptor) as file:
            return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    except OSError:
        return False


def _says(descriptor: int, text: bytes) -> bool:
    """Return whether a file contains the text; true if that cannot be determined."""
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
    """Reopen the same file, even if its name refers to another one now. Raises OSError if it cannot be read."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.ESPIPE, "it is not a regular file")
    return open(f"/proc/self/fd/{descriptor}", "rb", buffering=0)
