"""Curves of a job's samples, for a picture: their selection, scales and lines.

Owns neither layout nor elements. A line has no more points than are visible, and gaps where values are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_driver.reporting.drawing import number
from elastic_driver.reporting.story import Sample, Story

MOST_FIGURES = 12
"""The most figures of the training that are drawn."""
_LARGEST = 1e300  # so that the length of a scale is finite, too


@dataclass(frozen=True, slots=True)
class Curve:
    """The curve of one figure.

    Attributes:
        name, unit: its captions; "" for an unknown unit.
        points: time and value; None if unknown.
        low, high: the ends of the scale.
        show: formats a value.
    """

    name: str
    unit: str
    points: Sequence[tuple[float, float | None]]
    low: float
    high: float
    show: Callable[[float], str]

    @property
    def last(self) -> str:
        """The last known value, formatted."""
        return next((self.show(value) for _, value in reversed(self.points) if value is not None), "")

    def line(self, x: Callable[[float], float], y: Callable[[float], float]) -> str:
        """Return the path data: of the points within a pixel the first, the lowest, the highest and the last."""
        parts: list[str] = []
        column: list[tuple[float, float]] = []
        is_down = False

        def put() -> None:
            nonlocal is_down
            if not column:
                return
            low, high = min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])
            for at, value in dict.fromkeys(sorted({column[0], low, high, column[-1]})):
                parts.append(f"{'L' if is_down else 'M'}{number(at)} {number(y(value))}")
                is_down = True
            column.clear()

        for at, value in self.points:
            place = x(at)
            if column and (value is None or math.floor(column[0][0]) != math.floor(place)):
                put()
            if value is None:
                # A single point is drawn as a dot.
                parts += ["h.1"] if parts and parts[-1].startswith("M") else []
                is_down = False
            else:
                column.append((place, value))
        put()
        return "".join([*parts, "h.1"] if parts and parts[-1].startswith("M") else parts)


def curves_of(story: Story) -> tuple[list[Curve], int]:
    """Return the curves in order, and the number of further figures of the training."""
    found = [
        *_known("steps/s", "", story, lambda one: one.steps_per_s, shown),
        *_known("waiting", "of the workers' time", story, lambda one: one.waiting, _percent, high=1.0),
        *_known("CPU", "cores busy", story, lambda one: one.cpu, shown),
        *_known("memory", "of all workers", story, lambda one: one.memory_bytes, _size),
        *_known("GPU", "busy", story, lambda one: one.gpu, _percent, high=1.0),
        *_known("GPU memory", "of all GPUs", story, lambda one: one.gpu_memory_bytes, _size),
    ]
    names = list(dict.fromkeys(name for sample in story.samples for name in sample.figures))
    for name in names[:MOST_FIGURES]:
        points = [(sample.at, _bounded(sample.figures.get(name))) for sample in story.samples]
        values = [value for _, value in points if value is not None]
        if values:
            low, high = min(values), max(values)
            room = (high - low) / 20 or abs(high) / 10 or 1.0
            found.append(Curve(name, "", points, low - room, high + room, shown))
    return found, max(0, len(names) - MOST_FIGURES)


def _known(
    name: str,
    unit: str,
    story: Story,
    value_of: Callable[[Sample], float | None],
    show: Callable[[float], str],
    *,
    high: float | None = None,
) -> list[Curve]:
    points = [(sample.at, _bounded(value_of(sample))) for sample in story.samples]
    values = [value for _, value in points if value is not None]
    if not values:
        return []
    return [Curve(name, unit, points, min(0.0, *values), high or 1.05 * max(values) or 1.0, show)]


def _bounded(value: float | None) -> float | None:
    return value if value is not None and abs(value) <= _LARGEST else None


def shown(value: float) -> str:
    """Format a number with a sensible number of digits: "0.0124", "1520", "3.2e-5"."""
    if 999.5 <= abs(value) < 1e6:  # three digits would turn 999.5 into 1e+03
        return f"{value:.0f}"
    if 1e-2 <= abs(value) < 999.5 or not value:
        return f"{value:.3g}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _size(value: float) -> str:
    for unit, size in (("TB", 1 << 40), ("GB", 1 << 30)):
        if value >= size:
            return f"{shown(value / size)} {unit}"
    return f"{value / (1 << 20):.0f} MB"
