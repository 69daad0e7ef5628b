"""A worker's stream, cut into lines; what it redraws in place becomes the newest state of a progress bar.

Pure: bytes and times in, lines and states out. A newline ends a line, and so does a carriage return with a newline
behind it. Any other carriage return begins the line anew, as on a terminal: of such a line only the last text counts. A
stream that never has one, nor moves the cursor, is split at its newlines, and costs no more than that.

Bars in several rows (nested ones of tqdm, those of rich) go up again over rows that have ended. So a row that was
redrawn waits for a moment after its newline, until it is clear whether the cursor comes back. What was never redrawn
waits for nothing, and takes all rows above it along: lines keep their order.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum, auto

# A line longer than this is passed on in pieces, so that output without newlines cannot fill the memory.
MAX_LINE = 65536
# The cursor comes back at once, in the same write or in the next one.
_COMES_BACK_S = 0.25
# A bar that erases its rows (rich) keeps them until its next frame, or so long.
_NEXT_FRAME_S = 10.0
_MOST_ROWS = 64
_LONGEST_ESCAPE = 256

_TOKEN = re.compile(
    rb"[^\r\n\x1b]+|\r|\n"
    rb"|\x1b\[(?P<numbers>[0-?]*)[ -/]*(?P<final>[@-~])"
    rb"|\x1b"
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*)?\Z")
# What moves the cursor over the lines, or erases some of them.
_MOVES = re.compile(rb"\x1b\[[0-?]*[ABEFGHJKf]")
_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
# What is no part of one line of text: all escape sequences but colours, and control characters but tabs.
_NO_TEXT = re.compile(
    rb"\x1b\[(?![0-9;:]*m)[0-?]*[ -/]*[@-~]?"
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    rb"|\x1b(?!\[)[^\]]?"
    rb"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)
# Printed behind whatever stands in the line, as bars leave it open.
_TRACEBACK = re.compile(rb"(?:\[rank\d+\]: )?Traceback \(most recent call last\):")


class _Next(Enum):
    """What comes of a row's text when more is written there."""

    STAYS = auto()
    OVERWRITTEN = auto()  # after a carriage return
    ANEW = auto()  # the cursor has come from the row above


@dataclass(slots=True, eq=False)
class _Row:
    """A line as far as it is written.

    Attributes:
        text: what it shows.
        next: what comes of that.
        is_redrawn: whether its text was written over another, or over nothing after a carriage return.
        returned: whether there was a carriage return at all.
        erased: whether it was erased at some time.
        colour: sequences for what is written next.
        left_at: when its newline came, seconds; None while the cursor is there, or may be expected.
    """

    text: bytes = b""
    next: _Next = _Next.STAYS
    is_redrawn: bool = False
    returned: bool = False
    erased: bool = False
    colour: bytes = b""
    left_at: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is an ordinary line, for which nobody waits."""
        return not self.is_redrawn and not self.erased

    @property
    def is_blank(self) -> bool:
        """Whether it shows nothing."""
        return not _COLOUR.sub(b"", self.text).strip()

    def write(self, text: bytes) -> None:
        """Text comes, without line ends and without what moves the cursor."""
        if self.next is _Next.STAYS:
            self.text += self.colour + text
        else:
            self.is_redrawn = self.next is _Next.OVERWRITTEN
            self.returned = self.returned and self.is_redrawn
            self.text, self.next = self.colour + text, _Next.STAYS
        self.colour = b""

    def return_carriage(self) -> None:
        """The cursor goes to the row's beginning."""
        self.settle_colour()
        if self.next is _Next.STAYS and self.text and self.is_blank:
            self.clear()  # tqdm wipes its bar so, and an ordinary line may follow
        else:
            self.next = _Next.OVERWRITTEN
        self.returned = True

    def settle_colour(self) -> None:
        """The sequences that have come belong to what is there, as nothing follows it."""
        if self.next is _Next.STAYS:
            self.text, self.colour = self.text + self.colour, b""

    def clear(self) -> None:
        """Nothing is there any more."""
        self.text, self.next, self.is_redrawn, self.colour = b"", _Next.STAYS, False, b""


class LineReader:
    """Cuts a stream of bytes into lines; how the bytes were divided over the reads makes no difference to them.

    Args:
        max_line: the longest, in bytes; what is longer comes in pieces.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max_line = max_line
        self._held = b""  # a carriage return, or the beginning of an escape sequence, at the end of what has come
        self._rest = bytearray()  # the line that has not ended, where nothing is redrawn
        self._rows: list[_Row] = []  # else this, from the top on
        self._at = 0  # the cursor's
        self._depth = 0  # rows by which the cursor went up last
        self._newest: _Row | None = None  # that was redrawn

    @property
    def rest(self) -> bytes:
        """The beginning of the line that has not ended yet."""
        if not self._rows:
            return bytes(self._rest)
        return self._state_of(self._rows[self._at]) if self._rows[self._at].returned else self._rows[self._at].text

    @property
    def has_bar(self) -> bool:
        """Whether something is redrawn, or has been and may be again: else there is no state, and nothing is due."""
        return bool(self._rows) or self._held == b"\r"

    @property
    def state(self) -> bytes:
        """What the newest bar of the stream shows, one line of text and colours; b"" where there is none."""
        if not self._rows:
            return _clean(bytes(self._rest)) if self._held == b"\r" else b""
        for row in (self._newest, *reversed(self._rows)):
            if row is not None and not row.is_blank and (row.returned or row.erased) and row in self._rows:
                return self._state_of(row)
        return b""

    @property
    def due(self) -> float | None:
        """When :meth:`look` has something to do, seconds of the same clock; None for never."""
        return min((self._waits_until(row) for row in self._rows[: self._at] if row.left_at is not None), default=None)

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that end in ``data``, without their ends.

        Args:
            data: what has come.
            now: the time, in seconds of a monotonic clock.
        """
        if b"\r" not in data and b"\x1b" not in data and not self._rows and not self._held:
            return self._split(data)
        if self._held:
            data, self._held = self._held + data, b""
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
            if data.endswith(b"\r"):
                data, self._held = data[:-1], b"\r"
        if b"\x1b" in data and not self._held:
            unfinished = _UNFINISHED.match(data, data.rfind(b"\x1b"))
            if unfinished is not None and len(unfinished[0]) <= _LONGEST_ESCAPE:
                data, self._held = data[: unfinished.start()], unfinished[0]
        if not self._rows:
            if b"\r" not in data and (b"\x1b" not in data or _MOVES.search(data) is None):
                return self._split(data)
            self._rows, self._at = [_Row(bytes(self._rest))], 0
            self._rest.clear()
        return self._draw(data, now)

    def look(self, now: float) -> list[bytes]:
        """The rows to which the cursor has not come back: they are lines by now."""
        over = [index for index, row in enumerate(self._rows[: self._at]) if self._waits_until(row) <= now]
        lines = self._end_rows(over[-1] + 1) if over else []
        self._go_on_plainly()
        return lines

    def flush(self) -> list[bytes]:
        """What has not ended: the stream has."""
        if self._rows:
            if self._held.startswith(b"\x1b"):
                self._rows[self._at].write(self._held)
            lines = self._end_rows(len(self._rows), at_end=True)
        else:
            self._rest += b"" if self._held == b"\r" else self._held
            lines = self._pieces(bytes(self._rest)) if self._rest else []
        self._held = b""
        self._rest.clear()
        return lines

    # --- lines that are never redrawn ------------------------------------------------------------------------------

    def _split(self, data: bytes) -> list[bytes]:
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._rest:
            lines[0] = bytes(self._rest + lines[0])
            self._rest.clear()
        if lines and max(len(lines[0]), len(data)) > self._max_line:
            lines = [piece for line in lines for piece in self._pieces(line)]
        if rest:
            self._rest += rest
        if len(self._rest) > self._max_line:
            *pieces, last = self._pieces(bytes(self._rest))
            lines += pieces
            self._rest = bytearray(last)
        return lines

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

    # --- rows that are redrawn -------------------------------------------------------------------------------------

    def _draw(self, data: bytes, now: float) -> list[bytes]:
        lines: list[bytes] = []
        for token in _TOKEN.finditer(data):
            text, row = token[0], self._rows[self._at]
            if text == b"\n":
                lines += self._end_row(now)
            elif text == b"\r":
                row.return_carriage()
            elif token["final"] == b"m":
                row.colour += text
            elif token["final"] is not None:
                self._steer(row, token["final"], token["numbers"])
            else:
                row.write(text)
                if row.returned or row.erased:
                    self._newest = row
                lines += self._shorten(row)
        self._go_on_plainly()
        return lines

    def _steer(self, row: _Row, final: bytes, numbers: bytes) -> None:
        """Carries out what moves the cursor, or erases. All else changes no line."""
        first = numbers.partition(b";")[0]
        number = int(first) if first.isdigit() and len(first) < 4 else 0
        rows = min(max(number, 1), _MOST_ROWS)
        if final in b"AF":
            self._go_up(rows)
        elif final in b"BE":
            for _ in range(min(rows, _MOST_ROWS - self._at)):
                self._go_down()
        if final in b"EFGHf":
            self._rows[self._at].return_carriage()
        elif final in b"JK" and (number >= 2 or row.next is not _Next.STAYS or not row.text):
            row.clear()
            row.erased = True
            if final == b"J":
                del self._rows[self._at + 1 :]

    def _go_up(self, rows: int) -> None:
        while rows > self._at:
            self._rows.insert(0, _Row(returned=True))
            self._at += 1
        self._at -= rows
        del self._rows[self._at + _MOST_ROWS :]
        self._depth = len(self._rows) - 1 - self._at
        for row in self._rows[self._at :]:
            row.left_at = None

    def _go_down(self) -> None:
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        else:
            self._rows[self._at].next = _Next.ANEW

    def _end_row(self, now: float) -> list[bytes]:
        """A newline has come."""
        row = self._rows[self._at]
        row.settle_colour()
        row.left_at = now
        self._go_down()
        if row.returned and row.is_blank:
            row.clear()
        # Where nothing is written, the cursor may be on its way to a bar further down.
        if row.is_plain and (row.text or all(above.is_plain for above in self._rows[: self._at])):
            self._depth = 0
            return self._end_rows(self._at)
        over = max(0, self._at - _MOST_ROWS)
        while over < self._at and 0 < self._depth < self._at - over and not self._rows[over].is_redrawn:
            over += 1
        return self._end_rows(over)

    def _shorten(self, row: _Row) -> list[bytes]:
        """No bar is that long."""
        if len(row.text) <= self._max_line:
            return []
        lines = self._end_rows(self._at)
        *pieces, row.text = self._pieces(row.text)
        return lines + pieces

    def _waits_until(self, row: _Row) -> float:
        if row.left_at is None:
            return math.inf
        is_kept = row.erased and self._depth
        return row.left_at + (_NEXT_FRAME_S if is_kept else _COMES_BACK_S)

    def _end_rows(self, count: int, *, at_end: bool = False) -> list[bytes]:
        """So many rows from the top on are lines from now on."""
        lines: list[bytes] = []
        for index, row in enumerate(self._rows[:count]):
            row.settle_colour()
            if row.is_plain and not (row.is_blank and (row.returned or (at_end and index >= self._at))):
                lines += self._pieces(row.text)
            elif not row.is_blank:
                text = _clean(row.text)
                traceback = _TRACEBACK.search(text)
                if traceback is not None and traceback.start():
                    lines.append(text[: traceback.start()].rstrip())
                    text = text[traceback.start() :]
                lines += self._pieces(text)
        del self._rows[:count]
        self._at = max(0, self._at - count)
        return lines

    def _go_on_plainly(self) -> None:
        """Where nothing is redrawn any more, lines are split again."""
        if len(self._rows) == 1:
            row = self._rows[0]
            if row.is_plain and not row.returned and row.next is _Next.STAYS:
                self._rest = bytearray(row.text + row.colour)
                self._rows, self._newest, self._depth = [], None, 0

    def _state_of(self, row: _Row) -> bytes:
        text = _clean(row.text + row.colour if row.next is _Next.STAYS else row.text)
        traceback = _TRACEBACK.search(text)
        return text if traceback is None or not traceback.start() else text[: traceback.start()].rstrip()


def _clean(text: bytes) -> bytes:
    """On one line, with its colours."""
    return _NO_TEXT.sub(b"", text).rstrip()
