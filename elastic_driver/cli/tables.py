"""Tables and lengths of time for the terminal. Plain text, aligned; whatever a name holds stays on its line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence

from elastic_driver.report.printable import one_line

_GAP = "  "
# A column is not cut below this.
_LEAST = 8


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), width: int = 0) -> str:
    """The lines of a table.

    Args:
        heads: of the columns.
        rows: their cells.
        right: heads of the columns that are flush right.
        width: characters of a line; the widest columns that are flush left are cut to get there. 0 for any.
    """
    lines = [list(heads), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cut = [index for index, head in enumerate(heads) if head not in right and widths[index] > _LEAST]
    while width and cut and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        widest = max(cut, key=lambda index: widths[index])
        if widths[widest] == _LEAST:
            break
        widths[widest] -= 1
    return "\n".join(
        _GAP.join(
            cell.rjust(room) if head in right else _fitted(cell, room)
            for head, cell, room in zip(heads, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _fitted(cell: str, room: int) -> str:
    return cell.ljust(room) if len(cell) <= room else f"{cell[: room - 1]}…"


def width_of_output() -> int:
    """Characters of a line on the terminal; 0 where the output goes elsewhere, and is not to be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
