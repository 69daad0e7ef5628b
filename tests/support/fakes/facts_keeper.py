"""A keeper of facts whose disk the test plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_driver.journal.entries import Dropped, Fact, Facts, FactTable, Kept


class FactsKeeper:
    """See Keeper.

    Attributes:
        is_slow: whether what is kept is on disk only when the test says so (:meth:`answers`).
        news: all that came.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self.news: list[Kept | Dropped] = []
        self._table = FactTable()
        self._waiting: list[Callable[[], object]] = []

    @property
    def facts(self) -> Facts:
        """Those that hold, as a later driver reads them."""
        return self._table.facts()

    def keep(self, fact: Fact) -> None:
        self._note(Kept(fact))

    def drop(self, kind: type[Any], name: str) -> None:
        self._note(Dropped(kind.__name__, name))

    def when_kept(self, callback: Callable[[], object]) -> None:
        if self.is_slow:
            self._waiting.append(callback)
        else:
            callback()

    def answers(self) -> None:
        """The disk answers, now and from now on."""
        self.is_slow = False
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def _note(self, news: Kept | Dropped) -> None:
        self.news.append(news)
        self._table.note(news)
