"""A worker's output on its way to the user: cut into lines, prefixed, and passed on.

Owns the reading ends of the pipes. Works on bytes, so a character that comes in two reads stays whole.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence

from elastic_driver.errors import in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.words import OutputSink, Stream

# A line longer than this is passed on in pieces, so that output without newlines cannot fill the memory.
MAX_LINE = 65536
# One read empties a pipe of the usual size.
_READ_SIZE = 65536
# What is read at once when a worker has died: its pipes hold no more than this unless somebody enlarged them, and a
# descendant that goes on writing must not hold up the news.
_READ_AT_ONCE = 2 << 20
_LAST_LINES = 20
_LAST_LINE_SIZE = 2000
_LINE_END = re.compile(rb"\r\n|\n|\r")


class LineSplitter:
    """Cuts a stream of bytes into lines; how the bytes were divided over the reads makes no difference.

    A newline, a carriage return (progress bars) or both end a line. A carriage return at the start of a line ends none:
    progress bars write it before each of their texts.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max_line = max_line
        self._rest = bytearray()
        self._after_cr = False

    @property
    def rest(self) -> bytes:
        """The beginning of the line that has not ended yet."""
        return bytes(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in ``data``, without their ends."""
        if not data:
            return []
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        if data:
            self._after_cr = data.endswith(b"\r")
        else:
            self._after_cr = False
            return []
        lines: list[bytes] = []
        if b"\r" not in data:
            *ended, rest = data.split(b"\n")
            for line in ended:
                self._end_line(lines, line)
        else:
            start = 0
            for match in _LINE_END.finditer(data):
                line, start_next = data[start : match.start()], match.end()
                if line or self._rest or match[0] != b"\r":
                    self._end_line(lines, line)
                elif start_next == len(data):
                    # This one ended no line; a newline that comes next does.
                    self._after_cr = False
                start = start_next
            rest = data[start:]
        self._rest += rest
        if len(self._rest) > self._max_line:
            *pieces, last = self._pieces(bytes(self._rest))
            lines += pieces
            self._rest = bytearray(last)
        return lines

    def flush(self) -> list[bytes]:
        """The unfinished last line, if there is one: the stream has ended."""
        lines = self._pieces(bytes(self._rest)) if self._rest else []
        self._rest.clear()
        return lines

    def _end_line(self, lines: list[bytes], line: bytes) -> None:
        if self._rest:
            line = bytes(self._rest + line)
            self._rest.clear()
        if len(line) > self._max_line:
            lines += self._pieces(line)
        else:
            lines.append(line)

    def _pieces(self, line: bytes) -> list[bytes]:
        pieces: list[bytes] = []
        start = 0
        while len(line) - start > self._max_line:
            end = start + self._max_line
            # Not within a character: its second to fourth bytes are 10xxxxxx in UTF-8.
            for back in range(4):
                if line[end - back] & 0xC0 != 0x80:
                    end -= back
                    break
            pieces.append(line[start:end])
            start = end
        pieces.append(line[start:])
        return pieces


class WorkerOutput:
    """Reads one worker's two pipes on the running loop and passes on what comes.

    Args:
        descriptors: the reading ends; owned from now on.
        worker: whose they are.
        sink: takes the lines. What it raises is reported once and does not end the reading, or the worker would block.
        label: tells what stands in the prefix now.
        prefix_timestamp: whether the prefix begins with the time.
        warn: takes reports of what went wrong.
        paused: whether nothing is read until :meth:`resume`.
        shown: takes what comes as "stdout" as it is, too, where that is a terminal; None for nobody.
    """

    def __init__(
        self,
        descriptors: dict[Stream, int],
        worker: WorkerId,
        sink: OutputSink,
        *,
        label: Callable[[], str],
        prefix_timestamp: bool,
        warn: Callable[[str], None],
        paused: bool = False,
        shown: Callable[[bytes], None] | None = None,
    ) -> None:
        self._shown = shown
        self._loop = asyncio.get_running_loop()
        self._open = dict(descriptors)
        self._paused = paused
        self._worker = worker
        self._sink = sink
        self._label = label
        self._prefix_timestamp = prefix_timestamp
        self._warn = warn
        self._sink_failed = False
        self._splitters: dict[Stream, LineSplitter] = {stream: LineSplitter() for stream in descriptors}
        self._last: dict[Stream, deque[bytes]] = {stream: deque(maxlen=_LAST_LINES) for stream in descriptors}
        self._ended: asyncio.Future[None] = self._loop.create_future()
        for stream, descriptor in descriptors.items():
            os.set_blocking(descriptor, False)
            if not paused:
                self._loop.add_reader(descriptor, self._read, stream)

    @property
    def last_lines(self) -> Sequence[str]:
        """The end of stderr, or of stdout when nothing came there; 20 lines at most, the unfinished one included."""
        for stream in ("stderr", "stdout"):
            if stream not in self._last:
                continue
            lines = list(self._last[stream])
            if rest := self._splitters[stream].rest:
                lines.append(rest)
            if lines:
                return [line[:_LAST_LINE_SIZE].decode(errors="replace") for line in lines[-_LAST_LINES:]]
        return []

    def read_available(self) -> None:
        """Passes on what the pipes hold now, without waiting for more."""
        for stream in tuple(self._open):
            size = 0
            while size < _READ_AT_ONCE and (count := self._read(stream)):
                size += count

    def pause(self) -> None:
        """Reads nothing more, so that the worker blocks when its pipes are full. What it leaves at its end is read."""
        if not self._paused:
            self._paused = True
            for descriptor in self._open.values():
                self._loop.remove_reader(descriptor)

    def resume(self) -> None:
        """Reads on."""
        if self._paused:
            self._paused = False
            for stream, descriptor in self._open.items():
                self._loop.add_reader(descriptor, self._read, stream)

    async def wait_ended(self, timeout_s: float) -> None:
        """Blocks until both streams have ended, or the time is over."""
        await asyncio.wait((self._ended,), timeout=timeout_s)

    def close(self) -> None:
        """Passes on what is left and closes everything. Harmless when repeated."""
        self.read_available()
        for stream in tuple(self._open):
            self._end(stream)

    def _read(self, stream: Stream) -> int:
        descriptor = self._open.get(stream)
        if descriptor is None:  # it ended after the loop had seen it readable
            return 0
        try:
            data = os.read(descriptor, _READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if self._shown is None or error.errno != errno.EIO:  # which is how a terminal ends
                self._warn(f"cannot read a worker's {stream}: {in_words(error)}")
            data = b""
        if data:
            if self._shown is not None and stream == "stdout":
                self._shown(data)
            self._pass_on(stream, self._splitters[stream].feed(data))
        else:
            self._end(stream)
        return len(data)

    def _end(self, stream: Stream) -> None:
        descriptor = self._open.pop(stream)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        self._pass_on(stream, self._splitters[stream].flush())
        if not self._open and not self._ended.done():
            self._ended.set_result(None)

    def _pass_on(self, stream: Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        self._last[stream].extend(lines[-_LAST_LINES:])
        time_text = time.asctime() if self._prefix_timestamp else ""
        prefix = f"{time_text}[{self._label()}]<{stream}>:".encode()
        data = prefix + (b"\n" + prefix).join(lines) + b"\n"
        try:
            self._sink.write(self._worker, stream, data)
        except Exception as error:
            if not self._sink_failed:
                self._sink_failed = True
                self._warn(f"cannot pass on a worker's output: {in_words(error)}")
