"""How far a script is, and what that leaves: the arithmetic."""

from __future__ import annotations

import pytest

from elastic_driver.driver.progress import Estimate, Progress

pytestmark = pytest.mark.unit


def test_nothing_is_known_until_it_is_told() -> None:
    progress = Progress()
    assert progress.estimate(5.0) == Estimate()
    assert Estimate().percentage is None
    progress.told("a", 1, 7, 0, now=5.0)
    assert progress.estimate(100.0) == Estimate(step=7)
    assert progress.estimate(100.0).percentage is None, "nobody has said how far it goes"


def test_a_speed_and_what_is_left() -> None:
    progress = Progress()
    for second in range(21):
        progress.told("a", 1, 10 * second, 1000, now=float(second))
    estimate = progress.estimate(20.0)
    assert estimate == Estimate(200, 1000, 10.0, 80.0)
    assert estimate.percentage == 20
    assert progress.estimate(40.0).per_s == 5.0, "a job that stands still becomes slower"


def test_a_moment_is_no_speed() -> None:
    progress = Progress()
    progress.told("a", 1, 0, 100, now=0.0)
    progress.told("a", 1, 50, 100, now=1.0)
    assert progress.estimate(1.0) == Estimate(50, 100)


def test_what_a_round_has_lost_is_not_progress() -> None:
    progress = Progress()
    for second in range(11):
        progress.told("a", 1, 10 * second, 1000, now=float(second))
    progress.told("a", 2, 50, 0, now=11.0)
    progress.told("a", 1, 110, 1000, now=11.5)
    assert progress.estimate(12.0) == Estimate(50, 1000)


def test_a_script_may_train_again_from_the_beginning() -> None:
    """Its workers begin again one after the other: who is still in the first training says nothing of the second."""
    progress = Progress()
    for worker in "ab":
        progress.told(worker, 1, 900, 1000, now=0.0)
    progress.told("a", 1, 5, 0, now=10.0)
    assert progress.estimate(10.0) == Estimate(5)
    progress.told("b", 1, 1000, 1000, now=10.5)
    assert progress.estimate(10.5).step == 5
    progress.told("b", 1, 8, 200, now=11.0)
    assert (progress.estimate(11.0).step, progress.estimate(11.0).percentage) == (8, 4)
    progress.told("c", 1, 20, 200, now=20.0)
    assert progress.estimate(20.0) == Estimate(20, 200, 1.5, 120.0)


def test_only_the_last_minutes_count() -> None:
    progress = Progress()
    for second in range(300):
        progress.told("a", 1, second if second < 150 else 150 + 10 * (second - 150), 10_000, now=float(second))
    assert progress.estimate(299.0).per_s == pytest.approx(10.0, rel=0.01)


def test_a_job_that_has_done_more_than_its_total_is_not_over() -> None:
    progress = Progress()
    progress.told("a", 1, 500, 100, now=0.0)
    assert progress.estimate(0.0).percentage == 99
    progress.told("a", 1, 510, 100, now=10.0)
    assert progress.estimate(10.0).left_s == 0.0
