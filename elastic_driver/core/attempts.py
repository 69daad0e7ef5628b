"""Counts the processes of each place, so that no two workers ever have the same name; bounded, whatever hosts appear.

Pods and spot machines always have new names. Places that are long gone are forgotten; their numbers are not reused,
because new places start after them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

Place = tuple[str, int]

# More than the slots that come and go in a cluster within a day, and less than a megabyte.
MOST_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Attempts:
    """The next attempt of each place. A value.

    Attributes:
        places: (place, its next attempt), in the order of the last one given.
        first: the next attempt of a place that is not among them.
    """

    places: tuple[tuple[Place, int], ...] = ()
    first: int = 0

    def has_given(self, place: Place, attempt: int) -> bool:
        """Return whether a worker may have had this name. For a forgotten place that is not known for certain."""
        return 0 <= attempt < next((following for known, following in self.places if known == place), self.first)

    def give(self, wanted: list[Place], *, needed: Callable[[Place], bool]) -> tuple[Attempts, list[int]]:
        """Allocate an attempt for each of these places.

        Args:
            wanted: the places.
            needed: whether a place must be kept: its host is listed, or a worker lives there.

        Returns:
            The new counts, and the attempts.
        """
        known = dict(self.places)
        given = []
        for place in wanted:
            attempt = known.pop(place, self.first)
            given.append(attempt)
            known[place] = attempt + 1
        first = self.first
        if len(known) > MOST_REMEMBERED:
            gone = [place for place in known if not needed(place)]
            for place in gone[: max(0, len(gone) - MOST_REMEMBERED)]:
                first = max(first, known.pop(place))
        return replace(self, places=tuple(known.items()), first=first), given
