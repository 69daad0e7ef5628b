"""Cuts a worker's output into lines, and tracks the newest state of a progress bar.

Pure: takes bytes and times, returns lines and states. A newline ends a line, and so does a carriage return followed by
a newline. Any other carriage return starts the line over, as on a terminal: of such a line only the last text counts. A
stream that never has one, nor moves the cursor up, is split at its newlines, and costs no more than that.

Bars in several rows (nested ones of tqdm, those of rich) go up again over rows that have ended. So a row that was
redrawn waits for a moment after its newline, until it is clear whether the cursor comes back. A row that was never
redrawn does not wait, and ends all rows above it, too: lines keep their order.

Only what bars use is understood: carriage returns, moving the cursor up and down by some rows, erasing, colors, and
sequences that change no text (titles, visibility of the cursor). At anything else all rows end, and the line continues
unmodified, carriage returns included, until its newline: it may not be a bar, and no output must be lost.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum, auto

# A longer line is passed on in pieces, so that output without newlines cannot fill the memory.
MAX_LINE = 65536
# The cursor comes back at once, in the same write or in the next one.
_COMES_BACK_S = 0.25
# A bar that erases its rows (rich) keeps them until its next frame, or so long: rich draws four frames per second.
_NEXT_FRAME_S = 1.0
_MOST_ROWS = 64
# Bytes of sequences that wait for the text after them; no bar has that many.
_MOST_PENDING = 256

_CONTROL = rb"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
_COLOR = rb"\x1b\[[0-9;:]{0,64}m"
# Visibility of the cursor and the like; titles, links and progress for the terminal's frame; character sets.
_INERT = (
    rb"\x1b\[\?[0-9;]{1,64}[hl]"
    rb"|\x1b\][^\x07\x1b\r\n]{0,1024}(?:\x07|\x1b\\)"
    rb"|\x1b[ -/][0-~]"
)
_TOKEN = re.compile(
    rb"[^\x00-\x08\x0a-\x1f\x7f]+|\r|\n"
    rb"|(?P<control>" + _CONTROL + rb"+)"
    rb"|(?P<sequence>" + _COLOR + rb"|" + _INERT + rb")"
    rb"|\x1b\[(?P<number>[0-9]{0,2})(?P<move>[ABEFGJK])"
    rb"|(?P<unknown>\x1b)"
)
# The beginning of one of these, at the end of the data so far.
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]{0,65}|\][^\x07\x1b\r\n]{0,1024}\x1b?|[ -/])?\Z")
_LONGEST_UNFINISHED = 1027
# What may begin a bar. Without it nothing is erased, and there is no row to go down to.
_BEGINS_BAR = re.compile(rb"\r|\x1b\[(?:[0-9]{0,2}[AF]|[01]?G)")
_SHOWS_CURSOR = b"\x1b[?25h"
# Not part of a line of text: all escape sequences except colors, and control characters except tabs.
_NO_TEXT = re.compile(rb"(?!" + _COLOR + rb")(?:" + _INERT + rb"|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b|" + _CONTROL + rb")")
# Printed after whatever stands in the line, since bars leave it open.
_TRACEBACK = re.compile(rb"(?:\[rank\d+\]: )?Traceback \(most recent call last\):")


class _Next(Enum):
    """What happens to a row's text when more is written there."""

    STAYS = auto()
    OVERWRITTEN = auto()  # after a carriage return
    ANEW = auto()  # the cursor has come from the row above


@dataclass(slots=True, eq=False)
class _Row:
    """A line as far as it is written.

    Attributes:
        text: its content, with all sequences written there.
        is_blank: whether the text shows nothing.
        next: what happens to the text at the next write.
        is_redrawn: whether its text was written over another, or over nothing after a carriage return.
        returned: whether there was any carriage return.
        reentered: whether the cursor went up to it.
        erased: whether it was erased at some time.
        pending: sequences for what is written next, if that starts the text over.
        left_at: when the cursor left it downwards, seconds; None while it is there, or may be expected.
    """

    text: bytes = b""
    is_blank: bool = True
    next: _Next = _Next.STAYS
    is_redrawn: bool = False
    returned: bool = False
    reentered: bool = False
    erased: bool = False
    pending: bytes = b""
    left_at: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is an ordinary line, which need not wait."""
        return not self.is_redrawn and not self.erased

    @property
    def is_open_line(self) -> bool:
        """Whether it has text that no bar has drawn, or is about to draw."""
        return self.is_plain and not self.returned and not self.is_blank

    @property
    def whole(self) -> bytes:
        """Its text with the pending sequences, as if nothing else followed."""
        return self.text + self.pending

    def write(self, text: bytes) -> None:
        """Write text without line ends and sequences."""
        if self.next is _Next.STAYS:
            self.text += text
            self.is_blank = self.is_blank and not text.strip()
        else:
            self.is_redrawn = self.next is _Next.OVERWRITTEN
            self.returned = self.returned and self.is_redrawn
            self.text, self.next, self.pending = self.pending + text, _Next.STAYS, b""
            self.is_blank = not text.strip()

    def add(self, sequence: bytes) -> None:
        """Write an escape sequence that changes no text."""
        if self.next is _Next.STAYS:
            self.text += sequence
        elif len(self.pending) + len(sequence) > _MOST_PENDING:
            self.pending = sequence
        else:
            self.pending += sequence

    def return_carriage(self) -> None:
        """Move the cursor to the row's beginning."""
        if self.next is _Next.STAYS and self.text and self.is_blank:
            self.clear()  # tqdm wipes its bar like this, and an ordinary line may follow
        else:
            self.next = _Next.OVERWRITTEN
        self.returned = True

    def erase(self, sequence: bytes, number: int) -> None:
        """Erase the row from the cursor on (0), or as a whole (2): if there is no bar, its text stays.

        Args:
            sequence: the escape sequence.
            number: the number in it.
        """
        is_bar = self.returned or self.reentered or self.erased
        if is_bar and (number == 2 or (number == 0 and (self.next is not _Next.STAYS or not self.text))):
            self.clear()
            self.erased = True
        else:
            self.add(sequence)

    def clear(self) -> None:
        """Clear the row, except for sequences that wait for the next text."""
        self.text, self.next, self.is_redrawn, self.pending = self.pending, _Next.STAYS, False, b""
        self.is_blank = True


class LineReader:
    """Cuts a stream of bytes into lines; how the bytes were divided into reads makes no difference to them.

    Args:
        max_line: the longest line, in bytes; a longer one is returned in pieces.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max_line = max_line
        self._cut = b""  # a carriage return, or the beginning of an escape sequence, at the end of the data so far
        self._rest = bytearray()  # the unended line, if nothing is redrawn
        self._is_raw = False  # whether it continues unmodified until its newline
        self._rows: list[_Row] = []  # otherwise the rows, from the top
        self._at = 0  # the cursor's row
        self._depth = 0  # rows by which the cursor went up last
        self._newest: _Row | None = None  # the row redrawn last

    @property
    def unended(self) -> list[bytes]:
        """The lines that would end if the stream ended now."""
        if self._rows:
            return self._lines_of(self._rows, at_end=True)
        return self._pieces(bytes(self._rest)) if self._rest else []

    @property
    def has_bar(self) -> bool:
        """Whether anything is redrawn, or has been and may be again: otherwise it has no state, and nothing is due."""
        return bool(self._rows) or (self._cut == b"\r" and not self._is_raw)

    @property
    def state(self) -> bytes:
        """The text of the newest bar of the stream, one line with its colors; b"" if there is none."""
        if not self._rows:
            return _clean(bytes(self._rest)) if self.has_bar else b""
        for row in (self._newest, *reversed(self._rows)):
            if row is not None and not row.is_blank and (row.returned or row.erased) and row in self._rows:
                return _divide(row.text)[0]
        return b""

    @property
    def due(self) -> float | None:
        """When :meth:`look` is to be called, seconds of the same clock; None for never."""
        return min((self._waits_until(row) for row in self._rows[: self._at] if row.left_at is not None), default=None)

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that end in ``data``, without their line ends.

        Args:
            data: the next bytes of the stream.
            now: the time, in seconds of a monotonic clock.
        """
        if b"\r" not in data and b"\x1b" not in data and not self._rows and not self._cut:
            return self._split(data)
        data, self._cut = self._cut + data, b""
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if data.endswith(b"\r"):
            data, self._cut = data[:-1], b"\r"
        elif unfinished := _UNFINISHED.search(data, max(0, len(data) - _LONGEST_UNFINISHED)):
            data, self._cut = data[: unfinished.start()], unfinished[0]
        lines: list[bytes] = []
        begins_bar, at = -1, 0
        while at < len(data):
            if self._is_raw:
                end = data.find(b"\n", at) + 1 or len(data)
                lines += self._split(data[at:end])
                at = end
                continue
            if not self._rows:
                if begins_bar < at:
                    found = _BEGINS_BAR.search(data, at)
                    begins_bar = len(data) if found is None else found.start()
                if begins_bar == len(data):
                    lines += self._split(data[at:])
                    break
                if line := data.rfind(b"\n", at, begins_bar) + 1:
                    lines += self._split(data[at:line])
                    at = line
                if self._rest:
                    data, at, begins_bar = bytes(self._rest) + data[at:], 0, -1
                    self._rest.clear()
                self._rows, self._at = [_Row()], 0
            at = self._draw(data, at, now, lines)
        self._go_on_plainly()
        return lines

    def look(self, now: float) -> list[bytes]:
        """Return the rows to which the cursor has not come back, as lines."""
        over = [index for index, row in enumerate(self._rows[: self._at]) if self._waits_until(row) <= now]
        lines = self._end_rows(over[-1] + 1) if over else []
        self._go_on_plainly()
        return lines

    def flush(self) -> list[bytes]:
        """Return the unended lines, since the stream has ended."""
        if self._cut != b"\r":
            if self._rows:
                self._rows[self._at].add(self._cut)
            else:
                self._rest += self._cut
        lines = self.unended
        self._cut, self._is_raw = b"", False
        self._rest.clear()
        self._end_bars()
        return lines

    # --- lines that are never redrawn ------------------------------------------------------------------------------

    def _split(self, data: bytes) -> list[bytes]:
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._rest:
            lines[0] = bytes(self._rest + lines[0])
            self._rest.clear()
        if lines:
            self._is_raw = False
            if max(len(lines[0]), len(data)) > self._max_line:
                lines = [piece for line in lines for piece in self._pieces(line)]
        if rest:
            self._rest += rest
        if len(self._rest) > self._max_line:
            *pieces, last = self._pieces(bytes(self._rest))
            lines += pieces
            self._rest, self._is_raw = bytearray(last), True
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

    def _draw(self, data: bytes, start: int, now: float, lines: list[bytes]) -> int:
        """Carry out ``data`` from ``start`` on, and append ended lines to ``lines``.

        Returns:
            the position reached: the end, or something that no bar uses.
        """
        for token in _TOKEN.finditer(data, start):
            text, row = token[0], self._rows[self._at]
            if text == b"\n":
                lines += self._end_row(now)
            elif text == b"\r":
                row.return_carriage()
            elif token["sequence"] is not None:
                if text == _SHOWS_CURSOR:  # the last frame has been drawn
                    lines += self._end_rows(self._at)
                    self._depth = 0
                row.add(text)
            elif token["control"] is not None:
                if row.next is _Next.STAYS:
                    row.text += text
            elif token["unknown"] is not None or (token["move"] is not None and not self._steer(token, now, lines)):
                lines += self._give_up()
                return token.start()
            elif token["move"] is None:
                row.write(text)
                if row.returned or row.erased:
                    self._newest = row
            if len(row.text) > self._max_line:
                lines += self._give_up()
                return token.end()
        return len(data)

    def _end_row(self, now: float) -> list[bytes]:
        """Handle a newline. Returns the lines that end with it."""
        row = self._rows[self._at]
        row.text, row.pending = row.whole, b""
        row.left_at = now
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        else:
            self._rows[self._at].next = _Next.ANEW
        if row.returned and row.is_blank:
            row.clear()
        # If nothing is written, the cursor may be on its way to a bar further down.
        if row.is_plain and (row.text or all(above.is_plain for above in self._rows[: self._at])):
            self._depth = 0
            return self._end_rows(self._at)
        over = max(0, self._at - _MOST_ROWS)
        while over < self._at and 0 < self._depth < self._at - over and not self._rows[over].is_redrawn:
            over += 1
        return self._end_rows(over)

    def _waits_until(self, row: _Row) -> float:
        if row.left_at is None:
            return math.inf
        is_kept = row.erased and self._depth
        return row.left_at + (_NEXT_FRAME_S if is_kept else _COMES_BACK_S)

    def _end_rows(self, count: int) -> list[bytes]:
        """Turn so many rows from the top into lines."""
        lines = self._lines_of(self._rows[:count])
        del self._rows[:count]
        self._at = max(0, self._at - count)
        return lines

    def _lines_of(self, rows: list[_Row], *, at_end: bool = False) -> list[bytes]:
        lines: list[bytes] = []
        for index, row in enumerate(rows):
            if row.is_plain:
                is_none = (row.returned and row.is_blank) or (at_end and index >= self._at and not row.whole)
                lines += [] if is_none else self._pieces(row.whole)
            elif not row.is_blank:
                lines += [piece for line in _divide(row.whole) for piece in self._pieces(line)]
        return lines

    def _give_up(self) -> list[bytes]:
        """Treat the cursor's row as not a bar, or no longer one: the other rows end, and it continues unmodified."""
        row = self._rows.pop(self._at)
        lines = self._lines_of(self._rows)
        text = row.text + (b"" if row.next is _Next.STAYS else b"\r") + row.pending
        self._end_bars()
        *pieces, last = self._pieces(text)
        self._rest, self._is_raw = bytearray(last), True
        return lines + pieces

    def _go_on_plainly(self) -> None:
        """Split at newlines again once nothing is redrawn."""
        if len(self._rows) == 1:
            row = self._rows[0]
            if row.is_plain and not row.returned and row.next is _Next.STAYS:
                self._rest = bytearray(row.text)
                self._end_bars()

    def _end_bars(self) -> None:
        self._rows, self._newest, self._at, self._depth = [], None, 0, 0

    # --- moving the cursor -----------------------------------------------------------------------------------------

    def _steer(self, token: re.Match[bytes], now: float, lines: list[bytes]) -> bool:
        """Carry out a move of the cursor, or an erasure. Returns False for one that bars do not use."""
        move, count = token["move"], int(token["number"] or b"0")
        row = self._rows[self._at]
        match move:
            case b"A" | b"F" if count <= _MOST_ROWS:
                lines += self._go_up(max(count, 1))
            case b"B" | b"E" if count <= _MOST_ROWS and self._at + 1 < len(self._rows):
                lines += self._go_down(max(count, 1), now)
            case b"G" if count <= 1:
                row.return_carriage()
            case b"K":
                row.erase(token[0], count)
            case b"J" if count == 0:
                row.erase(token[0], count)
                for below in self._rows[self._at + 1 :]:
                    if below.text:
                        below.erase(b"", 2)
            case _:
                return False
        if move in b"EF":
            self._rows[self._at].return_carriage()
        return True

    def _go_up(self, count: int) -> list[bytes]:
        """Move the cursor up, over rows already passed on if there are too few. Returns the lines that end."""
        # Text that no bar has drawn was there first, and must not be overwritten unseen.
        lines = self._end_rows(self._at + 1) if self._rows[self._at].is_open_line else None
        missing = count - (self._at if lines is None else 0)
        above = [_Row(returned=True) for _ in range(min(missing, _MOST_ROWS - len(self._rows)))]
        self._rows[:0] = above
        self._at = 0 if missing >= 0 else -missing
        if not self._rows:
            self._rows = [_Row(returned=True)]
        self._depth = len(self._rows) - 1 - self._at
        for row in self._rows[self._at :]:
            row.left_at = None
        self._rows[self._at].reentered = True
        return lines or []

    def _go_down(self, count: int, now: float) -> list[bytes]:
        """Move the cursor down, over existing rows. Returns the lines that end."""
        end = min(self._at + count, len(self._rows) - 1)
        for row in self._rows[self._at : end]:
            row.left_at = now
        over = self._at + 1 if self._rows[self._at].is_open_line else 0
        self._at = end
        return self._end_rows(over)


def _divide(text: bytes) -> list[bytes]:
    """Return the text of a bar's row, and the traceback after it, if there is one."""
    text = _clean(text)
    traceback = _TRACEBACK.search(text)
    if traceback is None or not traceback.start():
        return [text]
    return [text[: traceback.start()].rstrip(), text[traceback.start() :]]


def _clean(text: bytes) -> bytes:
    """Return the text as one line, with its colors."""
    return _NO_TEXT.sub(b"", text).rstrip()
