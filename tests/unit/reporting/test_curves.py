"""The curves of the page: bounded, thinned where they are old, and told piece by piece."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from elastic_driver.health.sampler import Sampled
from elastic_driver.reporting.page.curves import MOST_POINTS, Curves

pytestmark = pytest.mark.unit


def test_a_curve_without_a_value_is_left_out() -> None:
    curves = Curves()
    curves.add(100.04, Sampled(steps_per_s=1.23456789, memory_bytes=3 << 19, workers=1))
    curves.add(102.0, Sampled(cpu=2.0))
    assert curves.news() == {
        "curves_new": {
            "t": [100.0, 102.0],
            "series": {"steps_per_s": [1.23457, None], "cpu": [None, 2.0], "memory_mb": [1.5, None]},
        }
    }
    assert curves.news() == {}


def test_a_figure_that_comes_later_has_no_value_before() -> None:
    curves = Curves()
    curves.add(1.0, Sampled(figures={"loss": 0.5}))
    curves.add(2.0, Sampled(figures={"accuracy": 0.25, "loss": None}))
    curves.add(3.0, Sampled(figures={"accuracy": 0.5}))
    assert curves.news()["curves_new"]["series"] == {
        "figures": {"loss": [0.5, None, None], "accuracy": [None, 0.25, 0.5]}
    }


def test_whoever_has_the_whole_and_what_is_new_has_each_point_once() -> None:
    curves = Curves()
    curves.add(1.0, Sampled(cpu=1.0))
    curves.news()
    curves.add(2.0, Sampled(cpu=2.0))
    assert curves.whole()["t"] == [1.0]
    assert curves.news()["curves_new"]["t"] == [2.0]
    assert curves.whole()["t"] == [1.0, 2.0]


def test_a_week_has_few_points_all_over_and_fine_ones_at_its_end() -> None:
    curves = Curves()
    for index in range(7 * 24 * 1800):
        curves.add(1e9 + 2 * index, Sampled(cpu=float(index), figures={"loss": 1.0}))
    points = curves.news()["curves"]
    times = points["t"]
    assert 1000 < len(times) <= MOST_POINTS
    assert {len(points["series"]["cpu"]), len(points["series"]["figures"]["loss"])} == {len(times)}
    assert times[0] == 1e9
    assert times[-1] == 1e9 + 2 * index
    assert [at - 1e9 for at in times] == [2 * value for value in points["series"]["cpu"]]
    gaps = [after - before for before, after in pairwise(times)]
    assert set(gaps[-500:]) == {2.0}
    assert max(gaps) <= 2 * 1100
    assert len(json.dumps(points)) < 100_000


def test_points_that_were_thinned_are_told_whole() -> None:
    curves = Curves()
    for index in range(MOST_POINTS):
        curves.add(2.0 * index, Sampled(cpu=1.0))
    assert len(curves.news()["curves_new"]["t"]) == MOST_POINTS
    curves.add(2.0 * MOST_POINTS, Sampled(cpu=1.0))
    whole = curves.whole()
    assert whole["t"][-1] == 2.0 * MOST_POINTS
    assert curves.news() == {"curves": whole}
    curves.add(2.0 * MOST_POINTS + 2, Sampled(cpu=1.0))
    assert list(curves.news()) == ["curves_new"]


def test_a_clock_that_is_set_back_leaves_no_point_behind_now() -> None:
    curves = Curves()
    for at in (1000.0, 1002.0, 1004.0, 1001.0):
        curves.add(at, Sampled(cpu=at))
    assert curves.news()["curves"] == {"t": [1000.0, 1001.0], "series": {"cpu": [1000.0, 1001.0]}}
