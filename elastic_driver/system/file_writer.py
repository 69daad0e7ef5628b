"""Writes to files in a thread: a hung disk blocks neither the event loop nor, at the end, the process.

Owns the thread and the data waiting for the disk. The files belong to the callers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

# Limit of data waiting for a disk that hangs or does not keep up; anything beyond is not written.
ROOM_BYTES = 64 << 20
# How long the end of the job waits for such a disk.
FLUSH_S = 5.0


class FileWriter:
    """Runs work in a thread, piece by piece in the order it was given.

    Args:
        name: of the thread.
        room: limit of waiting data, bytes.
    """

    def __init__(self, name: str, *, room: int | None = None) -> None:
        self._room = ROOM_BYTES if room is None else room
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._waiting = 0
        self._refused = 0
        # Woken by the queue, ended by None in it. A daemon: a disk that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object], size: int = 0) -> bool:
        """Queue work that writes so many bytes. It must not raise. Never blocks.

        Returns:
            Whether it will be done: if there is no room for the bytes, they are counted as lost, and the result is
                False.
        """
        with self._lock:
            if size and self._waiting + size > self._room:
                self._refused += size
                return False
            self._waiting += size
        self._queue.put((work, size))
        return True

    @property
    def lost(self) -> int:
        """Bytes that were rejected, or still wait."""
        with self._lock:
            return self._refused + self._waiting

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """End the thread when it has done everything. Blocks until then, for at most timeout_s seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, size = item
            work()
            with self._lock:
                self._waiting -= size
