"""Curves of a picture: their scales, their gaps, and how many points they have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest

from elastic_driver.reporting.curve_lines import MOST_FIGURES, Curve, curves_of, shown
from elastic_driver.reporting.story import Sample, Story

pytestmark = pytest.mark.unit


def sample(at: float, *, steps: float | None = None, memory: float | None = None, **figures: float | None) -> Sample:
    return Sample(at, steps, None, None, memory, None, None, 1, figures)


def line(*values: float | None, each: float = 10.0) -> str:
    points = [(index * each, value) for index, value in enumerate(values)]
    return Curve("loss", "", points, 0.0, 1.0, shown).line(lambda at: at, lambda value: value)


def story(samples: Sequence[Sample]) -> Story:
    return Story("feedface", 0.0, samples=list(samples))


def test_what_is_not_known_is_a_gap_and_what_stands_alone_is_a_dot() -> None:
    assert line(1, 2, None, None, 3, None, 4, 5) == "M0 1L10 2M40 3h.1M60 4L70 5"
    assert line(None, 1) == "M10 1h.1"
    assert line(None, None) == line() == ""


def test_within_a_pixel_there_are_four_points_the_extremes_among_them() -> None:
    values = [math.sin(index) for index in range(100_000)]
    values[50_050], values[50_060] = 9.0, -9.0
    drawn = line(*values, each=0.01)
    assert len(re.findall("[ML]", drawn)) <= 4 * 1001
    assert " 9L" in drawn
    assert " -9L" in drawn


def test_series_without_a_value_are_left_out_and_scales_begin_at_zero() -> None:
    curves, more = curves_of(story([sample(0, steps=20, loss=2.0), sample(10, steps=10, loss=1.0, nothing=None)]))
    assert [(curve.name, curve.last, curve.low, round(curve.high, 2)) for curve in curves] == [
        ("steps/s", "10", 0.0, 21.0),
        ("loss", "1", 0.95, 2.05),
    ]
    assert more == 0


@pytest.mark.parametrize("value", [0.0, -1e300, 1e300, 5e-324, 1e308])
def test_each_value_has_a_scale_with_a_length(value: float) -> None:
    curves, _ = curves_of(story([sample(0, steps=abs(value), memory=abs(value), loss=value), sample(1, loss=-value)]))
    for curve in curves:
        assert 0 < curve.high - curve.low < math.inf
        assert len(curve.show(curve.high)) < 12


def test_figures_are_bounded_and_the_others_counted() -> None:
    curves, more = curves_of(story([sample(0, **{f"figure {index}": 1.0 for index in range(64)})]))
    assert (len(curves), more) == (MOST_FIGURES, 64 - MOST_FIGURES)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.345, "12.3"),
        (1520.4, "1520"),
        (2.55e-4, "2.55e-4"),
        (5e7, "5e7"),
        (-0.5, "-0.5"),
        (999.7, "1000"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert shown(value) == text
