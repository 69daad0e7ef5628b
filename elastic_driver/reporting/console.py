"""The console: the driver's lines, the workers' forwarded output, a live status line, and the closing summary.

Owns standard output and standard error of the driver. The workers' output goes to the stream it came from, in whole
lines; all of the driver's own lines go to standard error. If standard error is a terminal, its last line is a status
line, with the workers' progress bars above it; both are erased before anything else is written, and redrawn after it.
Otherwise there are no control characters, and a bar is a line from time to time. The output of a worker that has the
terminal (:meth:`Console.lend`) is passed on unchanged, and ends the status line.

One thread does all writing, so that a slow or stopped reader (a pager, Ctrl-S) never stops the driver. If a reader has
exited (``elasticrun ... | head``) or a disk is full, writing to that stream ends. The other stream gets one message
about it, and the job continues, since its training is worth more than its output.
"""

from __future__ import annotations

import asyncio
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from elastic_driver.errors import in_words
from elastic_driver.hosts import WorkerId
from elastic_driver.reporting.bars import DrawnBars, cells
from elastic_driver.reporting.happenings import RoundSummary, Summary
from elastic_driver.reporting.printable import one_line, without_c1
from elastic_driver.reporting.status_line import status_line
from elastic_driver.reporting.tracebacks import Tracebacks
from elastic_driver.system.keeping import Keeping
from elastic_driver.words import ALL_BARS, NO_BARS, Bar, ExitCode, counted, is_chosen

Stream = Literal["stdout", "stderr"]

# Redrawn more often, the status line would add nothing to the job's lines; 4 Hz is what an eye follows.
_STATUS_PERIOD_S = 0.25
# The bars are several rows: if lines arrive faster, the bars are redrawn below them only this often.
_BACK_PERIOD_S = 0.05
# Limit of output not yet read by a stopped reader; beyond it workers' lines are dropped, and counted.
_BACKLOG_BYTES = 64 << 20
# A reader with this much unread has stopped. Less than the limit of output that agents hold unkept (UNKEPT_BYTES, 4
# MiB), beyond which they would write no more to the files.
_STOPPED_BYTES = 1 << 20
# A terminal with this much unread is not drawn on: the drawing would be outdated when shown.
_DRAWN_BYTES = 16 << 10
# How long the end of the job waits for a slow reader.
_FLUSH_S = 5.0
# How much of the output a user probably still has in view when the job ends.
_IN_VIEW_LINES, _IN_VIEW_BYTES = 60, 16384
_ERASE_LINE = b"\r\x1b[2K"
_ERASE_LINE_ABOVE = b"\x1b[A\x1b[2K"
_LEVELS = {"TRACE": 0, "DEBUG": 0, "INFO": 1, "WARNING": 2, "ERROR": 3, "FATAL": 3}


def _cells(line: RoundSummary, *, is_first: bool) -> tuple[str, ...]:
    lost = "-" if is_first else "unknown" if line.took_s is None else f"{line.took_s:.2f} s"
    return str(line.round_id), str(line.size), lost, "-" if line.commit is None else str(line.commit), line.cause


class Console:
    """The writer of the driver's terminal.

    Args:
        log_level: the least level written: "TRACE", "DEBUG", "INFO", "WARNING", "ERROR" or "FATAL".
        verbose: whether to write details, too.
        quiet: whether to write only warnings, errors and the last line, and no status line.
        progress_rank: whose progress bars to show: "all", "none" or a rank.
        event_log: the file to which the summary refers for more; None for none.
        keeping: counts workers' output, and how much of it is written; None if that is not needed.
        hears_ends: whether each worker's end is reported to it (:meth:`worker_ended`): then a traceback that several
            workers print is shown once.
        stdout, stderr: file descriptors.

    Attributes:
        keeping: as given.
        is_copy: returns whether files receive all of the workers' output, too: then a stopped reader is not waited for.
    """

    def __init__(
        self,
        *,
        log_level: str = "INFO",
        verbose: bool = False,
        quiet: bool = False,
        progress_rank: str = ALL_BARS,
        event_log: Path | None = None,
        keeping: Keeping | None = None,
        hears_ends: bool = True,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        self._terminal = stderr
        self._descriptors: dict[Stream, int | None] = {"stdout": stdout, "stderr": stderr}
        # Both --quiet and a higher --log-level apply.
        self._level = max(_LEVELS[log_level], _LEVELS["WARNING"]) if quiet else _LEVELS[log_level]
        self._tells_success = quiet
        self._verbose = self._level == 0 or (verbose and self._level == 1)
        self._live = os.isatty(stderr) and os.environ.get("TERM", "dumb") not in ("", "dumb") and not quiet
        self._color = self._live and not os.environ.get("NO_COLOR")
        # On a terminal that shows both streams the status line must make room for either of them.
        self._stdout_shown = os.isatty(stdout)
        self._shown_on_terminal: dict[Stream, bool] = {"stdout": self._stdout_shown, "stderr": os.isatty(stderr)}
        self._lent = False
        self._written_to = False  # by the worker that has the terminal
        self._line_open = False  # the worker's last output to its terminal was not a whole line
        self._progress_rank = progress_rank
        self._bars = DrawnBars(self._color)
        self._drawn: tuple[int, ...] = ()  # the widths of the drawn rows, including the status line
        self._status = ""
        self._figures: tuple[str, ...] = ()
        self._shown: tuple[str, tuple[str, ...], int] | None = None
        self._shown_at = 0.0
        self._looks_at = 0.0  # when the event loop draws a delayed drawing
        self._began = time.monotonic()
        self._event_log = event_log
        self._tracebacks = Tracebacks() if hears_ends else None
        self._tail = b""  # the end of standard error, still in view
        self.keeping = keeping
        self.is_copy: Callable[[], bool] = lambda: False
        # Data to write; or a count of workers' output, which is written by the time it is reached.
        self._queue: queue.SimpleQueue[tuple[Stream, bytes] | int | None] = queue.SimpleQueue()
        self._backlog = 0  # bytes queued; written by both threads, under _lock
        self._dropped = 0
        self._lock = threading.Lock()
        # Woken by the queue, ended by None in it. A daemon, because a reader that is stopped for good must not keep the
        # process alive; __exit__ waits for it as long as is sensible.
        self._writer = threading.Thread(target=self._write_all, name="elasticrun-console", daemon=True)
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._erase_status()
        self._status = ""
        self._bars.clear()
        self._show_rest()
        self._queue.put(None)
        self._writer.join(_FLUSH_S)

    # --- lines -----------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Write a line about something that happened to the job."""
        if self._level <= 1:
            self._say(text, "")

    def detail(self, text: str) -> None:
        """Write a detail, if the user asked for details (--verbose)."""
        if self._verbose:
            self._say(text, "2")

    def warning(self, text: str) -> None:
        """Write a warning."""
        if self._level <= 2:
            self._say(f"warning: {text}", "33")

    def error(self, text: str) -> None:
        """Write why the job fails."""
        self._say(text, "31")

    def write(self, stream: Stream, data: bytes) -> None:
        """Write workers' output: whole lines, prefix included; unchanged if the stream is not a terminal."""
        serial = 0 if self.keeping is None else self.keeping.comes()
        if stream == "stderr" and self._tracebacks is not None:
            data = self._tracebacks.take(data, time.monotonic(), serial)
        if data:
            self._write(stream, data)
        self._count()

    def _count(self) -> None:
        """Have the workers' output so far, except for any held back, counted as kept once it is written."""
        if self.keeping is None:
            return
        if self.is_copy():
            with self._lock:
                has_stopped = self._backlog > _STOPPED_BYTES
            if has_stopped:
                self.keeping.keep_soon(self.keeping.came)
                return
        held = None if self._tracebacks is None else self._tracebacks.first_held
        self._queue.put(self.keeping.came if held is None else held - 1)

    def _write(self, stream: Stream, data: bytes) -> None:
        if self._shown_on_terminal[stream]:
            data = without_c1(data)
        if self._live and (stream == "stderr" or self._stdout_shown):
            self._erase_status()
            self._put_lines(stream, data)
            self._put_status_back()
        else:
            self._put_lines(stream, data)

    @property
    def bars_shown(self) -> str:
        """Whose progress bars are drawn at each state: "all", "none" or a rank; "none" without a terminal."""
        return self._progress_rank if self._live else NO_BARS

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        """Show the newest state of a worker's progress bar.

        Args:
            worker: the worker.
            bar: the bar; without data if its stream has none any more; None if the worker has none at all.
        """
        if bar is None or not is_chosen(bar.label, self._progress_rank):
            self._bars.remove(worker)  # its rank may have changed
        elif not bar.data:
            self._bars.remove(worker, bar.stream)
        elif self._live and self._shown_on_terminal[bar.stream]:
            self._bars.set(worker, bar)
        elif bar.is_line:
            # Not searched for tracebacks, nor counted: a later state, or the last one, supersedes it.
            self._write(bar.stream, bar.data)
        self._draw_anew()

    def lend(self, lent: bool) -> None:  # noqa: FBT001 - says it all
        """Lend the terminal to a worker, whose output then is written to it unchanged; or take it back."""
        if lent == self._lent:
            return
        self._erase_status()
        self._lent, self._written_to = lent, False
        if not lent and self._line_open:
            self._line_open = False
            self._put("stdout", b"\n")

    def show(self, data: bytes) -> None:
        """Write the output of the worker that has the terminal."""
        self._erase_status()
        self._written_to = True
        self._line_open = not data.endswith(b"\n")
        self._tail = (self._tail + data)[-_IN_VIEW_BYTES:]
        self._put("stdout", data)

    def look(self) -> None:
        """Pass on output that has been held back long enough. To be called periodically."""
        if self._tracebacks is not None and (late := self._tracebacks.overdue(time.monotonic())):
            self._write("stderr", late)
            self._count()

    def _show_rest(self) -> None:
        if self._tracebacks is not None and (rest := self._tracebacks.rest()):
            self._write("stderr", rest)
            self._count()

    def worker_ended(self, label: str, *, has_failed: bool) -> str:
        """Note the end of a worker's process. Returns the label of the one that printed the same traceback.

        Args:
            label: of the worker.
            has_failed: if false, what it printed is a message, and shown in full.
        """
        if self._tracebacks is None:
            return ""
        shown, same = self._tracebacks.ended(label, has_failed=has_failed)
        if shown:
            self._write("stderr", shown)
        self._count()
        return same

    def shows(self, lines: Sequence[str]) -> bool:
        """Return whether these lines are among the last ones of standard error."""
        seen = self._tail.decode(errors="replace").splitlines()[-_IN_VIEW_LINES:]
        return all(any(shown.endswith(line) for shown in seen) for line in lines)

    @property
    def live(self) -> bool:
        """Whether there is a terminal with a status line."""
        return self._live

    def status(self, text: str, figures: tuple[str, ...] = ()) -> None:
        """Show the state of the job in the live line. Does nothing if standard error is not a terminal.

        Args:
            text: the state, and the reason for it.
            figures: shown after the text.
        """
        if not self._live or self._written_to:
            return
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._status = f"[{minutes:02d}:{seconds:02d}] {one_line(text)}"
        self._figures = figures
        self._draw_anew()

    def summary(self, summary: Summary, *, exit_code: int, message: str) -> None:
        """Write the closing table: the cost of each change, if there was any; then the exit code and the reason."""
        self._erase_status()
        self._status = ""
        self._bars.clear()
        self._show_rest()
        changes = len(summary.first) + summary.left_out + len(summary.last) - 1
        if self._level <= 1 and changes > 0:
            self._say_table(summary)
            lost = f"{summary.lost_s:.2f} s lost in total" if summary.unknown < changes else ""
            if lost and summary.unknown:
                lost = f"at least {lost}"
            self._say(f"{counted(changes, 'change')}{', ' if lost else ''}{lost}", "")
        for text, warning in summary.notes:
            (self.warning if warning else self.line)(text)
        if exit_code > 128:
            self._say(f"job ended: {message} (exit code {exit_code})", "33")
        elif exit_code == ExitCode.OTHER_DRIVER:
            self._say(f"{message} (exit code {exit_code})", "33")  # the job continues
        elif exit_code:
            self._say(f"job failed: {message} (exit code {exit_code})", "31")
        elif self._level <= 1 or self._tells_success:
            self._say(f"job succeeded: {message} (exit code 0)", "32")

    def _say_table(self, summary: Summary) -> None:
        header = ("round", "workers", "time lost", "from commit", "cause")
        first, last = (
            [_cells(line, is_first=line is summary.first[0]) for line in rounds]
            for rounds in (summary.first, summary.last)
        )
        widths = [max(len(row[column]) for row in (header, *first, *last)) for column in range(4)]
        has_commits = any(line.commit is not None for line in (*summary.first, *summary.last))

        def say(row: tuple[str, ...]) -> None:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
            if not has_commits:  # nor steps from which all could resume
                cells.pop()
            self._say(f"  {'  '.join(cells)}  {row[4]}", "")

        for row in (header, *first):
            say(row)
        if summary.left_out:
            where = f"see {self._event_log}" if self._event_log else "use --event-log FILE"
            text = f"{summary.left_out} more rounds; for all of them, {where}"
            say(("...", "", f"{summary.left_out_s:.2f} s", "", text))
        for row in last:
            say(row)

    # --- writing ---------------------------------------------------------------------------------------------------

    def _say(self, text: str, color: str) -> None:
        # Output of a worker or a script may be quoted in our lines.
        line = f"elasticrun: {one_line(text)}"
        if self._color and color:
            line = f"\x1b[{color}m{line}\x1b[0m"
        self._erase_status()
        self._put_lines("stderr", line.encode(errors="replace") + b"\n")
        self._put_status_back()

    def _draw_anew(self) -> None:
        """Redraw a changed status line or bar, unless it was drawn a moment ago."""
        shows = (self._status, self._figures, self._bars.version)
        if not self._live or shows == self._shown:
            return
        period_s = _STATUS_PERIOD_S if self._shown is not None else self._back_period_s
        left_s = self._shown_at + period_s - time.monotonic()
        if left_s > 0:
            self._draw_later(left_s)
            return
        with self._lock:
            is_behind = self._backlog > _DRAWN_BYTES
        if is_behind:
            self._draw_later(_STATUS_PERIOD_S)
            return
        self._draw(self._erased() + self._drawing())

    @property
    def _back_period_s(self) -> float:
        return _BACK_PERIOD_S if self._bars and not self._lent else 0.0

    def _draw_later(self, in_s: float) -> None:
        """Schedule a drawing for later. Without an event loop it is drawn with the next output."""
        now = time.monotonic()
        if now < self._looks_at <= now + in_s:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._looks_at = now + in_s
        loop.call_later(in_s, self._draw_anew)

    def _erase_status(self) -> None:
        self._draw(self._erased())

    def _put_status_back(self) -> None:
        left_s = self._shown_at + self._back_period_s - time.monotonic()
        if left_s > 0 and self._live:
            self._draw_later(left_s)
        else:
            self._draw(self._drawing())

    def _draw(self, data: bytes) -> None:
        if data:
            self._put("stderr", data, stays=False)

    def _erased(self) -> bytes:
        """Return the bytes that erase the whole drawing."""
        if self._shown is None:
            return b""
        # A terminal that has become narrower has wrapped the rows.
        width = self._size().columns
        rows = sum(max(1, -(-drawn // width)) for drawn in self._drawn)
        self._shown, self._drawn = None, ()
        return _ERASE_LINE + _ERASE_LINE_ABOVE * (rows - 1)

    def _drawing(self) -> bytes:
        """Return the bytes that draw the bars, and the status line below them."""
        if not self._live or self._written_to:
            return b""
        size = self._size()
        width = max(10, size.columns - 1)
        rows = [] if self._lent else self._bars.rows(width=width, lines=size.lines)
        if self._status:
            text = status_line(self._status, self._figures, width=width)
            rows.append((f"\x1b[2m{text}\x1b[0m" if self._color else text, cells(text)))
        if not rows:
            return b""
        self._drawn = tuple(drawn for _, drawn in rows)
        self._shown = (self._status, self._figures, self._bars.version)
        self._shown_at = time.monotonic()
        return without_c1("\n".join(text for text, _ in rows).encode(errors="replace"))

    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._terminal)
        except OSError:
            size = os.terminal_size((0, 0))
        return os.terminal_size((size.columns or 80, size.lines or 24))

    def _put_lines(self, stream: Stream, data: bytes) -> None:
        if self._lent and self._shown_on_terminal[stream]:
            # The terminal is in raw mode: it does not translate newlines, nor end the worker's line.
            data = (b"\r\n" if self._line_open else b"") + data.replace(b"\n", b"\r\n")
            self._line_open = False
        self._put(stream, data)

    def _put(self, stream: Stream, data: bytes, *, stays: bool = True) -> None:
        if stream == "stderr" and stays:
            self._tail = (self._tail + data)[-_IN_VIEW_BYTES:]
        with self._lock:
            if self._backlog > _BACKLOG_BYTES:
                self._dropped += len(data)
                return
            dropped, self._dropped = self._dropped, 0
            self._backlog += len(data)
        if dropped:
            warning = f"elasticrun: warning: {dropped} bytes of output dropped: the reader cannot keep up\n"
            self._queue.put(("stderr", warning.encode()))
        self._queue.put((stream, data))

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, int):
                assert self.keeping is not None
                self.keeping.keep_soon(item)
                continue
            stream, data = item
            self._write_now(stream, data)
            with self._lock:
                self._backlog -= len(data)

    def _write_now(self, stream: Stream, data: bytes) -> None:
        descriptor = self._descriptors[stream]
        view = memoryview(data)
        try:
            while descriptor is not None and view:
                try:
                    view = view[os.write(descriptor, view) :]
                except BlockingIOError:
                    # Another process made the descriptor non-blocking (a shared terminal): wait for room.
                    select.select([], [descriptor], [])
        except OSError as error:
            self._descriptors[stream] = None
            other: Stream = "stderr" if stream == "stdout" else "stdout"
            reason = in_words(error)
            text = f"elasticrun: warning: cannot write to {stream}: {reason}; continuing without it\n"
            self._write_now(other, text.encode())
