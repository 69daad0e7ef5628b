"""The job's counters and sums, stored from time to time for a later driver.

Owns the schedule. Nothing depends on them, so they cost few writes of their own: they go along with other records, at
most each BESIDE_S, and are written separately after ALONE_S; but a drain of a slow worker, whose pause they contain, is
never written without them. Nor is anything written without them once the job's standing has changed. The steps that
they lack are in the journal, and repeated in each of its snapshots. So a later driver's clock is at most that far
behind too, and a series of dying drivers does not restart a limit each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic_driver.health.drains import Drains
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.journal.entries import BooksKept
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.past import Recorded
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.goodput import GoodputKept
from elastic_driver.reporting.tally import Tally

BESIDE_S, ALONE_S = 5.0, 30.0


class Books:
    """Stores the counters of one job. Used on the event loop.

    Args:
        journal: the journal of the job.
        clock: the job's time.
        tally, chronicle, vitals: hold the counters.
        drains: the drains of slow workers; None if none is drained for being slow.
        heard: returns the time of the last step that the counters include; None before the first.
    """

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float],
        tally: Tally,
        chronicle: Chronicle,
        vitals: VitalsTable,
        drains: Drains | None,
        heard: Callable[[], float | None],
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._tally = tally
        self._chronicle = chronicle
        self._vitals = vitals
        self._drains = drains
        self._heard = heard
        self._kept_at = clock()
        self._drained_at: float | None = None
        self._turns = 0  # turns of the job that were stored
        journal.beside = self._beside

    async def keep(self) -> None:
        """Store them separately if nothing else is written. Runs until it is canceled."""
        while True:
            left_s = self._kept_at + ALONE_S - self._clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                self._journal.keep(self._now())

    def _beside(self) -> BooksKept | None:
        """Return what goes with the record that is written now; None for nothing."""
        is_new = self._drains is not None and self._drains.last_at != self._drained_at
        has_turned = self._chronicle.goodput.turns != self._turns
        return self._now() if is_new or has_turned or self._clock() - self._kept_at >= BESIDE_S else None

    def _now(self) -> BooksKept:
        self._kept_at = now = self._clock()
        chronicle = self._chronicle
        self._turns = chronicle.goodput.turns
        drains = None
        if self._drains is not None:
            drains, self._drained_at = self._drains.kept(), self._drains.last_at
        return BooksKept(
            now,
            self._tally.kept(),
            chronicle.goodput.kept(),
            chronicle.kept(),
            self._vitals.kept(),
            drains,
            self._heard(),
        )


def go_on(before: Recorded, tally: Tally, chronicle: Chronicle, vitals: VitalsTable, drains: Drains | None) -> None:
    """Continue the counters of the previous driver, as last stored. To be called before anything is counted."""
    kept = before.facts.books
    # If no book of the job was stored yet, its first one begins with the job.
    goodput, clock = GoodputKept.of_new(), before.took.clock - before.took.at_s
    if kept is not None:
        tally.go_on(kept.tally)
        chronicle.go_on(kept.chronicle)
        vitals.go_on(kept.vitals)
        if drains is not None and kept.drains is not None:
            drains.go_on(kept.drains)
        if kept.goodput is not None:
            goodput, clock = kept.goodput, kept.clock
    since = [(turned.at - clock, turned) for turned in before.turns]
    chronicle.goodput.go_on(goodput, before.ago_s + before.clock - clock, since)
