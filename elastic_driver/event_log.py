"""The event log: what happened to the job, one JSON object a line, for programs.

A log must never end the job that it tells of: a full disc or a vanished file is said once and then borne.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from elastic_driver.errors import SettingsError


class EventLog:
    """Appends events to a file.

    Args:
        path: the file; None for no log.
        on_warning: told once when it cannot be written.

    Raises:
        SettingsError: the file cannot be opened, or is a pipe that nobody reads.
    """

    def __init__(self, path: Path | None, *, on_warning: Callable[[str], None] = lambda text: None) -> None:
        self._path = path
        self._on_warning = on_warning
        self._file: BinaryIO | None = None
        if path is not None:
            # A pipe that nobody reads must hold up neither the start nor, once it is full, the job.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            try:
                # Unbuffered: each line is one write, and there at once.
                self._file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
            except OSError as error:
                reason = "nobody reads that pipe" if error.errno == errno.ENXIO else error.strerror
                raise SettingsError(f"cannot write the event log {path} (--event-log): {reason}") from error

    def write(self, event: str, **fields: object) -> None:
        """Appends ``{"time": unix seconds, "event": event, **fields}``; a value without a JSON form becomes text."""
        if self._file is None:
            return
        line = json.dumps({"time": time.time(), "event": event, **fields}, default=str, allow_nan=False)
        data = line.encode() + b"\n"
        try:
            written = self._file.write(data)  # None: it would have blocked
            reason = "" if written == len(data) else "there is no room for a whole line"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            self.close()
            self._on_warning(f"cannot write the event log {self._path}: {reason}; going on without it")

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
