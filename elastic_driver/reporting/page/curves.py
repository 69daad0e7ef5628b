"""The page's curves: the job's samples over time, in a bounded number of points.

Owns which points are kept. The newest ones are kept as they were taken; the older ones at equal distances, which grow
with the job's length. A point's values are those of :class:`~elastic_driver.health.sampler.Sampled`.

They are sent as ``{"t": [unix seconds, ...], "series": {NAME: [number or null, ...], ..., "figures": {NAME: [...]}}}``.
A series without a single value is omitted; one omitted from appended points has no values there.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

from elastic_driver.health.sampler import Sampled

MOST_POINTS = 2000
"""Limit of points in each curve."""
_FINE_POINTS = 600
_LEAST_S = 2.0
_MB = 1 << 20
_NAMES = ("steps_per_s", "waiting", "cpu", "memory_mb", "gpu", "gpu_memory_mb")

Column = list[float | None]
Points = dict[str, Any]


class Curves:
    """Keeps the points of all curves."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._series: dict[str, Column] = {name: [] for name in _NAMES}
        self._figures: dict[str, Column] = {}
        self._spacing_s = _LEAST_S  # between the older points
        self._told = 0  # points that browsers have; -1 if they have other ones than these

    def add(self, at: float, sample: Sampled) -> None:
        """Add a point.

        Args:
            at: its time, seconds since the epoch.
            sample: the job's state then.
        """
        if self._times and at <= self._times[-1]:
            # The clock has been set back: the real times of later points are unknown.
            self._keep([time < at for time in self._times])
        self._times.append(at)
        values = (
            sample.steps_per_s,
            sample.waiting,
            sample.cpu,
            _mb(sample.memory_bytes),
            sample.gpu,
            _mb(sample.gpu_memory_bytes),
        )
        for name, value in zip(_NAMES, values, strict=True):
            self._series[name].append(_short(value))
        for name in sample.figures.keys() - self._figures.keys():
            self._figures[name] = [None] * (len(self._times) - 1)
        for name, column in self._figures.items():
            column.append(_short(sample.figures.get(name)))
        if len(self._times) > MOST_POINTS:
            self._thin()

    def news(self) -> Points:
        """Return the changes for the next frame: all ``curves``, ``curves_new`` to append, or nothing."""
        begin, self._told = self._told, len(self._times)
        if begin < 0:
            return {"curves": self._points(0, self._told)}
        return {"curves_new": self._points(begin, self._told)} if begin < self._told else {}

    def whole(self) -> Points:
        """Return all points that have been sent."""
        return self._points(0, len(self._times) if self._told < 0 else self._told)

    def _points(self, begin: int, end: int) -> Points:
        def parts(columns: dict[str, Column]) -> dict[str, Column]:
            found = {name: column[begin:end] for name, column in columns.items()}
            return {name: part for name, part in found.items() if any(value is not None for value in part)}

        figures = parts(self._figures)
        series: dict[str, object] = {**parts(self._series), **({"figures": figures} if figures else {})}
        return {"t": [round(time, 1) for time in self._times[begin:end]], "series": series}

    def _thin(self) -> None:
        fine = len(self._times) - _FINE_POINTS
        kept = self._spaced(fine)
        while sum(kept) > (MOST_POINTS + _FINE_POINTS) / 2:
            self._spacing_s *= 2
            kept = self._spaced(fine)
        self._keep(kept)

    def _spaced(self, fine: int) -> list[bool]:
        """Choose the points to keep: all from index ``fine`` on, and of the older ones those far enough apart."""
        last, kept = float("-inf"), []
        for index, time in enumerate(self._times):
            kept.append(index >= fine or time - last >= self._spacing_s * 0.9)  # samples may be a little early or late
            last = time if kept[-1] else last
        return kept

    def _keep(self, kept: list[bool]) -> None:
        self._times = list(compress(self._times, kept))
        for columns in (self._series, self._figures):
            for name, column in columns.items():
                columns[name] = list(compress(column, kept))
        self._told = -1


def _mb(size: int | None) -> float | None:
    return None if size is None else size / _MB


def _short(value: float | None) -> float | None:
    """Round to a visible precision."""
    return None if value is None else float(f"{value:.6g}")
