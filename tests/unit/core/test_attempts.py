"""No two workers have one name, however few of the places are remembered."""

from __future__ import annotations

import pytest

from elastic_driver.core import attempts
from elastic_driver.core.attempts import Attempts

pytestmark = pytest.mark.unit


def test_a_place_counts_on_where_it_was() -> None:
    known, first = Attempts().give([("a", 0), ("b", 0)], needed=lambda place: True)
    known, second = known.give([("b", 0), ("c", 0)], needed=lambda place: True)
    assert (first, second) == ([0, 0], [1, 0])
    assert known.places == ((("a", 0), 1), (("b", 0), 2), (("c", 0), 1))


def test_places_of_the_past_are_forgotten_and_their_numbers_are_not_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "MOST_REMEMBERED", 4)
    known, given = Attempts(), set()
    for number in [*range(50), 3, 49, 3, 0, 3]:
        place = (f"pod-{number}", 0)
        known, (attempt,) = known.give([place], needed=lambda place: place[0] == "pod-7")
        assert (place, attempt) not in given
        given.add((place, attempt))
        assert len(known.places) <= 6
    assert "pod-7" in [place[0] for place, _ in known.places], "a living worker's place"
    assert known.first <= 56 / 4, "one more only when as many names as are remembered are new"


def test_nothing_is_forgotten_while_few_places_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MOST_REMEMBERED", 3)
    places = [(name, 0) for name in "abcd"]
    books, _ = Attempts().give(places, needed=lambda place: place[0] in "ab")
    assert [place for place, _ in books.places] == places
    assert books.first == 0
