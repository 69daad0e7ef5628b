"""Tables for the terminal. Plain text, aligned; each cell stays on its line, whatever it contains."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence

from elastic_driver.reporting.printable import one_line

_GAP = "  "
# The least width to which a column is cut.
_LEAST = 8


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), width: int = 0) -> str:
    """Format a table as lines.

    Args:
        heads: of the columns.
        rows: their cells.
        right: heads of the right-aligned columns.
        width: characters of a line; the widest left-aligned columns are cut to fit. 0 for unlimited.
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
    """Return the width of the terminal in characters; 0 if the output goes elsewhere, and must not be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
