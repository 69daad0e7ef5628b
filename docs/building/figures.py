"""Draws the pictures in docs/images/ that explain how a job works: `python docs/building/figures.py` writes them.

They are 360 pixels wide, so that their text is readable on a phone, and follow the reader's light or dark scheme.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "images"
WIDTH = 360

# The colors by name, for the light and the dark scheme. Text colors have a contrast of at least 4.5 in each scheme.
_COLORS = {
    "bg": ("#ffffff", "#0d1117"),
    "fg": ("#1f2328", "#e6edf3"),
    "dim": ("#59636e", "#9198a1"),
    "box": ("#f3f5f7", "#1c2129"),
    "line": ("#8c959f", "#6e7681"),
    "driver": ("#0969da", "#4493f8"),
    "agent": ("#8250df", "#ab7df8"),
    "worker": ("#0f7a5b", "#3fb68b"),
    "change": ("#b54708", "#f0803c"),
}


class Picture:
    """A picture, drawn from top to bottom."""

    def __init__(self, title: str, height: int) -> None:
        self._height = height
        light, dark = (";".join(f"--{name}:{pair[index]}" for name, pair in _COLORS.items()) for index in (0, 1))
        fills = "".join(f".{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in _COLORS)
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img"><title>{escape(title)}</title>',
            f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{fills}"
            "text{font:12px system-ui,sans-serif}.b{font-weight:600}.small{font-size:11px}"
            "path,rect.o{stroke-width:1.5}path{fill:none}.dash{stroke-dasharray:4 3}</style>",
            f'<rect class="bg" width="{WIDTH}" height="{height}"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "fg", *, anchor: str = "start") -> None:
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect class="box s-{color} o" {place} rx="5"/>')

    def bar(self, x: float, y: float, width: float, color: str) -> None:
        self._parts.append(f'<rect class="{color}" x="{x:g}" y="{y:g}" width="{width:g}" height="14" rx="2"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, color: str = "line", *, dashed: bool = False) -> None:
        kind = f"s-{color}{' dash' if dashed else ''}"
        self._parts.append(f'<path class="{kind}" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, color: str = "line") -> None:
        """Draw a horizontal or vertical line with a head at its end."""
        self.line(x, y, to_x, to_y, color)
        if y == to_y:
            back = 6 if to_x < x else -6
            head = f"M{to_x + back:g} {to_y - 4:g}L{to_x:g} {to_y:g}L{to_x + back:g} {to_y + 4:g}"
        else:
            back = 6 if to_y < y else -6
            head = f"M{to_x - 4:g} {to_y + back:g}L{to_x:g} {to_y:g}L{to_x + 4:g} {to_y + back:g}"
        self._parts.append(f'<path class="s-{color}" d="{head}"/>')

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def architecture() -> Picture:
    """Draw the processes of a job, their connections, and the open ports."""
    picture = Picture("A driver, an agent on each host, their workers, and the connections between them", 420)
    picture.box(10, 10, 340, 84, "driver")
    picture.text(22, 30, "driver (elasticrun)", "driver b")
    picture.text(22, 48, "discovers hosts, forms rounds")
    picture.text(22, 66, "one port, TLS: --rendezvous-port", "dim")
    picture.text(22, 83, "on its own machine: a Unix socket, no port", "dim small")
    picture.arrow(90, 150, 90, 96, "agent")
    picture.arrow(270, 150, 270, 96, "agent")
    picture.text(180, 116, "each agent opens", "fg small", anchor="middle")
    picture.text(180, 130, "one connection", "fg small", anchor="middle")
    for x, name, kind in ((10, "host A", "Unix socket"), (190, "host B", "Unix socket")):
        picture.box(x, 140, 160, 222, "line")
        picture.text(x + 80, 160, name, "fg b", anchor="middle")
        picture.box(x + 12, 170, 136, 50, "agent")
        picture.text(x + 24, 190, "agent", "agent b")
        picture.text(x + 24, 208, "runs the workers", "dim small")
        picture.arrow(x + 80, 276, x + 80, 222, "worker")
        picture.text(x + 74, 254, kind, "fg small", anchor="end")
        picture.box(x + 12, 276, 136, 74, "worker")
        picture.text(x + 24, 296, "workers", "worker b")
        picture.text(x + 24, 314, "train.py", "dim small")
        picture.text(x + 24, 330, "ports: --port-range", "dim small")
    picture.line(158, 340, 202, 340, "worker")
    picture.arrow(180, 340, 202, 340, "worker")
    picture.arrow(180, 340, 158, 340, "worker")
    picture.text(180, 384, "Workers exchange tensors with each other,", "fg small", anchor="middle")
    picture.text(180, 400, "not encrypted, on the ports of --port-range.", "fg small", anchor="middle")
    return picture


def a_round() -> Picture:
    """Draw the messages between the driver and the workers, from a worker's start to the end of its round."""
    picture = Picture("A round, from the start of the workers to their next change", 410)
    columns = {"driver": 44, "agent": 160, "worker": 290}
    for name, x in columns.items():
        picture.box(x - 38, 10, 76, 26, name)
        picture.text(x, 28, {"worker": "workers"}.get(name, name), f"{name} b", anchor="middle")
        picture.line(x, 36, x, 360, "line", dashed=True)
    steps = (
        ("driver", "agent", "start workers"),
        ("agent", "worker", "start processes"),
        ("worker", "agent", "request a round"),
        ("agent", "driver", "forward request"),
        ("driver", "agent", "round 1: ranks"),
        ("agent", "worker", "your rank, the size"),
    )
    y = 66
    for begin, end, words in steps:
        low, high = sorted((columns[begin], columns[end]))
        picture.text((low + high) / 2, y - 5, words, "fg small", anchor="middle")
        picture.arrow(columns[begin], y, columns[end], y, begin)
        y += 30
    picture.box(206, y - 14, 148, 64, "worker")
    for number, words in enumerate(("connect to each other", "train, commit,", "train, commit, ...")):
        picture.text(280, y + 3 + 17 * number, words, "fg small", anchor="middle")
    y += 76
    picture.text(100, y - 5, "notice: change", "change small", anchor="middle")
    picture.arrow(44, y, 160, y, "change")
    picture.text(225, y + 13, "notice", "change small", anchor="middle")
    picture.arrow(160, y + 18, 290, y + 18, "change")
    picture.text(180, 384, "At their next commit, all workers leave the round", "fg small", anchor="middle")
    picture.text(180, 400, "and ask for the next one.", "fg small", anchor="middle")
    return picture


def a_change() -> Picture:
    """Draw the addition of a host and the death of a worker over time."""
    picture = Picture("Two changes over time: a host is added, then a worker is killed", 330)
    left = 66

    def row(y: float, name: str, bars: tuple[tuple[float, float, str], ...]) -> None:
        picture.text(10, y + 11, name, "fg small")
        for begin, end, color in bars:
            picture.bar(left + begin, y, end - begin, color)

    picture.text(10, 20, "A host is added", "fg b")
    row(32, "worker 0", ((0, 150, "worker"), (158, 284, "worker")))
    row(52, "worker 1", ((0, 150, "worker"), (158, 284, "worker")))
    row(72, "worker 2", ((50, 138, "line"), (158, 284, "worker")))
    picture.line(left + 154, 28, left + 154, 94, "change", dashed=True)
    picture.text(left + 50, 102, "it starts, imports", "dim small")
    picture.text(left + 158, 102, "round 2", "change small")
    picture.text(10, 122, "The others train until it is ready. They change", "fg small")
    picture.text(10, 138, "at their next commit: no step is lost.", "fg small")

    picture.text(10, 174, "A worker is killed", "fg b")
    row(186, "worker 0", ((0, 110, "worker"), (136, 284, "worker")))
    row(206, "worker 1", ((0, 110, "worker"), (136, 284, "worker")))
    row(226, "worker 2", ((0, 100, "worker"),))
    picture.line(left + 70, 182, left + 70, 246, "line", dashed=True)
    picture.text(left + 66, 256, "last commit", "dim small", anchor="end")
    picture.line(left + 97, 229, left + 105, 237, "change")
    picture.line(left + 105, 229, left + 97, 237, "change")
    picture.text(left + 112, 237, "killed", "change small")
    picture.text(left + 136, 256, "round 2", "change small")
    picture.text(10, 280, "The survivors return to their last commit, in their", "fg small")
    picture.text(10, 296, "processes, and continue. The steps since that commit", "fg small")
    picture.text(10, 312, "are repeated.", "fg small")
    return picture


PICTURES = {"architecture": architecture, "round": a_round, "change": a_change}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
