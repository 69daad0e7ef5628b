"""The progress bars of a job's workers, as rows of a terminal.

Owns the newest bar of each stream of each worker; of a worker's bars the one drawn last is shown. Pure; does not access
a terminal. If there is not enough room, those of the lowest ranks are shown, and the number of the others.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from elastic_driver.hosts import WorkerId
from elastic_driver.words import MOST_BARS, Bar

_COLOR = re.compile("(\x1b\\[[0-9;:]*m)")
_CUT = "…"
# On a smaller terminal, the status line and a bar would take more rows than the output above them.
_FEWEST_LINES = 3


class DrawnBars:
    """The progress bars to draw.

    Args:
        in_color: whether to show the bars' own colors.

    Attributes:
        version: changes whenever the rows may have changed.
    """

    def __init__(self, in_color: bool) -> None:  # noqa: FBT001 - says it all
        self._in_color = in_color
        self._bars: dict[WorkerId, dict[str, Bar]] = {}  # by stream; the one drawn last is the last
        self._order: list[WorkerId] | None = None  # by rank; None if it has to be computed
        self._seen: set[WorkerId] = set()  # workers in the last rows
        self._rows: list[tuple[str, int]] = []  # the last rows, valid for _rows_of
        self._rows_of: tuple[int, int, int] | None = None  # version, width and lines
        self.version = 0

    def __bool__(self) -> bool:
        """Return whether there is any bar."""
        return bool(self._bars)

    def set(self, worker: WorkerId, bar: Bar) -> None:
        """Set the newest bar of its stream."""
        streams = self._bars.setdefault(worker, {})
        shown = _newest(streams)
        streams.pop(bar.stream, None)
        streams[bar.stream] = bar
        if shown is None or shown.label != bar.label:
            self._order = None
        elif shown.data == bar.data or (self._order is not None and worker not in self._seen):
            return
        self.version += 1

    def remove(self, worker: WorkerId, stream: Literal["stdout", "stderr"] | None = None) -> None:
        """Remove a worker's bar of this stream, or all of its bars."""
        streams = self._bars.get(worker)
        if streams is None or (stream is not None and streams.pop(stream, None) is None):
            return
        if stream is None or not streams:
            del self._bars[worker]
        self._order = None
        self.version += 1

    def clear(self) -> None:
        """Remove all bars."""
        self._bars.clear()
        self._order = None
        self.version += 1

    def rows(self, *, width: int, lines: int) -> list[tuple[str, int]]:
        """Return the rows for the terminal, each with the number of columns that it takes.

        Args:
            width: the most columns that a row may take.
            lines: the height of the terminal.
        """
        if self._rows_of != (self.version, width, lines):
            self._rows_of = self.version, width, lines
            self._rows = self._rows_anew(width, lines)
        return list(self._rows)

    def _rows_anew(self, width: int, lines: int) -> list[tuple[str, int]]:
        if self._order is None:
            newest = {worker: bar for worker, streams in self._bars.items() if (bar := _newest(streams)) is not None}
            self._order = sorted(newest, key=lambda worker: (_place(newest[worker].label), worker))
        most = 0 if lines < _FEWEST_LINES else min(MOST_BARS, lines // 3)
        shown = self._order[: most if len(self._order) <= most else max(0, most - 1)]
        self._seen = set(shown)
        bars = [bar for worker in shown if (bar := _newest(self._bars[worker])) is not None]
        rows = [fitted(bar.data.decode(errors="replace"), width, in_color=self._in_color) for bar in bars]
        if most and (more := len(self._order) - len(shown)):
            text = f"{more} more progress bar{'s' if more > 1 else ''}"
            rows.append(fitted(text, width, in_color=False))
        return rows


def _newest(streams: dict[str, Bar]) -> Bar | None:
    return next(reversed(streams.values()), None)


def _place(label: str) -> tuple[int, str]:
    return (int(label[:9]), "") if label.isdecimal() else (1 << 30, label)


def cells(text: str) -> int:
    """Return how many columns a text without control characters takes."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitted(text: str, width: int, *, in_color: bool) -> tuple[str, int]:
    """Return a line of output, cut to the width, and its columns. Of control sequences only colors are kept."""
    parts, used, has_color = [], 0, False
    spare = width  # limit of parts that take no column: colors, accents
    for index, part in enumerate(_COLOR.split(text)):
        if index % 2:
            if in_color and spare:
                spare -= 1
                has_color = True
                parts.append(part)
            continue
        for character in part.expandtabs(4):
            if not character.isprintable():
                continue
            size = _cells_of(character)
            if size == 0:
                if not spare:
                    continue
                spare -= 1
            if used + size > width:
                # The ellipsis replaces the last character, which may be a wide one.
                while parts and used + 1 > width:
                    last = parts.pop()
                    if last.startswith("\x1b"):
                        continue
                    used -= _cells_of(last)
                parts.append(_CUT)
                return "".join(parts) + ("\x1b[0m" if has_color else ""), used + 1
            parts.append(character)
            used += size
    return "".join(parts) + ("\x1b[0m" if has_color else ""), used
