"""The progress bars of a job's workers, as rows of a terminal.

Owns the newest one of each worker. Pure; knows no terminal. Where not all find room, those of the lowest ranks are
shown, and how many more there are.
"""

from __future__ import annotations

import re
import unicodedata

from elastic_driver.hosts import WorkerId
from elastic_driver.words import MOST_BARS, Bar

_COLOUR = re.compile("(\x1b\\[[0-9;:]*m)")
_CUT = "…"


class DrawnBars:
    """See above.

    Args:
        in_colour: whether the bars' own colours are shown.

    Attributes:
        version: another one whenever what is shown may be.
    """

    def __init__(self, in_colour: bool) -> None:  # noqa: FBT001 - says it all
        self._in_colour = in_colour
        self._bars: dict[WorkerId, Bar] = {}
        self.version = 0

    def set(self, worker: WorkerId, bar: Bar) -> None:
        """This is its newest one."""
        known = self._bars.get(worker)
        if known is None or (known.data, known.label) != (bar.data, bar.label):
            self._bars[worker] = bar
            self.version += 1

    def remove(self, worker: WorkerId) -> None:
        """It has none any more."""
        if self._bars.pop(worker, None) is not None:
            self.version += 1

    def clear(self) -> None:
        """Nobody has."""
        self._bars.clear()
        self.version += 1

    def rows(self, *, width: int, lines: int) -> list[tuple[str, int]]:
        """What stands on the terminal, row by row, each with the columns that it takes.

        Args:
            width: the most columns that a row may take.
            lines: of the terminal.
        """
        bars = sorted(self._bars.items(), key=lambda item: (_place(item[1].label), item[0]))
        most = max(1, min(MOST_BARS, lines // 3))
        shown = bars if len(bars) <= most else bars[: most - 1]
        rows = [fitted(bar.data.decode(errors="replace"), width, in_colour=self._in_colour) for _, bar in shown]
        if more := len(bars) - len(shown):
            text = f"{more} more progress bar{'s' if more > 1 else ''}"
            rows.append(fitted(text, width, in_colour=False))
        return rows


def _place(label: str) -> tuple[int, str]:
    return (int(label[:9]), "") if label.isdecimal() else (1 << 30, label)


def cells(text: str) -> int:
    """How many columns a text without control characters takes."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitted(text: str, width: int, *, in_colour: bool) -> tuple[str, int]:
    """A line of output, cut where it is too wide, and the columns that it takes. It steers nothing but colours."""
    parts, used, has_colour = [], 0, False
    for index, part in enumerate(_COLOUR.split(text)):
        if index % 2:
            if in_colour:
                has_colour = True
                parts.append(part)
            continue
        for character in part.expandtabs(4):
            if not character.isprintable():
                continue
            size = _cells_of(character)
            if used + size > width:
                # The cut takes the place of the last character, which may be a wide one.
                while parts and used + 1 > width:
                    last = parts.pop()
                    if last.startswith("\x1b"):
                        continue
                    used -= _cells_of(last)
                parts.append(_CUT)
                return "".join(parts) + ("\x1b[0m" if has_colour else ""), used + 1
            parts.append(character)
            used += size
    return "".join(parts) + ("\x1b[0m" if has_colour else ""), used
