"""Writing to files in a thread: a disc that hangs holds up neither the event loop nor, at the end, the process.

Owns the thread and what is on its way to the disc. The files are those of whoever gives it work.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

# What may be on its way to a disc that hangs or does not keep up; what comes on top of it is not written.
ROOM_BYTES = 64 << 20
# How long the end of the job waits for such a disc.
FLUSH_S = 5.0


class FileWriter:
    """Does work in a thread, piece after piece in the order it was given.

    Args:
        name: of the thread.
        room: what may be on its way, bytes.
    """

    def __init__(self, name: str, *, room: int | None = None) -> None:
        self._room = ROOM_BYTES if room is None else room
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._waiting = 0
        self._refused = 0
        # Woken by the queue, ended by None in it. A daemon: a disc that never answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object], size: int = 0) -> bool:
        """Has work done that writes so many bytes. It must not raise. Never blocks.

        Returns:
            Whether it will be: False, and the bytes are counted as lost, when there is no room for them.
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
        """Bytes that were refused, or still wait."""
        with self._lock:
            return self._refused + self._waiting

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Ends the thread when it has done everything. Blocks until then, or for that time."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, size = item
            work()
            with self._lock:
                self._waiting -= size
