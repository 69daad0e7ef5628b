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


# Changes that are kept beside the items before they are put among them. Each change copies the former, one in so many
# the latter: where thousands of workers report, a copy of all items at each report would be what they wait for.
_MOST_CHANGES = 64
# Of so few items a copy costs no more than one of the changes, and all later looks at them are quicker.
_FEW_ITEMS = 64


class Roster(Generic[T]):
    """Items, one for each worker; never changed. Equal to others with the same items in the same order."""

    __slots__ = ("_changes", "_items", "_new")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = {item.worker: item for item in items}
        self._changes: dict[WorkerId, T] = {}  # in the places of those in _items, or behind them
        self._new = 0  # of these, that are not in _items

    def __iter__(self) -> Iterator[T]:
        if not self._changes:
            return iter(self._items.values())
        return self._with_changes()

    def __len__(self) -> int:
        return len(self._items) + self._new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roster) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Roster({list(self)!r})"

    def find(self, worker: WorkerId) -> T | None:
        """The worker's item; None when there is none."""
        changed = self._changes.get(worker)
        return self._items.get(worker) if changed is None else changed

    def put(self, *items: T) -> Roster[T]:
        """With these: each in the place of its worker's former item, or behind all."""
        made: Roster[T] = Roster()
        if len(self._items) <= _FEW_ITEMS or len(self._changes) + len(items) > _MOST_CHANGES:
            made._items = {**self._items, **self._changes, **{item.worker: item for item in items}}
            return made
        made._items, made._new = self._items, self._new
        changes = made._changes = self._changes.copy()
        for item in items:
            worker = item.worker
            if worker not in changes and worker not in made._items:
                made._new += 1
            changes[worker] = item
        return made

    def without(self, *workers: WorkerId) -> Roster[T]:
        """Without the items of these workers."""
        if all(self.find(worker) is None for worker in workers):
            return self
        made: Roster[T] = Roster()
        made._items = {**self._items, **self._changes}
        for worker in workers:
            made._items.pop(worker, None)
        return made

    def _with_changes(self) -> Iterator[T]:
        items, changes = self._items, self._changes
        for worker, item in items.items():
            yield changes.get(worker, item)
        for worker, item in changes.items():
            if worker not in items:
                yield item
