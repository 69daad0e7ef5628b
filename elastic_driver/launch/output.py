"""Workers' output: bytes from their pipes become whole lines with a prefix, for the terminal and for files.

Owns the cutting into lines, the prefix and the files of ``--output-filename``. Where the lines go is the sink's matter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

Stream = Literal["stdout", "stderr"]

# A line longer than this is passed on in pieces, so that a worker that never ends its line costs no memory.
MAX_LINE_BYTES = 64 << 10
# How many last lines of a worker are kept for the message that tells why it failed.
LAST_LINES = 20


class OutputSink(Protocol):
    """Takes whole lines, prefix included. Must not raise for a reader that has gone or a disc that is full."""

    def write(self, stream: Stream, data: bytes) -> None:
        """One or more whole lines."""


class LineCutter:
    """Cuts a stream of bytes into lines. ``\\n``, ``\\r`` and ``\\r\\n`` end one (``\\r``: progress bars)."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, without their ends."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        if data:
            self._after_cr = data.endswith(b"\r")
        lines = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        while len(self._rest) >= MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        return lines

    def end(self) -> list[bytes]:
        """What is left when the stream ends: an unfinished last line, if there is one."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class WorkerOutput:
    """Where one worker's lines go.

    Args:
        sink: the console.
        prefix_timestamp: whether each line's prefix begins with the time.
        folder: for ``stdout`` and ``stderr`` files, appended to; None for none.
        header: first line in the files for this process.
        on_error: told once when the files cannot be written; the output goes on to the sink.
    """

    def __init__(
        self,
        sink: OutputSink,
        *,
        prefix_timestamp: bool,
        folder: Path | None,
        header: str,
        on_error: Callable[[str], None],
    ) -> None:
        self.label = ""
        self.last_lines: dict[Stream, deque[str]] = {
            "stdout": deque(maxlen=LAST_LINES),
            "stderr": deque(maxlen=LAST_LINES),
        }
        self._sink = sink
        self._prefix_timestamp = prefix_timestamp
        self._on_error = on_error
        self._folder = folder
        self._files: dict[Stream, BinaryIO] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for stream in ("stdout", "stderr"):
                    # Unbuffered: what a worker said last must be in the file when the driver is killed.
                    self._files[stream] = (folder / stream).open("ab", buffering=0)
                    self._files[stream].write(f"=== {header}\n".encode())
            except OSError as error:
                self._give_up_files(error)

    def write(self, stream: Stream, lines: list[bytes]) -> None:
        """Passes lines on, in one write each to sink and file."""
        if not lines:
            return
        stamp = time.asctime() if self._prefix_timestamp else ""
        prefix = f"{stamp}[{self.label}]<{stream}>:".encode()
        data = b"".join([piece for line in lines for piece in (prefix, line, b"\n")])
        self.last_lines[stream].extend(line.decode(errors="replace") for line in lines[-LAST_LINES:])
        self._sink.write(stream, data)
        file = self._files.get(stream)
        if file is not None:
            try:
                file.write(data)
            except OSError as error:
                self._give_up_files(error)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _give_up_files(self, error: OSError) -> None:
        self._on_error(f"cannot write workers' output to {self._folder}: {error.strerror}; going on without it")
        self.close()
