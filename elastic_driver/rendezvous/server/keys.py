"""The keys of a round, and the waiters for them: each is answered as soon as its key is set. Polls nothing.

Owns which waiter waits for which key, or for how many. Keys and fencing belong to the store
(:mod:`~elastic_driver.rendezvous.server.store`); delivery and time limits belong to the waiters. Used on the event loop
only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from elastic_driver.errors import StaleRoundError
from elastic_driver.rendezvous.routes import error_body
from elastic_driver.rendezvous.server.store import RoundStore


class KeyWaiter(Protocol):
    """A waiter; equal ones count as one."""

    @property
    def round_id(self) -> int:
        """The round in which it waits."""

    @property
    def scope(self) -> str:
        """The scope in which it waits."""

    @property
    def key(self) -> str | None:
        """The key it waits for; None if it waits for a number of keys."""

    @property
    def count(self) -> int:
        """The number of keys it waits for, if it waits for no particular key."""

    def answer(self, status: int, body: bytes) -> None:
        """End the wait: 200 with the value, or with all keys of the scope, packed; 409 if the round is over."""


W = TypeVar("W", bound=KeyWaiter)


class Keys(Generic[W]):
    """The keys of the current round and their waiters.

    Attributes:
        store: the keys.
    """

    def __init__(self) -> None:
        self.store = RoundStore()
        self._of_key: dict[tuple[str, str], dict[W, None]] = {}
        self._of_count: dict[str, dict[int, dict[W, None]]] = {}

    @property
    def waiting(self) -> list[W]:
        """All waiters."""
        return [
            *(waiter for group in self._of_key.values() for waiter in group),
            *(waiter for groups in self._of_count.values() for group in groups.values() for waiter in group),
        ]

    def begin_round(self, round_id: int) -> None:
        """Fence the past: drop its keys, and answer 409 to every waiter.

        Raises:
            ValueError: the round is not above the current one.
        """
        self.store.begin_round(round_id)
        waiting, self._of_key, self._of_count = self.waiting, {}, {}
        for waiter in waiting:
            waiter.answer(409, error_body(StaleRoundError(waiter.round_id, round_id)))

    def take(self, round_id: int, scope: str, entries: Iterable[tuple[str, bytes]]) -> None:
        """Store keys and answer their waiters. Keys of any round but the current one are dropped.

        Raises:
            RendezvousProtocolError: the store is full.
        """
        if round_id == self.store.round_id:
            for key, value in entries:
                self.store.put(round_id, scope, key, value)
                for waiter in self._of_key.pop((scope, key), ()):
                    waiter.answer(200, value)
            self._answer_counts(round_id, scope)

    def _answer_counts(self, round_id: int, scope: str) -> None:
        groups = self._of_count.get(scope)
        if groups is None:
            return
        present = self.store.count(round_id, scope)
        for count in [count for count in groups if count <= present]:
            for waiter in groups.pop(count):
                waiter.answer(200, self.store.packed(round_id, scope))
        if not groups:
            self._of_count.pop(scope, None)

    def find(self, waiter: W) -> bytes | None:
        """Return the answer to a waiter, or None if its keys are not there yet.

        Raises:
            StaleRoundError: its round is not the current one.
        """
        if waiter.key is not None:
            return self.store.get(waiter.round_id, waiter.scope, waiter.key)
        if self.store.count(waiter.round_id, waiter.scope) < waiter.count:
            return None
        return self.store.packed(waiter.round_id, waiter.scope)

    def add(self, waiter: W) -> None:
        """Add a waiter."""
        if waiter.key is not None:
            self._of_key.setdefault((waiter.scope, waiter.key), {})[waiter] = None
        else:
            self._of_count.setdefault(waiter.scope, {}).setdefault(waiter.count, {})[waiter] = None

    def remove(self, waiter: W) -> None:
        """Remove a waiter, if it waits."""
        if waiter.key is not None:
            group = self._of_key.get((waiter.scope, waiter.key), {})
            group.pop(waiter, None)
            if not group:
                self._of_key.pop((waiter.scope, waiter.key), None)
            return
        groups = self._of_count.get(waiter.scope, {})
        group = groups.get(waiter.count, {})
        group.pop(waiter, None)
        if not group:
            groups.pop(waiter.count, None)
        if not groups:
            self._of_count.pop(waiter.scope, None)
