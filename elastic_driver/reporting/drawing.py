"""A small writer of SVG and HTML: elements, escaped texts, and the style of all our pictures.

Owns no layout. Whatever its content, a text becomes neither markup nor a character that is invalid in XML.
"""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

from elastic_driver.reporting import palette
from elastic_driver.reporting.printable import one_line

_NOT_IN_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")
# Longer texts from elsewhere (a failure's command line, an error) are cut.
_LONGEST = 400


def text_of(text: str, longest: int = _LONGEST) -> str:
    """Make a text safe for markup: one line, cut, only valid XML characters, and escaped, also for attributes."""
    plain = _NOT_IN_XML.sub("\ufffd", one_line(text))
    plain = plain if len(plain) <= longest else f"{plain[: longest - 1]}…"
    return escape(plain, {'"': "&quot;", "'": "&#39;"})


def number(value: float) -> str:
    """Format a coordinate, in tenths."""
    rounded = round(value, 1)
    return f"{rounded:g}" if rounded < 1e5 else f"{rounded:.0f}"


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "", *, radius: float = 0) -> str:
    """Return a rectangle of a class, with its tooltip."""
    corners = f' rx="{number(radius)}"' if radius else ""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    if not title:
        return f'<rect class="{kind}" {place}{corners}/>'
    return f'<rect class="{kind}" {place}{corners}><title>{text_of(title)}</title></rect>'


def path(rects: list[tuple[float, float, float, float]], kind: str, title: str = "") -> str:
    """Return many rectangles of a class as one element."""
    drawn = "".join(f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h-{number(w)}z" for x, y, w, h in rects)
    return f'<path class="{kind}" d="{drawn}"><title>{text_of(title)}</title></path>'


def label(x: float, y: float, text: str, kind: str = "t", *, anchor: str = "", longest: int = _LONGEST) -> str:
    """Return a line of text at its baseline."""
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{number(x)}" y="{number(y)}"{where}>{text_of(text, longest)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a straight line of a class."""
    return f'<path class="{kind}" d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"/>'


def style() -> str:
    """Return the style sheet of a picture, for light and dark."""
    fills = "".join(f".{name}{{fill:var(--{name})}}.on-{name}{{fill:var(--on-{name})}}" for name in palette.FILLS)
    return (
        f"{palette.colors()}text{{font:12px system-ui,sans-serif;fill:var(--text)}}{fills}"
        ".bg{fill:var(--card)}.dim{fill:var(--dim)}.size{fill:var(--training);opacity:.25}"
        ".d{fill:var(--dim)}.h{font-size:18px;font-weight:600}"
        ".s{font-size:13px;font-weight:600}.band{opacity:.16}.grid{stroke:var(--line);fill:none}"
        ".round{stroke:var(--dim);stroke-dasharray:2 3;fill:none}.x{stroke:var(--bad);stroke-width:2;fill:none}"
        ".curve{stroke:var(--blue);stroke-width:1.5;stroke-linecap:round;stroke-linejoin:round;fill:none}"
        ".plot{fill:var(--soft);opacity:.5}.n{font-size:11px}"
        ".over{paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}"
    )
