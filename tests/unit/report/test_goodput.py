"""The books of a job: what a stretch of time counts as, and how that is told."""

from __future__ import annotations

import pytest

from elastic_driver.report.goodput import Book, Booked, Category

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
