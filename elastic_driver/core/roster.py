"""Roster: the items of many workers in an order, as a value, with quick access by worker.

The core keeps its state in values that can be compared, hashed and stored. A job of thousands of workers looks up one
of them at each report, so a tuple would be too slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from elastic_driver.hosts import WorkerId


class _HasWorker(Protocol):
    @property
    def worker(self) -> WorkerId:
        """The worker of this item."""


T = TypeVar("T", bound=_HasWorker)


# Changes that are kept separately before they are merged into the items. Each change copies the former, one in this
# many the latter: with thousands of reporting workers, a copy of all items at each report would dominate.
_MOST_CHANGES = 64
# With this few items a copy costs no more than a copy of the changes, and speeds up all later accesses.
_FEW_ITEMS = 64


class Roster(Generic[T]):
    """Items, one for each worker; never changed. Equal to another roster with the same items in the same order."""

    __slots__ = ("_by_host", "_changes", "_items", "_more")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = {item.worker: item for item in items}
        # In the places of those in _items, or after them; None for removed ones.
        self._changes: dict[WorkerId, T | None] = {}
        self._more = 0  # how many more items than in _items
        self._by_host: dict[str, list[T]] | None = None  # computed at the first use

    def __iter__(self) -> Iterator[T]:
        return iter(self._put_together().values())

    def __len__(self) -> int:
        return len(self._items) + self._more

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roster) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Roster({list(self)!r})"

    def find(self, worker: WorkerId) -> T | None:
        """Return the worker's item; None if there is none."""
        return self._changes[worker] if worker in self._changes else self._items.get(worker)

    @property
    def by_host(self) -> Mapping[str, Sequence[T]]:
        """The items of each host's workers, in their order. Computed at the first use."""
        if self._by_host is None:
            by_host: dict[str, list[T]] = {}
            for item in self:
                by_host.setdefault(item.worker.hostname, []).append(item)
            self._by_host = by_host
        return self._by_host

    def put(self, *items: T) -> Roster[T]:
        """Return a roster with these items too: each in the place of its worker's former item, or at the end."""
        made: Roster[T] = Roster()
        # A worker that was removed and is added again goes to the end, and not to its old place.
        again = any(self._changes.get(item.worker, item) is None for item in items)
        if again or self._costs_more_than_a_copy(len(items)):
            made._items = {**self._put_together(), **{item.worker: item for item in items}}
            return made
        made._items, made._more = self._items, self._more
        changes = made._changes = self._changes.copy()
        for item in items:
            worker = item.worker
            if worker not in changes and worker not in made._items:
                made._more += 1
            changes[worker] = item
        return made

    def without(self, *workers: WorkerId) -> Roster[T]:
        """Return a roster without the items of these workers."""
        gone = dict.fromkeys(worker for worker in workers if self.find(worker) is not None)
        if not gone:
            return self
        made: Roster[T] = Roster()
        if self._costs_more_than_a_copy(len(gone)):
            made._items = self._put_together().copy()
            for worker in gone:
                del made._items[worker]
            return made
        made._items, made._more = self._items, self._more - len(gone)
        made._changes = {**self._changes, **dict.fromkeys(gone)}
        return made

    def _costs_more_than_a_copy(self, more: int) -> bool:
        return len(self._items) <= _FEW_ITEMS or len(self._changes) + more > _MOST_CHANGES

    def _put_together(self) -> dict[WorkerId, T]:
        """Merge the changes into the items and return all. Later calls reuse the result."""
        if self._changes:
            items = self._items.copy()
            for worker, item in self._changes.items():
                if item is None:
                    items.pop(worker, None)
                else:
                    items[worker] = item
            self._items, self._changes, self._more = items, {}, 0
        return self._items
