"""Keeps the last output of each worker as it passes: for the page, and for queries.

Owns some kilobytes for each, including some workers that have ended. Passes all output on to its destination.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol

from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.printable import one_line
from elastic_driver.words import Bar

_BYTES, _LINES, _LINE = 16 << 10, 100, 2000
# Limit of ended workers; a job of weeks has thousands.
_MOST_ENDED = 64
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")


class Sink(Protocol):
    """A destination of output (:class:`elastic_driver.launch.words.OutputSink`)."""

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """Note that a worker runs."""

    def write(self, worker: WorkerId, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Write whole lines."""

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """Show the newest state of a line that the worker redraws."""

    def end(self, worker: WorkerId) -> None:
        """Note that a worker has no further output."""


class Tails:
    """Keeps the last output, and passes it on. Is a Sink.

    Args:
        sink: the destination of all output.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._living: dict[str, _Tail] = {}
        self._ended: dict[str, _Tail] = {}

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """Note that a worker runs (Sink)."""
        self._living[worker.key] = _Tail()
        self._sink.begin(worker, pid, rank, label)

    def write(self, worker: WorkerId, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Keep whole lines, and pass them on (Sink)."""
        tail = self._living.get(worker.key)
        if tail is not None:
            tail.add(data)
        self._sink.write(worker, stream, data)

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """Keep the newest state of a redrawn line, and pass it on (Sink)."""
        tail = self._living.get(worker.key)
        if tail is not None and bar.is_line:
            tail.add(bar.data)
        self._sink.bar(worker, bar)

    def end(self, worker: WorkerId) -> None:
        """Note that a worker has no further output (Sink)."""
        tail = self._living.pop(worker.key, None)
        if tail is not None:
            self._ended[worker.key] = tail
            while len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        self._sink.end(worker)

    def of(self, key: str) -> list[str] | None:
        """Return the last lines of a worker, without control sequences; None if it is unknown."""
        tail = self._living.get(key) or self._ended.get(key)
        return None if tail is None else list(tail.lines())


class _Tail:
    """Keeps pieces as they arrived: most are never read."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        data = data[-_BYTES:]
        self._pieces.append(data)
        self._size += len(data)
        # A piece has at least one whole line; each takes some memory of its own, even if it is a single dot.
        while self._size - len(self._pieces[0]) >= _BYTES or len(self._pieces) > _LINES:
            self._size -= len(self._pieces.popleft())

    def lines(self) -> Iterator[str]:
        text = b"".join(self._pieces).decode("utf-8", "replace")
        for line in text.splitlines()[-_LINES:]:
            yield one_line(_ESCAPES.sub("", line).replace("\t", "    "))[:_LINE]
