"""The keys of a round, and who waits for which: each is answered when what it waits for is there. Polls nothing.

Owns who waits for which key, or for how many. Keys and fencing are the store's
(:mod:`~elastic_driver.rendezvous.server.store`); how an answer reaches whoever waits, and for how long that waits, is
the waiter's. Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from elastic_driver.errors import StaleRoundError
from elastic_driver.rendezvous.routes import error_body
from elastic_driver.rendezvous.server.store import RoundStore


class KeyWaiter(Protocol):
    """Whoever waits; two that are equal wait once."""

    @property
    def round_id(self) -> int:
        """The round that it waits in."""

    @property
    def scope(self) -> str:
        """Where it waits."""

    @property
    def key(self) -> str | None:
        """For this key; None for a number of keys."""

    @property
    def count(self) -> int:
        """For so many keys, where it waits for none in particular."""

    def answer(self, status: int, body: bytes) -> None:
        """200 and the value, or all keys of the scope, packed; 409 when the round is over. It waits no more."""


W = TypeVar("W", bound=KeyWaiter)


class Keys(Generic[W]):
    """See above.

    Attributes:
        store: the keys of the current round.
    """

    def __init__(self) -> None:
        self.store = RoundStore()
        self._of_key: dict[tuple[str, str], dict[W, None]] = {}
        self._of_count: dict[str, dict[int, dict[W, None]]] = {}

    @property
    def waiting(self) -> list[W]:
        """All who wait."""
        return [
            *(waiter for group in self._of_key.values() for waiter in group),
            *(waiter for groups in self._of_count.values() for group in groups.values() for waiter in group),
        ]

    def begin_round(self, round_id: int) -> None:
        """Fences the past: its keys are dropped, and whoever waits for one is answered 409 at once.

        Raises:
            ValueError: the round is not above the current one.
        """
        self.store.begin_round(round_id)
        waiting, self._of_key, self._of_count = self.waiting, {}, {}
        for waiter in waiting:
            waiter.answer(409, error_body(StaleRoundError(waiter.round_id, round_id)))

    def take(self, round_id: int, scope: str, entries: Iterable[tuple[str, bytes]]) -> None:
        """Takes keys, and answers who waits for them. Those of another round than the current one it drops.

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
        """What it waits for; None when that is not there yet.

        Raises:
            StaleRoundError: its round is not the current one.
        """
        if waiter.key is not None:
            return self.store.get(waiter.round_id, waiter.scope, waiter.key)
        if self.store.count(waiter.round_id, waiter.scope) < waiter.count:
            return None
        return self.store.packed(waiter.round_id, waiter.scope)

    def add(self, waiter: W) -> None:
        """It waits."""
        if waiter.key is not None:
            self._of_key.setdefault((waiter.scope, waiter.key), {})[waiter] = None
        else:
            self._of_count.setdefault(waiter.scope, {}).setdefault(waiter.count, {})[waiter] = None

    def remove(self, waiter: W) -> None:
        """It waits no more. One that did not changes nothing."""
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
