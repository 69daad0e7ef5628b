"""Output of workers that the driver does not accept: in memory, then on disk, and sent in order as soon as it does.

Owns how much is kept, and where. Lines that exceed the room are dropped, and their number is reported in their place. A
worker of a job with a journal thus never waits for the receiver of its output: a driver that may be dead, or whose disk
hangs (decision 44). Knows nothing of connections. Used on the event loop only; a thread reads and writes the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from elastic_driver.launch.words import Stream
from elastic_driver.rendezvous.agent_messages import Output
from elastic_driver.system.file_writer import FileWriter

MEMORY_BYTES = 64 << 10
DISK_BYTES = 256 << 20
# Room on disk is freed file by file.
_FILE_BYTES = 16 << 20
# Limit of data waiting for a disk: gives a healthy one that is slower than a short burst of prints time to catch up.
_WAITING_BYTES = 16 << 20
_READ_BYTES = 256 << 10
# Number, lines dropped, bytes of the worker's key and of the data, stream.
_HEAD = struct.Struct("<QQHIB")
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole lines of one worker's stream, or the place of dropped lines.

    Attributes:
        number: grows from piece to piece.
        worker: its key.
        stream: which stream.
        data: as sent; of dropped lines, their prefix.
        left_out: the number of dropped lines; 0 if the lines are here.
    """

    number: int
    worker: str
    stream: Stream
    data: bytes
    left_out: int = 0

    @property
    def lines(self) -> int:
        """The number of lines."""
        return self.left_out or self.data.count(b"\n")

    def packed(self) -> bytes:
        """Return it as stored on disk."""
        key = self.worker.encode()
        stream = _STREAMS.index(self.stream)
        return _HEAD.pack(self.number, self.left_out, len(key), len(self.data), stream) + key + self.data

    def output(self) -> Output:
        """Return it as sent."""
        return Output(
            self.worker, self.stream, self.data if not self.left_out else self.data + _dropped_note(self.left_out)
        )


def _dropped_note(count: int) -> bytes:
    lines = "1 line is" if count == 1 else f"{count:,} lines are"
    why = "the driver did not accept them in time, and the buffer was full"
    return f"elastic_driver: {lines} missing here: {why}\n".encode()


class _Missing:
    """The lines dropped in one place, by worker and stream."""

    def __init__(self, pieces: Iterable[_Piece] = ()) -> None:
        self._of: dict[tuple[str, Stream], _Piece] = {}
        for piece in pieces:
            self.add(piece)

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, piece: _Piece) -> None:
        """Count this piece as dropped, too."""
        key, lines = (piece.worker, piece.stream), piece.lines
        head, separator, _ = piece.data.partition(b">:")
        known = self._of.get(key)
        so_far = 0 if known is None else known.left_out
        self._of[key] = replace(piece, data=head + separator if separator else b"", left_out=so_far + lines)

    def take(self, piece: _Piece) -> None:
        """No longer count this piece as dropped."""
        key = piece.worker, piece.stream
        known = self._of[key]
        if known.left_out == piece.lines:
            del self._of[key]
        else:
            self._of[key] = replace(known, left_out=known.left_out - piece.lines)

    def pieces(self) -> list[_Piece]:
        """Return one piece per worker and stream, ordered by their ends."""
        return sorted(self._of.values(), key=lambda piece: piece.number)


class _File:
    """Pieces on disk, in a file without a name: nothing stays behind, however this process ends.

    Attributes:
        size: bytes written.
        done: bytes of these read back.
    """

    def __init__(self) -> None:
        """Make the file. Raises OSError."""
        self._file = tempfile.TemporaryFile(prefix="elastic_driver-output-", buffering=0)  # noqa: SIM115 - see close()
        self.size = self.done = 0

    def append(self, pieces: Iterable[_Piece]) -> None:
        """Append all pieces, or none of them. Raises OSError."""
        rest = memoryview(b"".join(piece.packed() for piece in pieces))
        at = self.size
        while rest:
            written = os.pwrite(self._file.fileno(), rest, at)
            at, rest = at + written, rest[written:]
        self.size = at

    def read(self) -> list[_Piece]:
        """Return the next pieces, some at a time; none at the end. Raises OSError."""
        size = _READ_BYTES
        while self.done < self.size:
            pieces, used = _unpacked(os.pread(self._file.fileno(), min(size, self.size - self.done), self.done))
            if pieces:
                self.done += used
                return pieces
            if size >= self.size - self.done:
                raise OSError(errno.EIO, "a file of buffered output is truncated")
            size *= 2  # the next piece is a long one
        return []

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._file.close()


def _unpacked(data: bytes) -> tuple[list[_Piece], int]:
    """Return the whole pieces at the beginning, and their size in bytes."""
    pieces: list[_Piece] = []
    at = 0
    while len(data) - at >= _HEAD.size:
        number, left_out, key_size, size, stream = _HEAD.unpack_from(data, at)
        key_at = at + _HEAD.size
        end = key_at + key_size + size
        if end > len(data):
            break
        key = data[key_at : key_at + key_size].decode()
        pieces.append(_Piece(number, key, _STREAMS[stream], data[end - size : end], left_out))
        at = end
    return pieces, at


class Backlog:
    """Sends workers' output to the driver, and keeps it while the driver does not accept it.

    Kept output is in this order, the oldest first: pieces read back, in files, being written, only in memory, and
    dropped since then.

    Args:
        send: sends the driver output.
        has_room: returns whether the driver accepts output now.
        memory_bytes, disk_bytes, file_bytes: limits for memory, for the disk, and for one file.
    """

    def __init__(
        self,
        send: Callable[[Output], None],
        has_room: Callable[[], bool],
        *,
        memory_bytes: int = MEMORY_BYTES,
        disk_bytes: int = DISK_BYTES,
        file_bytes: int = _FILE_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._has_room = has_room
        self._memory_bytes, self._disk_bytes, self._file_bytes = memory_bytes, disk_bytes, file_bytes
        self._number = 0  # of the last piece
        self._sent = 0  # number of the last piece sent
        self._ready: deque[_Piece] = deque()
        self._files: deque[_File] = deque()
        self._in_files: deque[_Missing] = deque()  # what would be missing if each of them were lost
        self._fresh: deque[_Piece] = deque()
        self._fresh_bytes = 0
        self._missing = _Missing()
        self._works = False  # whether the thread is working on a file
        self._behind: deque[tuple[int, Callable[[], None]]] = deque()
        self._writer: FileWriter | None = None  # from the first file on
        self._closed = False

    @property
    def is_empty(self) -> bool:
        """Whether everything has been sent."""
        kept = self._ready or self._files or self._works or self._fresh or self._missing
        return self._closed or not kept

    @property
    def on_disk(self) -> int:
        """Total bytes of the present files."""
        return sum(file.size for file in self._files)

    def write(self, worker: str, stream: Stream, data: bytes) -> None:
        """Send whole lines of a worker, or keep them after those already waiting. Never blocks."""
        self._number += 1
        piece = _Piece(self._number, worker, stream, data)
        if self._closed:
            self._give(piece)
            return
        if self._finds_room(len(data)):
            self._keep_place()
            self._keep(piece)
        else:
            self._missing.add(piece)
        self.go_on()

    def behind(self, call: Callable[[], None]) -> None:
        """Call this once everything written until now has been sent; at once if nothing waits."""
        self._behind.append((self._number, call))
        self._call_those_behind()

    def go_on(self) -> None:
        """Send as much as the driver accepts now."""
        while self._has_room():
            if self._ready:
                self._give(self._ready.popleft())
            elif self._works or self._files:
                break
            elif self._fresh:
                self._give(self._next_fresh())
            elif self._missing:
                self._keep_place()
            else:
                break
        self._work()

    def close(self) -> None:
        """Drop everything kept. From now on output is sent at once, whether or not the driver accepts it."""
        self._closed = True
        self._ready.clear()
        self._fresh.clear()
        self._missing = _Missing()
        self._call_those_behind()
        if not self._works:
            self._drop_files()
        if self._writer is not None:
            self._writer.close(0.0)

    def _give(self, piece: _Piece) -> None:
        self._sent = piece.number
        self._send(piece.output())
        self._call_those_behind()

    def _keep(self, *pieces: _Piece) -> None:
        self._fresh.extend(pieces)
        self._fresh_bytes += sum(len(piece.data) for piece in pieces)

    def _next_fresh(self) -> _Piece:
        piece = self._fresh.popleft()
        self._fresh_bytes -= len(piece.data)
        return piece

    def _call_those_behind(self) -> None:
        while self._behind and (self.is_empty or self._behind[0][0] <= self._sent):
            self._behind.popleft()[1]()

    # --- dropped lines ---------------------------------------------------------------------------------------------

    def _finds_room(self, size: int) -> bool:
        waits = self._fresh_bytes + size
        # Once lines are missing, the next ones are dropped, too, so that there are few gaps instead of thousands.
        if waits <= (self._memory_bytes // 2 if self._missing else self._memory_bytes):
            return True
        return waits <= max(_WAITING_BYTES, size) and self.on_disk + waits <= self._disk_bytes

    def _keep_place(self) -> None:
        """Keep the notes of dropped lines, ahead of what follows."""
        self._keep(*self._missing.pieces())
        self._missing = _Missing()

    # --- on disk ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Have the thread read the next pieces to send, or write those beyond the memory limit."""
        if self._works or self._closed:
            return
        if self._files and not self._ready and self._has_room():
            self._in_thread(self._files[0].read, self._was_read)
        elif self._fresh_bytes > self._memory_bytes:
            pieces = tuple(self._fresh)
            self._fresh.clear()
            self._fresh_bytes = 0
            file = self._files[-1] if self._files and self._files[-1].size < self._file_bytes else None

            def write() -> _File:
                to = _File() if file is None else file
                try:
                    to.append(pieces)
                except OSError:
                    if file is None:
                        to.close()
                    raise
                return to

            self._in_thread(write, lambda result: self._was_written(pieces, result))

    def _in_thread(self, work: Callable[[], _T], done: Callable[[_T | OSError], None]) -> None:
        def run() -> None:
            result: _T | OSError
            try:
                result = work()
            except OSError as error:
                result = error
            except (MemoryError, ValueError) as error:
                result = OSError(errno.EIO, str(error))
            with contextlib.suppress(RuntimeError):  # the agent has ended, and the loop with it
                self._loop.call_soon_threadsafe(finish, result)

        def finish(result: _T | OSError) -> None:
            self._works = False
            if self._closed:
                if isinstance(result, _File):
                    result.close()
                self._drop_files()
            else:
                done(result)
                self.go_on()

        try:
            if self._writer is None:
                self._writer = FileWriter("elastic-driver-output")
        except RuntimeError as error:  # cannot start a thread
            self._works = True
            self._loop.call_soon(finish, OSError(errno.EAGAIN, str(error)))
        else:
            self._works = self._writer.put(run)

    def _was_written(self, pieces: tuple[_Piece, ...], result: _File | OSError) -> None:
        if isinstance(result, OSError):
            since = tuple(self._fresh)
            self._fresh.clear()
            self._fresh_bytes = 0
            self._keep(*_Missing(pieces).pieces(), *since)
            return
        if not self._files or self._files[-1] is not result:
            self._files.append(result)
            self._in_files.append(_Missing())
        for piece in pieces:
            self._in_files[-1].add(piece)

    def _was_read(self, result: list[_Piece] | OSError) -> None:
        file, held = self._files[0], self._in_files[0]
        if isinstance(result, OSError):
            self._ready.extend(held.pieces())
        else:
            self._ready.extend(result)
            for piece in result:
                held.take(piece)
        if isinstance(result, OSError) or file.done == file.size:
            self._files.popleft()
            self._in_files.popleft()
            file.close()

    def _drop_files(self) -> None:
        while self._files:
            self._files.pop().close()
        self._in_files.clear()
