"""A Chrome trace of what this rank's operations did when, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from elastic_driver.safe_files import open_named


class Trace:
    """A trace file under way: one row for each operation's name.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._lock = threading.Lock()  # guards the file
        descriptor = open_named(Path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.set_blocking(descriptor, True)  # as the native engine's: a pipe that is read has the training's pace
        self._file: TextIO | None = os.fdopen(descriptor, "w", encoding="utf-8")
        self._rows: dict[str, int] = {}
        self._zero = time.monotonic()
        self._first = True
        self._file.write("[")
        self._write({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        self._rank = rank

    def span(self, operation: str, what: str, begin: float, end: float) -> None:
        """A stretch of time, in monotonic seconds, of one operation."""
        with self._lock:
            row = self._rows.get(operation)
            if row is None:
                row = self._rows[operation] = len(self._rows) + 1
                name = {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": row, "args": {"name": operation}}
                self._write(name)
            start_us, end_us = (round((at - self._zero) * 1e6, 1) for at in (begin, end))
            self._write(
                {"name": what, "ph": "X", "pid": self._rank, "tid": row, "ts": start_us, "dur": end_us - start_us}
            )

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(("\n" if self._first else ",\n") + json.dumps(event))
            self._first = False

    def close(self) -> None:
        """Completes the file. Idempotent."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.write("\n]\n")
                file.close()
