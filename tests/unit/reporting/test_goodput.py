"""The books of a job: what a stretch of time counts as, and how that is told."""

from __future__ import annotations

import pytest

from elastic_driver import codec
from elastic_driver.core.standing import JobActivity, Standing
from elastic_driver.core.state import JobPhase
from elastic_driver.reporting.goodput import Book, Booked, Category, Goodput, GoodputKept, Turned
from elastic_driver.reporting.happenings import JobStarted, PhaseChanged, RoundFormed
from elastic_driver.words import Backend, OnChange

pytestmark = pytest.mark.unit


def test_a_book() -> None:
    book = Book(Category.START, 10.0)
    book.turn(Category.TRAINING, 14.0)
    book.turn(Category.TRAINING, 20.0)
    assert book.seconds(24.0) == {"start": 4.0, "training": 10.0}
    book.turn(Category.RESET, 24.0)
    assert book.seconds(24.0) == {"start": 4.0, "training": 10.0}


def test_what_was_something_else_after_all() -> None:
    book = Book(Category.START, 0.0)
    book.turn(Category.TRAINING, 10.0)
    book.turn(Category.RESET, 20.0)
    book.rewrite(17.0, 20.0, Category.RECOMPUTED, only=Category.TRAINING)
    assert book.seconds(22.0) == {"start": 10.0, "training": 7.0, "recomputed": 3.0, "reset": 2.0}
    book.rewrite(19.0, 22.0, Category.UNEXPLAINED)
    assert book.seconds(22.0) == {"start": 10.0, "training": 7.0, "recomputed": 2.0, "unexplained": 3.0}
    assert book.seconds(23.0)["reset"] == 1.0, "what goes on goes on"


def test_the_last_training_is_kept_open_however_often_the_wait_changes() -> None:
    book = Book(Category.TRAINING, 0.0)
    for second in range(100, 1100):
        book.turn((Category.RESET, Category.WAITING_FOR_SLOTS)[second % 2], float(second))
    book.rewrite(60.0, 100.0, Category.RECOMPUTED, only=Category.TRAINING)
    booked = book.seconds(1100.0)
    assert booked["training"] == 60.0
    assert booked["recomputed"] == 40.0
    assert sum(booked.values()) == 1100.0


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def doing(what: JobActivity) -> PhaseChanged:
    return PhaseChanged(JobPhase.RUNNING, what, OnChange.IN_PLACE)


def turned(what: JobActivity, *rounds: float) -> Turned:
    return Turned(0.0, Standing(JobPhase.RUNNING, what, OnChange.IN_PLACE), rounds)


def test_another_driver_goes_on_with_the_book() -> None:
    """On a clock of its own. Its workers train without a driver, and what they lose may lie before its time."""
    clock = Clock(1000.0)
    book = Goodput(clock)
    assert book.kept() is None
    book.hear(JobStarted("", "77"))
    clock.now += 5
    book.hear(doing(JobActivity.TRAINING))
    clock.now += 20
    kept = book.kept()
    assert kept is not None
    kept = codec.decode(GoodputKept, codec.encode(GoodputKept, kept))
    clock = Clock(3.0)
    successor = Goodput(clock)
    successor.go_on(kept, ago_s=2.0)
    successor.hear(JobStarted("", "77"))
    successor.hear(doing(JobActivity.TRAINING))
    clock.now += 8
    booked = successor.job()
    assert booked is not None
    assert (booked.wall_s, booked.resets) == (35.0, 0)
    assert {name: spent for name, spent in booked.seconds.items() if spent} == {"start": 5.0, "training": 30.0}
    successor.hear(doing(JobActivity.FORMING))
    successor.hear(RoundFormed(2, 2, "x", 0, True, Backend.NATIVE, 0.5, [], False, 9.0, 9.0))
    booked = successor.job()
    assert booked is not None
    assert (booked.seconds["recomputed"], booked.seconds["training"], booked.resets) == (9.0, 21.0, 1)


def test_another_driver_makes_up_for_the_steps_that_the_book_does_not_have() -> None:
    """They were made after it was kept, and the driver has died before it was kept again."""
    clock = Clock(0.0)
    book = Goodput(clock)
    book.hear(JobStarted("", "77"))
    clock.now = 5.0
    book.hear(doing(JobActivity.TRAINING))
    clock.now = 25.0
    kept = book.kept()
    assert kept is not None
    clock = Clock(1040.0)
    successor = Goodput(clock)
    since = [
        (-1.0, turned(JobActivity.TRAINING)),  # as it was
        (5.0, turned(JobActivity.FORMING)),
        (8.0, turned(JobActivity.FORMING, 2.0)),
        (9.0, turned(JobActivity.TRAINING)),
    ]
    successor.go_on(kept, 15.0, since)
    successor.hear(JobStarted("", "77"))
    successor.hear(doing(JobActivity.TRAINING))
    booked = successor.job()
    assert booked is not None
    assert (booked.wall_s, booked.resets) == (40.0, 1)
    spent = {name: spent for name, spent in booked.seconds.items() if spent}
    assert spent == {"start": 5.0, "training": 29.0, "reset": 4.0, "recomputed": 2.0}


def test_another_driver_counts_the_reset_that_it_finds_to_be_under_way() -> None:
    clock = Clock(0.0)
    book = Goodput(clock)
    book.hear(JobStarted("", "77"))
    book.hear(doing(JobActivity.TRAINING))
    clock.now = 10.0
    kept = book.kept()
    assert kept is not None
    successor = Goodput(clock)
    successor.go_on(kept, 0.0)
    successor.hear(doing(JobActivity.FORMING))
    clock.now = 11.0
    successor.hear(RoundFormed(2, 2, "x", 0, True, Backend.NATIVE, 0.5, [], False, 3.0, 3.0))
    booked = successor.job()
    assert booked is not None
    assert booked.resets == 1
    assert (booked.seconds["training"], booked.seconds["recomputed"], booked.seconds["reset"]) == (7.0, 3.0, 1.0)


def test_all_of_a_category() -> None:
    book = Book(Category.TRAINING, 0.0)
    for second in range(1, 101):
        book.turn((Category.TRAINING, Category.RESET)[second % 2], float(second))
    book.rewrite_all(Category.TRAINING, Category.START, 100.0)
    assert book.seconds(103.0) == {"start": 50.0, "reset": 50.0, "training": 3.0}


@pytest.mark.parametrize(
    ("seconds", "resets", "told"),
    [
        (
            {"start": 14.0, "training": 1234.4, "reset": 12.14, "recomputed": 8.0, "idle": 0.01, "unexplained": 0.2},
            3,
            "goodput 97.3 %: training 1,234 s, reset 12.1 s (3), recomputed 8.0 s, start 14.0 s, unexplained 0.2 s",
        ),
        ({"training": 0.0, "unexplained": 0.0}, 0, "goodput 0.0 %: training 0.0 s, unexplained 0.0 s"),
        (
            {"training": 1.0, "waiting_for_slots": 99.96, "unexplained": 0.0},
            0,
            "goodput 1.0 %: training 1.0 s, waiting for slots 100.0 s, unexplained 0.0 s",
        ),
    ],
)
def test_in_words(seconds: dict[str, float], resets: int, told: str) -> None:
    assert Booked(seconds, sum(seconds.values()), resets).told() == told
