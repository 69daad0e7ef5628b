"""A worker's output on its way to the user: cut into lines, prefixed, and passed on.

Owns the read ends of the pipes. Works on bytes, so a character divided over two reads stays whole.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

from elastic_driver.errors import in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.lines import LineReader
from elastic_driver.launch.words import OutputSink, Stream
from elastic_driver.words import Bar

BAR_PERIOD_S = 0.25
"""Between two states of a bar that is being watched: 4 Hz is what an eye can follow."""

BAR_LINE_PERIOD_S = 10.0
"""Between two states that are kept as lines, in files and pipes."""

BAR_AWAY_S = 0.5
"""How long a bar must be away to count as gone."""

# One read empties a pipe of the usual size.
_READ_SIZE = 65536
# While something is redrawn: 64 KiB of short rows take 0.3 s (measured), which block the loop.
_READ_SIZE_OF_BARS = 4096
# Read at once when a worker has died: its pipes hold no more than this unless they were enlarged, and a descendant that
# continues to write must not delay the report.
_READ_AT_ONCE = 2 << 20
_LAST_LINES = 20
# Differs from all states: none has a carriage return.
_NO_STATE = b"\r"
_LAST_LINE_SIZE = 2000


class BarPace:
    """Decides when a bar's state is passed on: some times per second while watched; as a line now and then.

    A bar counts as gone when it was away for a moment: tqdm wipes its own for each message, and draws it again below.
    """

    def __init__(self) -> None:
        self._shown, self._shown_at = b"", -math.inf
        self._is_watched = False  # whether it was watched then
        self._line, self._line_at = b"", math.inf
        self._away_at = math.inf  # since when there is no state

    @property
    def is_shown(self) -> bool:
        """Whether a state was passed on, and not yet that it is gone."""
        return bool(self._shown)

    def again(self) -> None:
        """Have the state passed on again, since the worker's rank has changed."""
        if self._shown:
            self._shown, self._shown_at = _NO_STATE, -math.inf

    def take(self, state: bytes, now: float, *, is_watched: bool) -> tuple[bytes, bool] | None:
        """Return the state to pass on now, and whether as a line; None for nothing.

        Args:
            state: of the bar; b"" if there is none.
            now: the time, in seconds of a monotonic clock.
            is_watched: whether the bar is being watched.
        """
        if state:
            self._away_at = math.inf
            if self._line_at == math.inf:
                self._line_at = now
        else:
            self._away_at = min(self._away_at, now)
            if now < self._away_at + BAR_AWAY_S:
                return None
            self._line, self._line_at = b"", math.inf
        if state and state != self._line and now >= self._line_at + BAR_LINE_PERIOD_S:
            self._shown, self._shown_at, self._is_watched = state, now, is_watched
            self._line, self._line_at = state, now
            return state, True
        wanted = self._wanted(state, is_watched=is_watched)
        if wanted == self._shown or now < self._shown_at + BAR_PERIOD_S:
            return None
        self._shown, self._shown_at, self._is_watched = wanted, now, is_watched
        return wanted, False

    def due(self, state: bytes, *, is_watched: bool) -> float:
        """Return when the next state is due, if it does not change; infinite for never."""
        is_news = self._wanted(state, is_watched=is_watched) != self._shown
        news_at = self._shown_at + BAR_PERIOD_S if is_news else math.inf
        if state:
            return min(news_at, self._line_at + BAR_LINE_PERIOD_S if state != self._line else math.inf)
        if not is_news and self._line_at == math.inf:
            return math.inf
        return max(self._away_at + BAR_AWAY_S, news_at if is_news else 0.0)

    def _wanted(self, state: bytes, *, is_watched: bool) -> bytes:
        """Return the state to show: nothing to those that stopped watching; others keep the last line."""
        if is_watched or not state:
            return state
        return b"" if self._is_watched else self._shown


class WorkerOutput:
    """Reads one worker's two pipes on the running loop, and passes their lines on.

    Args:
        descriptors: the read ends; owned from now on.
        worker: whose they are.
        sink: receives the lines. An error in it is reported once and does not end the reading, or the worker would
            block.
        label: returns the present label, for the prefix.
        prefix_timestamp: whether the prefix begins with the time.
        warn: called with warnings.
        paused: whether nothing is read until :meth:`resume`.
        shown: also called with the unmodified data of "stdout", if that is a terminal; None if it is not.
        is_watched: returns whether anybody watches the bars of a worker with this label now.
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
        is_watched: Callable[[str], bool] = lambda label: False,
    ) -> None:
        self._shown = shown
        self._is_watched = is_watched
        self._loop = asyncio.get_running_loop()
        self._open = dict(descriptors)
        self._paused = paused
        self._worker = worker
        self._sink = sink
        self._label = label
        self._prefix_timestamp = prefix_timestamp
        self._warn = warn
        self._sink_failed = False
        self._readers: dict[Stream, LineReader] = {stream: LineReader() for stream in descriptors}
        self._paces: dict[Stream, BarPace] = {}  # of streams that have had a bar
        self._looks: dict[Stream, asyncio.TimerHandle] = {}
        self._last: dict[Stream, deque[bytes]] = {stream: deque(maxlen=_LAST_LINES) for stream in descriptors}
        self._ended: asyncio.Future[None] = self._loop.create_future()
        for stream, descriptor in descriptors.items():
            os.set_blocking(descriptor, False)
            if not paused:
                self._loop.add_reader(descriptor, self._read, stream)

    @property
    def last_lines(self) -> Sequence[str]:
        """The end of stderr, or of stdout if stderr is empty; at most 20 lines, including the unfinished one."""
        for stream in ("stderr", "stdout"):
            if stream not in self._last:
                continue
            lines = [*self._last[stream], *self._readers[stream].unended]
            if lines:
                return [line[:_LAST_LINE_SIZE].decode(errors="replace") for line in lines[-_LAST_LINES:]]
        return []

    def read_available(self) -> None:
        """Pass on what the pipes hold now, without waiting for more."""
        for stream in tuple(self._open):
            size = 0
            while size < _READ_AT_ONCE and (count := self._read(stream)):
                size += count

    def pause(self) -> None:
        """Stop reading, so that the worker blocks when its pipes are full. What it leaves at its end is read."""
        if not self._paused:
            self._paused = True
            for descriptor in self._open.values():
                self._loop.remove_reader(descriptor)

    def resume(self) -> None:
        """Resume reading."""
        if self._paused:
            self._paused = False
            for stream, descriptor in self._open.items():
                self._loop.add_reader(descriptor, self._read, stream)

    def relabel(self) -> None:
        """Redraw or remove its bars on terminals, since the label has changed."""
        for stream, pace in tuple(self._paces.items()):
            pace.again()
            self._follow_bar(stream)

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until both streams have ended, for at most timeout_s seconds."""
        await asyncio.wait((self._ended,), timeout=timeout_s)

    def close(self) -> None:
        """Pass on what is left, and close everything. Harmless when repeated."""
        self.read_available()
        for stream in tuple(self._open):
            self._end(stream)

    def _read(self, stream: Stream) -> int:
        descriptor = self._open.get(stream)
        if descriptor is None:  # it ended after the loop had seen it readable
            return 0
        reader = self._readers[stream]
        try:
            data = os.read(descriptor, _READ_SIZE_OF_BARS if reader.has_bar else _READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if self._shown is None or error.errno != errno.EIO:  # EIO is how a terminal ends
                self._warn(f"cannot read a worker's {stream}: {in_words(error)}")
            data = b""
        if data:
            if self._shown is not None and stream == "stdout":
                self._shown(data)
            self._pass_on(stream, reader.feed(data, self._loop.time()))
            if reader.has_bar or stream in self._paces:
                self._follow_bar(stream)
        else:
            self._end(stream)
        return len(data)

    def _end(self, stream: Stream) -> None:
        descriptor = self._open.pop(stream)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        self._pass_on(stream, self._readers[stream].flush())
        if look := self._looks.pop(stream, None):
            look.cancel()
        if (pace := self._paces.pop(stream, None)) is not None and pace.is_shown:
            self._give_bar(stream, b"", is_line=False)
        if not self._open and not self._ended.done():
            self._ended.set_result(None)

    def _follow_bar(self, stream: Stream) -> None:
        """Pass on its bar's state, if it is due."""
        reader, pace = self._readers[stream], self._paces.setdefault(stream, BarPace())
        state, is_watched = reader.state, self._is_watched(self._label())
        if news := pace.take(state, self._loop.time(), is_watched=is_watched):
            self._give_bar(stream, news[0], is_line=news[1])
        due = min(pace.due(state, is_watched=is_watched), math.inf if reader.due is None else reader.due)
        look = self._looks.get(stream)
        if look is not None and look.when() != due:
            self._looks.pop(stream).cancel()
            look = None
        if look is None and due < math.inf:
            self._looks[stream] = self._loop.call_at(due, self._look, stream)
        elif due == math.inf and not reader.has_bar:
            del self._paces[stream]

    def _look(self, stream: Stream) -> None:
        del self._looks[stream]
        self._pass_on(stream, self._readers[stream].look(self._loop.time()))
        self._follow_bar(stream)

    def _give_bar(self, stream: Stream, state: bytes, *, is_line: bool) -> None:
        data = self._prefix(stream) + state + b"\n" if state else b""
        self._give(lambda: self._sink.bar(self._worker, Bar(stream, self._label(), data, is_line)))

    def _pass_on(self, stream: Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        self._last[stream].extend(lines[-_LAST_LINES:])
        prefix = self._prefix(stream)
        data = prefix + (b"\n" + prefix).join(lines) + b"\n"
        self._give(lambda: self._sink.write(self._worker, stream, data))

    def _prefix(self, stream: Stream) -> bytes:
        time_text = time.asctime() if self._prefix_timestamp else ""
        return f"{time_text}[{self._label()}]<{stream}>:".encode()

    def _give(self, give: Callable[[], None]) -> None:
        try:
            give()
        except Exception as error:
            if not self._sink_failed:
                self._sink_failed = True
                self._warn(f"cannot forward a worker's output: {in_words(error)}")
