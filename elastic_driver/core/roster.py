"""Roster: the items of many workers in an order, as a value, with quick access by worker.

The core keeps its state in values that can be compared, hashed and kept. A job of thousands of workers looks one of
them up at each report, so that a tuple will not do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    __slots__ = ("_by_host", "_changes", "_items", "_more")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = {item.worker: item for item in items}
        # In the places of those in _items, or behind them; None for those that are there no more.
        self._changes: dict[WorkerId, T | None] = {}
        self._more = 0  # how many more there are than in _items
        self._by_host: dict[str, list[T]] | None = None  # made for who asks first

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
        """The worker's item; None when there is none."""
        return self._changes[worker] if worker in self._changes else self._items.get(worker)

    @property
    def by_host(self) -> Mapping[str, Sequence[T]]:
        """The items of each host's workers, in their order. Whoever looks first pays for it."""
        if self._by_host is None:
            by_host: dict[str, list[T]] = {}
            for item in self:
                by_host.setdefault(item.worker.hostname, []).append(item)
            self._by_host = by_host
        return self._by_host

    def put(self, *items: T) -> Roster[T]:
        """With these: each in the place of its worker's former item, or behind all."""
        made: Roster[T] = Roster()
        # Who has gone and is there again comes behind all, and not where it was.
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
        """Without the items of these workers."""
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
        """All items. Whoever looks at all of them pays for that once, and later ones do not again."""
        if self._changes:
            items = self._items.copy()
            for worker, item in self._changes.items():
                if item is None:
                    items.pop(worker, None)
                else:
                    items[worker] = item
            self._items, self._changes, self._more = items, {}, 0
        return self._items
