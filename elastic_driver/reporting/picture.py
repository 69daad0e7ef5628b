"""A picture of a job: its hosts and workers over time, its rounds, its time by category, and its changes.

Owns the layout. One SVG, or one page of HTML with the SVG and its tables in it; nothing is loaded from anywhere.
Everything is laid out twice, for a desktop and for a phone; the reader's screen shows one of them. It stays readable,
and below a megabyte, whatever the job: pieces narrower than half a pixel are merged with their neighbors, and
omissions are listed below the picture.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_driver.reporting.curve_lines import Curve, curves_of
from elastic_driver.reporting.drawing import label, line, number, path, rect, style, text_of
from elastic_driver.reporting.goodput import Category
from elastic_driver.reporting.printable import one_line
from elastic_driver.reporting.story import BOOTS, DRAINED, ENDS, WAITS, WORKS, Life, Mark, Round, Story

_HALF_PIXEL = 0.5
# The mean width of a letter, pixels, to estimate the width of words.
_LETTER = 6.4
# The most places with a row of their own; the height of all rows, of one at most, and of one at least.
_MOST_ROWS, _ROWS_HEIGHT, _HIGHEST, _LOWEST = 1200, 1400.0, 15.0, 1.2
_MOST_MARKS = 400
# A picture that would be too large is drawn coarser.
_COARSEST = 16.0
# Length of a cross's arms, pixels; deaths closer to each other share one. The most rounds with lines through all hosts.
_CROSS, _FEW_ROUNDS = 8.0, 60
_TABLE_FIRST, _TABLE_LAST = 6, 14
_PAGE_FIRST, _PAGE_LAST = 100, 400
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY = 86400

_NAMES = {
    Category.TRAINING: "training",
    Category.RECOMPUTED: "recomputed",
    Category.RESET: "reset",
    Category.STALLED: "stalled",
    Category.WAITING_FOR_SLOTS: "waiting for slots",
    Category.START: "start",
    Category.IDLE: "idle",
    Category.UNEXPLAINED: "unexplained",
}
_OF_WORKER = {WORKS: "training", BOOTS: "start", WAITS: "idle", DRAINED: "drained", ENDS: "idle"}
_SAID_OF_WORKER = {
    WORKS: "in a round",
    BOOTS: "starts",
    WAITS: "ready, not in a round",
    DRAINED: "drained",
    ENDS: "stopping",
}


def duration(seconds: float) -> str:
    """Format a length of time: "0.42 s", "95 s", "35 min", "7.5 h", "3.2 d"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    for size, unit in ((_DAY, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def cells_of(each: Round, *, is_first: bool) -> tuple[str, ...]:
    """Return a row of the table of changes: round, when, workers, time lost, recomputed, from commit, cause."""
    change = str(each.size) if not each.old_size else f"{each.old_size} → {each.size}"
    lost = "-" if is_first else "unknown" if each.took_s is None else duration(each.took_s)
    again = "-" if is_first else "unknown" if each.lost_s is None else duration(each.lost_s) if each.lost_s else "0"
    commit = "-" if each.commit is None or is_first else str(each.commit)
    return str(each.round_id), clock(each.at), change, lost, again, commit, each.cause


HEADS = ("round", "at", "workers", "time lost", "recomputed", "from commit", "cause")


def clock(seconds: float) -> str:
    """Format a time of the job: "1:05", "2:00:10", "3 d 04:10"."""
    whole = int(seconds)
    days, rest = divmod(whole, _DAY)
    hours, minutes, left = rest // 3600, rest % 3600 // 60, rest % 60
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def ending_of(story: Story) -> str:
    """Return how the job has ended, as text."""
    if story.exit_code is None:
        return f"the log has no end: the job is running, or its driver was killed (last event at {clock(story.last)})"
    return f"exit code {story.exit_code}: {story.message}"


def kept(rounds: Sequence[Round], first: int, last: int) -> tuple[Sequence[Round], int, Sequence[Round]]:
    """Return the first and the last rounds, and how many are between."""
    if len(rounds) <= first + last:
        return rounds, 0, ()
    return rounds[:first], len(rounds) - first - last, rounds[-last:]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout for one kind of screen.

    Attributes:
        name: of its class.
        width: of the picture, pixels.
        left, right: of the areas beside the time axis.
        margin: of texts.
        ticks: the most ticks of the time axis.
        most_pieces: the most pieces with a tooltip each; a row with more is one element.
        most_bytes: limit of the picture's size.
    """

    name: str
    width: float
    left: float
    right: float
    margin: float
    ticks: int
    most_pieces: int
    most_bytes: int

    @property
    def is_narrow(self) -> bool:
        """Whether names are above the rows that they name, not beside them."""
        return self.left == self.margin

    @property
    def plot(self) -> float:
        """The width of the time axis."""
        return self.width - self.left - self.right

    @property
    def letters(self) -> int:
        """The number of letters in a line."""
        return int((self.width - 2 * self.margin) / _LETTER)


_WIDE = _Layout("wide", 1200, left=150, right=24, margin=16, ticks=14, most_pieces=2000, most_bytes=550_000)
_NARROW = _Layout("narrow", 360, left=12, right=12, margin=12, ticks=4, most_pieces=300, most_bytes=250_000)
# A phone reports its own width, even if it shows a picture as if on a wide screen. Chromium reports a device of width 0
# for a picture in an <img>.
_IS_NARROW = "(max-width:600px),(min-device-width:1px) and (max-device-width:600px)"


_SIZE = re.compile(r'width="([\d.]+)" height="([\d.]+)"')


@dataclass(slots=True)
class _Row:
    """A row of the timeline: a place, or all places of a host."""

    title: str
    lives: list[Life]


class _Picture:
    def __init__(self, story: Story, layout: _Layout, least: float = _HALF_PIXEL) -> None:
        self.story = story
        self.layout = layout
        self.least = least  # pixels: narrower pieces are merged
        self.span = max(story.last, 1e-3)
        self.parts: list[str] = []
        self.y = 0.0
        self.merged = 0
        self.unmarked = 0
        self.notes: list[str] = []
        self._first_of_timeline = 0
        self._lanes_from = 0.0

    def x(self, at: float) -> float:
        return self.layout.left + self.layout.plot * min(max(at, 0.0), self.span) / self.span

    # --- from top to bottom ----------------------------------------------------------------------------------------

    def draw(self, *, with_table: bool) -> str:
        self._head()
        self._goodput()
        top, self._first_of_timeline = self.y, len(self.parts)
        self._sizes()
        self._strip()
        self._curves()
        self._lanes()
        # The numbers of rounds are below the first name.
        self._columns(top + (19 if self.layout.is_narrow else 0))
        self._axis()
        if with_table:
            (self._cards if self.layout.is_narrow else self._table)()
        self._footnotes()
        width, height = number(self.layout.width), number(self.y + 12)
        ground = rect(0, 0, self.layout.width, self.y + 12, "bg")
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        return f'<svg class="{self.layout.name}" {size}>{ground}{"".join(self.parts)}</svg>'

    def _words(self, text: str, kind: str = "t", *, height: float = 18, size: float = 1.0) -> None:
        """Draw a text, in several lines on a narrow screen."""
        lines = textwrap.wrap(one_line(text), int(self.layout.letters / size)) if self.layout.is_narrow else [text]
        for each in lines[:8]:
            self.y += height
            self.parts.append(label(self.layout.margin, self.y, each, kind, longest=180))

    def _name(self, text: str, below: float) -> None:
        """Draw a name beside or above the next part; ``below`` is the top of that part."""
        if self.layout.is_narrow:
            self.y += 14
            self.parts.append(label(self.layout.margin, self.y, text, "s"))
            self.y += 5
        else:
            self.parts.append(label(self.layout.margin, self.y + below, text, "s", longest=16))

    def _head(self) -> None:
        story = self.story
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(story.began, 0.0), 4e9)))
        changes = max(0, len(story.rounds) - 1)
        facts = f"{changes} change{'' if changes == 1 else 's'}, {len(story.lives)} processes on {len(story.hosts)} "
        facts += f"host{'' if len(story.hosts) == 1 else 's'}"
        self.y = 10.0
        self._words(f"job {story.job_id}", "h", height=20, size=1.5)
        self._words(f"{began}, {duration(story.last)}; {facts}", "d")
        self._words(ending_of(story))
        self.y += 16

    def _goodput(self) -> None:
        booked, layout = self.story.booked, self.layout
        self._name(f"goodput {100 * booked.share:.1f} %", 16)
        x, width = layout.left, layout.plot
        legend_x, legend_y = layout.left, self.y + 42
        for category, name in _NAMES.items():
            spent_s = booked.seconds.get(category)
            share = spent_s / self.span if spent_s else 0.0
            if share > 0:
                title = f"{name}: {duration(spent_s or 0)}, {100 * share:.2f} %"
                self.parts.append(rect(x, self.y, width * share, 22, category, title))
                if width * share > _LETTER * len(name) + 10:
                    self.parts.append(label(x + 5, self.y + 15, name, f"on-{category}"))
                x += width * share
            figure = "unknown" if spent_s is None else f"{duration(spent_s)} ({100 * share:.1f} %)"
            times = f", {self.story.resets} time{'' if self.story.resets == 1 else 's'}" if self.story.resets else ""
            count = times if category is Category.RESET else ""
            text = f"{name} {figure}{count}"
            if not spent_s and category is not Category.UNEXPLAINED:
                continue
            room = 16 + 6.6 * len(text) + (6 if layout.is_narrow else 22)
            if legend_x + room > layout.width - layout.right and legend_x > layout.left:
                legend_x, legend_y = layout.left, legend_y + 18
            self.parts.append(rect(legend_x, legend_y - 9, 10, 10, category, radius=2))
            self.parts.append(label(legend_x + 15, legend_y, text, "d"))
            legend_x += room
        if legend_x + 110 > layout.width - layout.right:
            legend_x, legend_y = layout.left, legend_y + 18
        if any(piece.kind == DRAINED for life in self.story.lives for piece in life.pieces):
            self.parts.append(rect(legend_x, legend_y - 9, 10, 10, "drained", radius=2))
            self.parts.append(label(legend_x + 15, legend_y, "drained workers", "d"))
        self.y = legend_y + 22

    def _sizes(self) -> None:
        """Draw the sizes of the rounds, as steps."""
        sizes = self.story.sizes
        if not sizes:
            return
        most = max(size for _, size in sizes)
        self._name(f"workers: up to {most}" if self.layout.is_narrow else "workers", 14)
        top, height = self.y, 56.0
        self._scale(str(most), "0", height)
        points, before_x = [f"M{number(self.x(sizes[0][0]))} {number(top + height)}"], -1.0
        for index, (at, size) in enumerate(sizes):
            x = self.x(at)
            until = sizes[index + 1][0] if index + 1 < len(sizes) else self.span
            if index and x - before_x < _HALF_PIXEL and self.x(until) - x < _HALF_PIXEL:
                continue
            before_x = x
            points.append(f"H{number(x)}V{number(top + height - (height - 2) * size / most)}")
        points.append(f"H{number(self.x(self.span))}V{number(top + height)}z")
        self.parts.append(f'<path class="size" d="{"".join(points)}"><title>members of the round</title></path>')
        self.y = top + height + 8

    def _scale(self, high: str, low: str, height: float) -> None:
        """Label the ends of a scale, if there is room."""
        if not self.layout.is_narrow:
            self.parts.append(label(self.layout.left - 6, self.y + 10, high, "d", anchor="end"))
            self.parts.append(label(self.layout.left - 6, self.y + height, low, "d", anchor="end"))

    def _curves(self) -> None:
        """Draw the curves, if the log has samples."""
        curves, more = curves_of(self.story)
        for curve in curves:
            self._curve(curve)
        if more:
            self.notes.append(f"{more} more figures reported by the training are not drawn")

    def _curve(self, curve: Curve) -> None:
        layout, height = self.layout, 44.0
        high, low = curve.show(curve.high), curve.show(curve.low)
        if layout.is_narrow:
            self._name(curve.name if len(curve.name) <= 28 else f"{curve.name[:27]}…", 0)
            end = layout.width - layout.right
            self.parts.append(label(end, self.y - 5, f"last {curve.last}", "d", anchor="end", longest=22))
        else:
            self._name(curve.name, 23)
            self.parts.append(label(layout.margin, self.y + 36, f"last {curve.last}", "d", longest=20))
        top = self.y
        self.parts.append(rect(layout.left, top, layout.plot, height, "plot"))
        self._scale(high, low, height)
        scale = (height - 2) / (curve.high - curve.low)
        drawn = curve.line(self.x, lambda value: top + height - 1 - scale * (value - curve.low))
        unit = f" ({curve.unit})" if curve.unit else ""
        title = text_of(f"{curve.name}{unit}: last {curve.last}, scale {low} to {high}")
        self.parts.append(f'<path class="curve" d="{drawn}"><title>{title}</title></path>')
        if layout.is_narrow:
            self.parts.append(label(layout.left + 3, top + 11, high, "d n over"))
            self.parts.append(label(layout.left + 3, top + height - 3, low, "d n over"))
        self.y = top + height + 8

    def _strip(self) -> None:
        """Draw the job's time by category, in one row, and as bands behind all other rows."""
        self._name("the job", 13)
        for since, until, kind, many in self._fused([(p.since, p.until, p.kind) for p in self.story.pieces]):
            what = _NAMES.get(Category(kind), kind)
            title = f"{what}: {clock(since)} to {clock(until)}, {duration(until - since)}"
            title += f" ({many} pieces)" if many > 1 else ""
            width = max(_HALF_PIXEL, self.x(until) - self.x(since))
            self.parts.append(rect(self.x(since), self.y, width, 17, kind, title))
            if width > _LETTER * len(what) + 10:
                self.parts.append(label(self.x(since) + 4, self.y + 13, what, f"on-{kind}"))
        last = -_CROSS
        for mark in self.story.marks:
            x = self.x(mark.at)
            if mark.kind in ("notice", "stood_still", "took_over") and x - last >= _CROSS / 2:
                last = x
                drawn = f"M{number(x)} {number(self.y + 18)}l3 5h-6z"
                title = text_of(f"{clock(mark.at)}: {mark.text}")
                self.parts.append(f'<path class="dim" d="{drawn}"><title>{title}</title></path>')
        self.y += 27

    def _fused(self, pieces: Sequence[tuple[float, float | None, str]]) -> list[tuple[float, float, str, int]]:
        """Merge pieces until they are visible: since, until, kind, and the number of pieces in each.

        A piece narrower than half a pixel is merged with the one before it, unless there is a gap; a single short one
        is drawn half a pixel wide.
        """
        fused: list[tuple[float, float, str, int]] = []
        least = self.span * self.least / self.layout.plot
        for since, end, kind in pieces:
            until = self.story.last if end is None else end
            if fused and since - fused[-1][1] < least:
                first, _, before, many = fused[-1]
                if kind == before or until - since < least:
                    fused[-1] = (first, until, before, many + 1)
                    self.merged += 1
                    continue
                if fused[-1][1] - first < least and many > 1:
                    fused[-1] = (first, until, kind, many + 1)
                    self.merged += 1
                    continue
            fused.append((since, until, kind, 1))
        return fused

    # --- hosts and workers -----------------------------------------------------------------------------------------

    def _rows(self) -> dict[str, list[_Row]]:
        """Return the rows of each host."""
        places: dict[str, dict[int, list[Life]]] = {name: {} for name in self.story.hosts}
        for life in self.story.lives:
            places.setdefault(life.worker.hostname, {}).setdefault(life.worker.slot, []).append(life)
        if sum(map(len, places.values())) <= _MOST_ROWS:
            return {
                host: [_Row(f"{host}[{slot}]", lives) for slot, lives in sorted(slots.items())]
                for host, slots in places.items()
                if slots
            }
        used = {host: slots for host, slots in places.items() if slots}
        shown = dict(list(used.items())[:_MOST_ROWS])
        slots_in_all = sum(map(len, places.values()))
        self.notes.append(f"the workers of a host share a row: {slots_in_all} slots are too many for a row each")
        if len(shown) < len(used):
            self.notes.append(f"{len(used) - len(shown)} more hosts are not drawn")
        return {
            host: [_Row(host, [life for lives in slots.values() for life in lives])] for host, slots in shown.items()
        }

    def _lanes(self) -> None:
        rows, self._lanes_from = self._rows(), self.y
        number_of_rows = sum(map(len, rows.values()))
        if not number_of_rows:
            return
        height = max(_LOWEST, min(_HIGHEST, _ROWS_HEIGHT / number_of_rows))
        gap = 10.0 if height > 4 and len(rows) < 60 else 1.0 if height > 4 else 0.0
        self._name("hosts", 13)
        self.y += 0 if self.layout.is_narrow else 22
        pieces = sum(len(life.pieces) for life in self.story.lives)
        marks: dict[str, list[Mark]] = {}
        for mark in self.story.marks:
            if mark.host:
                marks.setdefault(mark.host, []).append(mark)
        labeled_at, unlabeled, crosses = self.y - 20, 0, 0
        for host, own in rows.items():
            if self.layout.is_narrow:
                unlabeled += self._host_above(host, height)
            elif self.y + height / 2 + 4 - labeled_at >= 12:
                labeled_at = self.y + min(height * len(own) / 2, 9) + 4
                room = 14 if height >= 10 and len(own) > 1 else 18
                name = host if len(host) <= room else f"{host[: room - 1]}…"
                name = label(self.layout.margin, labeled_at, name)
                self.parts.append(f"<g><title>{text_of(host)}</title>{name}</g>")
            else:
                unlabeled += 1
            top = self.y
            for row in own:
                self._row(row, height, each=pieces <= self.layout.most_pieces)
                if height >= 10 and len(own) > 1 and not self.layout.is_narrow:
                    slot = row.title[len(host) :]
                    self.parts.append(
                        label(self.layout.left - 6, self.y + height - 3, slot, "d", anchor="end", longest=8)
                    )
                self.y += height
            crosses += self._crosses(marks.get(host, []), top, self.y, _MOST_MARKS - crosses)
            self.y += gap
        if unlabeled:
            self.notes.append(f"{unlabeled} hosts have no room for their names; hover over a row to see it")
        self.y += 2

    def _host_above(self, host: str, height: float) -> bool:
        """Name a host above its rows. Returns whether there is no room for it."""
        if height < 10:
            return True
        self.y += 13
        name = label(self.layout.margin, self.y, host, "d", longest=self.layout.letters)
        self.parts.append(f"<g><title>{text_of(host)}</title>{name}</g>")
        self.y += 4
        return False

    def _row(self, row: _Row, height: float, *, each: bool) -> None:
        drawn = max(height - (2 if height > 6 else 0.3), 1.0)
        pieces = [
            (piece.since, piece.until if piece.until is not None else life.ended_at, piece.kind, life)
            for life in row.lives
            for piece in life.pieces
        ]
        if each:
            for since, end, kind, life in pieces:
                until = self.story.last if end is None else end
                rank = "" if life.rank is None or kind != WORKS else f", rank {life.rank}"
                how = f"; {life.how}" if life.how and life.ended_at is not None else ""
                title = f"{life.worker}{rank}: {_SAID_OF_WORKER[kind]}, {clock(since)} to {clock(until)}{how}"
                width = max(_HALF_PIXEL, self.x(until) - self.x(since))
                self.parts.append(rect(self.x(since), self.y, width, drawn, _OF_WORKER[kind], title))
            return
        by_kind: dict[str, list[tuple[float, float, float, float]]] = {}
        last = self.story.last
        ordered = sorted((since, last if end is None else end, kind) for since, end, kind, _ in pieces)
        for since, until, kind, _ in self._fused(ordered):
            width = max(_HALF_PIXEL, self.x(until) - self.x(since))
            by_kind.setdefault(kind, []).append((self.x(since), self.y, width, drawn))
        for kind, rects in by_kind.items():
            self.parts.append(path(rects, _OF_WORKER[kind], f"{row.title}: {_SAID_OF_WORKER[kind]}"))

    def _crosses(self, marks: list[Mark], top: float, bottom: float, room: int) -> int:
        """Draw deaths and losses of a host, and its workers that delayed the others, at their times."""
        seen: list[list[Mark]] = []
        for mark in marks:
            if mark.kind not in ("worker_dying", "worker_hung", "host_lost", "stall"):
                continue
            if (
                seen
                and (mark.kind == "stall") == (seen[-1][0].kind == "stall")
                and self.x(mark.at) - self.x(seen[-1][0].at) < _CROSS
            ):
                seen[-1].append(mark)
            else:
                seen.append([mark])
        shown = seen[: max(0, room)]
        self.unmarked += sum(map(len, seen[len(shown) :]))
        for together in shown:
            x, y, arm = self.x(together[0].at), (top + bottom) / 2, _CROSS / 2
            drawn = f"M{number(x - arm)} {number(y - arm)}l8 8m0-8l-8 8"
            if together[0].kind == "stall":
                drawn = f"M{number(x - arm)} {number(y)}a4 4 0 1 0 8 0a4 4 0 1 0-8 0"
            more = f" (and {len(together) - 1} more)" if len(together) > 1 else ""
            title = text_of(f"{clock(together[0].at)}: {together[0].text}{more}")
            self.parts.append(f'<path class="x" d="{drawn}"><title>{title}</title></path>')
        return len(shown)

    # --- across all rows -------------------------------------------------------------------------------------------

    def _columns(self, top: float) -> None:
        """Draw the beginnings of rounds, with their numbers, and bands where the job did not train."""
        bands = [
            (since, until, kind)
            for since, until, kind, _ in self._fused([(p.since, p.until, p.kind) for p in self.story.pieces])
            if kind not in (Category.TRAINING, Category.IDLE) and self.x(until) - self.x(since) >= 1
        ]
        drawn = [
            rect(self.x(since), top, self.x(until) - self.x(since), self.y - top, f"{kind} band")
            for since, until, kind in bands
        ]
        rounds, last_line, last_number, left_out = self.story.rounds, -100.0, -100.0, 0
        until = self.y if len(rounds) <= _FEW_ROUNDS else self._lanes_from
        for round_ in rounds:
            x = self.x(round_.at)
            if x - last_line < (3 if len(rounds) <= _FEW_ROUNDS else 6):
                left_out += 1
                continue
            last_line = x
            title = text_of(f"round {round_.round_id}, {round_.size} workers: {round_.cause}")
            drawn.append(f"<g>{line(x, top, x, until, 'round')}<title>{title}</title></g>")
            if x - last_number >= 12 + 8 * len(str(round_.round_id)) and x < self.layout.width - self.layout.right - 8:
                drawn.append(label(x + 3, top + 10, str(round_.round_id), "d n"))
                last_number = x
        if left_out:
            self.notes.append(f"{left_out} rounds have no line of their own: they are too close to others")
        # Behind all parts with tooltips.
        self.parts[self._first_of_timeline : self._first_of_timeline] = drawn

    def _axis(self) -> None:
        steps = [*_STEPS, *(_DAY * days for days in (1, 2, 5, 7, 14, 30, 60, 120, 365, 3650))]
        step = next((step for step in steps if self.span / step <= self.layout.ticks), self.span)
        at = 0.0
        left, end = self.layout.left, self.layout.width - self.layout.right
        self.parts.append(line(left, self.y, end, self.y, "grid"))
        while at <= self.span:
            self.parts.append(line(self.x(at), self.y, self.x(at), self.y + 4, "grid"))
            text = f"{at / _DAY:g} d" if step >= _DAY else clock(at)
            if self.x(at) <= end - 3 * len(text) + 24:
                self.parts.append(label(max(self.x(at), 3.6 * len(text)), self.y + 16, text, "d", anchor="middle"))
            at += step
        self.y += 26

    def _table(self) -> None:
        rounds = self.story.rounds
        if not rounds:
            return
        columns = (16.0, 74.0, 152.0, 232.0, 316.0, 410.0, 510.0)
        self.y += 20
        for x, head in zip(columns, HEADS, strict=True):
            self.parts.append(label(x, self.y, head, "s"))
        first, left_out, last = kept(rounds, _TABLE_FIRST, _TABLE_LAST)
        for index, each in enumerate((*first, *last)):
            if left_out and index == len(first):
                self.y += 18
                self.parts.append(label(16, self.y, f"… {left_out} more rounds: elasticrun report EVENTS.jsonl", "d"))
            self.y += 18
            for x, cell in zip(columns, cells_of(each, is_first=each is rounds[0]), strict=True):
                self.parts.append(label(x, self.y, cell, longest=108))
        self.y += 10

    def _cards(self) -> None:
        """Draw the table for a narrow screen: some lines for each round."""
        rounds = self.story.rounds
        if not rounds:
            return
        self._name("changes", 0)
        first, left_out, last = kept(rounds, _TABLE_FIRST, _TABLE_LAST)
        for index, each in enumerate((*first, *last)):
            if left_out and index == len(first):
                self._words(f"… {left_out} more rounds: elasticrun report EVENTS.jsonl", "d")
            number_of, at, size, lost, again, commit, cause = cells_of(each, is_first=each is rounds[0])
            self.y += 4
            self._words(f"round {number_of} at {at}: {size} workers", "s", size=1.15)
            if each is not rounds[0]:
                self._words(f"time lost {lost}, recomputed {again}, from commit {commit}", "d", height=16)
            self._words(cause, height=16)
        self.y += 10

    def _footnotes(self) -> None:
        story, notes = self.story, list(self.notes)
        if self.unmarked:
            notes.append(f"{self.unmarked} failures and stalls of workers are not marked")
        if self.merged:
            least = "half a pixel" if self.least == _HALF_PIXEL else f"{self.least:g} pixels"
            notes.append(f"{self.merged} pieces narrower than {least} are merged with their neighbors")
        if story.cut_at is not None:
            notes.append(f"from {clock(story.cut_at)} on: {story.cut}")
        if story.skipped:
            notes.append(f"{story.skipped} lines of the event log could not be read")
        for note in notes:
            self._words(note, "d n", height=16)
        self.y += 4


def svg(story: Story) -> str:
    """Return the picture as one SVG document, UTF-8 without a declaration."""
    wide, narrow = _drawn(story, _WIDE, with_table=True), _drawn(story, _NARROW, with_table=True)
    # In units of the wide layout, which determines its size; a phone's screen scales it.
    scale = _WIDE.width / _NARROW.width
    _, height = _size_of(wide)
    _, narrow_height = _size_of(narrow)
    narrow = _SIZE.sub(f'width="{number(_WIDE.width)}" height="{number(scale * narrow_height)}"', narrow, count=1)
    shape = number(100 * narrow_height / _NARROW.width)
    sheet = f"{_one_of_two('inline')}@media {_IS_NARROW}{{:root{{width:100vw;height:{shape}vw}}}}"
    size = (
        f'viewBox="0 0 {number(_WIDE.width)} {number(height)}" width="{number(_WIDE.width)}" height="{number(height)}"'
    )
    title = f"<title>{text_of(f'elasticrun job {story.job_id}')}</title><style>{style()}{sheet}</style>"
    anchor = 'preserveAspectRatio="xMinYMin"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {anchor} role="img">{title}{wide}{narrow}</svg>'


def _drawn(story: Story, layout: _Layout, *, with_table: bool) -> str:
    least = _HALF_PIXEL
    while True:
        drawn = _Picture(story, layout, least).draw(with_table=with_table)
        if len(drawn) <= layout.most_bytes or least >= _COARSEST:
            return drawn
        least *= 2


def _size_of(drawn: str) -> tuple[float, float]:
    """Return the width and the height of a layout."""
    found = _SIZE.search(drawn)
    assert found is not None
    return float(found[1]), float(found[2])


def _one_of_two(display: str) -> str:
    return f".narrow{{display:none}}@media {_IS_NARROW}{{.wide{{display:none}}.narrow{{display:{display}}}}}"


def page(story: Story) -> str:
    """Return the picture and its tables as one page of HTML, which loads nothing."""
    first, left_out, last = kept(story.rounds, _PAGE_FIRST, _PAGE_LAST)
    rows = []
    for index, each in enumerate((*first, *last)):
        if left_out and index == len(first):
            rows.append(f'<tr><td colspan="{len(HEADS)}">… {left_out} more rounds</td></tr>')
        cells = cells_of(each, is_first=each is story.rounds[0])
        row = "".join(f'<td data-label="{head}">{text_of(cell)}</td>' for head, cell in zip(HEADS, cells, strict=True))
        rows.append(f"<tr>{row}</tr>")
    heads = "".join(f'<th scope="col">{head}</th>' for head in HEADS)
    booked = story.booked
    seconds = "".join(
        f'<tr><th scope="row">{name}</th><td>{duration(booked.seconds[each])}</td>'
        f"<td>{100 * booked.seconds[each] / max(booked.wall_s, 1e-9):.2f} %</td></tr>"
        for each, name in _NAMES.items()
        if each in booked.seconds
    )
    sheet = (
        "body{margin:0 auto;max-width:1200px;font:14px system-ui,sans-serif;background:var(--card);color:var(--text);"
        "overflow-wrap:break-word}td:last-child{overflow-wrap:anywhere}"
        "svg{max-width:100%;height:auto}table{border-collapse:collapse;margin:8px 16px 24px}"
        "td,th{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}"
        "h1,h2{font-size:16px;margin:16px}h1{font-size:20px}th,td:nth-child(-n+6){white-space:nowrap}"
        ".sr{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}"
        f"{_one_of_two('block')}@media {_IS_NARROW}{{svg{{width:100%}}"
        ".changes,.changes tbody,.changes tr{display:block}.changes thead{display:none}"
        ".changes tr{border-bottom:1px solid var(--line);padding:6px 0}"
        ".changes td{display:inline-block;border:0;padding:1px 12px 1px 0}.changes td:last-child{display:block}"
        ".changes td::before{content:attr(data-label) ' ';color:var(--dim);font-size:12px}"
        "h2{margin:16px 12px}table{margin:8px 12px 24px}}"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    alternative = text_of(f"Timeline of job {story.job_id}: {ending_of(story)}")
    pictures = "".join(
        _drawn(story, layout, with_table=False).replace("<svg ", f'<svg role="img" aria-label="{alternative}" ', 1)
        for layout in (_WIDE, _NARROW)
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text_of(f'job {story.job_id}')}</title><style>{style()}{sheet}</style></head><body><main>"
        f'<h1 class="sr">{text_of(f"Job {story.job_id}")}</h1>'
        f'{pictures}<h2>Changes</h2><table class="changes"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table><h2>Goodput</h2><table>{seconds}</table></main></body></html>\n"
    )
