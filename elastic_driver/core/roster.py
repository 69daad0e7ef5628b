"""Roster: the items of many workers in an order, as a value, with quick access by worker.

The core keeps its state in values that can be compared, hashed and kept. A job of thousands of workers looks one of
them up at each report, so that a tuple will not do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from elastic_driver.hosts import WorkerId


class _HasWorker(Protocol):
    @property
    def worker(self) -> WorkerId:
        """Whose item it is."""


T = TypeVar("T", bound=_HasWorker)


class Roster(Generic[T]):
    """Items, one for each worker; never changed. Equal to others with the same items in the same order."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = {item.worker: item for item in items}

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roster) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Roster({list(self)!r})"

    def find(self, worker: WorkerId) -> T | None:
        """The worker's item; None when there is none."""
        return self._items.get(worker)

    def put(self, *items: T) -> Roster[T]:
        """With these: each in the place of its worker's former item, or behind all."""
        return self._with({item.worker: item for item in items})

    def without(self, *workers: WorkerId) -> Roster[T]:
        """Without the items of these workers."""
        made = self._with({})
        for worker in workers:
            made._items.pop(worker, None)
        return made

    def _with(self, items: dict[WorkerId, T]) -> Roster[T]:
        made: Roster[T] = Roster()
        made._items = {**self._items, **items}
        return made
