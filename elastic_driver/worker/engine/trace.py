"""A Chrome trace of this rank's operations, for chrome://tracing and Perfetto.

For ``PlainEngine``; the native engine writes its own (native/engine/timeline.h). Both use Horovod's names.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from elastic_driver.errors import in_words
from elastic_driver.system.safe_files import open_named
from elastic_driver.worker.engine.collectives import ReduceOp
from elastic_driver.worker.engine.protocol import Kind, Operation

_log = logging.getLogger("elastic_driver.worker")

# The end of the file. The next events overwrite it, so that the file is valid JSON at any time.
_TAIL = b"\n]\n"


def activity(operation: Operation) -> str:
    """Return an operation's activity: ALLREDUCE; with Adasum, ADASUM."""
    if operation.kind is Kind.ALLREDUCE and operation.reduce_op is ReduceOp.ADASUM:
        return ReduceOp.ADASUM.name
    return operation.kind.name


def row(operation: Operation) -> str:
    """Return an operation's row: ``allreduce.NAME``."""
    prefix = f"{operation.kind.name.lower()}."
    return operation.name if operation.name.startswith(prefix) else prefix + (operation.name or "noname")


class Trace:
    """An open trace file: one row for each operation's name.

    Args:
        path: the file.
        rank: this process's rank.
        mark_cycles: whether to mark the beginning of each operation.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, rank: int, *, mark_cycles: bool = False) -> None:
        self._lock = threading.Lock()  # guards the following attributes
        descriptor = open_named(Path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._file: BinaryIO | None = os.fdopen(descriptor, "wb", buffering=0)
        self._rows: dict[str, int] = {}
        self._end = 0  # of the last event
        self._zero = time.monotonic()
        self._rank = rank
        self._mark_cycles = mark_cycles
        about = {"name": f"rank {rank}", "start_time_since_epoch_in_micros": time.time_ns() // 1000}
        try:
            self._put(b"[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": rank, "args": about}).encode())
        except OSError:
            self.close()
            raise

    def operation(self, row: str, activity: str, submitted: float, begun: float, agreed: float) -> None:
        """Record an operation that is over now; its times are in monotonic seconds."""
        now = time.monotonic()
        with self._lock:
            if self._file is None:
                return
            events: list[dict[str, Any]] = []
            if self._mark_cycles:
                events.append({"name": "CYCLE_START", "ph": "i", "tid": 0, "ts": self._us(begun), "s": "g"})
            tid = self._rows.get(row)
            if tid is None:
                tid = self._rows[row] = len(self._rows) + 1
                events.append({"name": "thread_name", "ph": "M", "tid": tid, "args": {"name": row}})
            spans = (("QUEUE", submitted, begun), (f"NEGOTIATE_{activity}", begun, agreed), (activity, agreed, now))
            for name, begin, end in spans:
                ts = self._us(begin)
                events.append({"name": name, "ph": "X", "tid": tid, "ts": ts, "dur": max(self._us(end) - ts, 0)})
            try:
                self._put(b"".join(b",\n" + json.dumps({"pid": self._rank} | event).encode() for event in events))
            except OSError as error:  # a full disk: no reason to end the training
                _log.warning("elastic_driver: cannot continue the timeline: %s", in_words(error))
                self._file.close()
                self._file = None

    def _us(self, at: float) -> float:
        return round(max(at - self._zero, 0) * 1e6, 1)

    def _put(self, events: bytes) -> None:
        assert self._file is not None
        self._file.seek(self._end)
        text = memoryview(events + _TAIL)
        while text:
            text = text[self._file.write(text) :]
        self._end += len(events)

    def close(self) -> None:
        """Complete the trace. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
