"""The last output of each worker, as it passes by: for the page, and for whoever asks what a worker said last.

Owns some kilobytes of each, also of some that have ended. Passes all output on to where it went before.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol

from elastic_driver.hosts import WorkerId
from elastic_driver.report.printable import one_line
from elastic_driver.words import Bar

_BYTES, _LINES, _LINE = 16 << 10, 100, 2000
# Of those that have ended; a job of weeks has thousands.
_MOST_ENDED = 64
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")


class Sink(Protocol):
    """Where output goes (:class:`elastic_driver.launch.words.OutputSink`)."""

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """A worker runs."""

    def write(self, worker: WorkerId, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Takes whole lines."""

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """Takes the newest state of a line that it redraws."""

    def end(self, worker: WorkerId) -> None:
        """Nothing more comes of it."""


class Tails:
    """See above. Is a Sink.

    Args:
        sink: where all output goes on.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._living: dict[str, _Tail] = {}
        self._ended: dict[str, _Tail] = {}

    def begin(self, worker: WorkerId, pid: int, rank: int, label: str) -> None:
        """See Sink."""
        self._living[worker.key] = _Tail()
        self._sink.begin(worker, pid, rank, label)

    def write(self, worker: WorkerId, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """See Sink."""
        tail = self._living.get(worker.key)
        if tail is not None:
            tail.add(data)
        self._sink.write(worker, stream, data)

    def bar(self, worker: WorkerId, bar: Bar) -> None:
        """See Sink."""
        tail = self._living.get(worker.key)
        if tail is not None and bar.is_line:
            tail.add(bar.data)
        self._sink.bar(worker, bar)

    def end(self, worker: WorkerId) -> None:
        """See Sink."""
        tail = self._living.pop(worker.key, None)
        if tail is not None:
            self._ended[worker.key] = tail
            while len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        self._sink.end(worker)

    def of(self, key: str) -> list[str] | None:
        """The last lines of a worker, without what steers terminals; None where it is not known."""
        tail = self._living.get(key) or self._ended.get(key)
        return None if tail is None else list(tail.lines())


class _Tail:
    """Pieces as they came: most are never looked at."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        data = data[-_BYTES:]
        self._pieces.append(data)
        self._size += len(data)
        # A piece has whole lines, one at least; each takes some room of its own, also where it is a dot.
        while self._size - len(self._pieces[0]) >= _BYTES or len(self._pieces) > _LINES:
            self._size -= len(self._pieces.popleft())

    def lines(self) -> Iterator[str]:
        text = b"".join(self._pieces).decode("utf-8", "replace")
        for line in text.splitlines()[-_LINES:]:
            yield one_line(_ESCAPES.sub("", line).replace("\t", "    "))[:_LINE]
