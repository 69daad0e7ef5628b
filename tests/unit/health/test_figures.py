"""One figure a name for the whole job: of the lowest rank that reports it; and GPUs of all hosts."""

from __future__ import annotations

import pytest

from elastic_driver.figures import MOST_NAMES, GpuLook
from elastic_driver.health.figures import FigureBook
from elastic_driver.hosts import WorkerId

pytestmark = pytest.mark.unit

ONE, TWO, THREE = (WorkerId(name, 0, 0) for name in "abc")


@pytest.fixture
def places() -> dict[WorkerId, tuple[int, int]]:
    """Round and rank."""
    return {ONE: (1, 0), TWO: (1, 1)}


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def book(places: dict[WorkerId, tuple[int, int]], warnings: list[str]) -> FigureBook:
    return FigureBook(places.get, warnings.append)


def test_the_lowest_rank_that_reports_a_name_has_the_word(book: FigureBook) -> None:
    book.take(TWO, {"loss": 2.0, "of_two": 5.0})
    assert book.figures == {"loss": 2.0, "of_two": 5.0}
    book.take(ONE, {"loss": 1.0})
    book.take(TWO, {"loss": 3.0, "of_two": None})
    assert book.figures == {"loss": 1.0, "of_two": None}


def test_ranks_are_those_of_the_newest_round(book: FigureBook, places: dict[WorkerId, tuple[int, int]]) -> None:
    book.take(ONE, {"loss": 1.0, "of_one": 1.0})
    places.update({ONE: (2, 1), TWO: (2, 0)})
    book.take(TWO, {"loss": 2.0})
    book.take(ONE, {"loss": 3.0, "of_one": 3.0})
    assert book.figures == {"loss": 2.0, "of_one": 3.0}


def test_a_rank_that_reports_no_more_has_the_word_until_the_next_round(
    book: FigureBook, places: dict[WorkerId, tuple[int, int]]
) -> None:
    book.take(ONE, {"loss": 1.0})
    book.take(TWO, {"loss": 2.0})
    assert book.figures == {"loss": 1.0}
    places.update({ONE: (2, 0), TWO: (2, 1)})
    book.take(TWO, {"loss": 2.0})
    assert book.figures == {"loss": 2.0}


def test_whoever_ends_later_does_not_have_the_last_word(
    book: FigureBook, places: dict[WorkerId, tuple[int, int]]
) -> None:
    book.take(ONE, {"loss": 1.0})
    del places[ONE]
    book.take(TWO, {"loss": 2.0})
    assert book.figures == {"loss": 1.0}
    places[TWO] = (2, 0)
    book.take(TWO, {"loss": 3.0})
    book.take(ONE, {"loss": 4.0})
    assert book.figures == {"loss": 3.0}


def test_a_last_word_after_the_end_counts_as_much_as_those_before(
    book: FigureBook, places: dict[WorkerId, tuple[int, int]]
) -> None:
    book.take(ONE, {"loss": 1.0})
    del places[ONE]
    book.take(ONE, {"loss": 0.5})
    book.take(TWO, {"loss": 2.0})
    assert book.figures == {"loss": 0.5}


def test_of_workers_without_ranks_the_newest_counts(book: FigureBook, places: dict[WorkerId, tuple[int, int]]) -> None:
    places.clear()
    book.take(ONE, {"loss": 1.0})
    book.take(THREE, {"loss": 3.0})
    assert book.figures == {"loss": 3.0}


def test_there_are_only_so_many_and_none_without_a_proper_name(book: FigureBook, warnings: list[str]) -> None:
    book.take(ONE, {"\n": 1.0, "x" * 1000: 1.0})
    assert (book.figures, warnings) == ({}, [])
    for index in range(2 * MOST_NAMES):
        book.take(ONE, {str(index): float(index)})
    assert len(book.figures) == MOST_NAMES
    assert warnings == ["more than 64 figures are reported: '64' and further names are dropped"]


def test_what_is_no_figure_is_told_once_a_job(book: FigureBook, warnings: list[str]) -> None:
    for worker in (ONE, TWO):
        book.refuse(worker, "'epoch 7': Expecting value")
    assert warnings == [f"worker {ONE} reported an invalid figure, which is dropped: 'epoch 7': Expecting value"]


def test_gpus_are_those_of_all_hosts(book: FigureBook) -> None:
    assert (book.gpu, book.gpu_memory_bytes) == (None, None)
    book.see_gpus("a", GpuLook(3, 1.0, 30))
    book.see_gpus("b", GpuLook(1, 0.0, 5))
    book.see_gpus("c", GpuLook(8, None, 7))
    assert (book.gpu, book.gpu_memory_bytes) == (0.75, 42)
    book.lost("a")
    book.lost("unknown")
    assert (book.gpu, book.gpu_memory_bytes) == (0.0, 12)
    book.see_gpus("b", GpuLook(0, None, 0))  # its agent knows no more
    assert (book.gpu, book.gpu_memory_bytes) == (None, 7)
    book.see_gpus("c", GpuLook(8, 0.5, 0))
    assert (book.gpu, book.gpu_memory_bytes) == (0.5, None)
