"""Roster: the items of many workers in an order, as a value, with quick access by worker.

The core keeps its state in tuples, so that states can be compared, hashed and kept. A job of thousands of workers
looks one of them up at each report; so a roster is a tuple that also knows where each worker's item is. Rosters that
come from one another by :meth:`Roster.put` share that knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self, TypeVar

from elastic_driver.hosts import WorkerId


class _HasWorker(Protocol):
    @property
    def worker(self) -> WorkerId:
        """Whose item it is."""


T = TypeVar("T", bound=_HasWorker)


class Roster(tuple[T, ...]):
    """Items, at most one for each worker. Equal to the tuple of the same items."""

    # Where each worker's item is; the first len(self) are this roster's, the others those of rosters made from it.
    _places: dict[WorkerId, int] | None = None

    def find(self, worker: WorkerId) -> T | None:
        """The worker's item; None when there is none."""
        place = self._index().get(worker, len(self))
        return self[place] if place < len(self) else None

    def put(self, item: T) -> Self:
        """With this item: in the place of the worker's former one, or behind all."""
        places = self._index()
        place = places.get(item.worker, len(self))
        if place < len(self):
            made = type(self)((*self[:place], item, *self[place + 1 :]))
            made._places = places
            return made
        made = type(self)((*self, item))
        if len(places) == len(self):  # nobody else has put something behind these
            places[item.worker] = len(self)
            made._places = places
        return made

    def put_all(self, items: Iterable[T]) -> Self:
        """Like :meth:`put` for each, with one copy."""
        changed = list(self)
        places = self._index()
        for item in items:
            place = places.get(item.worker, len(self))
            if place >= len(self):
                raise ValueError(f"cannot change the item of {item.worker}: there is none")
            changed[place] = item
        made = type(self)(changed)
        made._places = places
        return made

    def without(self, worker: WorkerId) -> Self:
        """Without the worker's item; the same when there is none."""
        if self.find(worker) is None:
            return self
        return type(self)(item for item in self if item.worker != worker)

    def _index(self) -> dict[WorkerId, int]:
        if self._places is None:
            self._places = {item.worker: place for place, item in enumerate(self)}
        return self._places
